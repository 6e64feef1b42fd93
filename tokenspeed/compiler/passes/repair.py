"""Redistribution paths: the cheapest sequence of single steps from one type of a value to another.

Invariant: every step is a redistribution op of the table over one SET of axes in the same state, so all-reduce =
reduce-scatter + all-gather falls out and a product group costs one alpha. Ties go to fewer collectives, then to text.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from tokenspeed.compiler.passes.costs import CostModel
from tokenspeed.ir.collectives import outer_blocks
from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.mesh import Axes, Plan
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.types import DTYPE_BYTES, ROW_DIMS, Type

_INTS = frozenset({"i32", "i64", "u8"})


@dataclass(frozen=True)
class Step:
    op: str
    axes: Axes
    dim: str
    after: Type
    kind: str = "sum"  # of the reduction, where it is one

    def attrs(self) -> dict[str, object]:
        out: dict[str, object] = {"axes": self.axes}
        if self.kind != "sum":
            out["kind"] = self.kind
        return out | {"dim": self.dim} if self.dim else out


@dataclass(frozen=True)
class Path:
    cost: float  # us; inf where no path exists
    steps: tuple[Step, ...] = ()


class Repairs:
    """Paths on one plan and bucket, memoised."""

    def __init__(self, plan: Plan, sizes: Mapping[str, int], rows: Mapping[str, Axes], costs: CostModel) -> None:
        self.plan, self.sizes, self.rows, self.costs = plan, sizes, rows, costs
        self.memo: dict[tuple[Type, Type], Path] = {}

    def nbytes(self, t: Type) -> float:
        n = DTYPE_BYTES[t.dtype] * (2 if t.kind in ("argmax", "topk") else 1)
        for d in t.dims:
            n *= self.sizes[d.name] // self.plan.mesh.size(d.axes)
        return float(n)

    def path(self, source: Type, target: Type) -> Path:
        key = (source, target)
        if key not in self.memo:
            self.memo[key] = Path(0.0) if source == target else self._search(source, target)
        return self.memo[key]

    def _search(self, source: Type, target: Type) -> Path:
        if (source.dtype, source.names, source.index) != (target.dtype, target.names, target.index):
            return Path(float("inf"))
        count = itertools.count()
        heap: list[tuple[float, int, int, Type, tuple[Step, ...]]] = [(0.0, 0, next(count), source, ())]
        done: set[Type] = set()
        while heap:
            cost, wires, _, at, steps = heapq.heappop(heap)
            if at == target:
                return Path(cost, steps)
            if at in done:
                continue
            done.add(at)
            for step, price, wire in self._steps(at, target):
                if step.after not in done:
                    heapq.heappush(heap, (cost + price, wires + wire, next(count), step.after, (*steps, step)))
        return Path(float("inf"))

    def _steps(self, at: Type, target: Type) -> list[tuple[Step, float, int]]:
        out: list[tuple[Step, float, int]] = []
        mesh, order = self.plan.mesh, self.plan.mesh.ordered
        states: dict[str, list[str]] = {}
        for a in mesh.names:
            if at.index and a in self.plan.home:
                continue  # the values of an index count from the start of a home block: it cannot cross one
            states.setdefault(at.state(a), []).append(a)
        shard = [d for d in target.names if d in ROW_DIMS or target.dim(d).axes]
        for state, axes in states.items():
            for k in range(len(axes), 0, -1):
                for group in itertools.combinations(axes, k):
                    for op, dim in self._moves(at, state, group, shard, target):
                        moved = group if not dim or dim in ROW_DIMS else self._dim_order(at, target, dim, group)
                        kind = at.kind if state == "P" else "sum"
                        try:
                            if dim in ROW_DIMS:
                                held = tuple(a for a in at.dim(dim).axes if a not in moved)
                                outer_blocks(self.plan, self.rows[dim], held, moved, dim)
                            (after,) = OPS[op].infer([at], {"axes": moved, "dim": dim, "kind": kind}, order)
                        except RuleError:
                            continue
                        ranks = mesh.size(group)
                        if op in ("slice", "keep_first"):
                            price, wire = self.costs.compute(self.nbytes(after), 0.0, 1), 0
                        else:
                            whole = self.nbytes(after if op == "all_gather" else at)
                            price, wire = self.costs.collective(op, ranks, whole), 1
                        out.append((Step(op, moved, dim, after, kind), price, wire))
        return out

    def _moves(
        self, at: Type, state: str, group: tuple[str, ...], shard: list[str], target: Type
    ) -> list[tuple[str, str]]:
        row_ok = [d for d in at.names if d in ROW_DIMS and all(a in self.rows[d] for a in group)]
        if at.kind in ("lse", "topk", "varying") and state != "P":
            return []  # pairs are reduced before anything else moves
        if state == "P":
            moves = [("all_reduce", "")]
            if at.kind == "sum":
                moves += [("reduce_scatter", d) for d in row_ok]
            return moves
        if state != "R":
            return [] if at.kind == "argmax" else [("all_gather", state)]  # pairs are reduced before rows are gathered
        moves = [
            ("slice", d)
            for d in shard
            if d in row_ok or (d not in ROW_DIMS and all(target.state(a) == d for a in group))
        ]
        if (
            target.kind == "sum"
            and target.pending
            and at.dtype not in _INTS
            and all(a in target.pending for a in group)
        ):
            moves.append(("keep_first", ""))
        return moves

    def _dim_order(self, at: Type, target: Type, dim: str, group: tuple[str, ...]) -> Axes:
        """Axes of an ordered dim in the order the dim holds (or will hold) them."""
        have = [a for a in at.dim(dim).axes if a in group] or [a for a in target.dim(dim).axes if a in group]
        return tuple(have) if len(have) == len(group) else group
