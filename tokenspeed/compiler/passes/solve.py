"""Pass 5: the exact minimum over all placements of one bucket, by min-sum variable elimination in program order.

Variables: one a node, its rows. Factors: the cost of each node; for each VALUE the cheapest repairs that serve all its
consumers (equal targets once); what further passes add (fused kernels, memory). Invariant: the result is the global
minimum of that sum; ties go to fewer collectives, then to the earliest row. `Solution.runner_up` is exact as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenspeed.compiler.passes.eliminate import Elimination, Factor, eliminate
from tokenspeed.compiler.passes.repair import Path, Repairs
from tokenspeed.compiler.passes.rows import Choices, Row
from tokenspeed.compiler.passes.tactics import Edge, Tactics
from tokenspeed.compiler.passes.trace import Flat
from tokenspeed.ir.errors import PlanError
from tokenspeed.ir.types import Type

#: consumers of one value that are priced jointly; beyond, each edge is priced alone (ports read by every layer)
JOINT = 4

RESULT = -1  # the consumer of the program's results


@dataclass(frozen=True)
class RunnerUp:
    """The best plan in which one edge is not repaired as it is: what it would be instead, and what that costs more."""

    source: Type
    target: Type
    path: Path
    gap: float  # us a step


@dataclass
class Value:
    """One value and who takes it: the flat node that makes it (RESULT: a port), and (node, operand) of each consumer."""

    name: str
    maker: int
    sources: list[Type]  # one a row of the maker
    consumers: list[tuple[int, int]]
    wanted: list[list[Type]]  # a consumer: one a row
    key: tuple[Any, ...]  # equal for values with equal tables


@dataclass
class Solution:
    cost: float  # us a step, by the model
    rows: list[Row]  # one a flat node
    options: list[list[Row]]  # what each was picked of
    picks: tuple[int, ...]  # their numbers
    elimination: Elimination
    repairs: Repairs
    values: dict[str, Value]
    coded: dict[Any, Any] = field(default_factory=dict)
    asked: dict[Any, RunnerUp | None] = field(default_factory=dict)

    def runner_up(self, value: str, consumer: int) -> RunnerUp | None:
        """None where the types of this edge are the only ones any plan can have. `consumer`: a flat node, or RESULT."""
        v = self.values[value]
        j = next(j for j, (i, _) in enumerate(v.consumers) if i == consumer)
        e = self.elimination
        pair = [i for i in (v.maker, consumer) if i >= 0 and e.picks[i] > 1]
        if not pair:
            return None
        pair = list(dict.fromkeys(pair))
        gaps = e.marginal(pair)
        key = (v.key[0], v.key[j + 1], *(e.chosen[i] for i in pair), v.maker in pair, id(gaps))
        if key not in self.asked:  # equal layers have equal gaps
            self.asked[key] = self._other(v, j, consumer, pair, gaps)
        return self.asked[key]

    def _other(self, v: Value, j: int, consumer: int, pair: list[int], gaps: np.ndarray) -> RunnerUp | None:
        """The least of the gaps in which edge j of the value has other types than those chosen."""
        e = self.elimination
        sources, targets = self._codes(v, j)
        if len(pair) == 2:
            other = (sources[:, None] != sources[e.chosen[v.maker]]) | (targets != targets[e.chosen[consumer]])
        elif pair[0] == v.maker:
            other = sources != sources[e.chosen[v.maker]]
        else:
            other = targets != targets[e.chosen[consumer]]
        gaps = np.where(other, gaps, np.inf)
        at = np.unravel_index(int(gaps.argmin()), gaps.shape)
        least = float(gaps[at])
        if not np.isfinite(least):
            return None
        row = dict(zip(pair, map(int, at)))
        source = v.sources[row.get(v.maker, 0)]
        target = v.wanted[j][row.get(consumer, 0)]
        return RunnerUp(source, target, self.repairs.path(source, target), least)

    def _codes(self, v: Value, j: int) -> tuple[np.ndarray, np.ndarray]:
        """The types of the value's rows and of consumer j's as small integers."""
        key = (v.key[0], v.key[j + 1])
        if key not in self.coded:
            ids: dict[Type, int] = {}
            self.coded[key] = tuple(
                np.array([ids.setdefault(t, len(ids)) for t in ts]) for ts in (v.sources, v.wanted[j])
            )
        return self.coded[key]


def values_of(flat: Flat, choices: Choices, rows: list[list[Row]], results: list[Type]) -> dict[str, Value]:
    """Every value that somebody takes, in order of first use."""
    out: dict[str, Value] = {}
    for name, ((i, o), consumers) in flat.uses.items():
        sources = [choices.ports[name]] if i < 0 else [r.outs[o] for r in rows[i]]
        wanted = [[results[k]] if c < 0 else [r.ins[k] for r in rows[c]] for c, k in consumers]
        source_key: Any = ("port", choices.ports[name]) if i < 0 else (id(rows[i]), o)
        keys = [("result", results[k]) if c < 0 else (id(rows[c]), k) for c, k in consumers]
        out[name] = Value(name, i, sources, consumers, wanted, (source_key, *keys))
    return out


def solve(
    flat: Flat, choices: Choices, repairs: Repairs, rows: list[list[Row]], results: list[Type], values: dict[str, Value],
    tactics: Tactics | None = None, extra: Sequence[Factor] = (),
) -> Solution:  # fmt: skip
    """Picks one row a node. `extra`: further factors. PlanError P030 names the first value that no placement can serve,
    P038 says that the tactics leave no plan."""
    factors: list[Factor] = list(extra)
    constant = 0.0
    picks = [len(r) for r in rows]
    memo: dict[object, np.ndarray] = {}  # of equal layers the tables are one
    for i, options in enumerate(rows):
        if len(options) == 1:
            constant += options[0].cost
        else:
            if id(options) not in memo:
                memo[id(options)] = np.array([r.cost for r in options])
            factors.append(((i,), memo[id(options)]))
    for v in values.values():
        alone = len(v.consumers) > JOINT
        groups = [[j] for j in range(len(v.consumers))] if alone else [list(range(len(v.consumers)))]
        if v.maker < 0 and alone:
            groups = _distinct(groups, v.wanted)
        for group in groups:
            scope = [v.maker, *(v.consumers[j][0] for j in group)]
            keep = [x for x, owner in enumerate(scope) if owner >= 0 and picks[owner] > 1]
            key = (v.key[0], *(v.key[j + 1] for j in group), *keep, *(scope.index(x) for x in scope))
            pinned = tactics is not None and tactics.pins
            if pinned or key not in memo:
                table = _value_table(v, group, repairs, memo)
                if not np.isfinite(table).any():
                    _no_placement(flat, v, [v.wanted[j] for j in group])
                if tactics is not None and pinned:
                    table = _pinned(flat, v, group, table, repairs, tactics)
                table = table[tuple(slice(None) if x in keep else 0 for x in range(len(scope)))]
                memo[key] = merge_scope([scope[x] for x in keep], table)[1]
            if keep:
                factors.append((tuple(dict.fromkeys(scope[x] for x in keep)), memo[key]))
            else:
                constant += float(memo[key])
    found = eliminate(picks, factors)
    total = constant + found.cost
    if not np.isfinite(total):
        where = choices.layout.plan.describe()
        if tactics is not None and tactics.pins:
            raise PlanError("P038", f"the tactics {tactics} together leave no legal plan on {where}; drop one")
        raise PlanError("P030", f"no legal placement on {where}: every choice leaves some value unserved")
    chosen = [options[c] for options, c in zip(rows, found.chosen)]
    return Solution(total, chosen, rows, tuple(found.chosen), found, repairs, values)


def _distinct(groups: list[list[int]], wanted: list[list[Type]]) -> list[list[int]]:
    """A port read alike by many consumers is repaired once: keep one consumer of each fixed target."""
    seen: set[Type] = set()
    out: list[list[int]] = []
    for g in groups:
        options = wanted[g[0]]
        if len(options) == 1:
            if options[0] in seen:
                continue
            seen.add(options[0])
        out.append(g)
    return out


def _value_table(v: Value, group: list[int], repairs: Repairs, memo: dict[object, np.ndarray]) -> np.ndarray:
    """cost[source row, consumer 1 row, ...] of serving the consumers; a target wanted twice is paid once."""
    key = (v.key[0], *(v.key[j + 1] for j in group))
    if key in memo:
        return memo[key]
    wanted = [v.wanted[j] for j in group]
    m = len(wanted)
    shape = (len(v.sources), *(len(w) for w in wanted))
    total = np.zeros(shape)
    ids: dict[Type, int] = {}
    codes = [np.array([ids.setdefault(t, len(ids)) for t in w], dtype=np.intp) for w in wanted]
    sources = {s: i for i, s in enumerate(dict.fromkeys(v.sources))}  # rows share types: a pair of them is priced once
    prices = np.array([[repairs.price(s, t) for t in ids] for s in sources]).reshape(len(sources), len(ids))
    made = np.array([sources[s] for s in v.sources], dtype=np.intp)
    for j in range(m):
        edge = prices[made[:, None], codes[j]]
        view = [1] * (m + 1)
        view[0], view[j + 1] = shape[0], shape[j + 1]
        cost = np.broadcast_to(edge.reshape(view), shape)
        for i in range(j):
            vi, vj = [1] * (m + 1), [1] * (m + 1)
            vi[i + 1], vj[j + 1] = shape[i + 1], shape[j + 1]
            same = codes[i].reshape(vi) == codes[j].reshape(vj)
            cost = np.where(same & np.isfinite(cost), 0.0, cost)
        total = total + cost
    memo[key] = total
    return total


def _pinned(
    flat: Flat, v: Value, group: list[int], table: np.ndarray, repairs: Repairs, tactics: Tactics
) -> np.ndarray:
    """The table with what the tactics forbid priced out."""
    for x, j in enumerate(group):
        edge = Edge(v.name, flat.consumer_name(v.consumers[j][0]))
        pin = tactics.of(edge)
        if pin is None:
            continue
        legal = np.array([[np.isfinite(repairs.path(s, t).cost) for t in v.wanted[j]] for s in v.sources])
        ok = np.array(
            [[pin.allows(t, repairs.path(s, t), repairs.plan) for t in v.wanted[j]] for s in v.sources]
        )  # fmt: skip
        offers = [(t, repairs.path(s, t)) for s in v.sources for t in v.wanted[j]]
        if not (ok & legal).any():
            tactics.offered(edge, offers, repairs.plan)
            continue  # this bucket cannot: a tactic holds in each bucket that can
        tactics.applied.add(edge)
        view = [1] * table.ndim
        view[0], view[x + 1] = table.shape[0], table.shape[x + 1]
        table = np.where(ok.reshape(view), table, np.inf)
    return table


def merge_scope(scope: list[int], table: np.ndarray) -> Factor:
    """Variables ascending; a node that consumes a value twice appears twice in the scope: take the diagonal."""
    out = list(scope)
    while len(set(out)) < len(out):
        a = next(x for x in out if out.count(x) > 1)
        i, j = [k for k, x in enumerate(out) if x == a][:2]
        table = np.moveaxis(np.diagonal(table, axis1=i, axis2=j), -1, i)
        del out[j]
    return tuple(out), table


def _no_placement(flat: Flat, v: Value, wanted: list[list[Type]]) -> None:
    node = next((flat.nodes[i] for i, _ in v.consumers if i >= 0), None)
    want: Any = next((t for w in wanted for t in w), None)
    where = f"argument of {node.path or node.op}, {node.origin}" if node else "the program's result"
    source = v.sources[0]
    reason = "no redistribution leads from one to the other"
    if source.index:
        reason += ": an index into one dp block cannot cross dp"
    if want is None and node is not None:  # none is possible at all
        want = node.spec if node.spec is not None else "any"
        reason = "no placement is so in this bucket: its rows may be too few to be cut over the axes that are named"
    raise PlanError(
        "P030",
        f"no legal placement\n  value  : {source}      {'port' if v.maker < 0 else 'value'} `{v.name}`\n"
        f"  wanted : {want}   {where}\n  {reason}",
    )
