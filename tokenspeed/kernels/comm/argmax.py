"""The reduction of a pending argmax: each rank holds (value, global id) of its part of the vocabulary; all get the
winner.

Invariant: the largest value wins, the lowest id among equals, on every rank alike; 8 bytes a request and rank travel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed.kernels.comm.distributed import gather_into
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority


def all_reduce_argmax(value: Tensor, index: Tensor, *, group: Any, out: tuple[Tensor, Tensor]) -> None:
    """value f32 [S], index i32 [S] of this rank -> the winning (value, id) over the ranks of `group`, alike."""
    ranks, rows = dist.get_world_size(group), value.shape[0]
    pair = torch.stack([value.view(torch.int32), index])
    pairs = torch.empty((ranks * 2, rows), dtype=torch.int32, device=value.device)
    gather_into(pairs, pair, group=group)
    pairs = pairs.view(ranks, 2, rows)
    values = pairs[:, 0].contiguous().view(torch.float32)
    best = values.max(0).values
    ids = torch.where(values == best, pairs[:, 1], torch.iinfo(torch.int32).max)
    out[0].copy_(best)
    out[1].copy_(ids.min(0).values)


def register(registry: Registry) -> None:
    for solution, device in (("gloo", "cpu"), ("nccl", "cuda")):
        registry.register(
            KernelSpec(
                name=f"{solution}.all_reduce_argmax", op="all_reduce_argmax", solution=solution, fn=all_reduce_argmax,
                signatures=({},), priority=Priority.PORTABLE, capability=Capability(device),  # type: ignore[arg-type]
                tags=frozenset({"portability", "determinism"}), summary="gather the pairs, keep the best",
            )
        )  # fmt: skip
