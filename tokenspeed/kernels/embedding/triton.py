"""lookup and select_rows on GPU: rows gathered by index. Invariant: an index that the table does not hold (a negative
one included) gives zeros and reads nothing; offsets are 64-bit, so a table may exceed 2^31 elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.launch import launch, power_of_2


@triton.jit
def gather_rows(
    idx,
    source,
    source_stride,
    out,
    out_stride,
    rows,
    offset,
    width,
    blocks,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    program = tl.program_id(0)
    t = program // blocks
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(idx + t)
    at = index.to(tl.int64) - offset
    held = (index >= 0) & (at >= 0) & (at < rows)
    inside = column < width
    value = tl.load(source + at * source_stride + column, mask=inside & held, other=0.0)
    tl.store(out + t.to(tl.int64) * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


def gather(op: str, idx: Tensor, source: Tensor, offset: int, out: Tensor) -> None:
    """out[t] = source[idx[t] - offset] as out's dtype; source [rows, width], out [T, width], idx i32 [T]."""
    rows, width = source.shape
    t = idx.shape[0]
    if idx.dtype != torch.int32 or not idx.is_contiguous() or out.shape != (t, width):
        raise fail(op, ids=idx, x=source, out=out)
    if source.dtype not in CODE or out.dtype not in CODE:
        raise fail(op, ids=idx, x=source, out=out)
    if width != 1 and (source.stride(1) != 1 or out.stride(1) != 1):
        raise fail(op, ids=idx, x=source, out=out)
    if t == 0 or width == 0:
        return
    block = min(1024, max(128, power_of_2(width)))
    blocks = -(-width // block)
    launch(
        gather_rows, (t * blocks,), idx, source, source.stride(0), out, out.stride(0), rows, offset, width, blocks,
        BLOCK=block, num_warps=4,
    )  # fmt: skip


def lookup(ids: Tensor, w: Tensor, *, offset: int = 0, out: Tensor) -> None:
    """ids i32 [T]; w f32|bf16 [rows, H] holds the rows of ids offset.. ; out f32|bf16 [T, H]."""
    gather("lookup", ids, w, offset, out)
