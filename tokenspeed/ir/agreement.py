"""What the programs of several ranks must have in common, so that none waits for a collective another never calls.

Invariant: ranks that meet in a collective run the same chain of them (V7), in the same bucket (V8). One program is by
itself the same on all its ranks: no op branches on a rank. `agreement` is the set of home axes over which a program
communicates; the scheduler keeps the buckets of the ranks along them equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.graph import Program
from tokenspeed.ir.mesh import Axes
from tokenspeed.ir.ops import OPS, Redistribute
from tokenspeed.ir.types import Type


def chain(p: Program) -> Iterator[tuple[str, Axes, Type]]:
    """Every collective in program order: op, axes, type of its operand."""
    for n in p.nodes:
        leaf = p.leaves[n.attrs["leaf"]] if n.op == "call" else None
        for inner, types in [(i, leaf.types) for i in leaf.nodes] if leaf else [(n, p.types)]:
            op = OPS[inner.op]
            if isinstance(op, Redistribute) and op.wire:
                yield inner.op, tuple(inner.attrs["axes"]), types[inner.inputs[0]]


def agreement(p: Program) -> Axes:
    """Home axes over which `p` communicates."""
    return p.plan.mesh.ordered({a for _, axes, _ in chain(p) for a in axes if a in p.plan.home})


def meet(p: Program, r: int, peer: int) -> list[tuple[str, Axes, Type]]:
    """The collectives of `p` in which two ranks take part together."""
    a, b = p.plan.mesh.coords(r), p.plan.mesh.coords(peer)
    apart = {x for x in a if a[x] != b[x]}
    return [c for c in chain(p) if apart <= set(c[1])]


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
                raise VerifyError("V7", f"collective {k} of ranks {r} and {peer} differs: {_say(a)} and {_say(b)}")


def _say(c: tuple[str, Axes, Type] | None) -> str:
    return f"{c[0]} over {','.join(c[1])} of {c[2]}" if c else "none"
