"""Pass 2b: a plan meets the extents of a model. Splits mesh axes for sub-axes, pads heads, vocabularies and FFN widths.

Invariant after: every dim that a weight shards divides by the ranks of its axes; a factor `x@a:k` stands on whole
physical axes whose product is min(k, ranks of a). Padding is with zero weights, so values inside it are exact zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.compiler.passes.trace import Flat
from tokenspeed.ir.errors import PlanError
from tokenspeed.ir.mesh import DEFAULT_AXES, Axes, Plan
from tokenspeed.ir.ops.filters import words_of
from tokenspeed.ir.ops.sampling import SAMPLING_DIMS
from tokenspeed.ir.spec import Factor, SpecDim
from tokenspeed.ir.types import ROW_DIMS
from tokenspeed.models.nn.maps import Matrices, Weight
from tokenspeed.models.nn.params import MASK_WORDS, LatentCache, PagedAttention, SamplingState
from tokenspeed.models.nn.state import DeltaRule

#: dims whose extents the runtime fixes: token, request and drafted rows, KV and state slots, table width, packed words ...
RUNTIME_DIMS = frozenset(
    {*ROW_DIMS, "slots", "window_slots", "l", "r", "pos_table", "rope_dim", "states", *SAMPLING_DIMS}
)


@dataclass
class Layout:
    """Physical plan, and logical and physical extents of the static dims. `group` is n per kv head, before and after."""

    plan: Plan
    logical: dict[str, int]
    sizes: dict[str, int]
    groups: dict[str, tuple[str, int, int]] = field(default_factory=dict)  # n -> (kv, group, padded group)

    def axes(self, f: Factor) -> Axes:
        """Physical axes of a factor; a sub-axis takes the outermost ones up to its product."""
        axes = tuple(p for a in f.axes for p in self.plan.axes(a))
        if not f.sub:
            return axes
        limit = min(self.extent(f.sub), self.plan.mesh.size(axes))
        out: list[str] = []
        for a in axes:
            if self.plan.mesh.size(out) * self.plan.mesh.size(a) > limit:
                break
            out.append(a)
        if self.plan.mesh.size(out) != limit:
            raise PlanError(
                "P033", f"{f} ends inside an axis of {self.plan.describe()}: {limit} is no product of outer axes"
            )
        return tuple(out)

    def extent(self, sub: str) -> int:
        return int(sub) if sub.isdigit() else self.sizes[sub]

    def runs(self, dim: str) -> list[tuple[int, int, int]]:
        """How the logical entries of `dim` lie in the padded extent: (logical start, padded start, length)."""
        if dim in self.groups:
            kv, g, padded = self.groups[dim]
            if padded != g:
                return [(i * g, i * padded, g) for i in range(self.logical[kv])]
        return [(0, 0, self.logical[dim])]


def make_layout(flat: Flat, plan: Plan) -> Layout:
    """Lays `flat` out on `plan`. PlanError P032 (does not divide), P033 (ends inside a factor), P034 (unknown axis or dim)."""
    layout = Layout(plan, dict(flat.dims), dict(flat.dims))
    _check_names(flat, plan)
    for path, decl in flat.decls.items():
        if isinstance(decl, PagedAttention | DeltaRule):
            _heads(layout, path, decl)
    for decl in flat.decls.values():
        if isinstance(decl, Weight) and decl.pad:
            _pad_weight(layout, decl)
    for path, decl in flat.decls.items():
        for dim in _sharded_dims(decl):
            _divide(layout, path, decl, dim.factors[0])
    for decl in flat.decls.values():
        if isinstance(decl, SamplingState):
            vocabulary = layout.sizes[decl.vocabulary.dims[0].factors[0].name]
            layout.logical[MASK_WORDS] = layout.sizes[MASK_WORDS] = words_of(vocabulary)
    return layout


def _check_names(flat: Flat, plan: Plan) -> None:
    used: dict[str, str] = {}  # axis -> the first place that names it
    for leaf in flat.leaves:
        for s in (*leaf.in_specs, *leaf.out_specs):
            for a in s.logical_axes():
                used.setdefault(a, f"{leaf.origin}: {leaf.kind}.forward")
        for n in leaf.nodes:
            name = n.attrs.get("dim", "")
            if name and name not in flat.dims and name not in SAMPLING_DIMS:
                raise PlanError(
                    "P034",
                    f"{n.origin}: {n.op} makes a dim {name!r} that has no extent; the model's `dims` names {sorted(flat.dims)}",
                )
    for path, decl in flat.decls.items():
        if isinstance(decl, PagedAttention | LatentCache):
            used.setdefault("cp", path)
        for d in _dims(decl):
            for a in d.factors[0].axes:
                used.setdefault(a, path)
            name = d.factors[0].name
            if name not in flat.dims and name not in RUNTIME_DIMS:
                raise PlanError(
                    "P034", f"{path}: dim {name!r} has no extent; the model's `dims` names {sorted(flat.dims)}"
                )
    for a, where in sorted(used.items()):
        try:
            plan.axes(a)
        except PlanError as e:
            raise PlanError(e.code, f"{where}: {e.message}") from None
    known = {*DEFAULT_AXES, *plan.mesh.names, *plan.parts}
    unused = sorted(a for a in plan.logical if a not in known and a not in used)
    if unused:
        raise PlanError(
            "P034",
            f"--axes names {unused[0]!r}, which no module of this model uses; its axes are {sorted(used)}",
        )
    wanted = {p for a in used for p in plan.axes(a)}
    idle = [a for a in plan.mesh.names if a not in wanted]
    if idle:
        raise PlanError(
            "P034", f"mesh axis {idle[0]!r} is used by no module of this model; its axes are {sorted(used)}"
        )


def _dims(decl: Any) -> list[SpecDim]:
    if isinstance(decl, Matrices):
        return [*decl.inp, *(d for seg in decl.segments for d in seg.out)]
    if isinstance(decl, PagedAttention):
        return [decl.n, decl.kv, decl.d]
    if isinstance(decl, DeltaRule):
        return [decl.kv, *decl.spec.dims]
    return list(decl.spec.dims) if hasattr(decl, "spec") else []


def _sharded_dims(decl: Any) -> list[SpecDim]:
    return [d for d in _dims(decl) if d.factors[0].axes]


def _heads(layout: Layout, path: str, decl: PagedAttention | DeltaRule) -> None:
    """Splits the axes of the KV heads or pads heads, so that each rank holds whole KV heads and their query heads."""
    n_f, kv_f = decl.n.factors[0], decl.kv.factors[0]
    n, kv = n_f.name, kv_f.name
    heads, kvs = layout.logical[n], layout.logical[kv]
    if heads % kvs:
        raise PlanError("P032", f"{path}: {n}={heads} query heads are not a multiple of {kv}={kvs} KV heads")
    ranks = layout.plan.mesh.size(tuple(p for a in n_f.axes for p in layout.plan.axes(a)))
    group = heads // kvs
    padded_kv = kvs
    if kv_f.sub:
        while padded_kv % ranks and ranks % padded_kv:
            padded_kv += 1
        inner = max(ranks // padded_kv, 1)
        padded_group = math.ceil(group / inner) * inner
        _split(layout, kv_f, min(padded_kv, ranks))
    else:
        padded_group = group
        if kvs % ranks or heads % ranks:
            fits = [r for r in range(1, heads + 1) if heads % r == 0 and kvs % r == 0]
            raise PlanError(
                "P032",
                f"{path}: {n}={heads}, {kv}={kvs} do not divide over {ranks} ranks (write {kv}@AXIS:{kv}, or use {fits})",
            )
    layout.sizes[kv] = padded_kv
    layout.sizes[n] = padded_kv * padded_group
    layout.groups[n] = (kv, group, padded_group)


def _split(layout: Layout, kv: Factor, outer: int) -> None:
    """Splits physical axes of the KV heads' axis so that a product of outer ones is exactly `outer`."""
    for a in [p for name in kv.axes for p in layout.plan.axes(name)]:
        size = layout.plan.mesh.size(a)
        if outer >= size:
            if outer % size:
                raise _inside(layout, kv, a)
            outer //= size
        elif outer > 1:
            if size % outer:
                raise _inside(layout, kv, a)
            layout.plan = layout.plan.split(a, (outer, size // outer))
            return
        else:
            return


def _inside(layout: Layout, kv: Factor, axis: str) -> PlanError:
    heads, size = layout.logical[kv.name], layout.plan.mesh.size((axis,))
    return PlanError(
        "P033",
        f"{kv} over {layout.plan.describe()}: the {kv.name}={heads} heads end inside axis {axis!r} of {size}\n"
        f"  fix 1: order or split the mesh axes so that the outer ones multiply to a divisor of {heads}\n"
        f"  fix 2: spread heads over as many ranks as divide {heads}",
    )


def _pad_weight(layout: Layout, decl: Weight) -> None:
    assert decl.pad
    name, multiple = decl.pad
    f = next(d for d in decl.spec.dims if d.name == name).factors[0]
    unit = math.lcm(multiple, layout.plan.mesh.size(layout.axes(f)))
    layout.sizes[name] = max(layout.sizes[name], math.ceil(layout.logical[name] / unit) * unit)


def _divide(layout: Layout, path: str, decl: Any, f: Factor) -> None:
    ranks = layout.plan.mesh.size(layout.axes(f))
    extent = layout.sizes[f.name]
    if extent % ranks == 0:
        return
    expert = decl.segments[0].out[0].name if isinstance(decl, Matrices) and decl.stacked else ""
    if isinstance(decl, Matrices) and f.name not in (expert, *layout.groups):
        layout.sizes[f.name] = math.ceil(extent / ranks) * ranks  # zero rows and columns: exact
        return
    pad = "\n  fix 2: pad the weight (pad=), at the price of its zero rows" if isinstance(decl, Weight) else ""
    fits = [r for r in range(1, ranks + 1) if extent % r == 0]
    raise PlanError(
        "P032",
        f"{path}: {f.name}={extent} does not divide over {ranks} ranks of {','.join(f.axes)}\n"
        f"  fix 1: map {','.join(f.axes)} to one of {fits} ranks (--axes){pad}",
    )
