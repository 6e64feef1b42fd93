"""What a list of local tensors, one a rank, means as one global tensor: the semantics every rule is judged by.

Invariant: `assemble(distribute(x, t), t) == x` for every type t with a meaning. `assemble` checks the preconditions:
copies of a replicated value are equal bit for bit. Some values are pairs: lse (output, log-sum-exp), argmax and topk
(value, global index). A value pending by `varying` means nothing: only single ranks know what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.mesh import Axes, Plan
from tokenspeed.ir.types import ROW_DIMS, Dim, Type

Value = Any  # a Tensor, or the pair of a kind in PAIRS
PAIRS = ("lse", "argmax", "topk")


class Meaning:
    """Meaning of types on one plan. `sizes`: global extents of every dim; `factors`: row factors of this bucket."""

    def __init__(self, plan: Plan, sizes: Mapping[str, int], factors: Mapping[str, Axes]) -> None:
        self.plan, self.mesh, self.sizes, self.factors = plan, plan.mesh, sizes, factors

    def owned(self, d: Dim, rank: int) -> Tensor:
        """Global indices of `d` that a rank holds, in local order."""
        n = self.sizes[d.name]
        if not d.axes:
            return torch.arange(n)
        if d.name not in ROW_DIMS:
            width = n // self.mesh.size(d.axes)
            start = self.mesh.index(rank, d.axes) * width
            return torch.arange(start, start + width)
        factors = self.factors[d.name]
        grid = torch.arange(n).reshape(*(self.mesh.size(a) for a in factors), -1)
        at = self.mesh.coords(rank)
        return grid[tuple(at[a] if a in d.axes else slice(None) for a in factors)].flatten()

    def distribute(self, x: Tensor, t: Type, split: Callable[[Tensor, int, str], list[Tensor]] | None = None) -> list:
        """A global tensor as locals of type `t`; ranks that hold the same block share it. Over pending axes the first rank keeps
        it and the others hold zeros, or `split(block, ranks, kind)` says what each of the ranks holds."""
        blocks: dict[tuple[int, ...], list[Tensor]] = {}
        out: list[Tensor] = []
        parts = self.mesh.size(t.pending)
        for r in range(self.mesh.ranks):
            at = self.mesh.coords(r)
            key = tuple(at[a] for d in t.dims for a in d.axes)
            if key not in blocks:
                local = x
                for k, d in enumerate(t.dims):
                    local = local.index_select(k, self.owned(d, r))
                blocks[key] = (
                    split(local, parts, t.kind)
                    if split and t.pending
                    else [local, *(torch.zeros_like(local) for _ in range(parts - 1))]
                )
            out.append(blocks[key][self.mesh.index(r, t.pending)])
        return out

    def assemble(self, xs: Sequence[Value], t: Type) -> Value:
        """The meaning of a list; VerifyError V2 where ranks that must agree do not, or where there is none."""
        if t.pending and t.kind == "varying":
            raise VerifyError("V2", f"a value of type {t} differs from rank to rank: it has no meaning")
        blocks: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
        for r, x in enumerate(xs):
            at = self.mesh.coords(r)
            copies = blocks.setdefault(tuple(at[a] for d in t.dims for a in d.axes), {})
            first = copies.setdefault(tuple(at[a] for a in t.pending), r)
            if first != r and not same_bits(xs[first], x):
                raise VerifyError("V2", f"ranks that replicate a value of type {t} hold different bits")
        out: Tensor | None = None
        for copies in blocks.values():
            ranks = [copies[k] for k in sorted(copies)]
            part = settled(merge(t.kind if t.pending else "sum", [xs[r] for r in ranks]), t.kind)
            if out is None:
                out = torch.zeros([self.sizes[d.name] for d in t.dims], dtype=part.dtype)
            index = [self.owned(d, ranks[0]) for d in t.dims]
            want = tuple(len(i) for i in index)
            if tuple(part.shape) != want:
                raise VerifyError("V1", f"a local of type {t} has shape {tuple(part.shape)}, {want} is due")
            out[torch.meshgrid(*index, indexing="ij")] = part
        assert out is not None
        return out


def merge(kind: str, xs: Sequence[Value]) -> Value:
    """What one value pending over len(xs) ranks amounts to; a pair stays a pair. One value is itself."""
    if len(xs) == 1:
        return xs[0]
    if kind in ("sum", "max", "min"):
        stack = torch.stack(list(xs))
        return stack.sum(0, dtype=stack.dtype) if kind == "sum" else stack.amax(0) if kind == "max" else stack.amin(0)
    first, second = torch.stack([x[0] for x in xs]), torch.stack([x[1] for x in xs])
    if kind == "lse":
        total = second.logsumexp(0)
        weight = torch.where(total.isneginf(), 0.0, (second - total).exp())
        parts = torch.where(weight[..., None] > 0, first * weight[..., None].to(first.dtype), 0.0)
        return parts.sum(0, dtype=first.dtype), total
    if kind == "argmax":
        best = first.amax(0)
        return best, torch.where(first == best, second, torch.iinfo(second.dtype).max).amin(0)
    if kind == "topk":
        k = xs[0][0].shape[-1]
        values, ids = first.movedim(0, -2).flatten(-2), second.movedim(0, -2).flatten(-2)
        return first_k(values, ids, k)
    raise VerifyError("V2", f"values pending by {kind} cannot be merged")


def first_k(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest along the last dim with their ids; the lowest id first among equals."""
    by_id = ids.sort(dim=-1, stable=True).indices
    values, ids = values.gather(-1, by_id), ids.gather(-1, by_id)
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return values.gather(-1, order), ids.gather(-1, order)


def settled(x: Value, kind: str = "argmax") -> Tensor:
    """What a consumer reads of a value: of a pair by argmax or topk the index, by lse the output."""
    return x if not isinstance(x, tuple) else x[0] if kind == "lse" else x[1]


def same_bits(a: Value, b: Value) -> bool:
    """Equal bit for bit; NaN (a hole) equals NaN."""
    if isinstance(a, tuple):
        return all(same_bits(x, y) for x, y in zip(a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) if not a.is_floating_point() else bool(((a == b) | (a.isnan() & b.isnan())).all())
