"""The kernel calls of a program: leaves dissolved, parameters by absolute name, chains that one kernel runs fused.

Invariant: the list is a pure function of the program and of which fused requests have a kernel; binding, the memory plan
and emission all walk this one list. Chains are fused within a body (fuse.py), once however many layers share it, and then
across bodies (chain.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenspeed.compiler.binding import NO_KERNEL, Call, Request, request_of
from tokenspeed.compiler.chain import chained
from tokenspeed.compiler.exchange import lower
from tokenspeed.compiler.fuse import CALLS, fuse
from tokenspeed.ir.graph import Node, Param, Program, absolute, param_type
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.types import Type
from tokenspeed.kernels.ops import OPS as KERNEL_OPS

Bound = Callable[[Call], bool]  # whether a kernel that is more than the reference runs a fused call
QUIET: Request = ("", {}, {})  # of a call that runs no kernel


def flatten(p: Program, bound: Bound) -> list[Call]:
    """The kernel calls of a program in order."""

    def body(
        nodes: Sequence[Node], types: dict[str, Type], params: dict[str, Param], kept: Sequence[str]
    ) -> list[Call]:
        def call(n: Node) -> Call:
            return made(n, operands(n), [types[o] for o in n.outputs])

        def operands(n: Node) -> list[Type]:
            return [param_type(params, i) if i.startswith("@") else types[i] for i in n.inputs]

        def made(n: Node, ins: list[Type], outs: list[Type]) -> Call:
            kinds = [params[i[1:].partition(":")[0]].kind if i.startswith("@") else "" for i in n.inputs]
            quiet = n.op == "call" or n.op in NO_KERNEL or CALLS[n.op].alias
            request = QUIET if quiet else request_of(n, ins, outs, kinds, p)
            return Call(n, ins, outs, list(n.inputs), list(n.outputs), kinds, request)

        def runs(n: Node) -> bool:  # a chain on a part of a cache is no op that kernels have
            made = call(n)
            return made.request[0] in KERNEL_OPS and bound(made)

        out: list[Call] = []
        for n in fuse(nodes, kept, runs):
            if n.op in OPS and OPS[n.op].exchange(ins := operands(n)):
                out += [made(part.node, part.ins, part.outs) for part in lower(n, ins, types[n.outputs[0]])]
            else:
                out.append(call(n))
        return out

    calls: list[Call] = []
    bodies = {name: body(f.nodes, f.types, f.params, f.outputs) for name, f in p.leaves.items()}
    made_in = {name: [o for c in inner for o in c.outputs] for name, inner in bodies.items()}
    refs = {name: {i for c in inner for i in c.inputs if i.startswith("@")} for name, inner in bodies.items()}
    for c in body(p.nodes, p.types, p.params, p.results):
        if c.node.op != "call":
            calls.append(c)
            continue
        name, path = c.node.attrs["leaf"], c.node.attrs["path"]
        leaf = p.leaves[name]
        env = {o: f"{path}/{o}" for o in made_in[name]}
        env.update((r, f"@{absolute(path, r[1:])}") for r in refs[name])
        env.update(zip(leaf.inputs, c.inputs))
        env.update(zip(leaf.outputs, c.outputs))
        for i in bodies[name]:
            inputs, outputs = [env[v] for v in i.inputs], [env[o] for o in i.outputs]
            calls.append(Call(i.node, i.ins, i.outs, inputs, outputs, i.kinds, i.request))
    return chained(calls, p, bound)
