"""select_rows and fill on GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.embedding.triton import gather
from tokenspeed.kernels.launch import launch


@triton.jit
def fill_columns(
    z,
    z_stride,
    out,
    out_stride,
    start,
    first,
    width,
    blocks,
    value,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns first.. of a row: those before `start` are copied from z (with COPY), the rest set to value."""
    await_inputs(PDL)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = first + (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    filled = tl.full([BLOCK], value, tl.float32).to(out.dtype.element_ty)
    if COPY:
        kept = tl.load(z + row * z_stride + column, mask=column < start, other=0.0)
        filled = tl.where(column < start, kept, filled)
    tl.store(out + row * out_stride + column, filled, mask=column < width)


def select_rows(x: Tensor, idx: Tensor, *, offset: int = 0, out: Tensor) -> None:
    """out[s] = x[idx[s] - offset]; x, out f32|bf16 [T, H], [S, H]; idx i32 [S]. A row x does not hold gives zeros."""
    if out.dtype != x.dtype:
        raise fail("select_rows", x=x, idx=idx, out=out)
    gather("select_rows", idx, x, offset, out)


def fill(z: Tensor, *, start: int, value: float, out: Tensor) -> None:
    """out = z with columns from `start` on set to `value`; out may be z itself. z, out f32|bf16 [S, V]."""
    if out.shape != z.shape or out.dtype != z.dtype or out.dtype not in CODE or start < 0:
        raise fail("fill", z=z, start=start, out=out)
    rows, width = z.shape
    if width > 1 and not z.stride(1) == out.stride(1) == 1:
        raise fail("fill", z=z, out=out)
    copy = out.data_ptr() != z.data_ptr()
    first = 0 if copy else start
    if rows == 0 or first >= width:
        return
    block = 1024
    blocks = -(-(width - first) // block)
    launch(
        fill_columns, (rows * blocks,), z, z.stride(0), out, out.stride(0), start, first, width, blocks, float(value),
        COPY=copy, BLOCK=block, num_warps=4,
    )  # fmt: skip
