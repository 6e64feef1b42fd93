"""What the programs of several ranks must have in common, so that none waits for a collective another never calls.

Invariant: ranks that meet in a collective run the same chain of them (V7), in the same bucket (V8). One program is by
itself the same on all its ranks: no op branches on a rank. `agreement` is the set of home axes over which a program
communicates; the scheduler keeps the buckets of the ranks along them equal.
"""

from __future__ import annotations

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


def verify_ranks(programs: Sequence[Program]) -> None:
    """VerifyError V7 or V8 where `programs`, one a rank of their mesh, cannot be replayed together."""
    mesh = programs[0].plan.mesh
    if len(programs) != mesh.ranks or any(p.plan != programs[0].plan for p in programs):
        raise VerifyError(
            "V9", f"{len(programs)} programs on the plans {sorted({p.plan.describe() for p in programs})}"
        )
    chains = [list(chain(p)) for p in programs]
    for r, p in enumerate(programs):
        for peer in (q for q in range(mesh.ranks) if q != r):
            apart = {a for a in mesh.names if mesh.coords(r)[a] != mesh.coords(peer)[a]}
            mine, theirs = ([c for c in chains[x] if apart & set(c[1])] for x in (r, peer))
            if apart & set(agreement(p)) and p.bucket != programs[peer].bucket:
                raise VerifyError(
                    "V8",
                    f"ranks {r} and {peer} run the buckets {p.bucket} and {programs[peer].bucket} and meet in a collective",
                )
            for k, (a, b) in enumerate(zip(mine, theirs)):
                if a != b:
                    raise VerifyError("V7", f"collective {k} of ranks {r} and {peer} differs: {a[0]} over {a[1]} of {a[2]}, "
                                            f"{b[0]} over {b[1]} of {b[2]}")  # fmt: skip
            if len(mine) != len(theirs):
                raise VerifyError(
                    "V7", f"rank {r} meets rank {peer} in {len(mine)} collectives, it expects {len(theirs)}"
                )
