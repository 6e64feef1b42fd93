"""Emission: one `torch.fx` graph a program, of registry kernels that write into preallocated buffers.

Invariant: every value is a static tensor (a port, a view of a weight, or a slice of the arena at a planned offset), so a
replay allocates nothing and takes no argument; the order of the graph is program order. Nodes are `call_function` of a
kernel with an explicit `out`. This module needs the program text and the registry only, none of the compiler's passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn

from tokenspeed.compiler.binding import NO_KERNEL, Call, key_of
from tokenspeed.compiler.exchange import CALLS as EXCHANGE
from tokenspeed.compiler.fuse import CALLS
from tokenspeed.compiler.memory import verify_memory
from tokenspeed.compiler.storage import DTYPES, PICKS, View, lay_out, outer_blocks_of
from tokenspeed.ir.graph import Program
from tokenspeed.ir.meaning import Meaning
from tokenspeed.ir.ops import Fused, Local, Redistribute
from tokenspeed.ir.types import Type
from tokenspeed.kernels.capture import Replay, record

__all__ = ["DTYPES", "Emitted", "Runtime", "emit"]


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


Made = tuple[Any, Sequence[Any], Mapping[str, Any]]  # kernel, positional arguments, keyword arguments


@dataclass
class Emitted:
    """A program that can be replayed. `replay()` makes its calls, without Python between native kernels; `module()`, made when
    first asked for, interprets the same calls as a graph. `results` are the output tensors, in order."""

    name: str
    calls: list[Made]
    requests: list[str]  # the key of each call, "" of a copy
    replay: Replay
    results: list[Tensor]
    peak_bytes: int

    @cached_property
    def module(self) -> fx.GraphModule:
        return _graph_of(self.name, self.calls)


def emit(p: Program, rt: Runtime) -> Emitted:
    """Builds the graph of `p` for one rank. The arena is asked for once, with the program's peak."""
    return _Emitter(p, rt).build()


class _Emitter:
    def __init__(self, p: Program, rt: Runtime) -> None:
        self.p, self.rt = p, rt
        sizes = dict(p.sizes) | dict(rt.sizes)
        self.at = Local(p.plan, rt.rank, sizes, dict(rt.sizes) | dict(p.logical))
        self.layout = lay_out(p, rt.bound, rt.rank, rt.sizes)
        self.pairs = self.layout.pairs
        offsets, self.peak = self.layout.plan(sizes)
        verify_memory(self.layout.buffers(sizes), offsets, self.peak)
        arena = rt.arena(self.peak)
        self.tensors = {name: self._materialise(v, arena, offsets) for name, v in self.layout.values.items()}

    def _materialise(self, v: View, arena: Tensor, offsets: list[int]) -> Tensor:
        if v.port:
            base = self.rt.ports[v.port]
        else:
            base = arena[offsets[v.storage] :]
            base = base[: base.numel() // v.dtype.itemsize * v.dtype.itemsize].view(v.dtype)
        return base.as_strided(v.shape, v.strides(), base.storage_offset() + v.start)

    # ---- the graph ----

    def build(self) -> Emitted:
        calls: list[Made] = []
        requests: list[str] = []
        for f in self.layout.calls:
            if f.blocks is not None:
                pair = [(self.pairs[f.inputs[0]], self.pairs[f.outputs[0]])] if f.inputs[0] in self.pairs else []
                for a, b in [(f.inputs[0], f.outputs[0]), *pair]:
                    source, target = self._blocks(f.blocks, a, b)
                    calls.append((_COPY, [source], {"out": target}))
                    requests.append("")
            if CALLS[f.node.op].alias or f.node.op in NO_KERNEL:
                continue
            spec = self.rt.kernel(key_of(*f.request))
            args, out, attrs = self._call(f, spec)
            calls.append((spec, args, attrs if out is None else attrs | {"out": out}))
            requests.append(key_of(*f.request))
        name = f"{self.p.name}_{self.p.variant}_t{self.p.bucket['t']}"
        results = [self._tensor(r) for r in self.p.results]
        return Emitted(name, calls, requests, record(calls), results, self.peak)

    def _blocks(self, blocks: tuple[int, int, int], source: str, target: str) -> tuple[Tensor, Tensor]:
        """Source and target views [outer, rows, ...] of a slice whose rows lie apart in the operand."""
        outer, parts, index = blocks
        x, out = self._tensor(source), self._tensor(target)
        return x.unflatten(0, (outer, parts, -1))[:, index], out.unflatten(0, (outer, -1))

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def _operand(self, f: Call, k: int) -> Any:
        """The tensor of operand k: a value, a parameter (whole, also where the ref names a segment), or one of its tensors
        where it is a cache or a state."""
        ref, kind = f.inputs[k], f.kinds[k]
        if not kind:
            return self._tensor(ref)
        name = ref[1:] if kind in ("cache", "state") else ref[1:].partition(":")[0]
        return self.rt.params[name]

    def _call(self, f: Call, spec: Any) -> tuple[list[Any], Any, dict[str, Any]]:
        """Positional tensors, `out`, and attributes of one kernel call."""
        n = f.node
        if n.op in ("linear", "linear_silu_mul"):  # the weight's further segments are the same tensor
            x = self._tensor(f.inputs[0])
            args = [x.flatten(1) if x.dim() > 2 else x, spec.pack(self._operand(f, 1))]
            if n.op == "linear":
                args.append(self._operand(f, len(f.inputs) - 1) if n.attrs["bias"] else None)
            out = self._tensor(f"{f.outputs[0]}@whole" if n.op == "linear" else f.outputs[0])
            return args, out.flatten(1), {}
        args = [self._operand(f, k) for k in range(len(f.inputs))]
        if n.op == "linear_chain":
            args = [spec.pack(a) if k in (1, 4, 5, 7) else a for k, a in enumerate(args)]
            return args, (self._tensor(f.outputs[0]), self._tensor(f"{f.outputs[1]}@whole")), dict(n.attrs)
        if n.op == "experts":  # gate and up are the segments of one tensor, and so are their biases
            args[3:] = [spec.pack(args[3]), spec.pack(args[5]), *args[6:7], *args[8:]]
        if n.op == "head_linear":
            args[1] = spec.pack(args[1]).view(f.ins[1].local_shape(self.at.sizes, self.p.plan))
        if n.op == "lookup":
            args[1] = spec.pack(args[1])
        if isinstance(CALLS[n.op], Redistribute | Fused):
            return self._comm(f, args)
        attrs = CALLS[n.op].local_attrs(f.ins, f.outs, n.attrs, self.at)
        if n.op in EXCHANGE:
            attrs["group"] = self.rt.group(tuple(n.attrs["axes"]))
            if n.op == "dispatch":
                attrs |= self._holes(f.ins[0])
        if f.request[0] in PICKS:
            return args, (self._tensor(self.pairs[f.outputs[0]]), self._tensor(f.outputs[0])), attrs
        outs = [self._tensor(o) for o in f.outputs]
        outs += [self._tensor(self.pairs[o]) for o in f.outputs if o in self.pairs]
        return args, (None if not outs else outs[0] if len(outs) == 1 else tuple(outs)), attrs

    def _holes(self, t: Type) -> dict[str, Tensor]:
        """What tells the holes among rows of type `t`; nothing where no port of this home group does."""
        rows, p = t.dims[0], self.p
        told = [q for q in p.ports if (i := p.types[q].index) and i.name == "s" and p.types[q].names == (rows.name,)]
        if not told or not set(p.plan.home) <= set(rows.axes):
            return {}
        held = Meaning(p.plan, p.sizes, {rows.name: p.row_axes(rows.name)}).owned(rows, self.rt.rank)
        size = p.bucket[rows.name]
        return {"request": self.rt.ports[told[0]][:size], "mine": held % size}

    def _comm(self, f: Call, args: list[Any]) -> tuple[list[Any], Any, dict[str, Any]]:
        n, before = f.node, f.ins[0]
        out = self._tensor(f.outputs[0])
        if n.op == "keep_first":
            return args, out, CALLS[n.op].local_attrs(f.ins, f.outs, n.attrs, self.at)
        axes = tuple(n.attrs["axes"])
        attrs: dict[str, Any] = {"group": self.rt.group(axes)}
        if f.request[0] in PICKS:
            pair = (self._tensor(self.pairs[f.outputs[0]]), out)
            return [self._tensor(self.pairs[f.inputs[0]]), args[0]], pair, attrs
        if f.request[0] == "all_reduce_lse":
            pair = tuple(self._tensor(v) for v in (f.outputs[0], self.pairs.get(f.outputs[0])) if v)
            return [args[0], self._tensor(self.pairs[f.inputs[0]])], pair, attrs
        if isinstance(CALLS[n.op], Fused):
            attrs["eps"] = n.attrs["eps"]
            if "dim" in n.attrs:
                attrs["dim"] = before.names.index(n.attrs["dim"])
                attrs["outer"] = outer_blocks_of(self.p, f.outs[0], n.attrs["dim"], axes)
            return args, tuple(self._tensor(o) for o in f.outputs), attrs
        if n.op in ("all_gather", "reduce_scatter"):
            dim = n.attrs["dim"]
            attrs["dim"] = before.names.index(dim)
            attrs["outer"] = (
                outer_blocks_of(self.p, before, dim, axes)
                if n.op == "all_gather"
                else outer_blocks_of(self.p, f.outs[0], dim, axes)
            )
        return args, out, attrs


def _graph_of(name: str, calls: Sequence[Made]) -> fx.GraphModule:
    """The graph whose nodes are the calls, with their tensors as its constants."""
    root, graph = nn.Module(), fx.Graph()
    constants: dict[int, fx.Node] = {}

    def constant(x: Any) -> Any:
        if x is None or isinstance(x, int | float | bool | str):
            return x
        if isinstance(x, tuple):
            return tuple(map(constant, x))
        if id(x) not in constants:
            at = f"c{len(constants)}"
            object.__setattr__(root, at, x) if not isinstance(x, Tensor) else root.register_buffer(at, x, False)
            constants[id(x)] = graph.get_attr(at)
        return constants[id(x)]

    for spec, args, attrs in calls:
        node = graph.call_function(spec.fn, tuple(map(constant, args)), {k: constant(v) for k, v in attrs.items()})
        node.meta["kernel"] = spec.name
    graph.output(())
    return fx.GraphModule(root, graph, class_name=name)


def _copy(x: Tensor, *, out: Tensor) -> None:
    out.copy_(x)


@dataclass(frozen=True)
class _Step:
    """A call of emission's own in a replay."""

    fn: Callable[..., None]
    name: str
    native: bool = False
    solution: str = "torch"


_COPY = _Step(_copy, "copy")
