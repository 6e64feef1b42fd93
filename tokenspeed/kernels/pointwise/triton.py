"""Elementwise kernels on GPU. Invariant: computed in float32 and rounded once to the operands' dtype, but for silu_mul and
gelu_mul, which round the activated gate first, as torch does. An element is read before it is written, so `out` may be an operand."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import CODE, constant, fail
from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.launch import launch, power_of_2

SILU, SILU_MUL, ADD, MUL, SCALE, GELU, GELU_MUL, SOFTCAP = range(8)


@triton.jit
def elementwise(
    x,
    x_stride,
    y,
    y_stride,
    out,
    out_stride,
    width,
    blocks,
    factor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """KIND: 0 silu(x), 1 silu(x) * y, 2 x + y, 3 x * y, 4 x * factor, 5 gelu(x), 6 gelu(x) * y, 7 factor * tanh(x / factor)."""
    await_inputs(PDL)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind = out.dtype.element_ty
    a = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == 4:
        a = a * factor
    if KIND == 7:  # tanh x = 1 - 2 / (1 + e^2x)
        a = factor - 2.0 * factor / (1.0 + tl.exp(a * (2.0 / factor)))
    if KIND <= 1:
        a = a / (1.0 + tl.exp(-a))
    if (KIND == 5) | (KIND == 6):  # (1 + tanh u) / 2 = sigmoid(2 u)
        a = a / (1.0 + tl.exp(-1.5957691216057308 * (a + 0.044715 * a * a * a)))
    if (KIND == 1) | (KIND == 6):
        a = a.to(kind).to(tl.float32)
    if ((KIND >= 1) & (KIND <= 3)) | (KIND == 6):
        b = tl.load(y + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        if KIND == 2:
            a = a + b
        else:
            a = a * b
    tl.store(out + row * out_stride + column, a.to(kind), mask=inside)


def run(op: str, kind: int, x: Tensor, y: Tensor, out: Tensor, factor: float = 1.0) -> None:
    """x, y, out of one shape [T, ...] and dtype f32|bf16, rows contiguous; y is x for a unary kind."""
    if x.dim() != 2:
        x, y, out = _rows(x), _rows(y), _rows(out)
    shape, xs, ys, os = x.shape, x.stride(), y.stride(), out.stride()
    if y.shape != shape or out.shape != shape or x.dtype not in CODE or not x.dtype == y.dtype == out.dtype:
        raise fail(op, x=x, y=y, out=out)
    rows, width = shape
    if width > 1 and not xs[1] == ys[1] == os[1] == 1:
        raise fail(op, x=x, y=y, out=out)
    if rows == 0 or width == 0:
        return
    block = min(1024, max(128, power_of_2(width)))
    blocks = -(-width // block)
    launch(
        elementwise, (rows * blocks,), x, xs[0], y, ys[0], out, os[0], width, blocks, factor, KIND=kind, BLOCK=block,
        num_warps=4,
    )  # fmt: skip


def add(x: Tensor, y: Tensor, *, out: Tensor) -> None:
    """x + y; f32|bf16, [T, ...] with contiguous rows; `out` may be x or y."""
    run("add", ADD, x, y, out)


def mul(x: Tensor, y: Tensor, *, out: Tensor) -> None:
    """x * y; f32|bf16, [T, ...] with contiguous rows; `out` may be x or y."""
    run("mul", MUL, x, y, out)


def scale(x: Tensor, *, factor: float, out: Tensor) -> None:
    """x * factor rounded to x's dtype; f32|bf16, [T, ...] with contiguous rows; `out` may be x."""
    run("scale", SCALE, x, x, out, constant(float(factor), x.dtype))


def softcap(x: Tensor, *, cap: float, out: Tensor) -> None:
    """cap * tanh(x / cap); f32|bf16, [T, ...] with contiguous rows; `out` may be x."""
    run("softcap", SOFTCAP, x, x, out, float(cap))


def _rows(x: Tensor) -> Tensor:
    """[T, ...] as [T, width] without a copy; RuntimeError of torch where a row is not contiguous."""
    return x.view(-1, 1) if x.dim() == 1 else x.view(x.shape[0], -1)
