"""The kernel calls of a program: leaves dissolved, parameters by absolute name, chains that one kernel runs fused.

Invariant: the list is a pure function of the program and of which fused requests have a kernel; binding, the memory plan
and emission all walk this one list. Chains are fused within a body (fuse.py), once however many layers share it, and then
across bodies (chain.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenspeed.compiler.binding import NO_KERNEL, Call, Request, request_of
from tokenspeed.compiler.chain import chained
from tokenspeed.compiler.fuse import CALLS, fuse
from tokenspeed.ir.graph import Node, Param, Program, absolute, param_type
from tokenspeed.ir.types import Type
from tokenspeed.kernels.ops import OPS as KERNEL_OPS

Bound = Callable[[Request], bool]  # whether a kernel that is more than the reference runs a fused request
QUIET: Request = ("", {}, {})  # of a call that runs no kernel


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

        def runs(n: Node) -> bool:  # a chain on a part of a cache is no op that kernels have
            request = call(n).request
            return request[0] in KERNEL_OPS and bound(request)

        return [call(n) for n in fuse(nodes, kept, runs)]

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
    return chained(calls, p, bound)


def _absolute(ref: str, path: str) -> str:
    name, colon, segment = ref[1:].partition(":")
    return f"@{absolute(path, name)}{colon}{segment}"
