"""Elementwise ops: activations, products, sums, constants. T token rows.

Invariant: operands meet by the names of their dims, so one rule (`pointwise_rule`) places them all; what differs is in which
operands an op is linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.mesh import Plan
from tokenspeed.ir.ops.base import Op, OutSpec, States, pointwise_rule, wide
from tokenspeed.ir.types import Type


class Silu(Op):
    """x -> x * sigmoid(x)."""

    name = "silu"
    integers = ()
    in_place_ok = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [pointwise_rule(self.name, axis, states, ins, ins[0].names)]

    def reference(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)


class Sigmoid(Silu):
    """x -> 1 / (1 + exp(-x))."""

    name = "sigmoid"

    def reference(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class Mul(Op):
    """x * y elementwise; linear in each operand alone."""

    name = "mul"
    integers = ()
    in_place_ok = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        if ins[0].names != ins[1].names:
            raise RuleError("P004", f"{self.name} of {list(ins[0].names)} and {list(ins[1].names)}: the dims differ")
        return [(ins[0].dtype, ins[0].names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [pointwise_rule(self.name, axis, states, ins, ins[0].names, linear=[(0,), (1,)])]

    def reference(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


class MulRows(Mul):
    """x [T, D] times y [T], a value a row; linear in each operand alone."""

    name = "mul_rows"

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        if ins[0].names[:-1] != ins[1].names:
            raise RuleError("P004", f"mul_rows of {list(ins[0].names)} takes one value a row, not {list(ins[1].names)}")
        return [(ins[0].dtype, ins[0].names)]

    def reference(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y[:, None]


class SiluMul(Mul):
    """silu(gate) * up; linear in `up` only."""

    name = "silu_mul"

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [pointwise_rule(self.name, axis, states, ins, ins[0].names, linear=[(1,)])]

    def reference(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up


class Gelu(Silu):
    """x -> x times the normal distribution function, in its tanh form (Hendrycks and Gimpel, 1606.08415)."""

    name = "gelu"

    def reference(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")


class GeluMul(SiluMul):
    """gelu(gate) * up; linear in `up` only."""

    name = "gelu_mul"

    def reference(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up


class Softcap(Silu):
    """x -> cap * tanh(x / cap), which stays within attr `cap` of zero and keeps the order of values."""

    name = "softcap"

    def reference(self, x: Tensor, *, cap: float) -> Tensor:
        return ((wide(x) / cap).tanh() * cap).to(x.dtype)


class Add(Mul):
    """x + y; linear in both together: both complete or both pending."""

    name = "add"

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [pointwise_rule(self.name, axis, states, ins, ins[0].names, linear=[(0, 1)], joint=True)]

    def reference(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Scale(Op):
    """x * factor, a constant of x's dtype."""

    name = "scale"
    integers = ()
    in_place_ok = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        if states[0].startswith("P:"):
            return [states[0]]
        return [pointwise_rule(self.name, axis, states, ins, ins[0].names, linear=[(0,)])]

    def takes(self, kind: str, attrs: Mapping[str, Any]) -> bool:
        return kind in ("max", "min") and attrs["factor"] > 0

    def reference(self, x: Tensor, *, factor: float) -> Tensor:
        return x * torch.tensor(factor, dtype=x.dtype)


class Cat(Op):
    """x_i [T, D_i] side by side: [T, sum of D_i]; attr `dim` names the sum. Linear in all operands together."""

    name = "cat"
    integers = ()

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        if any(len(x.dims) != 2 or x.names[0] != ins[0].names[0] for x in ins):
            raise RuleError("P004", f"cat takes rows [t, d] of one row dim, not {', '.join(map(str, ins))}")
        return [(ins[0].dtype, (ins[0].names[0], attrs["dim"]))]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        group, closed = [range(len(ins))], [x.names[1] for x in ins]
        return [pointwise_rule(self.name, axis, states, ins, ins[0].names[:1], linear=group, joint=True, closed=closed)]

    def check_extents(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int]
    ) -> None:
        if sizes[attrs["dim"]] != sum(sizes[x.names[1]] for x in ins):
            raise RuleError("P004", f"cat of {', '.join(map(str, ins))}: {attrs['dim']} is not the sum of their widths")

    def reference(self, *xs: Tensor, **_: Any) -> Tensor:
        return torch.cat(xs, 1)


POINTWISE: list[Op] = [
    Silu(), Sigmoid(), Gelu(), Softcap(), Mul(), MulRows(), SiluMul(), GeluMul(), Add(), Scale(), Cat(),
]  # fmt: skip
