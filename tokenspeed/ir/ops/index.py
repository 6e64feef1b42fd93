"""The index of sparse attention (DeepSeek Sparse Attention): which positions a token attends, by scores that are cheap.

A position has one index key, kept in a cache of its own beside the latents, in the same slots. A token scores it with a few
index heads, sum over heads of weight * relu(query . key), and attends the positions of the highest scores, the lowest
position first among equals. Heads are whole on every rank: parts of a score would have to be added position by position
before the choice, which is more than the heads weigh. Slots, tables and holes are those of attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.mesh import Plan
from tokenspeed.ir.ops.attention import part_of
from tokenspeed.ir.ops.base import Local, Op, OutSpec, States, check_outer, index_axes, refuse, wide
from tokenspeed.ir.ops.latent import positions
from tokenspeed.ir.types import Type


class IndexTopk(Op):
    """q [T, M, D], w f32[T, M], keys [slots, D], pos, row, table (as `attend`) -> positions i32[T, K], -1 where there are fewer.

    Of positions 0..pos[t] of request row[t] the k of highest score, sum_m w[m] relu(q_m . key) in float32. attrs: `k`, and `dim`
    that names it. Where the slots of a home block are sharded the result is pending by topk: a pair with the scores [T, K].
    """

    name = "index_topk"
    integers = (3, 4, 5)
    discrete = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        q, w, keys, pos, row, table = ins
        if type(attrs["k"]) is not int or attrs["k"] < 1:
            raise RuleError("P004", f"index_topk takes a whole number of positions from 1 on, not {attrs['k']!r}")
        index_axes(self.name, row, "its rows", table.names[0])
        index_axes(self.name, table, "its block table", keys.names[0])
        if q.names[:2] != w.names or q.names[2:] != keys.names[1:] or not q.names[:1] == pos.names == row.names:
            raise RuleError(
                "P004", f"index_topk of {q}, {w} over {keys} by {pos}, {row}, {table}: the dims do not meet"
            )
        return [("i32", (q.names[0], attrs["dim"]))]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        t, (slots, s) = ins[0].names[0], (ins[2].names[0], ins[5].names[0])
        homes = [axis in index_axes(self.name, i, "an operand", d) for i, d in ((ins[4], s), (ins[5], slots))]
        table: dict[tuple[str, ...], str] = {(t, t, slots, t, t, s): t} if all(homes) else {}
        if not any(homes):
            table = {("R",) * 6: "R", ("R", "R", slots, "R", "R", "R"): "P:topk"}
        if tuple(states) not in table:
            raise refuse(self.name, axis, states, ins, "queries go with their request's keys: rows on the home axis, index "
                         "heads whole (the best by a part of a score are not the best)")  # fmt: skip
        return [table[tuple(states)]]

    def infer(self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Any, home: Any = ()) -> list[Type]:
        check_outer(self.name, ins[2:3], ins[5].index.axes if ins[5].index else ())
        return super().infer(ins, attrs, order, home)

    def check_extents(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int]
    ) -> None:
        if sizes[attrs["dim"]] != attrs["k"]:
            raise RuleError("P004", f"index_topk takes k={attrs['k']} positions, {attrs['dim']}={sizes[attrs['dim']]}")

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"k": attrs["k"], "page": at.sizes["page"]} | part_of(ins[2], ins[5], at, scores=True)

    def reference(
        self, q: Tensor, w: Tensor, keys: Tensor, pos: Tensor, row: Tensor, table: Tensor, *, k: int, page: int,
        offset: int = 0, scores: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """`scores`: also of each position its score, -inf where there is none."""
        best = torch.full((q.shape[0], k), float("-inf"), dtype=wide(q).dtype)
        at = torch.full(best.shape, -1, dtype=torch.int32)
        for r in row.unique().tolist():
            if r < 0:
                continue
            mine = (row == r).nonzero().flatten()
            p, slots = positions(table[r], pos[mine], page, offset, keys.shape[0])
            heads = (wide(q[mine]) @ wide(keys[slots]).to(best.dtype).t()).relu()
            score = torch.einsum("tmp,tm->tp", heads, wide(w[mine]).to(best.dtype))
            score.masked_fill_(p > pos[mine].long()[:, None], float("-inf"))
            value, index = score.sort(dim=-1, descending=True, stable=True)
            value, index = value[:, :k], p.int()[index[:, :k]]
            best[mine, : value.shape[1]] = value
            at[mine, : value.shape[1]] = torch.where(value.isneginf(), -1, index)
        return (best, at) if scores else at


INDEX = [IndexTopk()]
