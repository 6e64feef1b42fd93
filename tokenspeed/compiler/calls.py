"""The kernel calls of a program: leaves dissolved, parameters by absolute name, chains that one kernel runs fused.

Invariant: the list is a pure function of the program and of which fused requests have a kernel; binding, the memory plan
and emission all walk this one list. Chains inside a body are fused first, once a body (fuse.py); then what crosses a
leaf's boundary: a residual add behind a product, else before a norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenspeed.compiler.binding import NO_KERNEL, Request, request_of
from tokenspeed.compiler.fuse import CALLS, fuse
from tokenspeed.ir.graph import Node, Param, Program, absolute, param_type
from tokenspeed.ir.types import Type

Bound = Callable[[Request], bool]  # whether a kernel that is more than the reference runs a fused request
QUIET: Request = ("", {}, {})  # of a call that runs no kernel


@dataclass
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


def flatten(p: Program, bound: Bound) -> list[Call]:
    """The kernel calls of a program in order."""

    def body(
        nodes: Sequence[Node], types: dict[str, Type], params: dict[str, Param], kept: Sequence[str]
    ) -> list[Call]:
        def call(n: Node) -> Call:
            ins = [param_type(params, i) if i.startswith("@") else types[i] for i in n.inputs]
            outs = [types[o] for o in n.outputs]
            kinds = [params[i[1:].partition(":")[0]].kind if i.startswith("@") else "" for i in n.inputs]
            quiet = n.op == "call" or n.op in NO_KERNEL or CALLS[n.op].alias
            request = QUIET if quiet else request_of(n, ins, outs, kinds, p)
            return Call(n, ins, outs, list(n.inputs), list(n.outputs), kinds, request)

        return [call(n) for n in fuse(nodes, kept, lambda n: bound(call(n).request))]

    calls: list[Call] = []
    bodies = {name: body(f.nodes, f.types, f.params, f.outputs) for name, f in p.leaves.items()}
    for c in body(p.nodes, p.types, p.params, p.results):
        if c.node.op != "call":
            calls.append(c)
            continue
        leaf, path = p.leaves[c.node.attrs["leaf"]], c.node.attrs["path"]
        env = dict(zip(leaf.inputs, c.inputs))
        final = dict(zip(leaf.outputs, c.outputs))
        for inner in bodies[c.node.attrs["leaf"]]:
            env.update((o, final.get(o, f"{path}/{o}")) for o in inner.outputs)
            inputs = [_absolute(i, path) if i.startswith("@") else env[i] for i in inner.inputs]
            outputs = [env[o] for o in inner.outputs]
            calls.append(Call(inner.node, inner.ins, inner.outs, inputs, outputs, inner.kinds, inner.request))
    return _joined(calls, p, bound)


def _absolute(ref: str, path: str) -> str:
    name, colon, segment = ref[1:].partition(":")
    return f"@{absolute(path, name)}{colon}{segment}"


def _joined(calls: list[Call], p: Program, bound: Bound) -> list[Call]:
    """Chains across the boundaries of leaves; a fused call stands where the last of its members stood.

    First what a product can take in, then the sums and norms that are left.
    """
    made = {o: i for i, c in enumerate(calls) for o in c.outputs}
    uses = Counter(v for c in calls for v in c.inputs)
    uses.update(p.results)
    out: list[Call | None] = list(calls)

    def maker(value: str, op: str, *, alone: bool = True) -> int | None:
        """The call that makes `value` (for one reader, where `alone`), if it is an `op` and not fused yet."""
        i = made.get(value)
        if i is None or calls[i].node.op != op or out[i] is not calls[i] or (alone and uses[value] != 1):
            return None
        return i

    for ops, pattern in _PATTERNS:
        for i, c in enumerate(calls):
            if c.node.op not in ops or out[i] is not c or (found := pattern(i, calls, maker)) is None:
                continue
            first, fused = found
            fused.request = request_of(fused.node, fused.ins, fused.outs, fused.kinds, p)
            if bound(fused.request):
                out[first], out[i] = None, fused
    return [c for c in out if c is not None]


class _Maker(Protocol):
    def __call__(self, value: str, op: str, *, alone: bool = True) -> int | None: ...


Found = tuple[int, "Call"]  # index of the call that is absorbed, and the fused call, its request still to be made


def _product_add(i: int, calls: list[Call], maker: _Maker) -> Found | None:
    """A residual add behind a product."""
    c = calls[i]
    for k in (1, 0):
        j = maker(c.inputs[k], "linear")
        if j is not None and len(calls[j].outputs) == 1 and not calls[j].node.attrs["bias"]:
            rest = (c.inputs[1 - k], c.ins[1 - k], c.kinds[1 - k])
            return j, _call("linear_add", calls[j].node.attrs, [rest, *_operands(calls[j])], c, c.outputs, c.outs)
    return None


def _add_norm(i: int, calls: list[Call], maker: _Maker) -> Found | None:
    """A residual add right before the norm of its sum; both values stay."""
    c = calls[i]
    j = maker(c.inputs[0], "add", alone=False)
    if j is None or j != i - 1:
        return None
    add = calls[j]
    operands = [*_operands(add), *_operands(c)[1:]]
    return j, _call("add_rms_norm", c.node.attrs, operands, c, [*add.outputs, *c.outputs], [*add.outs, *c.outs])


_PATTERNS: list[tuple[tuple[str, ...], Callable[[int, list[Call], _Maker], Found | None]]] = [
    (("add",), _product_add),
    (("rms_norm",), _add_norm),
]

Operand = tuple[str, Type, str]


def _operands(c: Call) -> list[Operand]:
    return list(zip(c.inputs, c.ins, c.kinds))


def _call(
    op: str, attrs: Mapping[str, Any], operands: list[Operand], last: Call, outputs: list[str], outs: list[Type]
) -> Call:
    names, ins, kinds = [o[0] for o in operands], [o[1] for o in operands], [o[2] for o in operands]
    node = Node(op, tuple(names), tuple(outputs), dict(attrs), last.node.origin)
    return Call(node, ins, outs, names, outputs, kinds, QUIET)
