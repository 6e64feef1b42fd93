"""Fused collectives: one op that stands for a short list of ops, its definition.

Invariant: what a fused op means, and which placements it takes, is what its parts mean and take, in order; it has no rule
of its own, so it cannot allow more than they do. `expand` puts the parts back: verifier, simulator and explain see them.
Pair-valued and index-typed operands do not occur here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.graph import Node, Program, param_type
from tokenspeed.ir.mesh import Axes
from tokenspeed.ir.ops.base import Op, OutSpec
from tokenspeed.ir.ops.comm import COMM
from tokenspeed.ir.ops.dense import DENSE
from tokenspeed.ir.types import Type

_PARTS: dict[str, Op] = {op.name: op for op in (*COMM, *DENSE)}


class Fused(Op):
    """Base. `parts` gives the definition of a node in terms of its inputs and outputs."""

    def parts(self, n: Node) -> list[Node]:
        raise TypeError

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(t.dtype, t.names) for t in self.infer(ins, attrs, lambda a: a)]

    def infer(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Callable[[Axes], Axes], home: Axes = ()
    ) -> list[Type]:
        names = tuple(f"i{k}" for k in range(len(ins)))
        node = Node(self.name, names, ("o0", "o1"), dict(attrs))
        types = dict(zip(names, ins))
        for part in self.parts(node):
            types.update(
                zip(part.outputs, _PARTS[part.op].infer([types[i] for i in part.inputs], part.attrs, order, home))
            )
        return [types[o] for o in node.outputs]


class _ReduceAddNorm(Fused):
    """x complete, b pending over `axes`, w of the norm -> (x + the sum, rms_norm of it): the end of a branch and the
    start of the next. attrs: axes, eps, and dim where the sum is scattered."""

    reduce = ""

    def parts(self, n: Node) -> list[Node]:
        if len(n.inputs) != 3:
            raise RuleError("V1", f"{self.name} takes three operands, not {len(n.inputs)}")
        x, b, w = n.inputs
        total, normed = n.outputs
        inner = f"{total}'sum"
        moved = {k: n.attrs[k] for k in ("axes", "dim") if k in n.attrs}
        return [
            Node(self.reduce, (b,), (inner,), moved, n.origin, n.note),
            Node("add", (x, inner), (total,), {}, n.origin),
            Node("rms_norm", (total, w), (normed,), {"eps": n.attrs["eps"]}, n.origin),
        ]


class AllReduceAddRmsNorm(_ReduceAddNorm):
    name = "all_reduce_add_rms_norm"
    reduce = "all_reduce"


class ReduceScatterAddRmsNorm(_ReduceAddNorm):
    name = "reduce_scatter_add_rms_norm"
    reduce = "reduce_scatter"


FUSED: list[Op] = [AllReduceAddRmsNorm(), ReduceScatterAddRmsNorm()]
_BY_NAME: dict[str, Fused] = {op.name: op for op in FUSED if isinstance(op, Fused)}


def expand(p: Program) -> Program:
    """The program with the parts of every fused op in its place; `p` itself where there is none."""
    if not any(n.op in _BY_NAME for n in p.nodes):
        return p
    nodes: list[Node] = []
    types = dict(p.types)
    for n in p.nodes:
        parts = _BY_NAME[n.op].parts(n) if n.op in _BY_NAME else [n]
        for part in parts if len(parts) > 1 else ():
            ins = [param_type(p.params, i) if i.startswith("@") else types[i] for i in part.inputs]
            key = (part.op, *ins, *sorted(part.attrs.items()))
            if key not in p.plan.memo:
                p.plan.memo[key] = _PARTS[part.op].infer(ins, part.attrs, p.plan.mesh.ordered, p.plan.home)
            outs = p.plan.memo[key]
            types.update(zip(part.outputs, outs))
        nodes += parts
    return replace(p, nodes=nodes, types=types)
