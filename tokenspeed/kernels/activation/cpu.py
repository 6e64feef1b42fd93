"""silu and gelu on CPU, alone and times another operand."""

from __future__ import annotations

from torch import Tensor

from tokenspeed.kernels.elementwise import register_elementwise
from tokenspeed.kernels.pointwise.cpu import GELU, GELU_MUL, SIGMOID, SILU, SILU_MUL, binary, unary
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability


def silu(x: Tensor, *, out: Tensor) -> None:
    """x * sigmoid(x); f32|bf16, [T, ...] with contiguous rows; `out` may be x."""
    unary(SILU, x, out)


def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor) -> None:
    """silu(gate) * up; f32|bf16 [T, F] with contiguous rows; `out` may be either."""
    binary(SILU_MUL, gate, up, out)


def sigmoid(x: Tensor, *, out: Tensor) -> None:
    """1 / (1 + exp(-x)); f32|bf16, [T, ...] with contiguous rows; `out` may be x."""
    unary(SIGMOID, x, out)


def gelu(x: Tensor, *, out: Tensor) -> None:
    """gelu(x), by tanh; f32|bf16, [T, ...] with contiguous rows; `out` may be x."""
    unary(GELU, x, out)


def gelu_mul(gate: Tensor, up: Tensor, *, out: Tensor) -> None:
    """gelu(gate) * up; f32|bf16 [T, F] with contiguous rows; `out` may be either."""
    binary(GELU_MUL, gate, up, out)


def register(registry: Registry, capability: Capability) -> None:
    kernels = (("silu", silu), ("silu_mul", silu_mul), ("gelu", gelu), ("gelu_mul", gelu_mul), ("sigmoid", sigmoid))
    register_elementwise(registry, capability, kernels)
