"""Elementwise kernels on CPU. Invariant: computed in float32 and rounded once to the operands' dtype, but for silu_mul and
gelu_mul, which round the activated gate first, as torch does. One C++ entry serves them all."""

from __future__ import annotations

from torch import Tensor

from tokenspeed import _cpu
from tokenspeed.kernels.arguments import CODE, constant, fail
from tokenspeed.kernels.elementwise import register_elementwise
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability

SILU, SILU_MUL, ADD, MUL, GELU, GELU_MUL, SCALE, SOFTCAP, SIGMOID, MUL_ROWS = range(10)  # csrc/types.h Pointwise
_pointwise = _cpu.pointwise


def add(x: Tensor, y: Tensor, *, out: Tensor) -> None:
    """x + y; f32|bf16, [T, ...] with contiguous rows; `out` may be x or y."""
    binary(ADD, x, y, out)


def mul(x: Tensor, y: Tensor, *, out: Tensor) -> None:
    """x * y; f32|bf16, [T, ...] with contiguous rows; `out` may be x or y."""
    binary(MUL, x, y, out)


def mul_rows(x: Tensor, y: Tensor, *, out: Tensor) -> None:
    """x [T, D] * y [T]; f32|bf16 of contiguous rows; `out` may be x."""
    dtype, (rows, width) = CODE.get(x.dtype, -1), x.shape
    if y.shape != (rows,) or out.shape != x.shape or dtype < 0 or not x.dtype == y.dtype == out.dtype:
        raise fail("mul_rows", x=x, y=y, out=out)
    if width != 1 and not x.stride(1) == out.stride(1) == 1:
        raise fail("mul_rows", x=x, y=y, out=out)
    _pointwise(
        MUL_ROWS,
        x.data_ptr(),
        x.stride(0),
        y.data_ptr(),
        y.stride(0),
        out.data_ptr(),
        out.stride(0),
        rows,
        width,
        1.0,
        dtype,
    )


def scale(x: Tensor, *, factor: float, out: Tensor) -> None:
    """x * factor rounded to x's dtype; f32|bf16, [T, ...] with contiguous rows; `out` may be x."""
    unary(SCALE, x, out, constant(factor, x.dtype))


def softcap(x: Tensor, *, cap: float, out: Tensor) -> None:
    """cap * tanh(x / cap); f32|bf16, [T, ...] with contiguous rows; `out` may be x."""
    unary(SOFTCAP, x, out, cap)


def unary(kind: int, x: Tensor, out: Tensor, factor: float = 1.0) -> None:
    if x.dim() != 2:
        x, out = _rows(x), _rows(out)
    shape, xs, os = x.shape, x.stride(), out.stride()
    dtype = CODE.get(x.dtype, -1)
    if out.shape != shape or out.dtype != x.dtype or dtype < 0 or (shape[1] != 1 and (xs[1] != 1 or os[1] != 1)):
        raise fail("pointwise", x=x, out=out)
    _pointwise(kind, x.data_ptr(), xs[0], 0, 0, out.data_ptr(), os[0], shape[0], shape[1], factor, dtype)


def binary(kind: int, x: Tensor, y: Tensor, out: Tensor) -> None:
    if x.dim() != 2:
        x, y, out = _rows(x), _rows(y), _rows(out)
    shape, xs, ys, os = x.shape, x.stride(), y.stride(), out.stride()
    dtype = CODE.get(x.dtype, -1)
    if y.shape != shape or out.shape != shape or dtype < 0 or not x.dtype == y.dtype == out.dtype:
        raise fail("pointwise", x=x, y=y, out=out)
    if shape[1] != 1 and not xs[1] == ys[1] == os[1] == 1:
        raise fail("pointwise", x=x, y=y, out=out)
    _pointwise(kind, x.data_ptr(), xs[0], y.data_ptr(), ys[0], out.data_ptr(), os[0], shape[0], shape[1], 1.0, dtype)


def _rows(x: Tensor) -> Tensor:
    """[T, ...] as [T, width] without a copy; RuntimeError of torch where a row is not contiguous."""
    return x.view(-1, 1) if x.dim() == 1 else x.view(x.shape[0], -1)


def register(registry: Registry, capability: Capability) -> None:
    register_elementwise(
        registry,
        capability,
        (("add", add), ("mul", mul), ("mul_rows", mul_rows), ("scale", scale), ("softcap", softcap)),
    )
