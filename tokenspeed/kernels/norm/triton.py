"""RMS norm on GPU, with and without a residual add: float32 statistics, rounded to the activations' dtype before a
weight of that dtype is applied, as Hugging Face does; once where the weight is float32. Invariant: a row is held in
registers by one program and read once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.launch import launch, power_of_2

MAX_WIDTH = 32768  # values a row that one program holds


@triton.jit
def rms_rows(
    x, x_outer, x_inner, y, y_stride, w, total, total_stride, out, out_outer, out_inner, rows, inner, width, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row r is (r // inner, r % inner) of x and out. ADD: x + y is written to total and normalised (inner is 1)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    kind = out.dtype.element_ty
    inside = (row < rows)[:, None] & (column < width)[None, :]
    weight = tl.load(w + column, mask=column < width, other=0.0).to(tl.float32)
    await_inputs(PDL)
    outer = (row // inner).to(tl.int64)
    within = (row % inner).to(tl.int64)
    value = tl.load(x + (outer * x_outer + within * x_inner)[:, None] + column[None, :], mask=inside, other=0.0)
    value = value.to(tl.float32)
    if ADD:
        value += tl.load(y + (outer * y_stride)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        summed = value.to(kind)
        tl.store(total + (outer * total_stride)[:, None] + column[None, :], summed, mask=inside)
        value = summed.to(tl.float32)
    mean = tl.math.div_rn(tl.sum(value * value, axis=1), tl.cast(width, tl.float32))
    inverse = tl.math.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    normed = value * inverse[:, None]
    if w.dtype.element_ty != tl.float32:
        normed = normed.to(kind).to(tl.float32)
    result = (normed * weight[None, :]).to(kind)
    tl.store(out + (outer * out_outer + within * out_inner)[:, None] + column[None, :], result, mask=inside)


def rms_norm(x: Tensor, w: Tensor, *, eps: float, out: Tensor) -> None:
    """x, out f32|bf16 [T, D] or [T, n, D] of any leading strides; w f32|bf16 [D]; D at most 32,768. out may be x."""
    shape, xs, os = x.shape, x.stride(), out.stride()
    if out.shape != shape or out.dtype != x.dtype or w.shape != shape[-1:]:
        raise fail("rms_norm", x=x, w=w, out=out)
    if x.dtype not in CODE or w.dtype not in CODE or not xs[-1] == os[-1] == w.stride(0) == 1:
        raise fail("rms_norm", x=x, w=w, out=out)
    if len(shape) == 2:
        inner, xi, oi = 1, 0, 0
    elif len(shape) == 3:
        inner, xi, oi = shape[1], xs[1], os[1]
    else:
        raise fail("rms_norm", x=x, w=w, out=out)
    _run("rms_norm", x, (xs[0], xi), x, 0, w, x, 0, out, (os[0], oi), inner, eps, False)


def add_rms_norm(x: Tensor, y: Tensor, w: Tensor, *, eps: float, out: tuple[Tensor, Tensor]) -> None:
    """x, y f32|bf16 [T, D]; out = (x + y, rms_norm(x + y)), of x's dtype. The sum may share x's or y's memory."""
    total, normed = out
    shape = x.shape
    if len(shape) != 2 or not y.shape == total.shape == normed.shape == shape or w.shape != shape[-1:]:
        raise fail("add_rms_norm", x=x, y=y, w=w, sum=total, out=normed)
    if x.dtype not in CODE or w.dtype not in CODE or not x.dtype == y.dtype == total.dtype == normed.dtype:
        raise fail("add_rms_norm", x=x, y=y, w=w, sum=total, out=normed)
    xs, ys, ss, os = x.stride(), y.stride(), total.stride(), normed.stride()
    if not xs[1] == ys[1] == ss[1] == os[1] == w.stride(0) == 1:
        raise fail("add_rms_norm", x=x, y=y, w=w, sum=total, out=normed)
    _run("add_rms_norm", x, (xs[0], 0), y, ys[0], w, total, ss[0], normed, (os[0], 0), 1, eps, True)


def _run(
    op: str, x: Tensor, x_strides: tuple[int, int], y: Tensor, y_stride: int, w: Tensor, total: Tensor,
    total_stride: int, out: Tensor, out_strides: tuple[int, int], inner: int, eps: float, add: bool,
) -> None:  # fmt: skip
    width = x.shape[-1]
    rows = x.shape[0] * inner
    if rows == 0:
        return
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(
            f"{op}: rows of {width} values; this kernel holds a row in registers, 1 to {MAX_WIDTH} of them"
        )
    block = power_of_2(width)
    together = max(1, min(8, 1024 // block))  # short rows share a program
    warps = min(16, max(1, together * block // 512))
    launch(
        rms_rows, (-(-rows // together),), x, *x_strides, y, y_stride, w, total, total_stride, out, *out_strides, rows,
        inner, width, float(eps), ADD=add, ROWS=together, BLOCK=block, num_warps=warps,
    )  # fmt: skip
