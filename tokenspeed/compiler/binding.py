"""Kernel signatures: what the registry is asked for one call of a program, and under which key the answer is stored.

Invariant: the key holds everything selection may depend on (op, formats by role, facts), so one answer serves every node
with that key, and the loader finds it again from the program text alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed.ir.graph import Node, Program
from tokenspeed.ir.mesh import Axes
from tokenspeed.ir.ops.filters import FILTERS
from tokenspeed.ir.types import ROW_DIMS, Type

FORMAT = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32"}

Request = tuple[str, dict[str, str], dict[str, int]]  # registry op, role -> format, facts


@dataclass(slots=True)
class Call:
    """One call: operands and results by their names in the whole program; `kinds` says of each operand that is a parameter
    which kind it is ("" for a value)."""

    node: Node
    ins: list[Type]
    outs: list[Type]
    inputs: list[str]  # value names, or @absolute[:segment] of a parameter
    outputs: list[str]
    kinds: list[str]
    request: Request
    blocks: tuple[int, int, int] | None = None  # of a slice that copies: outer factor, parts, this rank's part


#: ops of the IR that have no kernel of their own: an alias, or a view of the operand
NO_KERNEL = frozenset({"cross", "slice"})
_PARTS = tuple(op.name for op in FILTERS)  # of the sampler: their results have one format each


def format_name(dtype: str) -> str:
    return FORMAT.get(dtype, dtype)


def kernel_op(node: Node, ins: Sequence[Type], caches: Sequence[Type], home: Axes) -> str:
    """The registry's op for a node: a reduction that is no sum has its own, and so has what works on a part of a home block's
    slots."""
    if node.op == "all_reduce" and ins[0].kind != "sum":
        return f"all_reduce_{ins[0].kind}"
    return f"{node.op}_part" if any(a not in home for t in caches for a in t.dims[0].axes) else node.op


def request_of(node: Node, ins: Sequence[Type], outs: Sequence[Type], kinds: Sequence[str], p: Program) -> Request:
    """What the registry is asked for one call; `kinds`: of each operand that is a parameter its kind, "" of a value."""
    x = ins[0]
    signature: dict[str, str] = {}
    if node.op != "lookup":
        signature["x"] = format_name(x.dtype)
    weights = [t for t, kind in zip(ins, kinds) if kind == "weight"]
    if weights:
        signature["w"] = format_name(weights[0].dtype)
    caches = [t for t, kind in zip(ins, kinds) if kind == "cache"]
    if caches:
        signature["cache"] = format_name(caches[0].dtype)
    if outs and node.op not in ("argmax", "gumbel_argmax", "sample", "route", "topk", "index_topk", *_PARTS):
        signature["out"] = format_name(outs[0].dtype)
    facts = {"tokens": rows_of(x, p)}
    if node.op == "attend":
        facts["head_dim"] = p.sizes[x.dims[-1].name]
    if "in_dims" in node.attrs:
        n_in = len(node.attrs["in_dims"])
        facts["k"] = math.prod(_local(d, p) for d in x.dims[len(x.dims) - n_in :])
        facts["n"] = sum(width_of(t, p) for t in outs)
    return kernel_op(node, ins, caches, p.plan.home), signature, facts


def in_bucket(c: Call, p: Program) -> Request:
    """The request of a call for another bucket of its body: of the facts, the rows alone depend on it."""
    op, signature, facts = c.request
    return op, signature, facts | {"tokens": rows_of(c.ins[0], p)}


def _local(d: object, p: Program) -> int:
    return p.sizes[d.name] // p.plan.mesh.size(d.axes)  # type: ignore[attr-defined]


def rows_of(t: Type, p: Program) -> int:
    rows = 1
    for d in t.dims:
        if d.name in ROW_DIMS:
            rows *= p.sizes[d.name] // p.plan.mesh.size(d.axes)
    return rows


def width_of(t: Type, p: Program) -> int:
    """Elements a row of `t` on one rank."""
    return math.prod(_local(d, p) for d in t.dims if d.name not in ROW_DIMS)


def key_of(op: str, signature: dict[str, str], facts: dict[str, int]) -> str:
    return "|".join(
        [op, *(f"{k}={v}" for k, v in sorted(signature.items())), *(f"{k}={v}" for k, v in sorted(facts.items()))]
    )


def parse_key(key: str) -> Request:
    """What `key_of` wrote: formats are words, facts are whole numbers."""
    op, *rest = key.split("|")
    signature: dict[str, str] = {}
    facts: dict[str, int] = {}
    for name, _, value in (part.partition("=") for part in rest):
        if value.lstrip("-").isdigit():
            facts[name] = int(value)
        else:
            signature[name] = value
    return op, signature, facts
