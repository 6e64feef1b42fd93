"""One op form on one mesh: its operands laid out, its reference run on every rank, its results read as types.

Invariant: what is expected is the op on one rank in float64, home block by home block; what ranks hold of an operand comes
from its type alone, and pending values are split at random, so that no part is neutral.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.collectives import exchange
from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.graph import row_factors
from tokenspeed.ir.meaning import Meaning, Value
from tokenspeed.ir.mesh import Axes, Mesh, Plan, make_plan
from tokenspeed.ir.ops import OPS, Local
from tokenspeed.ir.ops.sampling import SAMPLING_DIMS
from tokenspeed.ir.rulecheck_forms import BLOCKED, PAGE, UNITS, Form
from tokenspeed.ir.simulate import linear
from tokenspeed.ir.types import ROW_DIMS, Dim, Type

Run = Callable[[Form, list[Tensor], Mapping[str, Any], torch.dtype], Any]  # one rank's call


class Bench:
    """One form on one mesh: extents, global operands, and what the op makes of them."""

    def __init__(self, form: Form, mesh: Mesh, home: Axes, seed: int, dtype: torch.dtype = torch.float64) -> None:
        self.form, self.op = form, OPS[form.op]
        self.plan = Plan(mesh, {"dp": home} | {a: (a,) for a in mesh.names}, {})
        self.blocks = mesh.size(home)
        self.sizes = (
            {d: u * mesh.ranks for d, u in UNITS.items()}
            | {"page": PAGE, "rope_dim": 2}
            | SAMPLING_DIMS
            | dict(form.single)
        )
        self.logical = dict(self.sizes)
        if form.padded:
            self.logical[form.padded] -= 1
        factors = {d: row_factors(self.plan, self.sizes[d] // self.blocks) for d in ROW_DIMS}
        self.m = Meaning(self.plan, self.sizes, factors)
        self.g = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.inputs = [x.to(dtype) if x.is_floating_point() else x for x in form.make(self.sizes, self.blocks, self.g)]
        self.given: dict[tuple[int, Type], list[Tensor]] = {}
        self.placed: dict[tuple[Any, ...], Type] = {}

    def base(self, i: int) -> Type:
        o = self.form.operands[i]
        return Type(o.dtype, tuple(Dim(d) for d in o.dims), index=Dim(o.index, self.plan.home) if o.index else None)

    def types(self, states: Sequence[Mapping[str, str]]) -> list[Type]:
        """Operand types, one mapping axis -> state an operand; later axes lie inside earlier ones."""
        return [self._placed(i, per_axis) for i, per_axis in enumerate(states)]

    def _placed(self, i: int, per_axis: Mapping[str, str]) -> Type:
        key = (i, *per_axis.items())
        if key not in self.placed:
            t = self.base(i)
            for a, s in per_axis.items():
                t = t.with_state(a, s.partition(":")[0], self.plan.mesh.ordered, s.partition(":")[2] or "sum")
            self.placed[key] = t
        return self.placed[key]

    @functools.cached_property
    def expected(self) -> list[Tensor]:
        """The op on one rank, home block by home block, in float64 (an index counts from the start of its block)."""
        one = make_plan(Mesh())
        sizes = {d: n // self.blocks if d in BLOCKED else n for d, n in self.sizes.items()}
        logical = {d: n // self.blocks if d in BLOCKED else n for d, n in self.logical.items()}
        ins = [
            Type(t.dtype, t.dims, index=Dim(t.index.name) if t.index else None)
            for t in map(self.base, range(len(self.inputs)))
        ]
        results: list[list[Tensor]] = []
        for b in range(self.blocks):
            local = [
                (x.unflatten(0, (self.blocks, -1))[b] if o.dims and o.dims[0] in BLOCKED else x).clone()
                for o, x in zip(self.form.operands, self.inputs)
            ]
            local = [x.double() if x.is_floating_point() else x for x in local]
            outs = self.op.infer(ins, self.form.attrs, one.mesh.ordered)
            attrs = self.op.local_attrs(ins, outs, self.form.attrs, Local(one, 0, sizes, logical))
            results.append(
                [*_listed(reference(self.form, local, attrs, torch.float64)), *(local[i] for i in self.form.stored)]
            )
        dims = [*self.form.outputs, *(self.form.operands[i].dims for i in self.form.stored)]
        return [
            torch.cat(parts) if d[0] in BLOCKED else parts[0]
            for d, parts in zip(dims, ([_index_of(r[k]) for r in results] for k in range(len(dims))))
        ]

    def split(self, x: Tensor, n: int, kind: str) -> list[Tensor]:
        """A pending value as random parts, none of which is neutral."""
        noise = torch.randn((n, *x.shape), generator=self.g, dtype=torch.float64).to(x.dtype)
        if kind == "sum":
            parts = (noise * 4).round() / 4  # multiples of 1/4: the sum is exact in every dtype used
            parts[-1] = x - parts[:-1].sum(0)
            return list(parts)
        sign = 1 if kind == "min" else -1
        parts = x + sign * noise.abs()
        winner = torch.randint(0, n, x.shape, generator=self.g)
        return [torch.where(winner == i, x, part) for i, part in enumerate(parts)]

    def local_results(self, ins: Sequence[Type], outs: Sequence[Type], run: Run) -> list[list[Value]]:
        """Results of every rank, output by output, then of the operands that the op writes."""
        for i, t in enumerate(ins):
            if (i, t) not in self.given:
                self.given[i, t] = self.m.distribute(self.inputs[i], t, self.split)
        given = [self.given[i, t] for i, t in enumerate(ins)]
        got: list[list[Value]] = []
        ranks = range(self.plan.mesh.ranks)
        at = [Local(self.plan, r, self.sizes, self.logical) for r in ranks]
        per_rank = [self.op.local_attrs(ins, outs, self.form.attrs, local) for local in at]
        if axes := self.op.exchange(ins):
            firsts = [attrs["offset"] for attrs in per_rank]
            call = lambda r, local: run(self.form, local, per_rank[r], self.dtype)  # noqa: E731
            return [exchange([[x[r] for x in given] for r in ranks], firsts, axes, self.m, call)]
        for r, attrs in enumerate(per_rank):
            local = [x[r].clone() if i in self.form.stored else x[r] for i, x in enumerate(given)]
            got.append([*_listed(run(self.form, local, attrs, self.dtype)), *(local[i] for i in self.form.stored)])
        return [list(x) for x in zip(*got)]

    def out_type(self, k: int, dtype: str = "f32") -> Type:
        dims = [*self.form.outputs, *(self.form.operands[i].dims for i in self.form.stored)][k]
        return Type(dtype, tuple(Dim(d) for d in dims))

    def holds(self, k: int, xs: list[Value], t: Type, tolerance: float) -> bool:
        """Whether the list `xs` of output k, read as `t`, means what one rank computes; holes are free."""
        try:
            got, want = self.m.assemble(xs, t), self.expected[k]
        except (VerifyError, RuntimeError, IndexError):
            return False
        if got.shape != want.shape:
            return False
        if t.dims and t.dims[0].name in ROW_DIMS:
            got, want = (x.unflatten(0, (self.blocks, -1))[:, :-1] for x in (got, want))
        if not want.is_floating_point():
            return torch.equal(got.long(), want.long())
        same = torch.isclose(got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        return bool(same.all())


def reference(form: Form, local: list[Tensor], attrs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """One rank's call of an op's reference."""
    if form.op != "linear":
        return OPS[form.op].reference(*local, **attrs)
    n_in = len(form.attrs["in_dims"])
    ws = local[1 : 1 + form.attrs["segments"]]
    shapes = [(local[0].shape[0], *w.shape[: w.dim() - n_in]) for w in ws]
    return linear(local, form.attrs, shapes, dtype)


def _listed(x: Any) -> list[Value]:
    """Results as a list; a pair of argmax, topk or lse is one value."""
    if x is None:
        return []
    if isinstance(x, tuple) and not _is_pair(x):
        return list(x)
    return [x]


def _is_pair(x: tuple[Any, ...]) -> bool:
    return len(x) == 2 and (x[1].dtype == torch.int32 or x[1].dim() == x[0].dim() - 1)


def _index_of(x: Value) -> Tensor:
    return x if not isinstance(x, tuple) else x[1] if x[1].dtype == torch.int32 else x[0]
