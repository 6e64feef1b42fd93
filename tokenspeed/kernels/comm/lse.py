"""The reduction of attention that is pending by log-sum-exp: each rank holds the attention over its own positions, and the
log-sum-exp of their scores; all get the attention over all positions.

Invariant: parts are weighed and added in rank order, in float32, so every rank gets the same bits; a rank that saw no position
(log-sum-exp -inf) adds nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed.kernels.comm.distributed import gather_into
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority


def all_reduce_lse(o: Tensor, lse: Tensor, *, group: Any, out: tuple[Tensor, ...]) -> None:
    """o [T, N, D], lse f32 [T, N] of this rank -> out[0] of o's shape and dtype, and out[1], if it is asked for, of lse's."""
    ranks, t = dist.get_world_size(group), o.shape[0]
    pair = torch.cat([o.float(), lse[..., None]], -1)
    pairs = torch.empty((ranks * t, *pair.shape[1:]), device=o.device)
    gather_into(pairs, pair, group=group)
    parts = pairs.view(ranks, *pair.shape)
    scores = parts[..., -1]
    total = scores.logsumexp(0)
    weights = torch.where(scores.isneginf(), 0.0, (scores - total).exp())
    mixed = torch.zeros_like(pair[..., :-1])
    for part, weight in zip(parts[..., :-1], weights):
        mixed += torch.where(weight[..., None] > 0, part * weight[..., None], 0.0)
    out[0].copy_(mixed)
    if len(out) > 1:
        out[1].copy_(total)


def register(registry: Registry) -> None:
    for solution, device in (("gloo", "cpu"), ("nccl", "cuda")):
        registry.register(
            KernelSpec(
                name=f"{solution}.all_reduce_lse", op="all_reduce_lse", solution=solution, fn=all_reduce_lse,
                signatures=({},), priority=Priority.PORTABLE, capability=Capability(device),  # type: ignore[arg-type]
                tags=frozenset({"portability", "determinism"}), summary="gather the pairs, weigh and add them",
            )
        )  # fmt: skip
