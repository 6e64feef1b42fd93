"""Ops of a dense transformer: lookup, linear, norms, rope, reductions, row selection.

Each class states its shape rule and its placement rule for one axis, and holds the reference: plain torch, accumulated
in float32, the meaning every kernel is checked against. T token rows, S request rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.graph import row_factors
from tokenspeed.ir.mesh import Plan
from tokenspeed.ir.ops.base import Local, Op, OutSpec, States, pointwise_rule, refuse, wide
from tokenspeed.ir.ops.pointwise import POINTWISE
from tokenspeed.ir.types import ROW_DIMS, Dim, Type


class Lookup(Op):
    """ids i32[T], w [V, H] -> [T, H]. Rows outside this rank's block (and id -1, a hole) are zero."""

    name = "lookup"
    integers = (0,)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        ids, w = ins
        return [(attrs["dtype"], (*ids.names, *w.names[1:]))]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        ids, w = states
        v, h = ins[1].names
        row = ins[0].names[0]
        table = {("R", "R"): "R", (row, "R"): row, ("R", v): "P", ("R", h): h, ("R", "P"): "P"}
        if (ids, w) not in table:
            raise refuse("lookup", axis, states, ins, "the ids and the table cannot be sharded on the same axis")
        return [table[ids, w]]

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"offset": at.offset(ins[1].dims[0])}

    def reference(self, ids: Tensor, w: Tensor, *, offset: int = 0) -> Tensor:
        i = ids.long() - offset
        ok = (ids >= 0) & (i >= 0) & (i < w.shape[0])
        return torch.where(ok[:, None], w[i.clamp(0, w.shape[0] - 1)], torch.zeros((), dtype=w.dtype))

    def row_cost(
        self, ins: Sequence[Sequence[int]], outs: Sequence[Sequence[int]], weights: Sequence[Sequence[int]] = ()
    ) -> tuple[float, float]:
        return 2.0 * sum(outs[0][1:]), 0.0


class Linear(Op):
    """x [rows, *IN] times segments w_i [*OUT_i, *IN] (+ bias_i [*OUT_i]) -> one output [rows, *OUT_i] a segment.

    attrs: `in_dims` names, `segments` count, `bias` flag, `dtype` of the outputs. The segments are stored as one matrix.
    """

    name = "linear"
    integers = ()

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        x, k = ins[0], attrs["segments"]
        n_in = len(attrs["in_dims"])
        if x.names[len(x.names) - n_in :] != tuple(attrs["in_dims"]):
            raise RuleError(
                "P004", f"linear expects the trailing dims {list(attrs['in_dims'])}, the operand has {list(x.names)}"
            )
        rows = x.names[: len(x.names) - n_in]
        return [(attrs["dtype"], (*rows, *w.names[: len(w.names) - n_in])) for w in ins[1 : 1 + k]]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        k, n_in = attrs["segments"], len(attrs["in_dims"])
        x, ws = states[0], states[1 : 1 + k]
        bias = states[1 + k :]
        in_dims = attrs["in_dims"]

        def fail(why: str, code: str = "P010", **more: Any) -> RuleError:
            return refuse("linear", axis, states, ins, why, code, **more)

        out: list[str] = []
        for i, w in enumerate(ws):
            w_in, w_out = ins[1 + i].names[-n_in:], ins[1 + i].names[:-n_in]
            if x == "P":
                if w != "R":
                    raise fail(f"the operand is pending over {axis} and the weight is sharded on it", "P016")
                got = "P"
            elif x in in_dims:
                if w != x:
                    raise fail(
                        f"{x} is contracted: it is sharded on the operand and not on the weight, so blocks do not match"
                    )
                got = "P"
            elif w in w_in:
                raise fail(f"{w} is contracted: it is sharded on the weight and not on the operand (an implicit slice)")
            elif w == "P":
                if x != "R":
                    raise fail(f"the weight is pending over {axis} and the operand is sharded on it", "P016")
                got = "P"
            elif x != "R":
                if w != "R":
                    raise fail(f"{axis} shards the rows of the operand and {w} of the weight")
                got = x
            else:
                got = w if w in w_out else "R"
            if bias:
                want = got if got not in ROW_DIMS else "R"
                if bias[i] != want:
                    if want == "P":
                        raise fail(
                            f"a complete bias inside a sum pending over {axis} is counted once a rank", "P012",
                            fixes=(f"declare the bias pending over {axis}, e.g. bias=\"h +{axis}\" (0 bytes: the first rank keeps it)",)
                        )  # fmt: skip
                    raise fail(f"the bias must be placed like the output segment ({want}), it is {bias[i]}")
            out.append(got)
        return out

    def infer(self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Any, home: Any = ()) -> list[Type]:
        outs = super().infer(ins, attrs, order, home)
        x = ins[0]
        for w in ins[1 : 1 + attrs["segments"]]:
            for d in attrs["in_dims"]:
                if x.dim(d).axes != w.dim(d).axes:
                    raise RuleError(
                        "V4",
                        f"linear contracts {d}, sharded in the order {list(x.dim(d).axes)} on the operand and "
                        f"{list(w.dim(d).axes)} on the weight: their blocks do not match",
                    )
        return outs

    def reference(
        self, x: Tensor, w: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        y = wide(x.flatten(1)) @ wide(w).t()
        if bias is not None:
            y = y + wide(bias)
        return y.to(dtype or x.dtype)

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {}

    def row_cost(
        self, ins: Sequence[Sequence[int]], outs: Sequence[Sequence[int]], weights: Sequence[Sequence[int]] = ()
    ) -> tuple[float, float]:
        prod = lambda s: int(torch.Size(s).numel())  # noqa: E731
        k, n = prod(ins[0]), sum(prod(o) for o in outs)
        return float(k + n), float(k * n)


class RmsNorm(Op):
    """x [rows, *, D], w [D] -> same: x * rsqrt(mean(x^2) + eps), times w.

    The first factor is rounded to x's dtype where w is no wider; a float32 w of a bfloat16 x (Gemma's) is multiplied in
    float32.
    """

    name = "rms_norm"
    integers = ()
    in_place_ok = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        x, w = ins
        if x.names[-1:] != w.names:
            raise RuleError("P004", f"rms_norm weighs {list(w.names)}, the operand ends in {list(x.names[-1:])}")
        return [(x.dtype, x.names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [pointwise_rule("rms_norm", axis, states, ins, ins[0].names, closed=ins[1].names)]

    def reference(self, x: Tensor, w: Tensor, *, eps: float) -> Tensor:
        f = wide(x)
        normed = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
        return (w * normed.to(torch.promote_types(x.dtype, w.dtype))).to(x.dtype)


class LayerNorm(Op):
    """x [rows, *, D], w [D], b [D] -> same: (x - mean) * rsqrt(variance + eps) * w + b, rounded once."""

    name = "layer_norm"
    integers = ()
    in_place_ok = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        x, w, b = ins
        if not x.names[-1:] == w.names == b.names:
            raise RuleError("P004", f"layer_norm weighs {list(w.names)} and adds {list(b.names)}, the operand is {x}")
        return [(x.dtype, x.names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [pointwise_rule("layer_norm", axis, states, ins, ins[0].names, closed=ins[1].names)]

    def reference(self, x: Tensor, w: Tensor, b: Tensor, *, eps: float) -> Tensor:
        f = wide(x)
        f = f - f.mean(-1, keepdim=True)
        return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * wide(w) + wide(b)).to(x.dtype)


class AddRmsNorm(Op):
    """x, y [rows, D], w [D] -> (x + y, rms_norm(x + y, w)): the fused form of a residual add and the norm behind it."""

    name = "add_rms_norm"
    integers = ()

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names), (ins[0].dtype, ins[0].names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        got = pointwise_rule("add_rms_norm", axis, states, ins, ins[0].names, closed=ins[2].names)
        return [got, got]

    def reference(self, x: Tensor, y: Tensor, w: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        z = x + y
        return z, OPS_RMS.reference(z, w, eps=eps)


class SquareSum(Op):
    """x_i [T, N_i, D], one or several -> f32[T, M]: of each, the sum of the squares of a row; attr `dim` names M.

    Pending where heads or their width are sharded; of an operand that is whole where another is sharded, the first rank counts.
    """

    name = "square_sum"
    integers = ()

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        if len({x.names[0] for x in ins}) > 1:
            raise RuleError("P004", f"square_sum of {', '.join(map(str, ins))}: the rows are not the same")
        return [("f32", (ins[0].names[0], attrs["dim"]))]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        row = ins[0].names[0]
        if any(s.startswith("P") for s in states):
            raise refuse("square_sum", axis, states, ins, "the square of a sum is not the sum of squares", "P011")  # fmt: skip
        if row in states and set(states) != {row}:
            raise refuse("square_sum", axis, states, ins, f"{row} is sharded on one operand and whole on another")
        return [states[0] if set(states) <= {"R"} or row in states else "P"]

    def check_extents(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int]
    ) -> None:
        if sizes[attrs["dim"]] != len(ins):
            raise RuleError("P004", f"square_sum of {len(ins)} operands into {attrs['dim']}={sizes[attrs['dim']]}")

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        own = [{a for d in x.dims[1:] for a in d.axes} for x in ins]
        every = at.plan.mesh.ordered(tuple(set().union(*own)))
        first = [at.plan.mesh.index(at.rank, tuple(a for a in every if a not in mine)) == 0 for mine in own]
        return {"counted": tuple(first)}

    def reference(self, *xs: Tensor, counted: tuple[bool, ...]) -> Tensor:
        sums = [wide(x).flatten(1).pow(2).sum(-1) for x in xs]
        return torch.stack([s if count else torch.zeros_like(s) for s, count in zip(sums, counted)], -1)


class RmsScale(Op):
    """x [T, N, D], squares f32[T, M], w [N, D] -> x * rsqrt(squares[:, index] / (N D) + eps) * w: the RMS norm of whole rows, from
    the sums of their squares. N D counts all heads, and no padding; rounded as rms_norm is."""

    name = "rms_scale"
    integers = ()
    in_place_ok = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        x, squares, w = ins
        if squares.names[:1] != x.names[:1] or len(squares.names) != 2 or w.names != x.names[1:]:
            raise RuleError(
                "P004", f"rms_scale of {x} by {squares} and {w}: the dims do not meet as [t n d], [t m], [n d]"
            )
        return [(x.dtype, x.names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [pointwise_rule("rms_scale", axis, states, ins, ins[0].names, closed=ins[1].names[1:])]

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return dict(attrs) | {"count": math.prod(at.logical[d] for d in ins[2].names)}

    def reference(self, x: Tensor, squares: Tensor, w: Tensor, *, eps: float, index: int, count: int) -> Tensor:
        normed = wide(x) * torch.rsqrt(squares[:, index] / count + eps)[:, None, None]
        return (w.view(x.shape[1:]) * normed.to(torch.promote_types(x.dtype, w.dtype))).to(x.dtype)


class Rope(Op):
    """x [T, (heads,) D], pos i32[T], table f32[P, R] (cos R/2 | sin R/2) -> x rotated in halves on its first R dims."""

    name = "rope"
    integers = (1,)
    in_place_ok = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [
            pointwise_rule(
                self.name, axis, states, ins, ins[0].names, linear=[(0,)], closed=(ins[0].names[-1], *ins[2].names)
            )
        ]

    def reference(self, x: Tensor, pos: Tensor, table: Tensor) -> Tensor:
        half = table.shape[1] // 2
        rows = table[pos.clamp(min=0).long()].view(x.shape[0], *[1] * (x.dim() - 2), table.shape[1])
        cos, sin = rows[..., :half], rows[..., half:]
        a, b, rest = wide(x[..., :half]), wide(x[..., half : 2 * half]), x[..., 2 * half :]
        out = torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], dim=-1)
        return torch.where((pos >= 0).view(x.shape[0], *[1] * (x.dim() - 1)), out, x)


class RopePairs(Rope):
    """As rope, but dims 2i and 2i + 1 are a pair."""

    name = "rope_pairs"

    def reference(self, x: Tensor, pos: Tensor, table: Tensor) -> Tensor:
        turned = table.shape[1]
        split = torch.cat([x[..., 0:turned:2], x[..., 1:turned:2], x[..., turned:]], -1)
        a, b = super().reference(split, pos, table)[..., :turned].chunk(2, -1)
        return torch.cat([torch.stack([a, b], -1).flatten(-2), x[..., turned:]], -1)


class Reduce(Op):
    """x [.., D] -> [..]: the sum, maximum or minimum over the last dim (attr `kind`); pending by it where D is sharded."""

    name = "reduce"
    integers = ()

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        if attrs["kind"] not in ("sum", "max", "min") or len(ins[0].dims) < 2:
            raise RuleError("P004", f"reduce takes kind sum, max or min over the last of two dims or more, not {attrs}")
        return [(ins[0].dtype, ins[0].names[:-1])]

    def takes(self, kind: str, attrs: Mapping[str, Any]) -> bool:
        return kind == attrs["kind"]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        kind = attrs["kind"]
        pending = "P" if kind == "sum" else f"P:{kind}"
        table = {"R": "R", ins[0].names[-1]: pending, pending: pending} | {d: d for d in ins[0].names[:-1]}
        if states[0] not in table:
            raise refuse("reduce", axis, states, ins, f"the {kind} of parts of a sum is not the {kind} of the sum", "P011")  # fmt: skip
        return [table[states[0]]]

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"kind": attrs["kind"]}

    def reference(self, x: Tensor, *, kind: str) -> Tensor:
        y = wide(x)
        return (y.sum(-1) if kind == "sum" else y.amax(-1) if kind == "max" else y.amin(-1)).to(x.dtype)


class SelectRows(Op):
    """x [T, H], idx i32[S -> T] -> [S, H]: row idx of this home block; an index outside this rank's rows gives zeros."""

    name = "select_rows"

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        x, idx = ins
        if idx.index is None or idx.index.name != x.names[0]:
            raise RuleError("P004", f"select_rows needs an index into {x.names[0]}, the operand is {idx}")
        return [(x.dtype, (*idx.names, *x.names[1:]))]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        x, idx = states
        t, s = ins[0].names[0], ins[1].names[0]
        home = axis in (ins[1].index.axes if ins[1].index else ())
        if home:
            if (x, idx) != (t, s):
                raise refuse(
                    "select_rows",
                    axis,
                    states,
                    ins,
                    f"an index into one {axis} block means another row of a gathered value",
                    "P030",
                )
            return [s]
        table = {("R", "R"): "R", ("R", s): s, (t, "R"): "P", ("P", "R"): "P"} | {(d, "R"): d for d in ins[0].names[1:]}
        if (x, idx) not in table:
            raise refuse("select_rows", axis, states, ins, "rows and indices are sharded on the same axis")
        return [table[x, idx]]

    def check_extents(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int]
    ) -> None:
        """A rank masks one block of its home block's rows: its axes must be the outermost of the inner row factors."""
        t, home = ins[0].dims[0], ins[1].index.axes if ins[1].index else ()
        inner = [a for a in t.axes if a not in home]
        factors = [a for a in row_factors(plan, sizes[t.name] // plan.mesh.size(home)) if a not in home]
        if inner != factors[: len(inner)]:
            raise RuleError(
                "V5", f"select_rows of {ins[0]}: a rank's rows lie apart; {t.name} is factored over {factors}"
            )

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        t, home = ins[0].dims[0], ins[1].index.axes if ins[1].index else ()
        inner = tuple(a for a in t.axes if a not in home)
        rows = at.sizes[t.name] // at.plan.mesh.size(t.axes)
        return {"offset": at.plan.mesh.index(at.rank, inner) * rows}

    def reference(self, x: Tensor, idx: Tensor, *, offset: int = 0) -> Tensor:
        i = idx.long() - offset
        ok = (idx >= 0) & (i >= 0) & (i < x.shape[0])
        return torch.where(ok[:, None], x[i.clamp(0, max(x.shape[0] - 1, 0))], torch.zeros((), dtype=x.dtype))


class Cross(Op):
    """The value crosses a signature that constrains it; no kernel and no buffer."""

    name = "cross"
    alias = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [states[0]]

    def takes(self, kind: str, attrs: Mapping[str, Any]) -> bool:
        return True

    def out_index(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> Dim | None:
        return ins[0].index

    def reference(self, x: Tensor) -> Tensor:
        return x


OPS_RMS = RmsNorm()
DENSE: list[Op] = [
    *POINTWISE,
    Lookup(),
    Linear(),
    OPS_RMS,
    LayerNorm(),
    AddRmsNorm(),
    SquareSum(),
    RmsScale(),
    Rope(),
    RopePairs(),
    Reduce(),
    SelectRows(),
    Cross(),
]
