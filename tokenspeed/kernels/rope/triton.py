"""rope on GPU, the NeoX arrangement: the first R dimensions rotate in halves. Invariant: float32 arithmetic, rounded
once; a program reads both halves of its heads before it writes either, so `out` may be `x`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.launch import launch, power_of_2


@triton.jit
def rotate(
    x, x_token, x_head, pos, table, table_stride, out, out_token, out_head, heads, blocks, half, rest,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of HEADS heads of one token. REST: the block that covers the dimensions past the rotated ones, 0: none."""
    await_inputs(PDL)
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    head = (program % blocks) * HEADS + tl.arange(0, HEADS)
    place = tl.load(pos + token)
    turns = place >= 0
    column = tl.arange(0, HALF)
    inside = (head < heads)[:, None] & (column < half)[None, :]
    source = x + token * x_token + head.to(tl.int64)[:, None] * x_head
    target = out + token * out_token + head.to(tl.int64)[:, None] * out_head
    row = table + place.to(tl.int64) * table_stride + column
    cos = tl.load(row, mask=turns & (column < half), other=1.0)[None, :]
    sin = tl.load(row + half, mask=turns & (column < half), other=0.0)[None, :]
    first = tl.load(source + column[None, :], mask=inside, other=0.0)
    second = tl.load(source + half + column[None, :], mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    kind = out.dtype.element_ty
    # A hole is copied, not turned by zero: a NaN in one half must not reach the other.
    tl.store(target + column[None, :], tl.where(turns, (a * cos - b * sin).to(kind), first), mask=inside)
    tl.store(target + half + column[None, :], tl.where(turns, (b * cos + a * sin).to(kind), second), mask=inside)
    if REST > 0:
        past = tl.arange(0, REST)
        spared = (head < heads)[:, None] & (past < rest)[None, :]
        kept = tl.load(source + 2 * half + past[None, :], mask=spared, other=0.0)
        tl.store(target + 2 * half + past[None, :], kept, mask=spared)


def rope(x: Tensor, pos: Tensor, table: Tensor, *, out: Tensor) -> None:
    """x, out f32|bf16 [T, (n,) D]; pos i32 [T] (negative: the row is copied); table f32 [P, R]: cos R/2 | sin R/2."""
    if x.dim() == out.dim() == 2:
        x, out = x[:, None], out[:, None]
    t, n, d = x.shape
    xs, os, ts = x.stride(), out.stride(), table.stride()
    r = table.shape[1]
    if out.shape != x.shape or out.dtype != x.dtype or x.dtype not in CODE or not xs[2] == os[2] == 1:
        raise fail("rope", x=x, pos=pos, table=table, out=out)
    if pos.shape != (t,) or pos.dtype != torch.int32 or not pos.is_contiguous():
        raise fail("rope", x=x, pos=pos, table=table, out=out)
    if table.dtype != torch.float32 or ts[1] != 1 or not 0 < r <= d or r % 2:
        raise fail("rope", x=x, pos=pos, table=table, out=out)
    if t == 0 or n == 0:
        return
    half, rest = r // 2, d - r
    wide = power_of_2(half)
    together = min(power_of_2(n), max(1, 1024 // wide))
    blocks = -(-n // together)
    rest_block = power_of_2(rest) if rest and out.data_ptr() != x.data_ptr() else 0
    launch(
        rotate, (t * blocks,), x, xs[0], xs[1], pos, table, ts[0], out, os[0], os[1], n, blocks, half, rest,
        HEADS=together, HALF=wide, REST=rest_block, num_warps=4,
    )  # fmt: skip
