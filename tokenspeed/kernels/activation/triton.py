"""silu and gelu on GPU, alone and times another operand."""

from __future__ import annotations

from torch import Tensor

from tokenspeed.kernels.pointwise.triton import GELU, GELU_MUL, SILU, SILU_MUL, run


def silu(x: Tensor, *, out: Tensor) -> None:
    """x * sigmoid(x); f32|bf16, [T, ...] with contiguous rows; `out` may be x."""
    run("silu", SILU, x, x, out)


def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor) -> None:
    """silu(gate) * up; f32|bf16 [T, F] with contiguous rows; `out` may be either."""
    run("silu_mul", SILU_MUL, gate, up, out)


def gelu(x: Tensor, *, out: Tensor) -> None:
    """gelu(x), by tanh; f32|bf16, [T, ...] with contiguous rows; `out` may be x."""
    run("gelu", GELU, x, x, out)


def gelu_mul(gate: Tensor, up: Tensor, *, out: Tensor) -> None:
    """gelu(gate) * up; f32|bf16 [T, F] with contiguous rows; `out` may be either."""
    run("gelu_mul", GELU_MUL, gate, up, out)
