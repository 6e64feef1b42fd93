"""Paged attention over a KV cache: `append` writes this step's keys and values, `attend` reads a request's context.

Slot numbers and block tables count from the start of a home block; slot -1 and row -1 are holes. Position p of request
row r lives in slot table[r, p // page] * page + p % page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.ops.base import Local, Op, OutSpec, States, refuse
from tokenspeed.ir.types import Type


class Append(Op):
    """k, v [T, KV, D], slot i32[T -> slots], cache k, cache v [slots, KV, D]; writes the caches, returns nothing."""

    name = "append"
    writes_cache = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return []

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        k, v, slot, ck, cv = states
        t, kv = ins[0].names[:2]
        slots = ins[3].names[0]
        legal = {(t, t, t, slots, slots), (kv, kv, "R", kv, kv), ("R",) * 5}
        if (k, v, slot, ck, cv) not in legal:
            raise refuse(
                "append",
                axis,
                states,
                ins,
                "keys, values and slots must lie exactly as the cache does (rows on the home axis, heads alike)",
            )
        return []

    def reference(self, k: Tensor, v: Tensor, slot: Tensor, ck: Tensor, cv: Tensor) -> None:
        ok = slot >= 0
        ck[slot[ok].long()] = k[ok].to(ck.dtype)
        cv[slot[ok].long()] = v[ok].to(cv.dtype)


class Attend(Op):
    """q [T, N, D], cache k, cache v [slots, KV, D], pos i32[T], row i32[T -> s], table i32[S, L] -> [T, N, D].

    Token t attends positions 0..pos[t] of request row[t]; query head i reads KV head i // (N // KV). Softmax in float32.
    """

    name = "attend"

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        q, ck, cv, pos, row, table = states
        t, n = ins[0].names[:2]
        slots, kv = ins[1].names[:2]
        s = ins[5].names[0]
        if (q, ck, cv, pos, row, table) == (t, slots, slots, t, t, s):
            return [t]
        if (pos, row, table) == ("R",) * 3:
            if (q, ck, cv) in ((n, kv, kv), (n, "R", "R")):
                return [n]
            if (q, ck, cv) == ("R",) * 3:
                return ["R"]
        raise refuse(
            "attend",
            axis,
            states,
            ins,
            "queries go with their request's cache: rows on the home axis, heads as the cache's heads",
        )

    def infer(self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Any, home: Any = ()) -> list[Type]:
        n, kv = ins[0].dims[1], ins[1].dims[1]
        if n.axes[: len(kv.axes)] != kv.axes:
            raise RuleError(
                "V6",
                f"the axes of {kv.name} {list(kv.axes)} must be the outer factors of those of {n.name} {list(n.axes)}",
            )
        return super().infer(ins, attrs, order, home)

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"scale": attrs["scale"], "page": at.sizes["page"]}

    def reference(
        self, q: Tensor, ck: Tensor, cv: Tensor, pos: Tensor, row: Tensor, table: Tensor, *, page: int, scale: float
    ) -> Tensor:
        out = torch.zeros_like(q)
        group = q.shape[1] // ck.shape[1]
        for r in row.unique().tolist():
            if r < 0:
                continue
            mine = (row == r).nonzero().flatten()
            p = torch.arange(int(pos[mine].max()) + 1)
            slots = table[r, p // page].long() * page + p % page
            k = ck[slots].float().repeat_interleave(group, 1)
            v = cv[slots].float().repeat_interleave(group, 1)
            scores = torch.einsum("tnd,pnd->ntp", q[mine].float(), k) * scale
            scores.masked_fill_(p[None, None, :] > pos[mine].long()[None, :, None], float("-inf"))
            out[mine] = torch.einsum("ntp,pnd->tnd", scores.softmax(-1), v).to(q.dtype)
        return out


ATTENTION = [Append(), Attend()]
