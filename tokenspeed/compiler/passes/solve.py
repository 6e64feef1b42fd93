"""Pass 5: the exact minimum over all placements of one bucket, by min-sum variable elimination in program order.

Variables: one a node, its rows. Factors: the cost of each node, and for each VALUE the cheapest repairs that serve all
its consumers (equal targets once). Invariant: the result is the global minimum of that sum; ties go to the earliest row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from tokenspeed.compiler.passes.repair import Repairs
from tokenspeed.compiler.passes.rows import Choices, Row
from tokenspeed.compiler.passes.trace import Flat
from tokenspeed.ir.errors import PlanError
from tokenspeed.ir.types import Type

Factor = tuple[tuple[int, ...], np.ndarray]

#: consumers of one value that are priced jointly; beyond, each edge is priced alone (ports read by every layer)
JOINT = 4


@dataclass(frozen=True)
class Solution:
    cost: float  # us a step, by the model
    rows: list[Row]  # one a flat node
    picks: tuple[int, ...]  # their numbers


def solve(flat: Flat, choices: Choices, repairs: Repairs, rows: list[list[Row]], results: list[Type]) -> Solution:
    """Picks one row a node. PlanError P030 names the first value that no placement can serve."""
    factors: list[Factor] = []
    constant = 0.0
    picks = [len(r) for r in rows]
    for i, options in enumerate(rows):
        costs = np.array([r.cost for r in options])
        if len(options) == 1:
            constant += float(costs[0])
        else:
            factors.append(((i,), costs))
    makers = {o: (i, k) for i, n in enumerate(flat.nodes) for k, o in enumerate(n.outputs)}
    uses: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, n in enumerate(flat.nodes):
        for k, v in enumerate(v for v in n.inputs if not v.startswith("@")):
            uses[v].append((i, k))
    for k, (v, _) in enumerate(flat.results):
        uses[v].append((-1, k))
    memo: dict[object, tuple[tuple[int, ...], np.ndarray] | float] = {}
    for value, consumers in uses.items():
        maker = makers.get(value)
        source = [choices.ports[value]] if maker is None else [r.outs[maker[1]] for r in rows[maker[0]]]
        wanted = [[results[k]] if i < 0 else [r.ins[k] for r in rows[i]] for i, k in consumers]
        owners = [maker[0] if maker else -1, *(i for i, _ in consumers)]
        groups = [list(range(len(consumers)))] if len(consumers) <= JOINT else [[j] for j in range(len(consumers))]
        if maker is None and len(consumers) > JOINT:
            groups = _distinct(groups, wanted)
        for group in groups:
            table = _value_table(source, [wanted[j] for j in group], repairs, memo)
            if not np.isfinite(table).any():
                _no_placement(flat, value, source, [wanted[j] for j in group])
            scope = [owners[0], *(owners[j + 1] for j in group)]
            keep = [x for x, owner in enumerate(scope) if owner >= 0 and picks[owner] > 1]
            index = tuple(slice(None) if x in keep else 0 for x in range(len(scope)))
            table = table[index]
            if not keep:
                constant += float(table)
            else:
                factors.append(_merge_scope([scope[x] for x in keep], table))
    chosen, best = _eliminate(len(rows), picks, factors)
    total = constant + best
    if not np.isfinite(total):
        raise PlanError(
            "P030", f"no legal placement on {choices.layout.plan.describe()}: every choice leaves some value unserved"
        )
    return Solution(total, [options[c] for options, c in zip(rows, chosen)], tuple(chosen))


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


def _value_table(source: list[Type], wanted: list[list[Type]], repairs: Repairs, memo: dict) -> np.ndarray:
    """cost[source row, consumer 1 row, ...] of serving all consumers; a target wanted twice is paid once."""
    key = (tuple(source), tuple(tuple(w) for w in wanted))
    if key in memo:
        return memo[key]
    m = len(wanted)
    shape = (len(source), *(len(w) for w in wanted))
    total = np.zeros(shape)
    ids: dict[Type, int] = {}
    codes = [np.array([ids.setdefault(t, len(ids)) for t in w]) for w in wanted]
    for j, w in enumerate(wanted):
        edge = np.array([[repairs.path(s, t).cost for t in w] for s in source])
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


def _merge_scope(scope: list[int], table: np.ndarray) -> Factor:
    """A node that consumes a value twice appears twice in the scope: take the diagonal."""
    out = list(scope)
    while len(set(out)) < len(out):
        a = next(x for x in out if out.count(x) > 1)
        i, j = [k for k, x in enumerate(out) if x == a][:2]
        table = np.moveaxis(np.diagonal(table, axis1=i, axis2=j), -1, i)
        del out[j]
    return tuple(out), table


def _eliminate(n: int, picks: list[int], factors: list[Factor]) -> tuple[list[int], float]:
    """Minimum of the sum of all factors; returns the argmin (0 for variables without choice) and the minimum."""
    live: dict[int, Factor] = dict(enumerate(factors))
    of: dict[int, set[int]] = defaultdict(set)
    for k, (scope, _) in live.items():
        for v in scope:
            of[v].add(k)
    fresh, constant = len(factors), 0.0
    back: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    for v in range(n):
        if picks[v] == 1:
            continue
        mine: list[Factor] = []
        for k in sorted(of[v]):
            mine.append(live.pop(k))
            for u in mine[-1][0]:
                if u != v:
                    of[u].discard(k)
        scope = tuple(sorted({u for s, _ in mine for u in s} - {v}))
        order = (*scope, v)
        total = np.zeros(tuple(picks[u] for u in order))
        for s, table in mine:
            perm = sorted(range(len(s)), key=lambda x, s=s: order.index(s[x]))
            shape = [picks[u] if u in s else 1 for u in order]
            total = total + np.transpose(table, perm).reshape(shape)
        back.append((v, scope, total.argmin(-1)))
        best = total.min(-1)
        if scope:
            live[fresh] = (scope, best)
            for u in scope:
                of[u].add(fresh)
            fresh += 1
        else:
            constant += float(best)
    chosen = [0] * n
    for v, scope, arg in reversed(back):
        chosen[v] = int(arg[tuple(chosen[u] for u in scope)])
    return chosen, constant


def _no_placement(flat: Flat, value: str, source: list[Type], wanted: list[list[Type]]) -> None:
    node = next((n for n in flat.nodes if value in n.inputs), None)
    want = next((t for w in wanted for t in w), None)
    where = f"argument of {node.path or node.op}, {node.origin}" if node else "the program's result"
    raise PlanError(
        "P030",
        f"no legal placement\n  value  : {source[0]}      {'port' if value in flat.ports else 'value'} `{value}`\n"
        f"  wanted : {want}   {where}\n  no redistribution leads from one to the other"
        + (": an index into one dp block cannot cross dp" if source[0].index else ""),
    )
