"""Collectives through torch.distributed: gloo on CPU, NCCL on CUDA. Invariant: every rank of `group` gets the same bits
from a reduction, and a group of one rank costs a copy.

`group` is a torch.distributed ProcessGroup (None: the default group). Ranks count within the group.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed.kernels.arguments import fail
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority

Group = Any  # dist.ProcessGroup | None; torch builds without distributed lack the class


def all_reduce(x: Tensor, *, group: Group = None, out: Tensor) -> None:
    """out = the sum of x over the ranks; out may be x. Any shape; summed in x's dtype."""
    if out.shape != x.shape or out.dtype != x.dtype:
        raise fail("all_reduce", x=x, out=out)
    if out.data_ptr() != x.data_ptr() or out.stride() != x.stride():
        out.copy_(x)
    if dist.get_world_size(group) == 1:
        return
    if out.is_contiguous():
        dist.all_reduce(out, group=group)
    else:
        flat = out.contiguous()
        dist.all_reduce(flat, group=group)
        out.copy_(flat)


def all_gather(x: Tensor, *, group: Group = None, dim: int = 0, out: Tensor) -> None:
    """out = the ranks' x one after another along `dim` (0 or the last)."""
    ranks = dist.get_world_size(group)
    dim = dim % x.dim()
    want = list(x.shape)
    want[dim] *= ranks
    if list(out.shape) != want or out.dtype != x.dtype:
        raise fail("all_gather", x=x, dim=dim, ranks=ranks, out=out)
    if ranks == 1:
        out.copy_(x)
    elif dim == 0 and out.is_contiguous():
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    else:
        parts = torch.empty((ranks, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(parts.view(ranks * x.shape[0], *x.shape[1:]), x.contiguous(), group=group)
        for rank, part in enumerate(parts.unbind(0)):
            out.narrow(dim, rank * x.shape[dim], x.shape[dim]).copy_(part)


def reduce_scatter(x: Tensor, *, group: Group = None, dim: int = 0, out: Tensor) -> None:
    """out = this rank's block along `dim` of the sum of x over the ranks.

    Blocks are exchanged and summed locally in rank order (gloo's own reduce-scatter is not used: it moves the whole sum).
    """
    ranks = dist.get_world_size(group)
    dim = dim % x.dim()
    want = list(x.shape)
    want[dim] //= ranks
    if x.shape[dim] % ranks or list(out.shape) != want or out.dtype != x.dtype:
        raise fail("reduce_scatter", x=x, dim=dim, ranks=ranks, out=out)
    if ranks == 1:
        out.copy_(x)
        return
    if x.is_cuda and dim == 0 and x.is_contiguous() and out.is_contiguous():
        dist.reduce_scatter_tensor(out, x, group=group)
        return
    blocks = torch.stack(x.chunk(ranks, dim))
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    total = received[0].float()
    for other in range(1, ranks):
        total += received[other]
    out.copy_(total)


def slice_(x: Tensor, *, group: Group = None, dim: int = 0, out: Tensor) -> None:
    """out = this rank's block of x along `dim`; nothing moves."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    size = x.shape[dim] // ranks
    if x.shape[dim] % ranks or out.shape[dim] != size or out.dtype != x.dtype:
        raise fail("slice", x=x, dim=dim, ranks=ranks, out=out)
    out.copy_(x.narrow(dim, rank * size, size))


def register(registry: Registry) -> None:
    devices: tuple[tuple[str, Literal["cpu", "cuda"]], ...] = (("gloo", "cpu"), ("nccl", "cuda"))
    for solution, device in devices:
        for op, fn in (
            ("all_reduce", all_reduce),
            ("all_gather", all_gather),
            ("reduce_scatter", reduce_scatter),
            ("slice", slice_),
        ):
            registry.register(
                KernelSpec(
                    name=f"{solution}.{op}",
                    op=op,
                    solution=solution,
                    fn=fn,
                    signatures=({},),
                    priority=Priority.PORTABLE,
                    capability=Capability(device),
                    tags=frozenset({"portability", "determinism"}),
                )
            )
