"""Attention over latents (MLA, arXiv 2405.04434): one short vector a token stands for the keys and values of all heads.

A head's key is its matrix times the latent, beside a rotated part that all heads share; its value is another matrix times
the latent. Both matrices are absorbed into queries and results (`head_linear`), so the cache holds a latent and a rotated
part a token, whole on every rank that splits heads, and `mla` attends over them as all heads' one key. Slots, tables and
holes are those of attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.ops.attention import Append, Attend, _check_outer, _index, part_of
from tokenspeed.ir.ops.base import Local, Op, OutSpec, States, refuse, wide
from tokenspeed.ir.types import Type


class HeadLinear(Op):
    """x [T, N, A], w [N, B, A] or [N, A, B] -> [T, N, B]: a matrix a head."""

    name = "head_linear"
    integers = ()

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        x, w = ins
        a = x.names[-1]
        if len(w.dims) != 3 or w.names[0] != x.names[1] or a not in w.names[1:]:
            raise RuleError("P004", f"head_linear of {x} by {w}: a matrix a head that takes {a} is needed")
        return [(x.dtype, (*x.names[:2], _other(w, a)))]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        t, n, a = ins[0].names
        b = _other(ins[1], a)
        table = {("R", "R"): "R", (t, "R"): t, (n, n): n, (a, a): "P", ("R", b): b, ("P", "R"): "P", ("R", "P"): "P"}
        got = table.get((states[0], states[1]))
        if got is None:
            raise refuse("head_linear", axis, states, ins, f"heads lie as their matrices do, {a} is contracted")
        return [got]

    def infer(self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Any, home: Any = ()) -> list[Type]:
        outs = super().infer(ins, attrs, order, home)
        for d in ins[0].names[1:]:
            if ins[0].dim(d).axes != ins[1].dim(d).axes:
                raise RuleError("V4", f"head_linear of {ins[0]} by {ins[1]}: the blocks of {d} do not match")
        return outs

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"transposed": ins[1].names[1] == ins[0].names[-1]}

    def reference(self, x: Tensor, w: Tensor, *, transposed: bool = False) -> Tensor:
        y = wide(x).transpose(0, 1) @ (wide(w) if transposed else wide(w).transpose(1, 2))
        return y.transpose(0, 1).to(x.dtype)

    def row_cost(
        self, ins: Sequence[Sequence[int]], outs: Sequence[Sequence[int]], weights: Sequence[Sequence[int]] = ()
    ) -> tuple[float, float]:
        (_, n, a), (_, _, b) = ins[0], outs[0]
        return float(n * (a + b)), float(n * a * b)


def _other(w: Type, a: str) -> str:
    return next(d for d in w.names[1:] if d != a)


class AppendLatent(Append):
    """values [T, C_i], slot i32[T -> slots], a cache [slots, C_i] for each value; writes the caches."""

    name = "append_latent"

    def which_integers(self, count: int) -> tuple[int, ...]:
        return (count // 2,)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        values, slot, caches = _parts(ins)
        _index(self.name, slot, "its slots", caches[0].names[0])
        met = all(x.names == (slot.names[0], *c.names[1:]) and len(c.dims) == 2 for x, c in zip(values, caches))
        if not met or len({c.names[0] for c in caches}) > 1:
            written, into = (", ".join(map(str, ts)) for ts in (values, caches))
            raise RuleError("P004", f"append_latent writes {written} into {into} by {slot}: the dims do not meet")
        return []

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        _, slot, caches = _parts(ins)
        k, t, slots = len(caches), slot.names[0], caches[0].names[0]
        _check_outer(self.name, caches, slot.index.axes if slot.index else ())
        whole, held = ("R",) * (k + 1), (slots,) * k
        home = axis in _index(self.name, slot, "its slots", slots)
        legal = {((t,) * (k + 1), held)} if home else {(whole, ("R",) * k), (whole, held)}
        if (tuple(states[: k + 1]), tuple(states[k + 1 :])) not in legal or len({c.dims[0] for c in caches}) > 1:
            raise refuse(self.name, axis, states, ins, "latents are whole, and rows and slots lie as the cache does")
        return []

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        _, slot, caches = _parts(ins)
        return part_of(caches[0], slot, at)

    def reference(self, *ins: Tensor, offset: int = 0) -> None:
        values, slot, caches = _parts(ins)
        at = slot.long() - offset
        ok = (slot >= 0) & (at >= 0) & (at < caches[0].shape[0])
        for x, cache in zip(values, caches):
            cache[at[ok]] = x[ok].to(cache.dtype)


def _parts(ins: Sequence[Any]) -> tuple[Sequence[Any], Any, Sequence[Any]]:
    """The values, their slots and the caches, one a value."""
    k = len(ins) // 2
    return ins[:k], ins[k], ins[k + 1 :]


class Mla(Attend):
    """q [T, N, C], rotated q [T, N, R], caches [slots, C], [slots, R], pos, row, table (as `attend`) -> [T, N, C].

    Token t attends positions 0..pos[t] of request row[t]: score = (q . latent + rotated q . rotated) * scale, the result is
    the latents weighted by softmax, in float32. A further operand i32[T, K] names the positions that each token attends of
    these (-1: none). Where the slots of a home block are sharded the result is pending by lse.
    """

    name = "mla"
    integers = (4, 5, 6, 7)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        q, qr, cc, cr, pos, row, table, *picked = ins
        _index(self.name, row, "its rows", table.names[0])
        _index(self.name, table, "its block table", cc.names[0])
        met = q.names[2:] == cc.names[1:] and qr.names[2:] == cr.names[1:] and q.names[:2] == qr.names[:2]
        if not met or cc.names[0] != cr.names[0] or not q.names[:1] == pos.names == row.names:
            raise RuleError("P004", f"mla of {q}, {qr} over {cc}, {cr} by {pos}, {row}, {table}: the dims do not meet")
        if len(picked) > 1 or any(x.names[:1] != q.names[:1] or len(x.dims) != 2 for x in picked):
            raise RuleError("P004", f"mla of {q} at {', '.join(map(str, picked))}: one list of positions a row is due")
        return [(q.dtype, q.names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        t, n = ins[0].names[:2]
        slots, s = ins[2].names[0], ins[6].names[0]
        homes = [axis in _index(self.name, i, "an operand", d) for i, d in ((ins[5], s), (ins[6], slots))]
        r, picked = "R", len(ins) - 7
        table: dict[tuple[str, ...], str] = {(t, t, slots, slots, t, t, s, *[t] * picked): t} if all(homes) else {}
        if not any(homes):
            rest = (r,) * (3 + picked)
            table = {(r, r, r, r, *rest): r, (n, n, r, r, *rest): n, (r, r, slots, slots, *rest): "P:lse"}
        if tuple(states) not in table:
            raise refuse(self.name, axis, states, ins, "queries go with their request's cache: rows on the home axis, heads "
                         "anywhere, latents whole (a part of a score is no score)")  # fmt: skip
        return [table[tuple(states)]]

    def infer(self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Any, home: Any = ()) -> list[Type]:
        _check_outer(self.name, ins[2:4], ins[6].index.axes if ins[6].index else ())
        if ins[0].dims[:2] != ins[1].dims[:2] or ins[2].dims[0] != ins[3].dims[0]:
            raise RuleError("V6", f"mla of {ins[0]}, {ins[1]} over {ins[2]}, {ins[3]}: the two parts lie apart")
        return Op.infer(self, ins, attrs, order, home)

    def check_extents(self, *_: Any) -> None:
        """Any split of heads reads the same latents."""

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"scale": attrs["scale"], "page": at.sizes["page"]} | part_of(ins[2], ins[6], at, lse=True)

    def reference(
        self, q: Tensor, qr: Tensor, cc: Tensor, cr: Tensor, pos: Tensor, row: Tensor, table: Tensor,
        picked: Tensor | None = None, *, page: int, scale: float, offset: int = 0, lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        out = torch.zeros_like(q)
        total = torch.full(q.shape[:2], float("-inf"), dtype=wide(q).dtype)
        for r in row.unique().tolist():
            if r < 0:
                continue
            mine = (row == r).nonzero().flatten()
            p, slots = positions(table[r], pos[mine], page, offset, cc.shape[0])
            latents, rotated = (wide(c[slots]).to(total.dtype) for c in (cc, cr))
            scores = (wide(q[mine]) @ latents.t() + wide(qr[mine]) @ rotated.t()) * scale
            seen = p <= pos[mine].long()[:, None]
            if picked is not None:
                end = int(pos[mine].max()) + 1
                at = picked[mine].long()
                listed = torch.zeros(len(mine), end + 1, dtype=torch.bool)
                listed.scatter_(1, torch.where((at >= 0) & (at < end), at, end), True)
                seen &= listed[:, p]
            scores.masked_fill_(~seen[:, None], float("-inf"))
            sums = scores.logsumexp(-1)
            weights = torch.where(sums.isneginf()[..., None], 0.0, scores.softmax(-1))
            total[mine] = sums
            out[mine] = (weights @ latents).to(q.dtype)
        return (out, total) if lse else out


def positions(table: Tensor, pos: Tensor, page: int, offset: int, held: int) -> tuple[Tensor, Tensor]:
    """Positions of one request up to the last of `pos`, and the slots of a rank's cache that they lie in: those of its `held`
    slots, which start at slot `offset` of the home block. `table`: the request's pages."""
    p = torch.arange(int(pos.max()) + 1)
    slots = table[p // page].long() * page + p % page - offset
    mine = (slots >= 0) & (slots < held)
    return p[mine], slots[mine]


LATENT = [HeadLinear(), AppendLatent(), Mla()]
