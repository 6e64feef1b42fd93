"""Fusion across leaves: the calls between two attentions of a dense decoder as one. Invariant: as in fuse.py, the verified
program is untouched, and a chain is fused only where the registry has a kernel for the whole of it; a collective between
two of its calls keeps them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tokenspeed.compiler.binding import Call, rows_of, width_of
from tokenspeed.ir.graph import Node, Program

MEMBERS = ("linear", "add_rms_norm", "linear_silu_mul", "linear", "add_rms_norm", "linear")


def chained(calls: list[Call], p: Program, bound: Callable[[Call], bool]) -> list[Call]:
    """`calls` with every run of MEMBERS replaced whose inner values have one reader each."""
    ops = [c.node.op for c in calls]
    if MEMBERS[2] not in ops:
        return calls
    takers: dict[str, int] = dict.fromkeys(p.results, 1)
    for c in calls:
        for v in c.inputs:
            takers[v] = takers.get(v, 0) + 1
    out: list[Call] = []
    i = 0
    while i < len(calls):
        one = _fused(calls[i : i + 6], takers, p) if tuple(ops[i : i + 6]) == MEMBERS else None
        if one is not None and bound(one):
            out.append(one)
            i += 6
        else:
            out.append(calls[i])
            i += 1
    return out


def _fused(run: list[Call], takers: dict[str, int], p: Program) -> Call | None:
    heads, norm1, gated, down, norm2, following = run
    joined = (
        heads.outputs[0] in norm1.inputs[:2]
        and gated.inputs[0] == norm1.outputs[1]
        and down.inputs[0] == gated.outputs[0]
        and {norm1.outputs[0], down.outputs[0]} == set(norm2.inputs[:2])
        and following.inputs[0] == norm2.outputs[1]
    )
    inner = (*heads.outputs, *norm1.outputs, *gated.outputs, *down.outputs, norm2.outputs[1])
    plain = not any(c.node.attrs["bias"] for c in (heads, down, following)) and norm1.node.attrs == norm2.node.attrs
    products = (heads, gated, down, following)
    alike = all(c.request[1] == heads.request[1] for c in run)
    alone = all(takers.get(v, 0) == 1 for v in inner)
    if not (joined and plain and alike and alone):
        return None
    before = 1 - norm1.inputs.index(heads.outputs[0])
    picks = ((heads, 0), (heads, 1), (norm1, before), (norm1, 2), (gated, 1), (down, 1), (norm2, 2), (following, 1))
    inputs, outputs = [c.inputs[k] for c, k in picks], [norm2.outputs[0], *following.outputs]
    node = Node("linear_chain", tuple(inputs), tuple(outputs), dict(norm1.node.attrs), heads.node.origin)
    facts = {
        "tokens": rows_of(heads.ins[0], p),
        "unit": math.gcd(*(c.request[2]["k"] for c in products)),
        "width": width_of(norm2.outs[0], p),
    }
    request = ("linear_chain", heads.request[1], facts)
    types, kinds = [c.ins[k] for c, k in picks], [c.kinds[k] for c, k in picks]
    return Call(node, types, [norm2.outs[0], *following.outs], inputs, outputs, kinds, request)
