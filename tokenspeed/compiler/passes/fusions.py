"""Pass 8: fused collectives, as extra factors of the solver and as a rewrite of the program it chose.

Invariant: both look for the same thing, a branch that one reduction completes for one residual add whose sum a norm
reads, and use the same price, so what the solver counted on is what is built; where the target has no kernel for a fused
op there is neither. The fused program expands to the program it was made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from tokenspeed.compiler.passes.eliminate import Factor
from tokenspeed.compiler.passes.repair import Repairs
from tokenspeed.compiler.passes.rows import Row
from tokenspeed.compiler.passes.solve import Value, merge_scope
from tokenspeed.compiler.passes.trace import Flat
from tokenspeed.ir.graph import Node, Program
from tokenspeed.ir.ops import OPS, Redistribute
from tokenspeed.ir.types import Type

_REDUCTIONS = ("all_reduce", "reduce_scatter")


def fused_name(reduction: str) -> str:
    """The op that takes in a reduction, the add behind it and the norm of the sum."""
    return f"{reduction}_add_rms_norm"


def saving(repairs: Repairs, total: Type) -> float:
    """us: one kernel less, and the sum is read once less."""
    n, price = repairs.nbytes(total), repairs.costs.compute
    return price(3 * n, 0.0, 1) + price(2 * n, 0.0, 1) - price(4 * n, 0.0, 1)


def joins(flat: Flat) -> list[tuple[int, int, int]]:
    """(add, which operand of it is a branch that may be taken in, norm of the sum), as node numbers."""
    out: list[tuple[int, int, int]] = []
    for i, n in enumerate(flat.nodes):
        branch = _branch(n.op, n.inputs, lambda v: flat.uses[v][0][0] >= 0 and len(flat.uses[v][1]) == 1)
        if branch is None or n.outputs[0] not in flat.uses:
            continue
        norms = [c for c, k in flat.uses[n.outputs[0]][1] if c >= 0 and k == 0 and flat.nodes[c].op == "rms_norm"]
        out += [(i, branch, j) for j in norms[:1]]
    return out


def fused_factors(
    flat: Flat, found: list[tuple[int, int, int]], rows: list[list[Row]], values: dict[str, Value], repairs: Repairs,
    ops: Collection[str],
) -> list[Factor]:  # fmt: skip
    """What a fused kernel saves, over (who makes the branch, the add, the norm) of each join."""
    out: list[Factor] = []
    memo: dict[Any, np.ndarray] = {}
    for i, branch, j in found if ops else ():
        b = values[flat.nodes[i].inputs[branch]]
        scope = [b.maker, i, j]
        if not (b.sources and rows[i] and rows[j]):
            continue  # one that nothing can serve: solving says which
        key = (b.key[0], id(rows[i]), branch, id(rows[j]))
        if key not in memo:
            table = np.zeros([len(b.sources), len(rows[i]), len(rows[j])])
            for x, y in np.ndindex(*table.shape[:2]):
                add = rows[i][y]
                path = repairs.path(b.sources[x], add.ins[branch])
                if (
                    len(path.steps) == 1
                    and len(add.outs[0].dims) == 2
                    and _fits(path.steps[0].op, path.steps[0].kind, ops)
                ):
                    saved = saving(repairs, add.outs[0])
                    table[x, y] = [-saved if norm.ins[0] == add.outs[0] else 0.0 for norm in rows[j]]
            memo[key] = table
        keep = [x for x, v in enumerate(scope) if len(rows[v]) > 1]
        if (key, *keep) not in memo:
            memo[key, *keep] = memo[key][tuple(slice(None) if x in keep else 0 for x in range(3))]
        if memo[key, *keep].any():
            out.append(merge_scope([scope[x] for x in keep], memo[key, *keep]))
    return out


def fuse(p: Program, ops: Collection[str]) -> Program:
    """The program with its fused collectives."""
    if not ops:
        return p
    makers = {o: n for n in p.nodes for o in n.outputs}
    readers = Counter([*(v for n in p.nodes for v in n.inputs), *p.results])
    at: dict[str, int] = {o: i for i, n in enumerate(p.nodes) for o in n.outputs}
    gone: set[int] = set()
    fused: dict[int, Node] = {}
    types = dict(p.types)

    def alone(value: str) -> bool:
        """Whether one reduction of what some op makes gives this value, to this reader only."""
        r = makers.get(value)
        if r is None or not _reduces(r, ops) or readers[value] != 1 or readers[r.inputs[0]] != 1:
            return False
        inner = makers.get(r.inputs[0])
        return inner is not None and not (inner.op != "call" and isinstance(OPS[inner.op], Redistribute))

    for i, n in enumerate(p.nodes):
        branch = _branch(n.op, n.inputs, alone)
        if branch is None or len(p.types[n.outputs[0]].dims) != 2:
            continue
        norms = (k for k in range(i + 1, len(p.nodes)) if p.nodes[k].op == "rms_norm")
        j = next((k for k in norms if p.nodes[k].inputs[0] == n.outputs[0]), None)
        if j is None:
            continue
        r, norm = makers[n.inputs[branch]], p.nodes[j]
        attrs = dict(r.attrs) | dict(norm.attrs)
        inputs = (n.inputs[1 - branch], r.inputs[0], norm.inputs[1])
        fused[i] = Node(fused_name(r.op), inputs, (n.outputs[0], norm.outputs[0]), attrs, n.origin, r.note)
        gone |= {at[r.outputs[0]], j}
        del types[r.outputs[0]]
    nodes = [fused.get(i, n) for i, n in enumerate(p.nodes) if i not in gone]
    return replace(p, nodes=nodes, types=types) if fused else p


def _branch(op: str, inputs: Any, alone: Any) -> int | None:
    """Which operand of an add is a branch that may be taken in: the second where both are."""
    if op != "add" or inputs[0] == inputs[1]:
        return None
    return next((k for k in (1, 0) if alone(inputs[k])), None)


def _reduces(n: Node, ops: Collection[str]) -> bool:
    return n.op in _REDUCTIONS and _fits(n.op, n.attrs.get("kind", "sum"), ops)


def _fits(reduction: str, kind: str, ops: Collection[str]) -> bool:
    return reduction in _REDUCTIONS and kind == "sum" and fused_name(reduction) in ops
