"""Programs: leaves (typed bodies without collectives of their own choosing) and the flat main list that calls them.

Invariant: every value is produced once, before its first use; the type of every value is in `types`. Names starting with
`@` are parameters: weights, caches and per-request state; they are not produced. Order of nodes is program order and is
what effects (cache writes, collectives) rely on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.ir.errors import NOWHERE, Origin
from tokenspeed.ir.mesh import Axes, Plan
from tokenspeed.ir.types import Type


@dataclass(slots=True)
class Node:
    op: str  # an op of the table, or "call"
    inputs: tuple[str, ...]  # value names and @parameters
    outputs: tuple[str, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    origin: Origin = NOWHERE
    note: str = ""  # why an inserted op stands here

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(i for i in self.inputs if not i.startswith("@"))


@dataclass(slots=True)
class Param:
    """A parameter of a leaf or a program: `kind` weight | cache | state; one Type a segment (one for most)."""

    name: str
    kind: str
    types: tuple[Type, ...]


@dataclass(slots=True)
class Leaf:
    """A function of the program: the local body of one author module, shared by all its identical instances."""

    name: str
    inputs: list[str]
    outputs: list[str]
    nodes: list[Node]
    types: dict[str, Type]
    params: dict[str, Param]  # by name within the module, without "@"


@dataclass(slots=True)
class Program:
    name: str
    variant: str  # how it samples: "gumbel" or "full"
    plan: Plan
    bucket: dict[str, int]  # rows of t, s (and drafted rows, where there are any) a home group
    sizes: dict[str, int]  # physical global extents, rows included
    logical: dict[str, int]  # extents without padding
    ports: list[str]
    results: list[str]
    result_types: list[Type]  # as the root module's signature declares them
    nodes: list[Node]
    types: dict[str, Type]
    params: dict[str, Param]  # absolute names, without "@"; those of leaves are derived from their calls
    leaves: dict[str, Leaf]

    def row_axes(self, dim: str) -> Axes:
        return row_factors(self.plan, self.bucket[dim])

    def all_params(self) -> Iterator[Param]:
        """Every parameter by absolute name, each once, in program order."""
        seen: set[str] = set()
        for n in self.nodes:
            if n.op == "call":
                leaf = self.leaves[n.attrs["leaf"]]
                for p in leaf.params.values():
                    name = absolute(n.attrs["path"], p.name)
                    if name not in seen:
                        seen.add(name)
                        yield Param(name, p.kind, p.types)
            else:
                for ref in n.inputs:
                    base = ref[1:].split(":")[0]
                    if ref.startswith("@") and base not in seen:
                        seen.add(base)
                        yield self.params[base]


def absolute(path: str, name: str) -> str:
    """Absolute name of a leaf's parameter; a name starting with "/" is already absolute (shared by several modules)."""
    return name[1:] if name.startswith("/") else f"{path}.{name}" if path else name


def row_factors(plan: Plan, rows: int) -> Axes:
    """Axes that may shard a row dim of `rows` rows a home group: home axes, then mesh order while the product divides."""
    out, product = list(plan.home), 1
    for a, n in plan.mesh.axes:
        if a not in plan.home and rows % (product * n) == 0:
            out.append(a)
            product *= n
    return tuple(out)


def param_type(params: dict[str, Param], ref: str) -> Type:
    """Type of `@name` or `@name:segment`."""
    name, _, seg = ref[1:].partition(":")
    return params[name].types[int(seg or 0)]
