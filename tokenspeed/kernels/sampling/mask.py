"""The allow-mask of a grammar on GPU. Invariant: rows without a mask are not read or written where the result takes the
place of the logits, so a batch pays for the rows that have one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import fail
from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.launch import launch
from tokenspeed.kernels.sampling.triton import PARAM_WORDS, checked

BLOCK = 2048  # logits a program


@triton.jit
def allow_ids(
    z, z_stride, words, allow, allow_stride, slots, out, out_stride, offset, V, blocks,
    WORDS: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    slot = tl.load(words + row * WORDS + 12).to(tl.int64)
    masked = ((tl.load(words + row * WORDS) & 96) == 96) & (slot >= 0) & (slot < slots)  # valid, and with a mask
    if masked:
        value = tl.load(z + row * z_stride + column, mask=inside, other=0.0)
        id = offset + column
        word = tl.load(allow + slot * allow_stride + id // 32, mask=inside, other=0)
        value = tl.where(((word >> (id % 32)) & 1) != 0, value, float("-inf"))
        tl.store(out + row * out_stride + column, value, mask=inside)
    elif COPY:
        tl.store(out + row * out_stride + column, tl.load(z + row * z_stride + column, mask=inside), mask=inside)


def mask_logits(z: Tensor, params: Tensor, allow: Tensor, *, offset: int, out: Tensor) -> None:
    """z f32 [S, V] of the global ids `offset` .., params i32 [S, 16], allow i32 [R, words]; out may be z. See the op."""
    s, v = checked("mask_logits", z, params)
    if out.dtype != torch.float32 or out.shape != z.shape or (out.stride(1) != 1 and v != 1):
        raise fail("mask_logits", z=z, out=out)
    if allow.dtype != torch.int32 or allow.shape[1] * 32 < offset + v or allow.stride(1) != 1 or offset < 0:
        raise fail("mask_logits", z=z, allow=allow, offset=offset)
    if s == 0 or v == 0:
        return
    blocks = -(-v // BLOCK)
    launch(
        allow_ids, (s * blocks,), z, z.stride(0), params, allow, allow.stride(0), allow.shape[0], out, out.stride(0),
        offset, v, blocks, WORDS=PARAM_WORDS, COPY=out.data_ptr() != z.data_ptr(), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
