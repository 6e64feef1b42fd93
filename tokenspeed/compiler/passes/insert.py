"""Pass 6 and 9: build the program of one bucket from the chosen rows: leaves typed, repairs inserted, pads filled.

Invariant after: every consumer gets exactly the type its row wants; each value is repaired once for each target, common
prefixes of repairs are shared, and an inserted op stands right before the first node that needs it and says why.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenspeed.compiler.passes.leaves import type_body
from tokenspeed.compiler.passes.repair import Repairs
from tokenspeed.compiler.passes.rows import Choices, Row
from tokenspeed.compiler.passes.trace import Flat, FlatNode
from tokenspeed.ir.errors import NOWHERE, Origin, PlanError
from tokenspeed.ir.graph import Leaf, Node, Program
from tokenspeed.ir.pads import demand, leaf_taints, taint_of
from tokenspeed.ir.types import Type


class LeafCache:
    """Typed leaves by (body, candidate, row factors), shared by all buckets of one compile."""

    def __init__(self) -> None:
        self.made: dict[object, Leaf] = {}


def build_program(
    flat: Flat, choices: Choices, repairs: Repairs, chosen: list[Row], results: list[Type],
    bucket: dict[str, int], cache: LeafCache,
) -> Program:  # fmt: skip
    b = _Builder(flat, choices, repairs, cache)
    for name, t in choices.ports.items():
        b.types[name] = t
    for n, row in zip(flat.nodes, chosen):
        b.place(n, row)
    outs = [b.serve(v, t, "result") for (v, _), t in zip(flat.results, results)]
    sizes = choices.layout.sizes | {d: bucket[d] * choices.mesh.size(choices.layout.plan.home) for d in bucket}
    return Program(
        flat.name, flat.variant, choices.layout.plan, bucket, sizes, choices.layout.logical | {d: sizes[d] for d in bucket},
        list(choices.ports), outs, results, b.nodes, b.types, choices.params, b.leaves,
    )  # fmt: skip


class _Builder:
    def __init__(self, flat: Flat, choices: Choices, repairs: Repairs, cache: LeafCache) -> None:
        self.flat, self.choices, self.repairs, self.cache = flat, choices, repairs, cache
        self.nodes: list[Node] = []
        self.types: dict[str, Type] = {}
        self.leaves: dict[str, Leaf] = {}
        self.leaf_name: dict[int, str] = {}
        self.served: dict[tuple[str, Type], str] = {}
        self.alias: dict[str, str] = {}

    def place(self, n: FlatNode, row: Row) -> None:
        who = n.name
        wanted = iter(row.ins)
        inputs = [i if i.startswith("@") else self.serve(i, next(wanted), who) for i in n.inputs]
        if n.op == "cross":
            self.alias[n.outputs[0]] = inputs[0]
            return
        attrs = dict(n.attrs)
        if n.leaf is not None:
            attrs = {"leaf": self.leaf(n, row), "path": n.path}
        self.nodes.append(Node(n.op, tuple(inputs), tuple(n.outputs), attrs, n.origin))
        self.types.update(zip(n.outputs, row.outs))

    def serve(self, value: str, want: Type, who: str) -> str:
        """The name under which `value` is available as `want`; inserts what is missing."""
        edge, value = value, self.alias.get(value, value)
        have = self.types[value]
        path = self.repairs.path(have, want)
        if path.cost == float("inf"):
            raise PlanError("P030", f"no redistribution from {have} to {want} for {value}, needed by {who}")
        at = value
        for step in path.steps:
            key = (value, step.after)
            if key not in self.served:
                name = value + "'"
                while name in self.types:  # a value that crossed a signature may bear an inserted name itself
                    name += "'"
                note = f"{edge} {_change(self.types[at], step.after)} for {who}"
                self.nodes.append(Node(step.op, (at,), (name,), dict(step.attrs()), NOWHERE, note))
                self.types[name] = step.after
                self.served[key] = name
            at = self.served[key]
        return at

    def leaf(self, n: FlatNode, row: Row) -> str:
        leaf = n.leaf
        assert leaf is not None
        key = (id(leaf), row.stars, tuple(sorted((d, tuple(a)) for d, a in self.repairs.rows.items())))
        if key not in self.cache.made:
            typed = type_body(
                leaf,
                self.choices.b,
                self.choices.leaf_param[id(leaf)],
                list(row.ins),
                dict(row.stars),
                self._repair_inside,
            )
            self.cache.made[key] = _fill_pads(typed, self.choices.layout.sizes, self.choices.layout.logical)
        typed = self.cache.made[key]
        if id(typed) not in self.leaf_name:
            taken = sum(name.split("#")[0] == leaf.kind for name in self.leaves)
            self.leaf_name[id(typed)] = leaf.kind + (f"#{taken}" if taken else "")
            self.leaves[self.leaf_name[id(typed)]] = typed
        return self.leaf_name[id(typed)]

    def _repair_inside(
        self, value: str, have: Type, want: Type, origin: Origin
    ) -> tuple[list[Node], dict[str, Type], str]:
        """What the author's `place` takes, inside a leaf."""
        path = self.repairs.path(have, want)
        if path.cost == float("inf"):
            raise PlanError("P030", f"{origin}: place: no redistribution from {have} to {want}")
        nodes: list[Node] = []
        types: dict[str, Type] = {}
        at = value
        for k, step in enumerate(path.steps, 1):
            name = value + "'" * k
            nodes.append(
                Node(
                    step.op, (at,), (name,), dict(step.attrs()), origin, f"{value} {_change(have, step.after)} by place"
                )
            )
            types[name] = have = step.after
            at = name
        return nodes, types, at


def _change(a: Type, b: Type) -> str:
    """`+tp -> whole`, the axes that changed."""
    axes = [x for x in dict.fromkeys((*a.axes(), *b.axes())) if a.state(x) != b.state(x)]
    word = {"R": "whole", "P": "pending"}
    return ", ".join(f"{x}: {word.get(a.state(x), a.state(x))} -> {word.get(b.state(x), b.state(x))}" for x in axes)


def _fill_pads(leaf: Leaf, sizes: Mapping[str, int], logical: Mapping[str, int]) -> Leaf:
    """Puts `fill` before an op whose demand on the padding of its operand's last dim is not met by what is there."""
    nodes: list[Node] = []
    padded = {d for d, n in sizes.items() if n != logical.get(d, n)}
    filled: dict[tuple[str, float], str] = {}
    for node in leaf.nodes:
        value = demand(node.op, node.attrs)
        if value is not None:
            source = node.inputs[0]
            last = leaf.types[source].dims[-1].name
            if last in padded and leaf_taints(leaf, padded, source)[last] != taint_of(value):
                if (source, value) not in filled:
                    filled[source, value] = name = source + "'fill" + "'" * sum(k[0] == source for k in filled)
                    nodes.append(Node("fill", (source,), (name,), {"value": value}, node.origin, f"padding of {last}"))
                    leaf.types[name] = leaf.types[source]
                name = filled[source, value]
                node = Node(node.op, (name, *node.inputs[1:]), node.outputs, node.attrs, node.origin, node.note)
        nodes.append(node)
    leaf.nodes = nodes
    return leaf
