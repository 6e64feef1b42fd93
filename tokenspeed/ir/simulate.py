"""The n-rank simulator: runs a program on every rank of its mesh in this process, the oracle of the compiler.

A value is a list of local tensors, one a rank; `Meaning` says what a list means. Ops run their references on each rank's
locals; a redistribution moves blocks within its groups. Reals are float64 by default, so that reassociated sums differ by
less than any margin between two logits and tokens can be compared for equality.

Invariant: ranks share a tensor only where each would compute it from the very same operands and attributes, so it is
computed once; what an op writes, its caches, is parted between ranks that write differently before it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.collectives import collective, exchange
from tokenspeed.ir.graph import Node, Param, Program, absolute, param_type
from tokenspeed.ir.meaning import Meaning, Value, settled
from tokenspeed.ir.ops import OPS, REFERENCES, Local, Redistribute
from tokenspeed.ir.ops.fused import expand
from tokenspeed.ir.types import Type


class Simulator:
    """Runs one program on all ranks of its mesh in this process."""

    def __init__(
        self, program: Program, runtime: Mapping[str, int], real: torch.dtype = torch.float64,
        moved: dict[tuple[str, Type], list[Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """`runtime`: extents the runtime fixes (slots, page, l, p, r ...), global. `real`: what f32 is computed in. `moved`:
        weights as locals, filled here; simulators of one plan that run on the same weights may share it."""
        self.p, self.mesh = expand(program), program.plan.mesh
        self.sizes = dict(program.sizes) | dict(runtime)
        self.logical = dict(program.logical) | {k: v for k, v in runtime.items() if k not in program.logical}
        self.meaning = Meaning(program.plan, self.sizes, {d: program.row_axes(d) for d in program.bucket})
        self.real = real
        self.dtypes = {"f32": real, "bf16": torch.bfloat16, "i32": torch.int32, "u8": torch.uint8}
        self.moved = {} if moved is None else moved
        self.told: dict[int, list[tuple[int, dict[str, Any]]]] = {}  # of each node, by its id: `_attrs`

    def run(
        self, ports: Mapping[str, Tensor], weights: Mapping[str, Tensor], caches: dict[str, list[Tensor]]
    ) -> tuple[list[Tensor], dict[str, list[Value]]]:
        """Results (global) and every value of the main list. `weights`: global tensors by `name` or `name:segment`;
        `caches`: locals by `name:segment`, created on first use and kept by the caller between steps."""
        env: dict[str, list[Value]] = {
            n: self.meaning.distribute(self._cast(ports[n]), self.p.types[n]) for n in self.p.ports
        }
        for node in self.p.nodes:
            if node.op != "call":
                self._node(node, env, self.p.types, self.p.params, "", weights, caches)
                continue
            leaf = self.p.leaves[node.attrs["leaf"]]
            inner: dict[str, list[Value]] = dict(zip(leaf.inputs, (env[i] for i in node.inputs)))
            for n in leaf.nodes:
                self._node(n, inner, leaf.types, leaf.params, node.attrs["path"], weights, caches)
            env.update((o, inner[i]) for o, i in zip(node.outputs, leaf.outputs))
        return [self.meaning.assemble(env[r], self.p.types[r]) for r in self.p.results], env

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.real) if x.dtype == torch.float32 else x

    def _param(
        self,
        ref: str,
        params: dict[str, Param],
        path: str,
        weights: Mapping[str, Tensor],
        caches: dict[str, list[Tensor]],
    ) -> list[Tensor]:
        base, _, seg = ref[1:].partition(":")
        name = absolute(path, base) + (f":{seg}" if seg else "")
        t = param_type(params, ref)
        if params[base].kind in ("cache", "state"):
            if name not in caches:
                zeros = torch.zeros([self.sizes[d.name] for d in t.dims], dtype=self.dtypes[t.dtype])
                caches[name] = self.meaning.distribute(zeros, t)
            return caches[name]
        if (name, t) not in self.moved:
            x = self._cast(weights[name])
            table = params[base].kind == "table"
            self.moved[name, t] = [x] * self.mesh.ranks if table else self.meaning.distribute(x, t)
        return self.moved[name, t]

    def _attrs(self, n: Node, ins: list[Type], outs: list[Type]) -> list[tuple[int, dict[str, Any]]]:
        """What a node's kernel is told on each rank, and the first rank that is told the same."""
        if id(n) not in self.told:
            own = [
                OPS[n.op].local_attrs(ins, outs, n.attrs, Local(self.p.plan, r, self.sizes, self.logical))
                for r in range(self.mesh.ranks)
            ]
            self.told[id(n)] = [(own.index(a), a) for a in own]
        return self.told[id(n)]

    def _node(
        self, n: Node, env: dict[str, list[Value]], types: dict[str, Type], params: dict[str, Param], path: str,
        weights: Mapping[str, Tensor], caches: dict[str, list[Tensor]],
    ) -> None:  # fmt: skip
        op = OPS[n.op]
        ins = [param_type(params, i) if i.startswith("@") else types[i] for i in n.inputs]
        if isinstance(op, Redistribute):
            moved = collective(n.op, env[n.inputs[0]], ins[0], n.attrs["axes"], n.attrs.get("dim", ""), self.meaning)
            env[n.outputs[0]] = moved
            return
        args = [
            self._param(i, params, path, weights, caches)
            if i.startswith("@")
            else [settled(x, t.kind) for x in env[i]]
            if not op.alias
            else env[i]
            for i, t in zip(n.inputs, ins)
        ]
        outs = [types[o] for o in n.outputs]
        told = self._attrs(n, ins, outs)
        if axes := op.exchange(ins):
            env[n.outputs[0]] = exchange(
                list(zip(*args)), [a["offset"] for _, a in told], axes, self.meaning,
                lambda r, given: op.reference(*given, **told[r][1]),
            )  # fmt: skip
            return
        alike: dict[tuple[int, ...], list[int]] = {}  # ranks by their operands and attributes
        for r, (first, _) in enumerate(told):
            alike.setdefault((first, *(id(a[r]) for a in args)), []).append(r)
        if op.writes_cache or op.slotted:
            kept = [
                a for a, i in zip(args, n.inputs) if i.startswith("@") and params[_base(i)].kind in ("cache", "state")
            ]
            part(kept, list(alike.values()))
        for ranks in alike.values():
            r = ranks[0]
            local = [a[r] for a in args]
            if n.op == "linear":
                shapes = [t.local_shape(self.sizes, self.p.plan) for t in outs]
                got: Any = linear(local, n.attrs, shapes, self.dtypes[outs[0].dtype])
            else:
                got = op.reference(*local, **told[r][1])
            results = got if len(n.outputs) > 1 else (got,)
            for o, x in zip(n.outputs, results):
                values = env.setdefault(o, [None] * self.mesh.ranks)
                for r in ranks:
                    values[r] = x


def _base(ref: str) -> str:
    """The parameter that an operand `@name` or `@name:segment` is of."""
    return ref[1:].partition(":")[0]


def part(kept: list[list[Tensor]], groups: list[list[int]]) -> None:
    """Gives each group of ranks that write alike caches of its own, where it shares one with another group."""
    for locals_ in kept:
        owner: dict[int, int] = {}
        for g, ranks in enumerate(groups):
            if owner.setdefault(id(locals_[ranks[0]]), g) != g:
                mine = locals_[ranks[0]].clone()
                for r in ranks:
                    locals_[r] = mine


def linear(args: list[Tensor], attrs: Mapping[str, Any], shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Any:
    """The linear op on one rank's operand, segments and biases; `shapes` are the local shapes of the outputs."""
    k, n_in = attrs["segments"], len(attrs["in_dims"])
    ws, bias = args[1 : 1 + k], args[1 + k :]
    x = args[0].flatten(1) if n_in > 1 else args[0]
    ys = []
    for i, (w, shape) in enumerate(zip(ws, shapes)):
        flat = w.flatten(-n_in)
        flat = flat.reshape(-1, flat.shape[-1])
        y = REFERENCES["linear"](x, flat, bias[i].flatten() if bias else None, dtype=dtype)
        ys.append(y.reshape(x.shape[0], *shape[1:]))
    return tuple(ys) if k > 1 else ys[0]
