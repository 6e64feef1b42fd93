"""Tactics: choices that a person pins. A tactic names an edge and says what repairs it, or which placement it carries.

    layers.*.attn=reduce_scatter            every consumer of these values takes them by one reduce-scatter
    layers.3.add->layers.3.mlp=t@tp h       this consumer takes the value placed so
    embed=none                              as it is made, no repair

`*` stands for any text. Invariant: a tactic holds in every bucket whose rules allow it, and one that no edge is named
by, or that no bucket allows, is an error that lists what there is.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path as File

from tokenspeed.compiler.passes.repair import Path
from tokenspeed.ir.errors import PlanError
from tokenspeed.ir.mesh import Plan
from tokenspeed.ir.types import Type

#: what may stand between "+" in a repair
STEPS = ("all_reduce", "reduce_scatter", "all_gather", "slice", "keep_first")


@dataclass(frozen=True, order=True)
class Edge:
    """A value of the flat program and one consumer of it: a module's path, or `op` of `path.op`, or `result`."""

    value: str
    consumer: str

    def __str__(self) -> str:
        return f"{self.value}->{self.consumer}"


@dataclass(frozen=True)
class Pin:
    """One tactic. `steps`: the repair, () for none; None: `placement` says how the value arrives."""

    name: str
    text: str
    steps: tuple[str, ...] | None
    placement: tuple[str, ...] = ()

    def allows(self, target: Type, path: Path, plan: Plan) -> bool:
        if self.steps is not None:
            return tuple(s.op for s in path.steps) == self.steps
        return placement_of(target, plan) == self.placement


def placement_of(t: Type, plan: Plan) -> tuple[str, ...]:
    """`t@tp h +mlp` as words: dims and pending, without the dtype."""
    return tuple(re.sub(r"^\w+\[|\]", "", t.text(plan)).replace(", ", " ").split())


@dataclass
class Tactics:
    pins: tuple[Pin, ...] = ()
    applied: set[Edge] = field(default_factory=set)
    offers: dict[Edge, set[str]] = field(default_factory=dict)  # of edges whose pin some bucket does not allow
    known: dict[Edge, Pin | None] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{p.name}={p.text}" for p in self.pins)

    def of(self, edge: Edge) -> Pin | None:
        """The last tactic that names an edge."""
        if edge not in self.known:
            named = [p for p in self.pins if _matches(p.name, edge)]
            self.known[edge] = named[-1] if named else None
        return self.known[edge]

    def offered(self, edge: Edge, options: Iterable[tuple[Type, Path]], plan: Plan) -> None:
        """Records what an edge could be, for the error of `check`."""
        for t, path in options:
            if path.cost != float("inf"):
                repair = "+".join(s.op for s in path.steps) or "none"
                self.offers.setdefault(edge, set()).add(f"{repair} ({' '.join(placement_of(t, plan))})")

    def check(self, edges: Sequence[Edge]) -> None:
        """After all buckets are solved: PlanError P037 for a name without an edge, P038 for one no bucket could honour."""
        for p in self.pins:
            mine = [e for e in edges if _matches(p.name, e)]
            if not mine:
                names = sorted({_fold(str(e)) for e in edges})
                close = difflib.get_close_matches(p.name, [*names, *(n.split("->")[0] for n in names)], 3, 0.5)
                hint = f"; did you mean {' or '.join(dict.fromkeys(close))}?" if close else ""
                raise PlanError("P037", f"--tactic names {p.name!r}, which is no edge of this program{hint}\n  its edges: "
                                        + ", ".join(names))  # fmt: skip
            pinned = [e for e in mine if self.of(e) is p]
            if pinned and not self.applied.intersection(pinned):
                options = sorted({o for e in pinned for o in self.offers.get(e, ())})
                raise PlanError(
                    "P038", f"--tactic {p.name}={p.text}: no bucket allows it; the edge can be " + ", ".join(options)
                )


def _matches(name: str, edge: Edge) -> bool:
    return fnmatchcase(str(edge) if "->" in name else edge.value, name)


def _fold(name: str) -> str:
    """Module paths with list positions as `*`: layers.3.attn -> layers.*.attn."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def parse_tactics(items: Sequence[str]) -> Tactics:
    """`NAME=VALUE` items, or files (ending in .json) that hold an object of them. PlanError P037 where one cannot be read."""
    pairs: list[tuple[str, str]] = []
    for item in items:
        if item.endswith(".json"):
            try:
                raw = json.loads(File(item).read_text("utf-8"))
                pairs += [(k, v) for k, v in raw.items() if isinstance(v, str) or _fail(item, f"{k!r} is no string")]
            except (OSError, ValueError, AttributeError) as e:
                raise PlanError(
                    "P037", f"--tactic {item}: cannot be read as an object of NAME: VALUE strings: {e}"
                ) from None
            continue
        name, eq, value = item.partition("=")
        if not eq or not name.strip() or not value.strip():
            raise PlanError(
                "P037", f"--tactic {item!r}: write NAME=VALUE, e.g. 'layers.*.attn=reduce_scatter', or a .json file"
            )
        pairs.append((name.strip(), value.strip()))
    return Tactics(tuple(_pin(n, v) for n, v in pairs))


def _pin(name: str, value: str) -> Pin:
    words = [w.strip() for w in value.split("+")]
    if value == "none":
        return Pin(name, value, ())
    if all(w in STEPS for w in words):
        return Pin(name, value, tuple(words))
    placement = tuple(value.replace(", ", " ").split())
    if not all(re.fullmatch(r"\w+(@(\w[\w.]*|\([\w.,]+\)))?|\+[\w.,]+", w) for w in placement):
        raise PlanError(
            "P037",
            f"--tactic {name}={value}: neither a repair ({', '.join(STEPS)}, joined by +, or none) nor a placement "
            "such as 't@tp h'",
        )
    return Pin(name, value, None, placement)


def _fail(where: str, why: str) -> bool:
    raise ValueError(f"{where}: {why}")
