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
from tokenspeed.ir.ops.attention import Append, Attend, _check_outer, _first_slot, _index, _inner
from tokenspeed.ir.ops.base import Local, Op, OutSpec, States, refuse, wide
from tokenspeed.ir.types import Type


class HeadLinear(Op):
    """x [T, N, A], w [N, B, A] or [N, A, B] -> [T, N, B]: a matrix a head."""

    name = "head_linear"

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
    """latent [T, C], rotated [T, R], slot i32[T -> slots], their caches [slots, C], [slots, R]; writes the caches."""

    name = "append_latent"

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        c, r, slot, cc, cr = ins
        _index(self.name, slot, "its slots", cc.names[0])
        if not c.names[:1] == r.names[:1] == slot.names or (c.names[1:], r.names[1:]) != (cc.names[1:], cr.names[1:]):
            raise RuleError("P004", f"append_latent writes {c}, {r} into {cc}, {cr} by {slot}: the dims do not meet")
        return []

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        t, slots = ins[0].names[0], ins[3].names[0]
        _check_outer(self.name, ins[3:], ins[2].index.axes if ins[2].index else ())
        if axis in _index(self.name, ins[2], "its slots", slots):
            legal = {(t, t, t, slots, slots)}
        else:
            legal = {("R",) * 5, ("R", "R", "R", slots, slots)}
        if tuple(states) not in legal or ins[3].dims[0] != ins[4].dims[0]:
            raise refuse(self.name, axis, states, ins, "latents are whole, and rows and slots lie as the cache does")
        return []


class Mla(Attend):
    """q [T, N, C], rotated q [T, N, R], caches [slots, C], [slots, R], pos, row, table (as `attend`) -> [T, N, C].

    Token t attends positions 0..pos[t] of request row[t]: score = (q . latent + rotated q . rotated) * scale, the result is
    the latents weighted by softmax, in float32. Where the slots of a home block are sharded the result is pending by lse.
    """

    name = "mla"

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        q, qr, cc, cr, pos, row, table = ins
        _index(self.name, row, "its rows", table.names[0])
        _index(self.name, table, "its block table", cc.names[0])
        met = q.names[2:] == cc.names[1:] and qr.names[2:] == cr.names[1:] and q.names[:2] == qr.names[:2]
        if not met or cc.names[0] != cr.names[0] or not q.names[:1] == pos.names == row.names:
            raise RuleError("P004", f"mla of {q}, {qr} over {cc}, {cr} by {pos}, {row}, {table}: the dims do not meet")
        return [(q.dtype, q.names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        t, n = ins[0].names[:2]
        slots, s = ins[2].names[0], ins[6].names[0]
        homes = [axis in _index(self.name, i, "an operand", d) for i, d in ((ins[5], s), (ins[6], slots))]
        r = "R"
        table: dict[tuple[str, ...], str] = {(t, t, slots, slots, t, t, s): t} if all(homes) else {}
        if not any(homes):
            table = {(r,) * 7: r, (n, n, r, r, r, r, r): n, (r, r, slots, slots, r, r, r): "P:lse"}
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
        own = {"scale": attrs["scale"], "page": at.sizes["page"]}
        home = ins[6].index.axes if ins[6].index else ()
        return own | {"offset": _first_slot(ins[2], home, at), "lse": True} if _inner(ins[2], home) else own

    def reference(
        self, q: Tensor, qr: Tensor, cc: Tensor, cr: Tensor, pos: Tensor, row: Tensor, table: Tensor, *, page: int,
        scale: float, offset: int = 0, lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        out = torch.zeros_like(q)
        total = torch.full(q.shape[:2], float("-inf"), dtype=wide(q).dtype)
        for r in row.unique().tolist():
            if r < 0:
                continue
            mine = (row == r).nonzero().flatten()
            p = torch.arange(int(pos[mine].max()) + 1)
            slots = table[r, p // page].long() * page + p % page - offset
            held = (slots >= 0) & (slots < cc.shape[0])
            p, slots = p[held], slots[held]
            latents, rotated = (wide(c[slots]).to(total.dtype) for c in (cc, cr))
            scores = (wide(q[mine]) @ latents.t() + wide(qr[mine]) @ rotated.t()) * scale
            scores.masked_fill_(p > pos[mine].long()[:, None, None], float("-inf"))
            sums = scores.logsumexp(-1)
            weights = torch.where(sums.isneginf()[..., None], 0.0, scores.softmax(-1))
            total[mine] = sums
            out[mine] = (weights @ latents).to(q.dtype)
        return (out, total) if lse else out


LATENT = [HeadLinear(), AppendLatent(), Mla()]
