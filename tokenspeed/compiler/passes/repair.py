"""Redistribution paths: the cheapest sequence of single steps from one type of a value to another.

Invariant: every step is a redistribution op of the table over one SET of axes in the same state, so all-reduce =
reduce-scatter + all-gather falls out and a product group costs one alpha. Ties go to fewer collectives, then to text.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import networkx as nx

from tokenspeed.compiler.costs import CostModel
from tokenspeed.ir.collectives import outer_blocks
from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.mesh import Axes, Mesh, Plan
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


#: us a collective in comparisons: of two plans of one price, the one with fewer collectives
TIE = 2.0**-24


def _wire(step: Step) -> bool:
    return step.op not in ("slice", "keep_first")


@dataclass(frozen=True)
class Path:
    cost: float  # us; inf where no path exists
    steps: tuple[Step, ...] = ()

    @property
    def wires(self) -> int:
        return sum(map(_wire, self.steps))


@dataclass
class _Graph:
    """Single steps between the types of one family of values: an edge from type number u to v is step `edges[n]`."""

    g: nx.DiGraph = field(default_factory=nx.DiGraph)
    number: dict[Type, int] = field(default_factory=dict)
    types: list[Type] = field(default_factory=list)
    edges: list[tuple[Type, Step]] = field(default_factory=list)  # the type before, and the step
    grown: set[int] = field(default_factory=set)  # types whose steps are in

    def node(self, t: Type) -> int:
        if t not in self.number:
            self.number[t] = len(self.types)
            self.types.append(t)
        return self.number[t]


@lru_cache(maxsize=64)
def _graphs(mesh: Mesh, home: Axes) -> dict[Hashable, _Graph]:
    """Graphs by (row factors, what targets of the family may look like). Which steps there are depends on the mesh and its
    home axes alone: buckets, models and plans share them."""
    return {}


class Repairs:
    """Paths on one plan and bucket, memoised."""

    def __init__(self, plan: Plan, sizes: Mapping[str, int], rows: Mapping[str, Axes], costs: CostModel) -> None:
        self.plan, self.sizes, self.rows, self.costs = plan, sizes, rows, costs
        self.graphs = _graphs(plan.mesh, plan.home)
        self.rows_key = tuple(sorted(rows.items()))
        self.prices: dict[Hashable, dict[int, float]] = {}  # us of the edges of a graph
        self.from_source: dict[Hashable, tuple[_Graph, dict[int, float], dict[int, list[int]]]] = {}
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

    def price(self, source: Type, target: Type) -> float:
        """What the solver compares: us, and a tie-break by collectives."""
        if source == target:
            return 0.0
        found = self._from(source, target)
        return found[1].get(found[0].number.get(target, -1), float("inf")) if found else float("inf")

    def _search(self, source: Type, target: Type) -> Path:
        found = self._from(source, target)
        if found is None or (number := found[0].number.get(target, -1)) not in found[2]:
            return Path(float("inf"))
        graph, _, paths = found
        edges = [graph.g.edges[u, v]["edge"] for u, v in itertools.pairwise(paths[number])]
        prices = self.prices[self._family(target), source.dtype, source.names, source.index]
        return Path(sum(prices[e] for e in edges), tuple(graph.edges[e][1] for e in edges))

    def _family(self, target: Type) -> Hashable:
        """What the types that one search leads to have in common."""
        fixed = tuple(d for d in target.dims if d.name not in ROW_DIMS)
        return fixed, bool(target.pending) and target.kind == "sum", self.rows_key

    def _from(self, source: Type, target: Type) -> tuple[_Graph, dict[int, float], dict[int, list[int]]] | None:
        """Dijkstra from `source` to all types that look like `target` in its ordered dims; ties by collectives."""
        if (source.dtype, source.names, source.index) != (target.dtype, target.names, target.index):
            return None
        family = self._family(target)
        if (source, family) not in self.from_source:
            self.from_source[source, family] = self._paths(source, target, family)
        return self.from_source[source, family]

    def _paths(
        self, source: Type, target: Type, family: Hashable
    ) -> tuple[_Graph, dict[int, float], dict[int, list[int]]]:
        """The graph, and price and path of every type that `source` leads to."""
        key = (family, source.dtype, source.names, source.index)
        graph = self.graphs.setdefault(key, _Graph())
        self._grow(graph, source, target)
        prices = self.prices.setdefault(key, {})

        def weight(u: int, v: int, data: dict[str, int]) -> float:
            n = data["edge"]
            before, step = graph.edges[n]
            if n not in prices:
                prices[n] = self._price(before, step)
            return prices[n] + TIE * _wire(step)

        found: tuple[Any, Any] = nx.single_source_dijkstra(graph.g, graph.number[source], weight=weight)
        return graph, *found

    def _grow(self, graph: _Graph, source: Type, target: Type) -> None:
        """Adds all that `source` leads to."""
        todo = [source]
        while todo:
            at = todo.pop()
            u = graph.node(at)
            if u in graph.grown:
                continue
            graph.grown.add(u)
            graph.g.add_node(u)
            for step in self._steps(at, target):
                v = graph.node(step.after)
                graph.g.add_edge(u, v, edge=len(graph.edges))
                graph.edges.append((at, step))
                todo.append(step.after)

    def _price(self, before: Type, step: Step) -> float:
        if not _wire(step):
            return self.costs.compute(self.nbytes(step.after), 0.0, 1)
        whole = self.nbytes(step.after if step.op == "all_gather" else before)
        return self.costs.collective(step.op, self.plan.mesh.size(step.axes), whole)

    def _steps(self, at: Type, target: Type) -> list[Step]:
        out: list[Step] = []
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
                        out.append(Step(op, moved, dim, after, kind))
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
        if target.kind == "sum" and target.pending and at.dtype not in _INTS:
            moves.append(("keep_first", ""))
        return moves

    def _dim_order(self, at: Type, target: Type, dim: str, group: tuple[str, ...]) -> Axes:
        """Axes of an ordered dim in the order the dim holds (or will hold) them."""
        have = [a for a in at.dim(dim).axes if a in group] or [a for a in target.dim(dim).axes if a in group]
        return tuple(have) if len(have) == len(group) else group
