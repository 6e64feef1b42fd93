"""Where every value of a program lies: in a port, or in a storage of the arena at a planned offset.

Invariant: the layout is the same on every rank but for which block a slice views, and a pure function of the program and
of the chains that have a fused kernel; so the bytes of the arena are known when the program is compiled, and emission
finds the same ones. No tensor is made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tokenspeed.compiler.binding import Call, key_of
from tokenspeed.compiler.calls import flatten
from tokenspeed.compiler.fuse import CALLS
from tokenspeed.compiler.memory import Buffer, plan_memory
from tokenspeed.ir.graph import Program
from tokenspeed.ir.ops.sampling import SAMPLING_DIMS
from tokenspeed.ir.types import ROW_DIMS, Type

DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
}  # fmt: skip
#: requests whose result is a pair: the value beside the index
PICKS = ("argmax", "gumbel_argmax", "topk", "index_topk_part", "all_reduce_argmax", "all_reduce_topk")

#: extents of values that the program does not state and no deployment changes
FIXED = SAMPLING_DIMS

#: stand-ins, at compile time, for extents of ports alone
_OF_PORTS = {"l": 1, "slots": 1, "window_slots": 1, "states": 1, "r": 1}


@dataclass(slots=True)
class View:
    """Where a value lies: in a storage or a port, from element `start` on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int = -1
    stride: tuple[int, ...] | None = None  # elements; None: contiguous
    start: int = 0
    port: str = ""

    def strides(self) -> tuple[int, ...]:
        return self.stride or contiguous(self.shape)


@dataclass(slots=True)
class Storage:
    """A piece of the arena: what it holds side by side, and the first and last call that touch it."""

    types: tuple[Type, ...]
    itemsize: int
    birth: int
    death: int


@dataclass
class Layout:
    """`values` by name; a pending argmax value `v` has its values tensor under `pairs[v]`, one pending by lse its sums."""

    p: Program
    sizes: Mapping[str, int]
    calls: list[Call] = field(default_factory=list)
    values: dict[str, View] = field(default_factory=dict)
    pairs: dict[str, str] = field(default_factory=dict)
    storages: list[Storage] = field(default_factory=list)

    def buffers(self, sizes: Mapping[str, int]) -> list[Buffer]:
        """The storages in bytes, for these extents: buckets that choose alike share a layout. KeyError where a storage has
        an extent that only the runtime knows."""
        known: dict[tuple[Type, ...], int] = {}
        out: list[Buffer] = []
        for s in self.storages:
            if s.types not in known:
                known[s.types] = sum(math.prod(t.local_shape(sizes, self.p.plan)) for t in s.types)
            out.append(Buffer(max(known[s.types], 1) * s.itemsize, s.birth, s.death))
        return out

    def plan(self, sizes: Mapping[str, int]) -> tuple[list[int], int]:
        """Offset of each storage, and the arena's bytes."""
        return plan_memory(self.buffers(sizes))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    out: list[int] = []
    step = 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def lay_out(p: Program, bound: Callable[[str], bool], rank: int = 0, sizes: Mapping[str, int] = FIXED) -> Layout:
    """Views and storages of every value. `bound`: whether a kernel was bound to a request key; `sizes`: extents that the
    runtime fixes, global."""
    return place(p, flatten(p, lambda call: bound(key_of(*call.request))), rank, sizes)


def place(p: Program, calls: list[Call], rank: int = 0, sizes: Mapping[str, int] = FIXED) -> Layout:
    """The layout of a program whose calls are known."""
    layout = _Placer(p, rank, _OF_PORTS | dict(p.sizes) | dict(sizes))
    layout.place(calls)
    return layout.out


class _Placer:
    def __init__(self, p: Program, rank: int, sizes: Mapping[str, int]) -> None:
        self.p, self.rank = p, rank
        self.out = Layout(p, sizes)
        self.values, self.pairs, self.storages = self.out.values, self.out.pairs, self.out.storages
        self.sharers: dict[int, int] = {}  # names of one view, where they are several
        self.shapes: dict[Type, tuple[int, ...]] = {}

    def local(self, t: Type) -> tuple[int, ...]:
        if t not in self.shapes:
            self.shapes[t] = t.local_shape(self.out.sizes, self.p.plan)
        return self.shapes[t]

    def place(self, calls: list[Call]) -> None:
        self.out.calls = calls
        for name in self.p.ports:
            t = self.p.types[name]
            self.values[name] = View(self.local(t), DTYPES[t.dtype], port=name)
        last: dict[str, int] = {}
        for i, c in enumerate(calls):
            for v in c.inputs:
                last[v] = i
        for r in self.p.results:
            last[r] = len(calls)
        for i, c in enumerate(calls):
            self._place(i, c, last)
        for i, c in enumerate(calls):
            for v in (*c.inputs, *(self.pairs[v] for v in c.inputs if v in self.pairs)):
                if not v.startswith("@"):
                    self._touch(v, i)
        for r in self.p.results:
            self._touch(r, len(calls))

    def _touch(self, value: str, i: int) -> None:
        storage = self.values[value].storage
        if storage >= 0:
            s = self.storages[storage]
            s.death = max(s.death, i)

    def _new(self, i: int, types: tuple[Type, ...], shape: tuple[int, ...], dtype: torch.dtype) -> View:
        self.storages.append(Storage(types, dtype.itemsize, i, i))
        return View(shape, dtype, len(self.storages) - 1)

    def _place(self, i: int, c: Call, last: dict[str, int]) -> None:
        op = CALLS[c.node.op]
        shapes = [(self.local(t), DTYPES[t.dtype]) for t in c.outs]
        if op.alias:
            view = self.values[c.outputs[0]] = self.values[c.inputs[0]]
            self.sharers[id(view)] = self.sharers.get(id(view), 1) + 1
        elif c.node.op == "slice":
            self.values[c.outputs[0]] = self._sliced(i, c, c.inputs[0])
            if c.inputs[0] in self.pairs:
                self.pairs[c.outputs[0]] = name = c.outputs[0] + "@value"
                self.values[name] = self._sliced(i, c, self.pairs[c.inputs[0]])
        elif c.node.op == "linear":
            self._segments(i, c.outputs, c.outs)
        elif c.node.op == "linear_chain":
            self.values[c.outputs[0]] = self._new(i, (c.outs[0],), *shapes[0])
            self._segments(i, c.outputs[1:], c.outs[1:])
        elif c.request[0] in PICKS:
            value = self._new(i, tuple(c.outs), shapes[0][0], torch.float32)
            self.values[c.outputs[0]] = self._new(i, tuple(c.outs), *shapes[0])
            self.pairs[c.outputs[0]] = name = c.outputs[0] + "@value"
            self.values[name] = value
        elif c.outs and c.outs[0].kind == "lse" and c.outs[0].pending:
            sums = replace(c.outs[0], dtype="f32", dims=c.outs[0].dims[:-1])
            self.values[c.outputs[0]] = self._new(i, (c.outs[0],), *shapes[0])
            self.pairs[c.outputs[0]] = name = c.outputs[0] + "@lse"
            self.values[name] = self._new(i, (sums,), self.local(sums), torch.float32)
        elif op.in_place_ok and last[c.inputs[0]] == i and self._owns(c.inputs[0], shapes[0]):
            old = self.values[c.inputs[0]]
            self.values[c.outputs[0]] = View(old.shape, old.dtype, old.storage, old.stride, old.start)
        else:
            for name, t, (shape, dtype) in zip(c.outputs, c.outs, shapes):
                self.values[name] = self._new(i, (t,), shape, dtype)
        for o in c.outputs:
            self._touch(o, i)

    def _segments(self, i: int, names: Sequence[str], types: Sequence[Type]) -> None:
        """Results of one product: side by side in the rows of one storage, which `NAME@whole` of the first is a view of."""
        shapes = [self.local(t) for t in types]
        widths = [math.prod(s[1:]) for s in shapes]
        dtype = DTYPES[types[0].dtype]
        whole = self._new(i, tuple(types), (shapes[0][0], sum(widths)), dtype)
        start = 0
        for name, shape, width in zip(names, shapes, widths):
            self.values[name] = View(shape, dtype, whole.storage, (sum(widths), *contiguous(shape[1:])), start)
            start += width
        self.values[f"{names[0]}@whole"] = whole

    def _owns(self, value: str, want: tuple[tuple[int, ...], torch.dtype]) -> bool:
        """Whether a value lies in the arena alone (not in a port, not shared with an alias) and has the output's form."""
        v = self.values[value]
        return v.storage >= 0 and (v.shape, v.dtype) == want and self.sharers.get(id(v), 1) == 1

    def _sliced(self, i: int, c: Call, source: str) -> View:
        """A slice is a view of the operand: this rank's block of one dim."""
        old = self.values[source]
        before, after = c.ins[0], c.outs[0]
        dim = next(k for k, (a, b) in enumerate(zip(before.dims, after.dims)) if a.axes != b.axes)
        axes = tuple(c.node.attrs["axes"])
        index = self.p.plan.mesh.index(self.rank, axes)
        outer = outer_blocks_of(self.p, before, before.dims[dim].name, axes)
        shape = self.local(after)
        if outer > 1:  # blocks of a whole outer factor lie apart: they are copied together
            c.blocks = (outer, self.p.plan.mesh.size(axes), index)
            return self._new(i, (after,), shape, old.dtype)
        stride = old.strides()
        return View(shape, old.dtype, old.storage, stride, old.start + index * shape[dim] * stride[dim], old.port)


def outer_blocks_of(p: Program, t: Type, dim: str, axes: tuple[str, ...]) -> int:
    """Product of the factors of a row dim that lie outside `axes` and are whole on this rank (1 for other dims)."""
    if dim not in ROW_DIMS:
        return 1
    factors = p.row_axes(dim)
    first = min(factors.index(a) for a in axes)
    held = set(t.dim(dim).axes) | set(axes)
    return p.plan.mesh.size([a for a in factors[:first] if a not in held])
