"""Emission: one `torch.fx.GraphModule` a program, of registry kernels that write into preallocated buffers.

Invariant: every value is a static tensor (a port, a view of a weight, or a slice of the arena at a planned offset), so a
replay allocates nothing and takes no argument; the order of the graph is program order. Nodes are `call_function` of a
kernel with an explicit `out`. This module needs the program text and the registry only, none of the compiler's passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from tokenspeed.compiler.binding import NO_KERNEL, key_of, request_of
from tokenspeed.compiler.fuse import CALLS, fuse
from tokenspeed.compiler.memory import Buffer, plan_memory
from tokenspeed.ir.graph import Node, Param, Program, absolute, param_type
from tokenspeed.ir.ops import Local, Redistribute
from tokenspeed.ir.types import ROW_DIMS, Type
from tokenspeed.kernels.capture import Replay, record

DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
}  # fmt: skip
ARGMAX = ("argmax", "gumbel_argmax")  # their result is a pair: the value beside the index


@dataclass
class Runtime:
    """What emission takes from the process that runs the program."""

    rank: int
    sizes: Mapping[str, int]  # extents the runtime fixes, global: slots, page, l, p, r, top
    params: Mapping[str, Any]  # local parameters by absolute name (tables, weights), `name:segment` (caches, state)
    ports: Mapping[str, Tensor]  # local static inputs with at least the bucket's rows
    kernel: Callable[[str], Any]  # request key -> KernelSpec
    bound: Callable[[str], bool]  # whether a kernel was bound to a request key
    group: Callable[[tuple[str, ...]], Any]  # axes -> process group of this rank
    arena: Callable[[int], Tensor]  # bytes -> a uint8 tensor shared by all programs of this rank


@dataclass
class Emitted:
    """A program that can be replayed. `module()` interprets the graph call by call; `replay()` makes the same calls as it
    was captured, without Python between native kernels. `results` are the output tensors, in order."""

    module: fx.GraphModule
    replay: Replay
    results: list[Tensor]
    peak_bytes: int
    kernels: list[str]  # request keys of its calls


@dataclass
class _Storage:
    """A piece of the arena before it has an address: bytes, first and last node that touch it."""

    nbytes: int
    birth: int
    death: int


@dataclass
class _View:
    """Where a value lies: in a storage (a dtype and element layout), or a tensor that exists already."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int = -1
    stride: tuple[int, ...] | None = None
    start: int = 0  # elements
    tensor: Tensor | None = None


@dataclass
class _Flat:
    """One kernel node of the flattened program."""

    node: Node
    ins: list[Type]
    outs: list[Type]
    inputs: list[str]  # value names, flat
    outputs: list[str]
    path: str
    params: dict[str, Param]
    request: tuple[str, dict[str, str], dict[str, int]]
    blocks: tuple[int, int, int] | None = None  # of a slice that copies: outer factor, parts, this rank's part


def emit(p: Program, rt: Runtime) -> Emitted:
    """Builds the graph of `p` for one rank. The arena is asked for once, with the program's peak."""
    e = _Emitter(p, rt)
    e.flatten()
    e.place()
    return e.build()


class _Emitter:
    def __init__(self, p: Program, rt: Runtime) -> None:
        self.p, self.rt = p, rt
        self.sizes = dict(p.sizes) | dict(rt.sizes)
        self.logical = dict(rt.sizes) | dict(p.logical)
        self.at = Local(p.plan, rt.rank, self.sizes, self.logical)
        self.flat: list[_Flat] = []
        self.values: dict[str, _View] = {}
        self.pairs: dict[str, str] = {}  # pending argmax value -> name of its values tensor
        self.storages: list[_Storage] = []
        self.results = list(p.results)

    # ---- flattening ----

    def flatten(self) -> None:
        for n in self._fused(self.p.nodes, self.p.types, self.p.params, self.p.results):
            if n.op != "call":
                self._add(n, self.p.types, self.p.params, "", {v: v for v in (*n.inputs, *n.outputs)})
                continue
            leaf = self.p.leaves[n.attrs["leaf"]]
            path = n.attrs["path"]
            env = dict(zip(leaf.inputs, n.inputs))
            final = dict(zip(leaf.outputs, n.outputs))
            for inner in self._fused(leaf.nodes, leaf.types, leaf.params, leaf.outputs):
                for o in inner.outputs:
                    env[o] = final.get(o, f"{path}/{o}")
                self._add(inner, leaf.types, leaf.params, path, env)

    def _fused(
        self, nodes: Sequence[Node], types: dict[str, Type], params: dict[str, Param], kept: Sequence[str]
    ) -> list[Node]:
        return fuse(nodes, kept, lambda n: self.rt.bound(key_of(*request_of(n, types, params, self.p))))

    def _add(self, n: Node, types: dict[str, Type], params: dict[str, Param], path: str, env: dict[str, str]) -> None:
        ins = [param_type(params, i) if i.startswith("@") else types[i] for i in n.inputs]
        outs = [types[o] for o in n.outputs]
        inputs = [i if i.startswith("@") else env[i] for i in n.inputs]
        request = ("", {}, {}) if n.op in NO_KERNEL or CALLS[n.op].alias else request_of(n, types, params, self.p)
        self.flat.append(_Flat(n, ins, outs, inputs, [env[o] for o in n.outputs], path, params, request))

    # ---- placing values ----

    def local(self, t: Type) -> tuple[int, ...]:
        return t.local_shape(self.sizes, self.p.plan)

    def place(self) -> None:
        for name in self.p.ports:
            t = self.p.types[name]
            whole = self.rt.ports[name]
            self.values[name] = _View(self.local(t), whole.dtype, tensor=whole[: self.local(t)[0]])
        last: dict[str, int] = {}
        for i, f in enumerate(self.flat):
            for v in f.inputs:
                last[v] = i
        for r in self.results:
            last[r] = len(self.flat)
        for i, f in enumerate(self.flat):
            self._place(i, f, last)
        for i, f in enumerate(self.flat):
            for v in (*f.inputs, *(self.pairs[v] for v in f.inputs if v in self.pairs)):
                if not v.startswith("@") and self.values[v].storage >= 0:
                    s = self.storages[self.values[v].storage]
                    s.death = max(s.death, i)
        for r in self.results:
            if self.values[r].storage >= 0:
                self.storages[self.values[r].storage].death = len(self.flat)
        offsets, self.peak = plan_memory([Buffer(s.nbytes, s.birth, s.death) for s in self.storages])
        arena = self.rt.arena(self.peak)
        for v in self.values.values():
            if v.tensor is None:
                s = self.storages[v.storage]
                base = arena[offsets[v.storage] : offsets[v.storage] + s.nbytes].view(v.dtype)
                stride = v.stride or _contiguous(v.shape)
                v.tensor = base.as_strided(v.shape, stride, base.storage_offset() + v.start)

    def _new(self, i: int, shape: tuple[int, ...], dtype: torch.dtype) -> _View:
        self.storages.append(_Storage(max(math.prod(shape), 1) * dtype.itemsize, i, i))
        return _View(shape, dtype, len(self.storages) - 1)

    def _place(self, i: int, f: _Flat, last: dict[str, int]) -> None:
        op = CALLS[f.node.op]
        shapes = [(self.local(t), DTYPES[t.dtype]) for t in f.outs]
        if op.alias:
            self.values[f.outputs[0]] = self.values[f.inputs[0]]
        elif f.node.op == "slice":
            self.values[f.outputs[0]] = self._sliced(i, f, f.inputs[0])
            if f.inputs[0] in self.pairs:
                self.pairs[f.outputs[0]] = name = f.outputs[0] + "@value"
                self.values[name] = self._sliced(i, f, self.pairs[f.inputs[0]])
        elif f.node.op == "linear":
            rows = shapes[0][0][0]
            widths = [math.prod(s[1:]) for s, _ in shapes]
            whole = self._new(i, (rows, sum(widths)), shapes[0][1])
            start = 0
            for name, (shape, dtype), width in zip(f.outputs, shapes, widths):
                stride = (sum(widths), *_contiguous(shape[1:]))
                self.values[name] = _View(shape, dtype, whole.storage, stride, start)
                start += width
            self.values[f"{f.outputs[0]}@whole"] = whole
        elif f.node.op in ARGMAX or f.request[0] == "all_reduce_argmax":
            value = self._new(i, shapes[0][0], torch.float32)
            self.values[f.outputs[0]] = self._new(i, *shapes[0])
            self.pairs[f.outputs[0]] = name = f.outputs[0] + "@value"
            self.values[name] = value
        elif op.in_place_ok and last[f.inputs[0]] == i and self._owns(f.inputs[0], shapes[0]):
            old = self.values[f.inputs[0]]
            self.values[f.outputs[0]] = _View(old.shape, old.dtype, old.storage, old.stride, old.start)
        else:
            for name, (shape, dtype) in zip(f.outputs, shapes):
                self.values[name] = self._new(i, shape, dtype)
        for o in f.outputs:
            s = self.values[o].storage
            if s >= 0:
                self.storages[s].death = max(self.storages[s].death, i)

    def _owns(self, value: str, want: tuple[tuple[int, ...], torch.dtype]) -> bool:
        """Whether a value lies in the arena alone (not in a port, not shared with an alias) and has the output's form."""
        v = self.values[value]
        sharers = sum(w is v for w in self.values.values())
        return v.storage >= 0 and (v.shape, v.dtype) == want and sharers == 1

    def _sliced(self, i: int, f: _Flat, source: str) -> _View:
        """A slice is a view of the operand: this rank's block of one dim."""
        old = self.values[source]
        before, after = f.ins[0], f.outs[0]
        dim = next(k for k, (a, b) in enumerate(zip(before.dims, after.dims)) if a.axes != b.axes)
        axes = tuple(f.node.attrs["axes"])
        index = self.p.plan.mesh.index(self.rt.rank, axes)
        outer = self.outer(before, before.dims[dim].name, axes)
        width = self.local(after)[dim]
        if outer > 1:  # blocks of a whole outer factor lie apart: they are copied together
            f.blocks = (outer, self.p.plan.mesh.size(axes), index)
            return self._new(i, self.local(after), old.dtype)
        stride = old.stride or (old.tensor.stride() if old.tensor is not None else _contiguous(old.shape))
        if old.tensor is not None:
            return _View(self.local(after), old.dtype, tensor=old.tensor.narrow(dim, index * width, width))
        return _View(self.local(after), old.dtype, old.storage, stride, old.start + index * width * stride[dim])

    def outer(self, t: Type, dim: str, axes: tuple[str, ...]) -> int:
        """Product of the factors of a row dim that lie outside `axes` and are whole on this rank (1 for other dims)."""
        if dim not in ROW_DIMS:
            return 1
        factors = self.p.row_axes(dim)
        first = min(factors.index(a) for a in axes)
        held = set(t.dim(dim).axes) | set(axes)
        return self.p.plan.mesh.size([a for a in factors[:first] if a not in held])

    # ---- the graph ----

    def build(self) -> Emitted:
        root = nn.Module()
        graph = fx.Graph()
        constants: dict[int, fx.Node] = {}
        calls: list[tuple[Any, list[Any], dict[str, Any]]] = []
        keep: list[Any] = []

        def constant(x: Any) -> fx.Node:
            if id(x) not in constants:
                name = f"c{len(constants)}"
                object.__setattr__(root, name, x) if not isinstance(x, Tensor) else root.register_buffer(name, x, False)
                keep.append(x)
                constants[id(x)] = graph.get_attr(name)
            return constants[id(x)]

        for f in self.flat:
            if f.blocks is not None:
                pair = [(self.pairs[f.inputs[0]], self.pairs[f.outputs[0]])] if f.inputs[0] in self.pairs else []
                for a, b in [(f.inputs[0], f.outputs[0]), *pair]:
                    source, target = self._blocks(f.blocks, a, b)
                    graph.call_function(_COPY.fn, (constant(source),), {"out": constant(target)})
                    calls.append((_COPY, [source], {"out": target}))
            if CALLS[f.node.op].alias or f.node.op in NO_KERNEL:
                continue
            spec = self.rt.kernel(key_of(*f.request))
            args, out, attrs = self._call(f, spec)
            kwargs: dict[str, Any] = {
                k: (v if isinstance(v, int | float | bool | str) else constant(v)) for k, v in attrs.items()
            }
            if out is not None:
                kwargs["out"] = tuple(map(constant, out)) if isinstance(out, tuple) else constant(out)
            node = graph.call_function(spec.fn, tuple(None if a is None else constant(a) for a in args), kwargs)
            node.meta["kernel"], node.meta["value"] = spec.name, f.outputs
            calls.append((spec, args, attrs if out is None else attrs | {"out": out}))
        graph.output(())
        module = fx.GraphModule(root, graph, class_name=f"{self.p.name}_{self.p.variant}_t{self.p.bucket['t']}")
        keys = sorted({key_of(*f.request) for f in self.flat if f.request[0]})
        return Emitted(module, record(calls), [self._tensor(r) for r in self.results], self.peak, keys)

    def _blocks(self, blocks: tuple[int, int, int], source: str, target: str) -> tuple[Tensor, Tensor]:
        """Source and target views [outer, rows, ...] of a slice whose rows lie apart in the operand."""
        outer, parts, index = blocks
        x, out = self._tensor(source), self._tensor(target)
        return x.unflatten(0, (outer, parts, -1))[:, index], out.unflatten(0, (outer, -1))

    def _tensor(self, name: str) -> Tensor:
        t = self.values[name].tensor
        assert t is not None
        return t

    def _param(self, f: _Flat, ref: str) -> Any:
        base, _, seg = ref[1:].partition(":")
        name = absolute(f.path, base)
        kind = f.params[base].kind
        return self.rt.params[f"{name}:{seg}" if kind in ("cache", "state") else name]

    def _call(self, f: _Flat, spec: Any) -> tuple[list[Any], Any, dict[str, Any]]:
        """Positional tensors, `out`, and attributes of one kernel call."""
        n = f.node
        if n.op == "linear":
            x = self._tensor(f.inputs[0])
            x = x.flatten(1) if x.dim() > 2 else x
            weight = spec.pack(self._param(f, f.inputs[1].partition(":")[0]))
            bias = self._param(f, f.inputs[-1].partition(":")[0]) if n.attrs["bias"] else None
            return [x, weight, bias], self._tensor(f"{f.outputs[0]}@whole"), {}
        if n.op == "linear_silu_mul":
            x = self._tensor(f.inputs[0])
            weight = spec.pack(self._param(f, f.inputs[1].partition(":")[0]))
            return [x.flatten(1), weight], self._tensor(f.outputs[0]).flatten(1), {}
        args: list[Any] = [self._param(f, i) if i.startswith("@") else self._tensor(i) for i in f.inputs]
        if n.op == "lookup":
            args[1] = spec.pack(args[1])
        if isinstance(CALLS[n.op], Redistribute):
            return self._comm(f, args)
        attrs = CALLS[n.op].local_attrs(f.ins, f.outs, n.attrs, self.at)
        if n.op in ARGMAX:
            return args, (self._tensor(self.pairs[f.outputs[0]]), self._tensor(f.outputs[0])), attrs
        outs = [self._tensor(o) for o in f.outputs]
        return args, (None if not outs else outs[0] if len(outs) == 1 else tuple(outs)), attrs

    def _comm(self, f: _Flat, args: list[Any]) -> tuple[list[Any], Any, dict[str, Any]]:
        n, before = f.node, f.ins[0]
        out = self._tensor(f.outputs[0])
        if n.op == "keep_first":
            return args, out, CALLS[n.op].local_attrs(f.ins, f.outs, n.attrs, self.at)
        axes = tuple(n.attrs["axes"])
        attrs: dict[str, Any] = {"group": self.rt.group(axes)}
        if f.request[0] == "all_reduce_argmax":
            pair = (self._tensor(self.pairs[f.outputs[0]]), out)
            return [self._tensor(self.pairs[f.inputs[0]]), args[0]], pair, attrs
        if n.op in ("all_gather", "reduce_scatter"):
            dim = n.attrs["dim"]
            attrs["dim"] = before.names.index(dim)
            attrs["outer"] = self.outer(before, dim, axes) if n.op == "all_gather" else self.outer(f.outs[0], dim, axes)
        return args, out, attrs


def _copy(x: Tensor, *, out: Tensor) -> None:
    out.copy_(x)


@dataclass(frozen=True)
class _Step:
    """A call of emission's own in a replay."""

    fn: Callable[..., None]
    name: str
    native: bool = False


_COPY = _Step(_copy, "copy")


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    out: list[int] = []
    step = 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))
