"""Pass 4: the finite choices of every node. A row gives the types a node wants, the types it makes, and its cost.

Invariant: a leaf has one row a candidate of its starred dims, a glue op one a legal combination of states (found by
asking the op's own rule, one axis at a time, and taking the product), a cross one a type its signature admits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.compiler.costs import CostModel
from tokenspeed.compiler.exchange import Load, load_of
from tokenspeed.compiler.passes.layout import Layout
from tokenspeed.compiler.passes.leaves import (
    Binding,
    expert_axes,
    leaf_params,
    param_types,
    physical_stars,
    type_body,
)
from tokenspeed.compiler.passes.trace import Flat, FlatNode, LeafDef
from tokenspeed.ir.errors import PlanError, RuleError
from tokenspeed.ir.graph import Param, param_type
from tokenspeed.ir.mesh import Axes
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.spec import Spec
from tokenspeed.ir.types import DTYPE_BYTES, ROW_DIMS, Dim, Type
from tokenspeed.models.nn.maps import STREAM


@dataclass(frozen=True)
class Row:
    ins: tuple[Type, ...]
    outs: tuple[Type, ...]
    cost: float  # us
    stars: tuple[tuple[str, Axes], ...] = ()
    held: float = 0.0  # bytes a rank holds inside a leaf at most, beyond its arguments and results


def port_types(flat: Flat, b: Binding) -> dict[str, Type]:
    return {name: b.spec(spec, b.dtype if dtype == STREAM else dtype) for name, (spec, dtype) in flat.ports.items()}


class Choices:
    """Rows of every node of one flat program on one layout; shared by all buckets but for row factors and row counts."""

    def __init__(self, flat: Flat, layout: Layout, binding: Binding, costs: CostModel, exchanges: bool = True) -> None:
        """`exchanges`: whether the target has kernels that exchange rows."""
        self.flat, self.layout, self.b, self.costs, self.exchanges = flat, layout, binding, costs, exchanges
        self.mesh = layout.plan.mesh
        self.ports = port_types(flat, binding)
        self.params = self._params()
        self.leaf_outs: dict[int, tuple[Type, ...]] = {}
        self.leaf_param: dict[int, dict[str, Param]] = {id(leaf): leaf_params(leaf, binding) for leaf in flat.leaves}
        self.base = self._shapes()
        self.leaf_cost: dict[tuple[int, Any], tuple[float, float, int, float, dict[str, Axes], list[Load]]] = {}
        self.row_memo: dict[Any, dict[int, list[Row]]] = {}  # by bucket and kind of node
        self.known: dict[Any, int] = {}  # number of a kind of node
        self.kinds = [self._kind(n) for n in flat.nodes]
        self.legal: dict[Any, list[tuple[tuple[Type, ...], tuple[Type, ...]]]] = {}  # by kind and row factors

    def _params(self) -> dict[str, Param]:
        out: dict[str, Param] = {}
        for n in self.flat.nodes:
            for ref in n.inputs if n.leaf is None else ():
                name = ref[1:].split(":")[0]
                if ref.startswith("@") and name not in out:
                    out.update(param_types(name, self.flat.decls[name], self.b))
        return out

    # ---- shapes: dtype and dims of every value, before placement ----

    def _shapes(self) -> dict[str, Type]:
        none = Binding(lambda f: (), lambda a: (), lambda a: (), (), self.b.dtype, self.b.cache_dtype, self.b.formats)
        base = port_types(self.flat, none)
        params = {k: v for n, d in self.flat.decls.items() for k, v in param_types(n, d, none).items()}
        known: dict[tuple[int, tuple[Type, ...]], list[Type]] = {}
        for n in self.flat.nodes:
            args = [param_type(params, i) if i.startswith("@") else base[i] for i in n.inputs]
            if n.leaf is not None:
                key = (id(n.leaf), tuple(args))
                if key not in known:
                    body = type_body(n.leaf, none, leaf_params(n.leaf, none), args, {})
                    known[key] = [body.types[o] for o in body.outputs]
                outs = known[key]
            else:
                try:
                    outs = OPS[n.op].infer(args, n.attrs, none.order)
                except RuleError as e:
                    raise PlanError(e.code, f"{n.origin}: {e.reason}") from None
            base.update(zip(n.outputs, outs))
        return base

    # ---- rows ----

    def rows(self, factors: Mapping[str, Axes], count: Mapping[str, int]) -> list[list[Row]]:
        """All rows of every node; `factors` are the row factors and `count` the global rows of t and s in this bucket."""
        bucket = (tuple(sorted(factors.items())), tuple(sorted(count.items())))
        memo = self.row_memo.setdefault(bucket, {})
        for n, kind in zip(self.flat.nodes, self.kinds):
            if kind in memo:
                continue
            if n.leaf is not None:
                rows = self._leaf_rows(n, n.leaf, factors, count)
            else:
                ins = [self.base[i] for i in n.inputs if not i.startswith("@")]
                weights = [param_type(self.params, i) for i in n.inputs if i.startswith("@")]
                rows = self._glue_rows(n, ins, weights, factors, count)
                if not rows:
                    given = ", ".join(t.text(self.layout.plan) for t in (*ins, *weights))
                    raise PlanError(
                        "P030", f"{n.origin}: {n.op} has no legal placement of {given}, however its values are placed"
                    )
                rows = [r for r in rows if n.spec is None or self._admits(n.spec, r.outs[0])]
            memo[kind] = rows
        return [memo[kind] for kind in self.kinds]

    def _kind(self, n: FlatNode) -> int:
        """Number of what decides a node's rows: alike for the same node of every layer."""
        if n.leaf is not None:
            key: Any = id(n.leaf)
        else:
            values = [i for i in n.inputs if not i.startswith("@")]
            ins = tuple(self.base[i] for i in values)
            indexed = tuple(self.ports[i].index if i in self.ports else None for i in values)
            weights = tuple(param_type(self.params, i) for i in n.inputs if i.startswith("@"))
            key = (n.op, ins, indexed, weights, tuple(sorted(n.attrs.items())), n.spec)
        return self.known.setdefault(key, len(self.known))

    def _leaf_rows(
        self, n: FlatNode, leaf: LeafDef, factors: Mapping[str, Axes], count: Mapping[str, int]
    ) -> list[Row]:
        out: list[Row] = []
        for stars in physical_stars(leaf, self.layout, factors):
            ins = tuple(self.b.spec(s, self.base[i].dtype, stars) for s, i in zip(leaf.in_specs, n.inputs))
            outs = tuple(self.b.spec(s, self.base[o].dtype, stars) for s, o in zip(leaf.out_specs, n.outputs))
            if (
                any(set(axes) & expert_axes(leaf, self.layout.plan.axes) for axes in stars.values())
                and not self.exchanges
            ):
                continue
            cost, held = self._leaf_price(leaf, ins, stars, count)
            out.append(Row(ins, outs, cost, tuple(sorted(stars.items())), held))
        if not out:
            raise PlanError(
                "P030", f"{leaf.kind}: no placement of {leaf.in_specs} is possible on {self.layout.plan.describe()}"
            )
        return out

    def _leaf_price(
        self, leaf: LeafDef, ins: tuple[Type, ...], stars: Mapping[str, Axes], count: Mapping[str, int]
    ) -> tuple[float, float]:
        """us, and the bytes held inside."""
        key = (id(leaf), tuple(sorted(stars.items())))
        if key not in self.leaf_cost:
            body = type_body(leaf, self.b, self.leaf_param[id(leaf)], list(ins), stars)
            moved, madds, held = 0.0, 0.0, 0.0
            outside = {*body.inputs, *body.outputs}
            loads: list[Load] = []
            row_axes: dict[str, Axes] = {}
            for node in body.nodes:
                args = [body.types[i] for i in node.inputs if not i.startswith("@")]
                outs = [body.types[o] for o in node.outputs]
                for t in (*args, *outs):
                    row_axes.update({d.name: d.axes for d in t.dims if d.name in ROW_DIMS})
                weights = [param_type(body.params, i) for i in node.inputs if i.startswith("@")]
                m, f = OPS[node.op].row_cost(*([self._local(t) for t in ts] for ts in (args, outs, weights)))
                sharing = self.mesh.size(OPS[node.op].spread([*args, *weights]))
                moved, madds = moved + m / sharing, madds + f / sharing
                if load := load_of(node, [*args, *weights], body.nodes, self.layout.plan, self.layout.sizes):
                    loads.append(load)
                inner = {v: body.types[v] for v in (*node.values, *node.outputs) if v not in outside}
                held = max(held, float(sum(math.prod(self._local(t)) * DTYPE_BYTES[t.dtype] for t in inner.values())))
            held += sum(load.held for load in loads)
            self.leaf_cost[key] = (moved, madds, len(body.nodes), held, row_axes, loads)
        moved, madds, ops, held, row_axes, loads = self.leaf_cost[key]
        rows = max((count[d] // self.mesh.size(a) for d, a in row_axes.items()), default=1)
        work = self.costs.compute(moved * DTYPE_BYTES[self.b.dtype] * rows, madds * rows, ops)
        return work + sum(load.price(self.costs, rows) for load in loads), held * rows

    def _local(self, t: Type) -> tuple[int, ...]:
        sizes = self.layout.sizes
        return tuple(1 if d.name in ROW_DIMS else sizes.get(d.name, 16) // self.mesh.size(d.axes) for d in t.dims)

    def _glue_rows(
        self, n: FlatNode, ins: list[Type], weights: list[Type], factors: Mapping[str, Axes], count: Mapping[str, int]
    ) -> list[Row]:
        out: list[Row] = []
        for full, outs in self._legal(n, ins, weights, factors):
            try:
                OPS[n.op].check_extents([*full, *weights], n.attrs, self.layout.plan, self.layout.sizes | dict(count))
            except RuleError:
                continue
            local = 0.0
            for t in (*full, *outs):
                elements = 1
                for d in t.dims:
                    elements *= count.get(d.name) or self.layout.sizes.get(d.name, 16)
                    elements //= self.mesh.size(d.axes)
                local += elements * DTYPE_BYTES[t.dtype]
            out.append(Row(full, outs, 0.0 if OPS[n.op].alias else self.costs.compute(local, 0.0, 1)))
        return out

    def _legal(
        self, n: FlatNode, ins: list[Type], weights: list[Type], factors: Mapping[str, Axes]
    ) -> list[tuple[tuple[Type, ...], tuple[Type, ...]]]:
        """Types of the operands and results of every legal combination of states; the same for all buckets of one factors."""
        key = (self._kind(n), tuple(sorted(factors.items())))
        if key in self.legal:
            return self.legal[key]
        ports = [self.ports.get(i) for i in n.inputs if not i.startswith("@")]
        per_axis: list[list[tuple[tuple[str, ...], tuple[str, ...]]]] = []
        for a in self.mesh.names:
            options = [self._states(t, a, factors) for t in ins]
            legal: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
            for states in itertools.product(*options):
                args = [self._one_axis(t, a, s, p) for t, s, p in zip(ins, states, ports)]
                try:
                    outs = OPS[n.op].infer([*args, *weights], n.attrs, self.mesh.ordered)
                except RuleError:
                    continue
                legal.append((states, tuple(o.state(a) for o in outs)))
            per_axis.append(legal)
        found: list[tuple[tuple[Type, ...], tuple[Type, ...]]] = []
        for combo in itertools.product(*per_axis):
            full = [self._with_index(t, p) for t, p in zip(ins, ports)]
            for a, (states, _) in zip(self.mesh.names, combo):
                full = [t.with_state(a, s, self.mesh.ordered) for t, s in zip(full, states)]
            outs = [self.base[o] for o in n.outputs]
            for a, (_, states) in zip(self.mesh.names, combo):
                outs = [t.with_state(a, s, self.mesh.ordered) for t, s in zip(outs, states)]
            found.append((tuple(full), tuple(outs)))
        self.legal[key] = found
        return found

    def _states(self, t: Type, axis: str, factors: Mapping[str, Axes]) -> list[str]:
        states = ["R", *(d for d in t.names if d in ROW_DIMS and axis in factors[d])]
        return states if t.dtype in ("i32", "i64", "u8") else [*states, "P"]

    def _one_axis(self, t: Type, axis: str, state: str, port: Type | None) -> Type:
        home = port.index if port is not None and port.index and axis in port.index.axes else None
        with_index = Type(t.dtype, t.dims, index=Dim(t.index.name, (axis,) if home else ()) if t.index else None)
        return with_index.with_state(axis, state, self.mesh.ordered)

    def _with_index(self, t: Type, port: Type | None) -> Type:
        return Type(t.dtype, t.dims, index=port.index) if port is not None and port.index else t

    def _admits(self, spec: Spec, t: Type) -> bool:
        """Whether a composite's signature admits this type: stars free, `+x?` may, `+?` any."""
        may = {p for pend in spec.pending if pend.maybe for a in pend.axes for p in self.layout.plan.axes(a)}
        must = {p for pend in spec.pending if not pend.maybe for a in pend.axes for p in self.layout.plan.axes(a)}
        for d, have in zip(spec.dims, t.dims):
            if not d.starred and tuple(self.b.order(self.layout.axes(d.factors[0]))) != have.axes:
                return False
        pending = set(t.pending)
        return must <= pending and (spec.any_pending or pending <= must | may)
