"""The exchange of rows in `experts` (ir/ops/moe.py): what it moves, what it costs, and the kernel calls it becomes.

Invariant: a rank sends a row once to each rank of the group that holds an expert the row picked, however many of them it
picked there, and gets one row back from each; so the buffers hold the rows of the group, known when the program is compiled,
and the rows that travel are counted when it runs. Prices take choices to be even over all experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tokenspeed.compiler.costs import CostModel
from tokenspeed.ir.graph import Node
from tokenspeed.ir.mesh import Axes, Plan
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.types import DTYPE_BYTES, Dim, Type

#: what a kernel library must have for rows to be exchanged
CALLS = ("dispatch", "combine")


@dataclass(frozen=True)
class Load:
    """Of one row that a rank holds: its bytes, those of its ids and shares, and the ranks it visits (its own counts)."""

    axes: Axes
    ranks: int
    row: int
    choice: int
    visits: float

    def price(self, costs: CostModel, rows: int) -> float:
        """us of `rows` rows a rank: ids and shares are gathered, rows go out and come back."""
        return costs.collective("all_gather", self.ranks, self.ranks * rows * self.choice) + 2 * costs.collective(
            "all_to_all", self.ranks, self.visits * rows * self.row
        )

    @property
    def wire(self) -> float:
        """Bytes that a rank sends for one row it holds."""
        return (self.ranks - 1) * (self.choice + 2 * self.visits * self.row / self.ranks)

    @property
    def held(self) -> int:
        """Bytes of the buffers for one row that a rank holds."""
        return self.ranks * (2 * self.row + self.choice)


def load_of(n: Node, ins: Sequence[Type], body: Sequence[Node], plan: Plan, sizes: Mapping[str, int]) -> Load | None:
    """Of a node of `body` with operands `ins`; None where it exchanges nothing."""
    axes = OPS[n.op].exchange(ins)
    if not axes:
        return None
    x, ids, shares, weight = ins[:4]
    ranks, experts, k = plan.mesh.size(axes), sizes[weight.dims[0].name], sizes[ids.names[-1]]
    elements = math.prod(sizes[d.name] // plan.mesh.size(d.axes) for d in x.dims[1:])
    choice = k * (DTYPE_BYTES[ids.dtype] + DTYPE_BYTES[shares.dtype])
    how = next((m.attrs for m in body if n.inputs[1] in m.outputs), {})
    held = experts // plan.mesh.size(weight.dims[0].axes)
    visits = ranks * _visited(experts, held, k, how.get("groups", 1), how.get("top_groups", 1))
    return Load(axes, ranks, elements * DTYPE_BYTES[x.dtype], choice, visits)


def _visited(experts: int, held: int, k: int, groups: int, top: int) -> float:
    """The chance that a row picks some of the `held` experts of a rank: k of those in `top` of as many equal `groups`."""
    size = experts // groups
    whole, part = max(held // size, 1), min(held, size)  # groups that the rank holds, and of each its experts
    of = math.comb(groups, top)
    return sum(
        math.comb(whole, j) * math.comb(groups - whole, top - j) / of * _reach(top * size, j * part, k)
        for j in range(1, min(whole, top) + 1)
    )


def _reach(experts: int, held: int, k: int) -> float:
    """The chance that some of k experts, all alike likely, are among the `held`."""
    missed = 1.0
    for i in range(k):
        missed *= max(experts - held - i, 0) / (experts - i)
    return 1.0 - missed


@dataclass(frozen=True)
class Part:
    """One kernel call of an exchange: a node, the types of its operands and of its results."""

    node: Node
    ins: list[Type]
    outs: list[Type]


def lower(n: Node, ins: Sequence[Type], out: Type) -> list[Part]:
    """The calls of an `experts` node that exchanges rows: dispatch to buffers of the group's rows, experts on those, combine."""
    axes, (result,) = OPS[n.op].exchange(ins), n.outputs
    x, ids, shares, *weights = ins

    def gathered(t: Type) -> Type:
        first = t.dims[0]
        return replace(t, dims=(Dim(first.name, tuple(a for a in first.axes if a not in axes)), *t.dims[1:]))

    given, names = [gathered(t) for t in (x, ids, shares)], [f"{result}@{what}" for what in ("rows", "ids", "shares")]
    made, back = replace(given[0], dtype=out.dtype), f"{result}@back"
    moved = {"axes": axes, "experts": weights[0].dims[0]}
    return [
        Part(Node("dispatch", n.inputs[:3], tuple(names), moved, n.origin), list(ins[:3]), given),
        Part(replace(n, inputs=(*names, *n.inputs[3:]), outputs=(back,)), [*given, *weights], [made]),
        Part(Node("combine", (back, names[1]), n.outputs, moved, n.origin), [made, given[1]], [out]),
    ]
