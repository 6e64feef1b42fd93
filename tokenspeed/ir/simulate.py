"""The n-rank simulator: list-of-tensors semantics of every placement, the oracle of the compiler.

A value is a list of local tensors, one a rank. `distribute` and `assemble` say what a list means; a redistribution is
exactly "assemble, then distribute". `assemble` also checks the precondition of replication: equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.graph import Node, Param, Program, absolute, param_type, row_factors
from tokenspeed.ir.ops import OPS, REFERENCES, Local, Redistribute
from tokenspeed.ir.types import ROW_DIMS, Dim, Type

Value = Any  # a Tensor, or the pair (value, index) of argmax


class Simulator:
    """Runs one program on all ranks of its mesh in this process."""

    def __init__(self, program: Program, runtime: Mapping[str, int]) -> None:
        """`runtime`: extents the runtime fixes (slots, page, l, p, r ...), global."""
        self.p, self.mesh = program, program.plan.mesh
        self.sizes = dict(program.sizes) | dict(runtime)
        self.logical = dict(program.logical) | {k: v for k, v in runtime.items() if k not in program.logical}
        self.factors = {d: row_factors(program.plan, n) for d, n in program.bucket.items()}

    # ---- meaning ----

    def owned(self, d: Dim, rank: int) -> Tensor:
        """Global indices of `d` that a rank holds, in local order."""
        n = self.sizes[d.name]
        if not d.axes:
            return torch.arange(n)
        if d.name not in ROW_DIMS:
            width = n // self.mesh.size(d.axes)
            start = self.mesh.index(rank, d.axes) * width
            return torch.arange(start, start + width)
        factors = self.factors[d.name]
        grid = torch.arange(n).reshape(*(self.mesh.size(a) for a in factors), -1)
        at = self.mesh.coords(rank)
        return grid[tuple(at[a] if a in d.axes else slice(None) for a in factors)].flatten()

    def distribute(self, x: Tensor, t: Type) -> list[Tensor]:
        """A global tensor as locals of type `t`; over pending axes the first rank keeps it."""
        out: list[Tensor] = []
        for r in range(self.mesh.ranks):
            local = x
            for k, d in enumerate(t.dims):
                local = local.index_select(k, self.owned(d, r))
            keep = all(self.mesh.coords(r)[a] == 0 for a in t.pending)
            out.append(local.clone() if keep else torch.zeros_like(local))
        return out

    def assemble(self, xs: list[Value], t: Type) -> Value:
        """The meaning of a list; VerifyError V2 where ranks that must agree do not."""
        pair = isinstance(xs[0], tuple)
        shape = tuple(self.sizes[d.name] for d in t.dims)
        first = xs[0][1] if pair else xs[0]
        out = torch.zeros(shape, dtype=first.dtype)
        best = torch.full(shape, float("-inf"))
        done: dict[tuple[int, ...], Any] = {}
        sharded = [a for d in t.dims for a in d.axes]
        for r, x in enumerate(xs):
            at = self.mesh.coords(r)
            key = tuple(at[a] for a in (*sharded, *t.pending))
            if key in done:
                same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(_tuple(done[key]), _tuple(x)))
                if not same:
                    raise VerifyError("V2", f"ranks that replicate a value of type {t} hold different bits")
                continue
            done[key] = x
            index = torch.meshgrid(*(self.owned(d, r) for d in t.dims), indexing="ij")
            if pair:
                old, old_i = best[index], out[index]
                wins = (x[0] > old) | ((x[0] == old) & (x[1] < old_i))
                out[index], best[index] = torch.where(wins, x[1], old_i), torch.where(wins, x[0], old)
            else:
                out[index] = out[index] + x if t.pending else x
        return out

    # ---- execution ----

    def run(
        self, ports: Mapping[str, Tensor], weights: Mapping[str, Tensor], caches: dict[str, list[Tensor]]
    ) -> tuple[list[Tensor], dict[str, list[Value]]]:
        """Results (global) and every value of the main list. `weights`: global tensors by `name` or `name:segment`;
        `caches`: locals by `name:segment`, created on first use and kept by the caller between steps."""
        env: dict[str, list[Value]] = {n: self.distribute(ports[n], self.p.types[n]) for n in self.p.ports}
        for node in self.p.nodes:
            if node.op != "call":
                self._node(node, env, self.p.types, self.p.params, "", weights, caches)
                continue
            leaf = self.p.leaves[node.attrs["leaf"]]
            inner: dict[str, list[Value]] = dict(zip(leaf.inputs, (env[i] for i in node.inputs)))
            for n in leaf.nodes:
                self._node(n, inner, leaf.types, leaf.params, node.attrs["path"], weights, caches)
            env.update((o, inner[i]) for o, i in zip(node.outputs, leaf.outputs))
        return [self.assemble(_settled(env[r]), self.p.types[r]) for r in self.p.results], env

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
                dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32, "u8": torch.uint8}[t.dtype]
                caches[name] = self.distribute(torch.zeros([self.sizes[d.name] for d in t.dims], dtype=dtype), t)
            return caches[name]
        x = weights[name]
        return [x] * self.mesh.ranks if params[base].kind == "table" else self.distribute(x, t)

    def _node(
        self, n: Node, env: dict[str, list[Value]], types: dict[str, Type], params: dict[str, Param], path: str,
        weights: Mapping[str, Tensor], caches: dict[str, list[Tensor]],
    ) -> None:  # fmt: skip
        op = OPS[n.op]
        if isinstance(op, Redistribute):
            source, target = types[n.inputs[0]], types[n.outputs[0]]
            whole = self.assemble(env[n.inputs[0]], source)
            env[n.outputs[0]] = self.distribute(whole, target)
            return
        args = [
            self._param(i, params, path, weights, caches) if i.startswith("@") else _settled(env[i]) for i in n.inputs
        ]
        ins = [param_type(params, i) if i.startswith("@") else types[i] for i in n.inputs]
        outs = [types[o] for o in n.outputs]
        for r in range(self.mesh.ranks):
            local = [a[r] for a in args]
            attrs = op.local_attrs(ins, outs, n.attrs, Local(self.p.plan, r, self.sizes, self.logical))
            if n.op == "linear":
                got: Any = self._linear(n, local, outs)
            else:
                got = op.reference(*local, **attrs)
            results = got if len(n.outputs) > 1 else (got,)
            for o, x in zip(n.outputs, results):
                env.setdefault(o, [None] * self.mesh.ranks)[r] = x

    def _linear(self, n: Node, args: list[Tensor], outs: list[Type]) -> Any:
        k, n_in = n.attrs["segments"], len(n.attrs["in_dims"])
        ws, bias = args[1 : 1 + k], args[1 + k :]
        x = args[0].flatten(1) if n_in > 1 else args[0]
        ys = []
        for i, (w, t) in enumerate(zip(ws, outs)):
            flat = w.flatten(-n_in).flatten(0, -2)
            dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[t.dtype]
            b = bias[i].flatten() if bias else None
            y = REFERENCES["linear"](x, flat, b, dtype=dtype)
            ys.append(y.reshape(x.shape[0], *t.local_shape(self.sizes, self.p.plan)[1:]))
        return tuple(ys) if k > 1 else ys[0]


def _tuple(x: Value) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _settled(xs: list[Value]) -> list[Value]:
    """An argmax whose vocabulary is whole gives a pair too; its consumers read the index."""
    return [x[1] if isinstance(x, tuple) else x for x in xs]
