"""The type of a value: dtype, named dims with the axes that shard each, and pending reductions.

Invariant: an axis appears at most once in a type. Axes of a ROW dim (t, s) are a set, kept in canonical order by the
caller's mesh; axes of any other dim are ordered, outermost first. Local shapes are derived, never stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tokenspeed.ir.mesh import Axes, Plan
from tokenspeed.ir.spec import Factor, Spec, SpecDim

ROW_DIMS = ("t", "s", "drafted")  # tokens; request rows; drafted rows: those that a program drafts a token behind


class Dim(NamedTuple):
    name: str
    axes: Axes = ()


@dataclass(frozen=True, slots=True)
class Type:
    dtype: str  # f32, bf16, i32, u8, or a weight format (q4_1, ...)
    dims: tuple[Dim, ...]
    pending: Axes = ()
    kind: str = "sum"  # of `pending`: sum, max, min, lse, argmax, topk, or varying (of no meaning)
    index: Dim | None = None  # the values are row numbers of this dim
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)
    _names: tuple[str, ...] | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        """Kept: the passes look a type up many times more often than they make one."""
        known = self._hash
        if known is None:
            known = hash((self.dtype, self.dims, self.pending, self.kind, self.index))
            object.__setattr__(self, "_hash", known)
        return known

    def state(self, axis: str) -> str:
        """`"R"`, `"P"`, or the name of the dim that `axis` shards."""
        if axis in self.pending:
            return "P"
        for d in self.dims:
            if axis in d.axes:
                return d.name
        return "R"

    def axes(self) -> Axes:
        return tuple(a for d in self.dims for a in d.axes) + self.pending

    def dim(self, name: str) -> Dim:
        return next(d for d in self.dims if d.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the dims, in order; kept as the hash is."""
        known = self._names
        if known is None:
            known = tuple(d.name for d in self.dims)
            object.__setattr__(self, "_names", known)
        return known

    def with_state(self, axis: str, state: str, order: Callable[[Axes], Axes], kind: str = "sum") -> Type:
        """The same value with `axis` in another state; `order` puts a set of axes into mesh order."""
        dims = tuple(Dim(d.name, tuple(a for a in d.axes if a != axis)) for d in self.dims)
        pending = tuple(a for a in self.pending if a != axis)
        if state == "P":
            pending = order((*pending, axis))
        elif state != "R":
            dims = tuple(
                Dim(d.name, (order((*d.axes, axis)) if d.name in ROW_DIMS else (*d.axes, axis)))
                if d.name == state
                else d
                for d in dims
            )
        return replace(self, dims=dims, pending=pending, kind=kind if pending else "sum")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Global (physical) shape."""
        return tuple(sizes[d.name] for d in self.dims)

    def local_shape(self, sizes: Mapping[str, int], plan: Plan) -> tuple[int, ...]:
        return tuple(sizes[d.name] // plan.mesh.size(d.axes) for d in self.dims)

    def text(self, plan: Plan | None = None) -> str:
        """`bf16[t@dp, n@tp, d] +tp`; with `plan`, the parts of a split axis fold back into it."""
        if plan is None:
            return self._text(lambda axes: axes)
        if self not in plan.memo:
            plan.memo[self] = self._text(plan.fold)
        return plan.memo[self]

    def _text(self, fold: Callable[[Axes], Axes]) -> str:

        def dim(d: Dim) -> str:
            axes = fold(d.axes)
            return d.name + ("" if not axes else f"@{axes[0]}" if len(axes) == 1 else f"@({','.join(axes)})")

        out = f"{self.dtype}[{', '.join(map(dim, self.dims))}{f' -> {dim(self.index)}' if self.index else ''}]"
        if self.pending:
            out += (" +" if self.kind == "sum" else f" {self.kind}:") + ",".join(fold(self.pending))
        return out

    def __str__(self) -> str:
        return self.text()


def nbytes(type_: Type, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPE_BYTES[type_.dtype]


DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i64": 8, "u8": 1}


def bind_spec(
    spec: Spec,
    dtype: str,
    axes_of: Callable[[Factor], Axes],
    order: Callable[[Axes], Axes],
    stars: Mapping[str, Axes] | None = None,
    pending_of: Callable[[str], Axes] | None = None,
) -> Type:
    """A Spec with axes resolved: `axes_of` maps a factor to physical axes, `stars` gives each starred row dim its axes.

    `+x?` becomes pending on exactly those axes of x over which no starred row dim is sharded; `+?` adds nothing.
    """
    starred = {a for axes in (stars or {}).values() for a in axes}
    dims: list[Dim] = []
    for d in spec.dims:
        for f in d.factors:
            axes = (stars or {}).get(f.name, ()) if d.starred else axes_of(f)
            dims.append(Dim(f.name, order(axes) if f.name in ROW_DIMS else axes))
    pending: list[str] = []
    for p in spec.pending:
        for name in p.axes:
            axes = pending_of(name) if pending_of else axes_of(Factor("", (name,)))
            pending.extend(a for a in axes if not (p.maybe and a in starred) and a not in pending)
    index = None
    if spec.index:
        index = Dim(spec.index.name, order(axes_of(spec.index.factors[0])))
    kind = spec.pending[0].kind if spec.pending and pending else "sum"
    return Type(dtype, tuple(dims), order(tuple(pending)), kind, index)


__all__ = ["DTYPE_BYTES", "ROW_DIMS", "Dim", "SpecDim", "Type", "bind_spec", "nbytes"]
