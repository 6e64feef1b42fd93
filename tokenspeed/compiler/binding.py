"""Kernel signatures: what the registry is asked for one op of a program, and under which key the answer is stored.

Invariant: the key holds everything selection may depend on (op, formats by role, facts), so one answer serves every node
with that key, and the loader finds it again from the program text alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from tokenspeed.compiler.fuse import CALLS, fuse
from tokenspeed.ir.graph import Node, Param, Program, param_type
from tokenspeed.ir.types import ROW_DIMS, Type

FORMAT = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32"}

#: ops of the IR that have no kernel of their own: an alias, or a view of the operand
NO_KERNEL = frozenset({"cross", "slice"})


def format_name(dtype: str) -> str:
    return FORMAT.get(dtype, dtype)


def kernel_op(node: Node, source: Type) -> str:
    """The registry's op for a node: a reduction of (value, index) pairs has its own."""
    return "all_reduce_argmax" if node.op == "all_reduce" and source.kind == "argmax" else node.op


def request_of(
    node: Node, types: dict[str, Type], params: dict[str, Param], p: Program
) -> tuple[str, dict[str, str], dict[str, int]]:
    """(registry op, role -> format, facts) of one node."""
    ins = [param_type(params, i) if i.startswith("@") else types[i] for i in node.inputs]
    outs = [types[o] for o in node.outputs]
    x = ins[0]
    signature: dict[str, str] = {}
    if node.op != "lookup":
        signature["x"] = format_name(x.dtype)
    weights = [
        t for i, t in zip(node.inputs, ins) if i.startswith("@") and params[i[1:].split(":")[0]].kind == "weight"
    ]
    if weights:
        signature["w"] = format_name(weights[0].dtype)
    caches = [t for i, t in zip(node.inputs, ins) if i.startswith("@") and params[i[1:].split(":")[0]].kind == "cache"]
    if caches:
        signature["cache"] = format_name(caches[0].dtype)
    if outs and node.op not in ("argmax", "gumbel_argmax", "sample"):
        signature["out"] = format_name(outs[0].dtype)
    facts = {"tokens": rows_of(x, p)}
    if node.op == "attend":
        facts["head_dim"] = p.sizes[x.dims[-1].name]
    if node.op in ("linear", "linear_silu_mul"):
        n_in = len(node.attrs["in_dims"])
        facts["k"] = math.prod(_local(d, p) for d in x.dims[len(x.dims) - n_in :])
    return kernel_op(node, x), signature, facts


def _local(d: object, p: Program) -> int:
    return p.sizes[d.name] // p.plan.mesh.size(d.axes)  # type: ignore[attr-defined]


def rows_of(t: Type, p: Program) -> int:
    rows = 1
    for d in t.dims:
        if d.name in ROW_DIMS:
            rows *= p.sizes[d.name] // p.plan.mesh.size(d.axes)
    return rows


def key_of(op: str, signature: dict[str, str], facts: dict[str, int]) -> str:
    return "|".join(
        [op, *(f"{k}={v}" for k, v in sorted(signature.items())), *(f"{k}={v}" for k, v in sorted(facts.items()))]
    )


def kernel_nodes(
    p: Program, bound: Callable[[str, dict[str, str], dict[str, int]], bool]
) -> Iterator[tuple[str, dict[str, str], dict[str, int]]]:
    """The request of every call that runs a kernel, leaves once; `bound` says whether a fused one has a kernel."""
    for nodes, types, params, kept in [
        (p.nodes, p.types, p.params, p.results),
        *((f.nodes, f.types, f.params, f.outputs) for f in p.leaves.values()),
    ]:
        for n in fuse(nodes, kept, lambda n, t=types, q=params: bound(*request_of(n, t, q, p))):
            if n.op != "call" and n.op not in NO_KERNEL and not CALLS[n.op].alias:
                yield request_of(n, types, params, p)
