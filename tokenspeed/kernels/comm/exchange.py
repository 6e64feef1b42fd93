"""Rows to the ranks that hold their experts, and what those made of them back (the two halves of an exchange).

Invariant: ids and shares of all rows of the group are gathered, so every rank knows which rows travel and none is told how
many; a row travels once to a rank that holds several of its experts, and a hole not at all. What comes back is added in rank
order, in float32, so a row's bits depend neither on the other rows nor on how often it travelled.

Counts are read by the host: no captured graph can hold these calls, so there is none for a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed.ir.ops.moe import wanted
from tokenspeed.kernels.arguments import fail
from tokenspeed.kernels.comm.distributed import gather_into
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority


def dispatch(
    x: Tensor, ids: Tensor, shares: Tensor, *, group: Any, firsts: tuple[int, ...], held: int, request: Tensor | None = None,
    mine: Tensor | None = None, out: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """x [T, H], ids i32 [T, K], shares f32 [T, K] of this rank -> rows [N T, H], ids and shares [N T, K] of all N ranks of
    `group`, in group order. Rank r holds the experts firsts[r] .. firsts[r] + held; rows that picked none of this rank's are
    left as they were. With `request` i32, of each row of the home group its request (-1: a hole), and `mine` i64 [T], the rows
    of the home group that x holds, holes pick nothing and stay."""
    rows, all_ids, all_shares = out
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    count, width = x.shape
    fits = rows.shape == (ranks * count, width) and rows.dtype == x.dtype and len(firsts) == ranks
    if not fits or all_ids.shape != all_shares.shape or all_ids.shape != (ranks * count, ids.shape[1]):
        raise fail("dispatch", x=x, ids=ids, shares=shares, rows=rows, all_ids=all_ids, all_shares=all_shares)
    if request is not None:
        ids = torch.where((request[mine] >= 0)[:, None], ids, -1)
    choice = torch.cat([ids, shares.view(torch.int32)], 1)
    choices = choice.new_empty(ranks * count, choice.shape[1])
    gather_into(choices, choice, group=group)
    all_ids.copy_(choices[:, : ids.shape[1]])
    all_shares.copy_(choices[:, ids.shape[1] :].view(torch.float32))
    given = wanted(all_ids, firsts[rank], held)
    to = [wanted(ids, first, held).nonzero().flatten() for first in firsts]
    rows[given] = _exchange(x, to, given.view(ranks, count).sum(1).tolist(), group)


def combine(y: Tensor, ids: Tensor, *, group: Any, firsts: tuple[int, ...], held: int, out: Tensor) -> None:
    """y [N T, H], what this rank made of the rows it was given, ids i32 [N T, K] as dispatch gathered them -> out [T, H]: of
    each of this rank's rows the sum of what the ranks made of it."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    count = out.shape[0]
    if y.shape != (ranks * count, out.shape[1]) or y.dtype != out.dtype or ids.shape[0] != y.shape[0]:
        raise fail("combine", y=y, ids=ids, out=out)
    own = ids.view(ranks, count, -1)[rank]
    visited = [wanted(own, first, held).nonzero().flatten() for first in firsts]
    to = [
        wanted(part, firsts[rank], held).nonzero().flatten() + r * count
        for r, part in enumerate(ids.view(ranks, count, -1))
    ]
    got = _exchange(y, to, [len(v) for v in visited], group)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for rows, part in zip(visited, got.split([len(v) for v in visited])):
        total.index_add_(0, rows, part.float())
    out.copy_(total)


def _exchange(x: Tensor, to: list[Tensor], counts: list[int], group: Any) -> Tensor:
    """Rows to[r] of x go to rank r of the group; counts[r] rows come from it. What comes, in group order."""
    sent = x[torch.cat(to)]
    got = x.new_empty(sum(counts), x.shape[1])
    dist.all_to_all_single(got, sent, counts, [len(rows) for rows in to], group=group)
    return got


def register(registry: Registry) -> None:
    for fn in (dispatch, combine):
        registry.register(
            KernelSpec(
                name=f"gloo.{fn.__name__}", op=fn.__name__, solution="gloo", fn=fn, signatures=({},),
                priority=Priority.PORTABLE, capability=Capability("cpu"), tags=frozenset({"portability", "determinism"}),
                summary="all-to-all of the rows that picked a rank's experts",
            )
        )  # fmt: skip
