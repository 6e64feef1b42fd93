"""Min-sum variable elimination: the exact minimum of a sum of small tables, and the best total with any choice forced.

Invariant: variables go in program order, so tables stay as narrow as what is live at a cut; ties go to the lowest
choice (costs add without rounding, so what costs the same is a tie and equal layers choose alike). `marginal` is exact too:
messages run back over the same cliques, nothing is solved again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Factor = tuple[tuple[int, ...], np.ndarray]  # variables, ascending; cost[choice of each]


@dataclass
class _Clique:
    """What one variable met when it was eliminated: `total[choices of scope, own choice]`."""

    scope: tuple[int, ...]
    total: np.ndarray
    message: np.ndarray  # total, minimised over the own choice


@dataclass
class Elimination:
    """`chosen`: a choice for each variable; `cost`: the minimum (inf: no assignment is legal)."""

    picks: list[int]
    chosen: list[int]
    cost: float
    cliques: dict[int, _Clique]
    beliefs: dict[int, np.ndarray] = field(default_factory=dict)

    def marginal(self, variables: Sequence[int]) -> np.ndarray:
        """Least total for each joint choice of `variables`, which some factor holds together; axes in the given order.

        Costs of the constant part (variables without choice) are the caller's to add.
        """
        first = min(variables)  # the first to go met all the others
        order = (*self.cliques[first].scope, first) if first in self.cliques else ()
        missing = [v for v in variables if v not in order]
        if missing:
            raise ValueError(f"variables {missing} never met {first} in one table")
        belief = self._belief(first)
        rest = tuple(x for x, v in enumerate(order) if v not in variables)
        kept = [v for v in order if v in variables]
        out = belief.min(axis=rest) if rest else belief
        return np.transpose(out, [kept.index(v) for v in variables])

    def _belief(self, v: int) -> np.ndarray:
        """Least total of the whole problem for each joint choice of a clique."""
        if not self.beliefs:
            self._propagate()
        return self.beliefs[v]

    def _propagate(self) -> None:
        roots = [v for v, c in self.cliques.items() if not c.scope]
        apart = {v: self.cost - float(self.cliques[v].message) for v in roots}  # what the other components cost
        for v in reversed(list(self.cliques)):
            c = self.cliques[v]
            if not c.scope:
                self.beliefs[v] = c.total + apart[v]
                continue
            parent = min(c.scope)  # the next of the scope to go took the message in
            order = (*self.cliques[parent].scope, parent)
            message = _spread(c.message, c.scope, order, self.picks)
            with np.errstate(invalid="ignore"):
                without = self.beliefs[parent] - message
            without = np.where(np.isnan(without), np.inf, without)
            rest = tuple(x for x, u in enumerate(order) if u not in c.scope)
            back = without.min(axis=rest) if rest else without
            kept = [u for u in order if u in c.scope]
            back = np.transpose(back, [kept.index(u) for u in c.scope])
            self.beliefs[v] = c.total + back[..., None]


def eliminate(picks: Sequence[int], factors: Sequence[Factor]) -> Elimination:
    """Minimises the sum of `factors`; `picks[v]` choices a variable. Variables with one choice are in no factor."""
    live: dict[int, Factor] = dict(enumerate(factors))
    of: dict[int, set[int]] = defaultdict(set)
    for k, (scope, _) in live.items():
        for v in scope:
            of[v].add(k)
    fresh, constant = len(factors), 0.0
    cliques: dict[int, _Clique] = {}
    for v, n in enumerate(picks):
        if n == 1:
            continue
        mine: list[Factor] = []
        for k in sorted(of[v]):
            mine.append(live.pop(k))
            for u in mine[-1][0]:
                if u != v:
                    of[u].discard(k)
        scope = tuple(sorted({u for s, _ in mine for u in s} - {v}))
        order = (*scope, v)
        total = np.zeros([picks[u] for u in order])
        for s, table in mine:
            total += _spread(table, s, order, picks)
        best = total.min(-1)
        cliques[v] = _Clique(scope, total, best)
        if scope:
            live[fresh] = (scope, best)
            for u in scope:
                of[u].add(fresh)
            fresh += 1
        else:
            constant += float(best)
    chosen = [0] * len(picks)
    for v in reversed(cliques):
        c = cliques[v]
        chosen[v] = int(c.total[tuple(chosen[u] for u in c.scope)].argmin())
    return Elimination(list(picks), chosen, constant, cliques)


def _spread(table: np.ndarray, scope: tuple[int, ...], order: tuple[int, ...], picks: Sequence[int]) -> np.ndarray:
    """`table` over `scope` as a broadcastable table over `order`."""
    perm = sorted(range(len(scope)), key=lambda x: order.index(scope[x]))
    shape = [picks[u] if u in scope else 1 for u in order]
    return np.transpose(table, perm).reshape(shape)
