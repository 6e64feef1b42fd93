"""Paged attention over a KV cache: `append` writes this step's keys and values, `attend` reads a request's context.

Slot numbers and block tables count from the start of a home block; slot -1 and row -1 are holes. Position p of request
row r lies in slot table[r, p // page] * page + p % page. A cache whose slots are sharded beyond the home axes (`cp`) holds
a block of each home block's slots a rank: the owner of a slot writes it, and each rank attends to what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.mesh import Plan
from tokenspeed.ir.ops.base import Local, Op, OutSpec, States, refuse, wide
from tokenspeed.ir.ops.base import check_outer as _check_outer
from tokenspeed.ir.ops.base import index_axes as _index
from tokenspeed.ir.types import Dim, Type


def check_group(n: Dim, kv: Dim, plan: Plan, sizes: Mapping[str, int]) -> None:
    """Heads n share the heads kv in groups: where ranks split a block of kv's heads it must be one head."""
    if len(n.axes) > len(kv.axes) and sizes[kv.name] > plan.mesh.size(kv.axes):
        raise RuleError(
            "V6",
            f"{n.name} is split over {list(n.axes[len(kv.axes) :])} inside one block of {kv.name}, which holds "
            f"{sizes[kv.name] // plan.mesh.size(kv.axes)} heads: its heads would read the wrong ones",
        )


def part_of(cache: Type, index: Type, at: Local, **said: Any) -> dict[str, Any]:
    """What a kernel is told that works on a part of a home block's slots: its first slot, and what more is `said` to it.
    `index`: the operand that points into the block, and so names the home axes. Nothing where the block is whole."""
    home = index.index.axes if index.index else ()
    inner = tuple(a for a in cache.dims[0].axes if a not in home)
    if not inner:
        return {}
    slots = at.sizes[cache.dims[0].name] // at.plan.mesh.size(cache.dims[0].axes)
    return {"offset": at.plan.mesh.index(at.rank, inner) * slots} | said


class Append(Op):
    """k, v [T, KV, D], slot i32[T -> slots], cache k, cache v [slots, KV, D]; writes the caches, returns nothing."""

    name = "append"
    integers = (2,)
    writes_cache = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        k, v, slot, ck, cv = ins
        _index("append", slot, "its slots", ck.names[0])
        if k.names != v.names or ck.names != cv.names or k.names[1:] != ck.names[1:] or slot.names != k.names[:1]:
            raise RuleError("P004", f"append writes {k}, {v} into {ck}, {cv} by {slot}: the dims do not meet")
        return []

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        t, kv = ins[0].names[:2]
        slots = ins[3].names[0]
        _check_outer("append", ins[3:], ins[2].index.axes if ins[2].index else ())
        if len({t.dims[1].axes for t in (ins[0], ins[1], *ins[3:])}) > 1 or ins[3].dims != ins[4].dims:
            raise RuleError(
                "V4", f"append of {ins[0]}, {ins[1]} into {ins[3]}, {ins[4]}: the heads' blocks do not match"
            )
        if axis in _index("append", ins[2], "its slots", slots):
            legal = {(t, t, t, slots, slots)}
        else:
            legal = {(kv, kv, "R", kv, kv), ("R",) * 5, ("R", "R", "R", slots, slots)}
        if tuple(states) not in legal:
            raise refuse(
                "append",
                axis,
                states,
                ins,
                "keys, values and slots must lie exactly as the cache does (rows on the home axis, heads alike)",
            )
        return []

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return part_of(ins[3], ins[2], at)

    def reference(self, k: Tensor, v: Tensor, slot: Tensor, ck: Tensor, cv: Tensor, *, offset: int = 0) -> None:
        at = slot.long() - offset
        ok = (slot >= 0) & (at >= 0) & (at < ck.shape[0])
        ck[at[ok]] = k[ok].to(ck.dtype)
        cv[at[ok]] = v[ok].to(cv.dtype)


class Attend(Op):
    """q [T, N, D], cache k, cache v [slots, KV, D], pos i32[T], row i32[T -> s], table i32[S, L -> slots] -> [T, N, D].

    Token t attends positions 0..pos[t] of request row[t]; query head i reads KV head i // (N // KV). Scores are q k * `scale`,
    softmax in float32. attrs: `window`, the last positions that a token sees, its own among them; `softcap` c, which bends a
    score x to c tanh(x / c). A further operand [N] gives each head a sink: a score beside the others whose weight goes to
    nothing (Xiao et al., 2309.17453).
    Where the slots of a home block are sharded the result is pending by lse: a pair with the log-sum-exp [T, N], the sink
    counted by the first rank.
    """

    name = "attend"
    integers = (3, 4, 5)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        q, ck, cv, pos, row, table, *sinks = ins
        _index("attend", row, "its rows", table.names[0])
        _index("attend", table, "its block table", ck.names[0])
        if q.names[2:] != ck.names[2:] or ck.names != cv.names or not q.names[:1] == pos.names == row.names:
            raise RuleError("P004", f"attend of {q} over {ck}, {cv} by {pos}, {row}, {table}: the dims do not meet")
        if len(sinks) > 1 or any(s.names != q.names[1:2] for s in sinks):
            raise RuleError(
                "P004", f"attend of {q} with sinks {', '.join(map(str, sinks))}: one value a query head is due"
            )
        return [(q.dtype, q.names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        q, ck, cv, pos, row, table, *sinks = states
        t, n = ins[0].names[:2]
        slots, kv = ins[1].names[:2]
        s = ins[5].names[0]
        homes = [axis in _index("attend", i, "an operand", d) for i, d in ((ins[4], s), (ins[5], slots))]
        if any(homes):
            if all(homes) and (q, ck, cv, pos, row, table) == (t, slots, slots, t, t, s) and set(sinks) <= {"R"}:
                return [t]
        elif (pos, row, table) == ("R",) * 3:
            if (q, ck, cv) in ((n, kv, kv), (n, "R", "R")) and set(sinks) <= {n}:
                return [n]
            if (q, ck, cv) == ("R", slots, slots) and set(sinks) <= {"R"}:
                return ["P:lse"]
            if (q, ck, cv) == ("R",) * 3 and set(sinks) <= {"R"}:
                return ["R"]
        raise refuse(
            "attend",
            axis,
            states,
            ins,
            "queries go with their request's cache: rows on the home axis, heads as the cache's heads and the sinks",
        )

    def infer(self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Any, home: Any = ()) -> list[Type]:
        n, kv = ins[0].dims[1], ins[1].dims[1]
        _check_outer("attend", ins[1:3], ins[5].index.axes if ins[5].index else ())
        if n.axes[: len(kv.axes)] != kv.axes or ins[2].dims != ins[1].dims:
            raise RuleError(
                "V6",
                f"the axes of {kv.name} {list(kv.axes)} must be the outer factors of those of {n.name} {list(n.axes)}",
            )
        if any(t.dims[0].axes != n.axes for t in ins[6:]):
            raise RuleError("V6", f"the sinks {ins[6]} do not lie as the heads {n.name} over {list(n.axes)}")
        return super().infer(ins, attrs, order, home)

    def check_extents(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int]
    ) -> None:
        if attrs.get("window", 1) < 1 or attrs.get("softcap", 1.0) <= 0:
            raise RuleError("P004", f"attend takes a window and a softcap above zero, not {dict(attrs)}")
        check_group(ins[0].dims[1], ins[1].dims[1], plan, sizes)

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        own = dict(attrs) | {"page": at.sizes["page"]} | (part := part_of(ins[1], ins[5], at, lse=True))
        return own | ({"sink": part["offset"] == 0} if part and len(ins) > 6 else {})

    def reference(
        self, q: Tensor, ck: Tensor, cv: Tensor, pos: Tensor, row: Tensor, table: Tensor, sinks: Tensor | None = None, *,
        page: int, scale: float, window: int = 0, softcap: float = 0.0, offset: int = 0, lse: bool = False, sink: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """`window` 0: all positions; `softcap` 0: none; `sink`: whether this rank counts the sinks."""
        out = torch.zeros_like(q)
        total = torch.full(q.shape[:2], float("-inf"), dtype=wide(q).dtype)
        group = q.shape[1] // ck.shape[1]
        for r in row.unique().tolist():
            if r < 0:
                continue
            mine = (row == r).nonzero().flatten()
            at = pos[mine].long()[:, None]
            p = torch.arange(max(int(at.min()) - window + 1, 0) if window else 0, int(at.max()) + 1)
            slots = table[r, p // page].long() * page + p % page - offset
            held = (slots >= 0) & (slots < ck.shape[0])
            p, slots = p[held], slots[held]
            k, v = (
                wide(c[slots]).to(total.dtype).repeat_interleave(group, 1).transpose(0, 1) for c in (ck, cv)
            )  # [N, P, D]
            scores = wide(q[mine]).transpose(0, 1) @ k.transpose(1, 2) * scale  # [N, T, P]
            if softcap:
                scores = (scores / softcap).tanh() * softcap
            seen = (p <= at) & (p > at - window) if window else p <= at
            scores.masked_fill_(~seen[None], float("-inf"))
            sums = scores.logsumexp(-1)
            if sinks is not None and sink:
                sums = torch.logaddexp(sums, wide(sinks).to(sums.dtype)[:, None])
            weights = torch.where(scores.isneginf(), 0.0, (scores - sums[..., None]).exp())
            total[mine] = sums.T
            out[mine] = (weights @ v).transpose(0, 1).to(q.dtype)
        return (out, total) if lse else out


ATTENTION = [Append(), Attend()]
