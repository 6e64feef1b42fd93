"""What the programs of several ranks must have in common, so that none waits for a collective another never calls.

Invariant: ranks that meet in a collective run the same chain of them (V7), in the same bucket (V8), and, where every rank
waits in each collective for its whole group, all come to their ends: an order that each pair of ranks shares may still go
round in a circle over several groups (V7). One program is by itself the same on all its ranks: no op branches on a rank.
`agreement` is the set of home axes over which a program communicates; the scheduler keeps the buckets of the ranks along
them equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.graph import Node, Param, Program, param_type
from tokenspeed.ir.mesh import Axes
from tokenspeed.ir.ops import OPS, Redistribute
from tokenspeed.ir.ops.fused import expand
from tokenspeed.ir.types import Type


@dataclass(frozen=True)
class Meeting:
    """One collective: what it does to which value (by name, after its module's path)."""

    op: str
    axes: Axes
    value: str
    type: Type

    def __str__(self) -> str:
        return f"{self.op} over {','.join(self.axes)} of %{self.value} : {self.type}"


def chain(p: Program) -> Iterator[Meeting]:
    """Every collective in program order."""
    p = expand(p)
    inside = {name: list(_meetings(f.nodes, f.types, f.params)) for name, f in p.leaves.items()}
    for n in p.nodes:
        if n.op == "call":
            for m in inside[n.attrs["leaf"]]:
                yield replace(m, value=f"{n.attrs['path']}/{m.value}")
        else:
            yield from _meetings([n], p.types, p.params)


def _meetings(nodes: Sequence[Node], types: Mapping[str, Type], params: dict[str, Param]) -> Iterator[Meeting]:
    for n in nodes:
        if axes := met_over(n, types, params):
            yield Meeting(n.op, axes, n.inputs[0], types[n.inputs[0]])


def met_over(n: Node, types: Mapping[str, Type], params: dict[str, Param]) -> Axes:
    """Axes over which the ranks meet in a node: those of a collective, or of rows that the op exchanges itself."""
    op = OPS[n.op]
    if isinstance(op, Redistribute):
        return tuple(n.attrs["axes"]) if op.wire else ()
    return op.exchange([param_type(params, i) if i.startswith("@") else types[i] for i in n.inputs])


def agreement(p: Program) -> Axes:
    """Home axes over which `p` communicates."""
    return p.plan.mesh.ordered({a for c in chain(p) for a in c.axes if a in p.plan.home})


def meet(p: Program, r: int, peer: int) -> list[Meeting]:
    """The collectives of `p` in which two ranks take part together."""
    a, b = p.plan.mesh.coords(r), p.plan.mesh.coords(peer)
    apart = {x for x in a if a[x] != b[x]}
    return [c for c in chain(p) if apart <= set(c.axes)]


def verify_ranks(programs: Sequence[Program]) -> None:
    """VerifyError V7 or V8 where `programs`, one a rank of their mesh, cannot be replayed together."""
    first = programs[0]
    mesh, home = first.plan.mesh, first.plan.home
    if len(programs) != mesh.ranks or any(p.plan != first.plan for p in programs):
        raise VerifyError(
            "V9", f"{len(programs)} programs on the plans {sorted({p.plan.describe() for p in programs})}"
        )
    if all(p is first for p in programs):
        return
    for r, peer in itertools.combinations(range(mesh.ranks), 2):
        p, q = programs[r], programs[peer]
        mine, theirs = meet(p, r, peer), meet(q, r, peer)
        together = mesh.index(r, home) == mesh.index(peer, home)
        if (together or mine or theirs) and p.bucket != q.bucket:
            why = "share a home group" if together else "meet in a collective"
            raise VerifyError("V8", f"ranks {r} and {peer} {why} and run the buckets {p.bucket} and {q.bucket}")
        for k, (a, b) in enumerate(itertools.zip_longest(mine, theirs)):
            if a != b:
                raise VerifyError(
                    "V7", f"collective {k} of ranks {r} and {peer} differs: {a or 'none'} and {b or 'none'}"
                )
    if waiting := stuck(programs):
        said = "; ".join(f"rank {r} in {m}" for r, m in waiting.items())
        raise VerifyError("V7", f"ranks wait for each other in a circle: {said}")


def stuck(programs: Sequence[Program]) -> dict[int, Meeting]:
    """The collective in which each rank waits for ever, where every one waits for its whole group; empty if all come to their
    ends."""
    chains = [list(chain(p)) for p in programs]
    left, mesh = [len(c) for c in chains], programs[0].plan.mesh

    def at(r: int) -> Meeting | None:
        return chains[r][-left[r]] if left[r] else None

    moved = True
    while moved:
        moved = False
        for r in range(mesh.ranks):
            here = at(r)
            group = mesh.group(r, here.axes) if here else []
            if here and all(at(g) == here for g in group):
                for g in group:
                    left[g] -= 1
                moved = True
    return {r: m for r in range(mesh.ranks) if (m := at(r))}
