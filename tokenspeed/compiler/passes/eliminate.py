"""Min-sum variable elimination: the exact minimum of a sum of small tables, and the best total with any choice forced.

Invariant: variables go in program order, so tables stay as narrow as what is live at a cut, or, where that is wide, in the
order that a greedy search finds for narrower ones; ties go to the lowest
choice (costs add without rounding, so what costs the same is a tie and equal layers choose alike). `marginal` is exact too:
messages run back over the same cliques, nothing is solved again. Messages are kept less their minimum: those of equal layers
become equal a few layers into a stack, and what was worked out on equal tables is looked up.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

WIDE = 1 << 22  # entries of a table, 32 MiB: beyond, another order is looked for

Factor = tuple[tuple[int, ...], np.ndarray]  # variables, ascending; cost[choice of each]


@dataclass(frozen=True)
class _Table:
    """What one variable met when it was eliminated: `total[choices of scope, own choice]`, and the `message` it left: that,
    minimised over the own choice, less `low`, its minimum."""

    total: np.ndarray
    message: np.ndarray
    low: float


@dataclass(frozen=True)
class _Clique:
    scope: tuple[int, ...]
    table: _Table

    @property
    def total(self) -> np.ndarray:
        return self.table.total


class _Shared:
    """One array for all arrays of equal content, so that equal tables are known by their identity."""

    def __init__(self) -> None:
        self.known: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.known.setdefault((x.shape, x.tobytes()), x)


@dataclass
class Elimination:
    """`chosen`: a choice for each variable; `cost`: the minimum (inf: no assignment is legal)."""

    picks: list[int]
    order: list[int]  # of the variables that have several choices
    chosen: list[int]
    cost: float
    cliques: dict[int, _Clique]
    gaps: dict[int, np.ndarray] = field(default_factory=dict)
    seen: dict[Hashable, np.ndarray] = field(default_factory=dict)

    @cached_property
    def place(self) -> dict[int, int]:
        return {v: i for i, v in enumerate(self.order)}

    def first(self, variables: Sequence[int]) -> int:
        """The one that was eliminated first."""
        return min(variables, key=lambda v: self.place.get(v, -1))

    def marginal(self, variables: Sequence[int]) -> np.ndarray:
        """How much more than the minimum each joint choice of `variables`, which some factor holds together, costs at least;
        axes in the given order. Equal results are one array."""
        first = self.first(variables)  # it met all the others
        order = (*self.cliques[first].scope, first) if first in self.cliques else ()
        missing = [v for v in variables if v not in order]
        if missing:
            raise ValueError(f"variables {missing} never met {first} in one table")
        if not self.gaps:
            self._propagate()
        gaps, at = self.gaps[first], tuple(order.index(v) for v in variables)
        key = (id(gaps), at)
        if key not in self.seen:
            self.seen[key] = _onto(gaps, at)
        return self.seen[key]

    def _propagate(self) -> None:
        """Of every clique, what each joint choice costs more than the minimum."""
        shared, known = _Shared(), dict[Any, np.ndarray]()
        for v in reversed(list(self.cliques)):
            scope, table = self.cliques[v].scope, self.cliques[v].table
            if not scope:
                self.gaps[v] = shared(table.total - table.total.min())
                continue
            parent = self.first(scope)  # it took the message in
            order = (*self.cliques[parent].scope, parent)
            at = tuple(order.index(u) for u in scope)
            key = (id(table), id(self.gaps[parent]), at)
            if key not in known:
                with np.errstate(invalid="ignore"):
                    without = self.gaps[parent] - _spread(table.message, at, len(order))
                back = _onto(np.where(np.isnan(without), np.inf, without), at)
                gaps = table.total + back[..., None]
                known[key] = shared(gaps - gaps.min())
            self.gaps[v] = known[key]


def eliminate(picks: Sequence[int], factors: Sequence[Factor]) -> Elimination:
    """Minimises the sum of `factors`; `picks[v]` choices a variable. Variables with one choice are in no factor. Equal tables are
    best given as one array."""
    program = [v for v, n in enumerate(picks) if n > 1]
    found = _eliminate(picks, factors, program, WIDE)
    if found is None:
        order = _order(program, picks, [scope for scope, _ in factors])
        found = _eliminate(picks, factors, order, sys.maxsize)
        assert found is not None
    return found


def _eliminate(picks: Sequence[int], factors: Sequence[Factor], order: list[int], widest: int) -> Elimination | None:
    """In this order; None where a table would have more entries than `widest`."""
    live: dict[int, Factor] = dict(enumerate(factors))
    of: dict[int, set[int]] = defaultdict(set)
    for k, (scope, _) in live.items():
        for v in scope:
            of[v].add(k)
    fresh, cost = len(factors), 0.0
    cliques: dict[int, _Clique] = {}
    shared, known = _Shared(), dict[Any, _Table]()
    for v in order:
        n = picks[v]
        mine = [live.pop(k) for k in sorted(of[v])]
        scope = tuple(sorted({u for s, _ in mine for u in s} - {v}))
        place = {u: x for x, u in enumerate((*scope, v))}
        parts = [(table, tuple([place[u] for u in s])) for s, table in mine]
        key = (n, *((id(table), at) for table, at in parts))
        if key not in known:
            extent = [picks[u] for u in place]
            if math.prod(extent) > widest:
                return None
            total = np.zeros(extent)
            for table, at in parts:
                total += _spread(table, at, len(place))
            best = total.min(-1)
            low = float(best.min())
            known[key] = _Table(total, shared(best - low) if np.isfinite(low) else best, low)
        table = known[key]
        cliques[v] = _Clique(scope, table)
        cost += table.low
        for u in scope:
            of[u] -= of[v]
            of[u].add(fresh)
        if scope:
            live[fresh] = (scope, table.message)
            fresh += 1
    chosen = [0] * len(picks)
    for v in reversed(cliques):
        c = cliques[v]
        chosen[v] = int(c.total[tuple([chosen[u] for u in c.scope])].argmin())
    return Elimination(list(picks), order, chosen, cost, cliques)


def _order(program: list[int], picks: Sequence[int], scopes: Sequence[tuple[int, ...]]) -> list[int]:
    """Variables as `_narrow` says, or in program order where that does not help."""
    near: dict[int, set[int]] = {v: set() for v in program}
    for scope in scopes:
        for v in scope:
            near[v].update(scope)
    other = _narrow(program, picks, near)
    return other if _widest(other, picks, near) < _widest(program, picks, near) else program


def _widest(order: Sequence[int], picks: Sequence[int], near: Mapping[int, set[int]]) -> int:
    """Entries of the largest table of an order."""
    near = {v: set(met) for v, met in near.items()}
    return max((_met(v, picks, near) for v in order), default=0)


def _narrow(program: Sequence[int], picks: Sequence[int], near: Mapping[int, set[int]]) -> list[int]:
    """Next goes the variable whose table is the smallest, the first in the program among equals."""
    near, order = {v: set(met) for v, met in near.items()}, list[int]()
    while left := [v for v in program if v in near]:
        order.append(min(left, key=lambda v: math.prod(picks[u] for u in near[v])))
        _met(order[-1], picks, near)
    return order


def _met(v: int, picks: Sequence[int], near: dict[int, set[int]]) -> int:
    """Eliminates `v` in `near`, the variables that each meets; entries of the table that takes."""
    others = near.pop(v) - {v}
    for u in others:
        near[u] |= others
        near[u].discard(v)
    return picks[v] * math.prod(picks[u] for u in others)


def _spread(table: np.ndarray, at: tuple[int, ...], axes: int) -> np.ndarray:
    """`table`, whose axes are the axes `at` of a wider one with `axes` of them, so that it can be added to that."""
    if list(at) != sorted(at):
        perm = sorted(range(len(at)), key=at.__getitem__)
        table, at = np.transpose(table, perm), tuple(at[x] for x in perm)
    shape = [1] * axes
    for x, n in zip(at, table.shape):
        shape[x] = n
    return table.reshape(shape)


def _onto(table: np.ndarray, at: tuple[int, ...]) -> np.ndarray:
    """`table` minimised over all axes but `at`, which come in that order."""
    rest = tuple([x for x in range(table.ndim) if x not in at])
    out = table.min(axis=rest) if rest else table
    kept = sorted(at)
    return np.transpose(out, [kept.index(x) for x in at])
