"""The reductions of a pending argmax and topk: each rank holds (value, global id) of the best of its part of the vocabulary;
all get the winner, or the k best of all.

Invariant: the larger value wins, the lower id among equals, on every rank alike; 8 bytes a pair and rank travel.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed.ir.meaning import merge
from tokenspeed.kernels.comm.distributed import gather_into
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority


def all_reduce_argmax(value: Tensor, index: Tensor, *, group: Any, out: tuple[Tensor, Tensor]) -> None:
    """value f32 [S], index i32 [S] of this rank -> the winning (value, id) over the ranks of `group`, alike."""
    values, indices = _gathered(value, index, group)
    best = values.max(0).values
    ids = torch.where(values == best, indices, torch.iinfo(torch.int32).max)
    out[0].copy_(best)
    out[1].copy_(ids.min(0).values)


def all_reduce_topk(values: Tensor, ids: Tensor, *, group: Any, out: tuple[Tensor, Tensor]) -> None:
    """values f32, ids i32 [S, k] of this rank -> the k best (value, id) over the ranks of `group`, best first, alike."""
    merged = merge("topk", list(zip(*_gathered(values, ids, group))))
    for target, found in zip(out, merged):
        target.copy_(found)


def _gathered(value: Tensor, index: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Values f32 and ids i32 of all ranks, stacked in front; one message."""
    ranks = dist.get_world_size(group)
    pair = torch.stack([value.contiguous().view(torch.int32), index])
    pairs = torch.empty((ranks * 2, *value.shape), dtype=torch.int32, device=value.device)
    gather_into(pairs, pair, group=group)
    pairs = pairs.view(ranks, 2, *value.shape)
    return pairs[:, 0].contiguous().view(torch.float32), pairs[:, 1]


def register(registry: Registry) -> None:
    devices, kernels = (("gloo", "cpu"), ("nccl", "cuda")), (all_reduce_argmax, all_reduce_topk)
    for (solution, device), fn in itertools.product(devices, kernels):
        op = fn.__name__
        registry.register(
            KernelSpec(
                name=f"{solution}.{op}", op=op, solution=solution, fn=fn,
                signatures=({},), priority=Priority.PORTABLE, capability=Capability(device),  # type: ignore[arg-type]
                tags=frozenset({"portability", "determinism"}), summary="gather the pairs, keep the best",
            )
        )  # fmt: skip
