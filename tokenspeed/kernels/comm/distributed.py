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

# torch 2.13 renamed these and warns of the old names, which are all that 2.11 knows.
gather_into: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
scatter_sum: Any = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))

Group = Any  # dist.ProcessGroup | None; torch builds without distributed lack the class


def all_reduce(x: Tensor, *, group: Group = None, out: Tensor) -> None:
    """out = the sum of x over the ranks; out may be x. Any shape; summed in x's dtype."""
    _reduced("sum", x, group, out)


def all_reduce_max(x: Tensor, *, group: Group = None, out: Tensor) -> None:
    """out = the largest of x over the ranks; out may be x."""
    _reduced("max", x, group, out)


def all_reduce_min(x: Tensor, *, group: Group = None, out: Tensor) -> None:
    """out = the least of x over the ranks; out may be x."""
    _reduced("min", x, group, out)


def _reduced(kind: str, x: Tensor, group: Group, out: Tensor) -> None:
    if out.shape != x.shape or out.dtype != x.dtype:
        raise fail("all_reduce", x=x, out=out)
    if out.data_ptr() != x.data_ptr() or out.stride() != x.stride():
        out.copy_(x)
    if dist.get_world_size(group) == 1:
        return
    flat = out.contiguous()
    dist.all_reduce(flat, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[kind], group)
    if flat.data_ptr() != out.data_ptr():
        out.copy_(flat)


def all_gather(x: Tensor, *, group: Group = None, dim: int = 0, outer: int = 1, out: Tensor) -> None:
    """out = the ranks' x joined along `dim`: [.., outer * b, ..] of each rank -> [.., outer * ranks * b, ..].

    `outer` > 1: the dimension has whole factors outside the gathered ones, so the ranks' blocks interleave.
    """
    ranks = dist.get_world_size(group)
    dim = dim % x.dim()
    split = _split(x, dim, outer)
    if out.shape != _scaled(x, dim, ranks) or out.dtype != x.dtype or split is None:
        raise fail("all_gather", x=x, dim=dim, outer=outer, ranks=ranks, out=out)
    if ranks == 1:
        out.copy_(x)
    elif dim == 0 and outer == 1 and out.is_contiguous():
        gather_into(out, x.contiguous(), group=group)
    else:
        parts = torch.empty((ranks, *x.shape), dtype=x.dtype, device=x.device)
        gather_into(parts.view(ranks * x.shape[0], *x.shape[1:]), x.contiguous(), group=group)
        # [ranks, lead, outer, b, ...] -> [lead, outer, ranks, b, ...]
        out.copy_(parts.view(ranks, *split).movedim(0, dim + 1).reshape(out.shape))


def reduce_scatter(x: Tensor, *, group: Group = None, dim: int = 0, outer: int = 1, out: Tensor) -> None:
    """out = this rank's blocks along `dim` of the sum: [.., outer * ranks * b, ..] -> [.., outer * b, ..].

    Blocks are exchanged and summed locally in rank order (gloo's own reduce-scatter moves the whole sum).
    """
    ranks = dist.get_world_size(group)
    dim = dim % x.dim()
    if out.dtype != x.dtype or _scaled(out, dim, ranks) != x.shape or (split := _split(out, dim, outer)) is None:
        raise fail("reduce_scatter", x=x, dim=dim, outer=outer, ranks=ranks, out=out)
    if ranks == 1:
        out.copy_(x)
        return
    if x.is_cuda and dim == 0 and outer == 1 and x.is_contiguous() and out.is_contiguous():
        scatter_sum(out, x, group=group)
        return
    blocks = x.reshape(*split[: dim + 1], ranks, *split[dim + 1 :]).movedim(dim + 1, 0).contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received.view(ranks, -1), blocks.view(ranks, -1), group=group)
    total = received[0].float()
    for other in range(1, ranks):
        total += received[other]
    out.copy_(total.view(out.shape))


def slice_(x: Tensor, *, group: Group = None, dim: int = 0, out: Tensor) -> None:
    """out = this rank's block of x along `dim`; nothing moves."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if out.dtype != x.dtype or _scaled(out, dim % x.dim(), ranks) != x.shape:
        raise fail("slice", x=x, dim=dim, ranks=ranks, out=out)
    out.copy_(x.narrow(dim, rank * out.shape[dim], out.shape[dim]))


def keep_first(x: Tensor, *, keep: bool, out: Tensor) -> None:
    """out = x on the rank that keeps the value, zeros on the others (no NaN of a hole spreads); out may be x."""
    if out.shape != x.shape or out.dtype != x.dtype:
        raise fail("keep_first", x=x, out=out)
    if not keep:
        out.zero_()
    elif out.data_ptr() != x.data_ptr():
        out.copy_(x)


def _scaled(x: Tensor, dim: int, ranks: int) -> torch.Size:
    """x's shape with `dim` taken `ranks` times."""
    return torch.Size(size * ranks if i == dim else size for i, size in enumerate(x.shape))


def _split(x: Tensor, dim: int, outer: int) -> tuple[int, ...] | None:
    """x's shape with `dim` as (outer, rest); None where outer does not divide it."""
    if outer < 1 or x.shape[dim] % outer:
        return None
    return (*x.shape[:dim], outer, x.shape[dim] // outer, *x.shape[dim + 1 :])


def register(registry: Registry) -> None:
    devices: tuple[tuple[str, Literal["cpu", "cuda"]], ...] = (("gloo", "cpu"), ("nccl", "cuda"))
    for solution, device in devices:
        for op, fn in (
            ("all_reduce", all_reduce),
            ("all_reduce_max", all_reduce_max),
            ("all_reduce_min", all_reduce_min),
            ("all_gather", all_gather),
            ("reduce_scatter", reduce_scatter),
            ("slice", slice_),
            ("keep_first", keep_first),
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
