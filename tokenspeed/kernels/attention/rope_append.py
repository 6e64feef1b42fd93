"""What stands between the qkv product and attention, in one pass on GPU: per-head RMS norm (where the model has it), rope,
and the write of keys and values to their slots. Invariant: every value is rounded where the separate kernels round it, so
results are those of the separate kernels, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.launch import launch, power_of_2


@triton.jit
def normed(first, second, rest, w, half, width, eps, column, past, kind, HALF: tl.constexpr, REST: tl.constexpr):
    """RMS norm of rows given as two halves of the rotated dims and the rest, float32 in and out, rounded as rms_norm does."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if REST > 0:
        squares += tl.sum(rest * rest, axis=1)
    mean = tl.math.div_rn(squares, tl.zeros_like(squares) + width)
    inverse = tl.math.div_rn(tl.zeros_like(squares) + 1.0, tl.sqrt_rn(mean + eps))[:, None]
    w1 = tl.load(w + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(w + half + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    first, second = first * inverse, second * inverse
    if w.dtype.element_ty != tl.float32:
        first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
    first = (first * w1).to(kind).to(tl.float32)
    second = (second * w2).to(kind).to(tl.float32)
    if REST > 0:
        w3 = tl.load(w + 2 * half + past, mask=2 * half + past < width, other=0.0).to(tl.float32)[None, :]
        rest = rest * inverse
        if w.dtype.element_ty != tl.float32:
            rest = rest.to(kind).to(tl.float32)
        rest = (rest * w3).to(kind).to(tl.float32)
    return first, second, rest


@triton.jit
def prepare(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, wq, wk, pos, table, table_stride, slot,
    kcache, vcache, c_slot, c_head, slots, out, out_token, out_head, heads, kv, q_blocks, blocks, half, width, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block of HEADS heads of one token: of q (to out), or of k and v (to the caches)."""
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    block = program % blocks
    of_k = block >= q_blocks
    head = tl.where(of_k, block - q_blocks, block) * HEADS + tl.arange(0, HEADS)
    count = tl.where(of_k, kv, heads)
    index = head.to(tl.int64)
    column = tl.arange(0, HALF)
    past = tl.arange(0, REST if REST > 0 else 1)
    place = tl.load(pos + token)
    turns = place >= 0
    into = tl.load(slot + token).to(tl.int64)
    row = table + place.to(tl.int64) * table_stride + column
    cos = tl.load(row, mask=turns & (column < half), other=1.0)[None, :]
    sin = tl.load(row + half, mask=turns & (column < half), other=0.0)[None, :]
    live = head < count
    held = (into >= 0) & (into < slots)
    inside = live[:, None] & (column < half)[None, :]
    spared = live[:, None] & (2 * half + past < width)[None, :]
    kind = out.dtype.element_ty
    await_inputs(PDL)
    if of_k:
        source = k + token * k_token + index[:, None] * k_head
        w = wk
    else:
        source = q + token * q_token + index[:, None] * q_head
        w = wq
    first = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + column[None, :], mask=inside, other=0.0).to(tl.float32)
    rest = tl.zeros([HEADS, REST if REST > 0 else 1], tl.float32)
    if REST > 0:
        rest = tl.load(source + 2 * half + past[None, :], mask=spared, other=0.0).to(tl.float32)
    if NORM:
        first, second, rest = normed(first, second, rest, w, half, width, eps, column, past, kind, HALF, REST)
    # A hole is copied, not turned by zero: a NaN in one half must not reach the other.
    a = tl.where(turns, first * cos - second * sin, first).to(kind)
    b = tl.where(turns, second * cos + first * sin, second).to(kind)
    if of_k:
        store = kcache.dtype.element_ty
        k_at = kcache + into * c_slot + index[:, None] * c_head
        tl.store(k_at + column[None, :], a.to(store), mask=inside & held)
        tl.store(k_at + half + column[None, :], b.to(store), mask=inside & held)
        if REST > 0:
            tl.store(k_at + 2 * half + past[None, :], rest.to(kind).to(store), mask=spared & held)
        whole = tl.arange(0, WIDTH)
        every = live[:, None] & (whole < width)[None, :] & held
        value = tl.load(v + token * v_token + index[:, None] * v_head + whole[None, :], mask=every, other=0.0)
        tl.store(vcache + into * c_slot + index[:, None] * c_head + whole[None, :], value.to(store), mask=every)
    else:
        q_at = out + token * out_token + index[:, None] * out_head
        tl.store(q_at + column[None, :], a, mask=inside)
        tl.store(q_at + half + column[None, :], b, mask=inside)
        if REST > 0:
            tl.store(q_at + 2 * half + past[None, :], rest.to(kind), mask=spared)


def rope_append(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, table: Tensor, slot: Tensor, kcache: Tensor, vcache: Tensor,
    *, out: Tensor,
) -> None:  # fmt: skip
    """rope of q [T, n, D] into out, rope of k [T, KV, D] and v into slots `slot` i32 [T] of the caches [slots, KV, D].

    pos i32 [T], table f32 [P, R]: cos R/2 | sin R/2. Holes (pos or slot -1) as in rope and append.
    """
    _run("rope_append", q, k, v, None, None, pos, table, slot, kcache, vcache, 0.0, out)


def norm_rope_append(
    q: Tensor, k: Tensor, v: Tensor, wq: Tensor, wk: Tensor, pos: Tensor, table: Tensor, slot: Tensor, kcache: Tensor,
    vcache: Tensor, *, eps: float, out: Tensor,
) -> None:  # fmt: skip
    """As rope_append, of q and k after an RMS norm over each head's D values with weights wq, wk [D]."""
    _run("norm_rope_append", q, k, v, wq, wk, pos, table, slot, kcache, vcache, eps, out)


def _run(
    op: str, q: Tensor, k: Tensor, v: Tensor, wq: Tensor | None, wk: Tensor | None, pos: Tensor, table: Tensor,
    slot: Tensor, kcache: Tensor, vcache: Tensor, eps: float, out: Tensor,
) -> None:  # fmt: skip
    t, n, d = q.shape
    kv, r = k.shape[1], table.shape[1]
    qs, ks, vs, os, cs = q.stride(), k.stride(), v.stride(), out.stride(), kcache.stride()
    same = q.dtype == k.dtype == v.dtype == out.dtype and q.dtype in CODE and kcache.dtype in CODE
    if not same or out.shape != q.shape or k.shape != (t, kv, d) or v.shape != k.shape or kcache.shape[1:] != (kv, d):
        raise fail(op, q=q, k=k, v=v, kcache=kcache, out=out)
    if vcache.shape != kcache.shape or vcache.dtype != kcache.dtype or vcache.stride() != cs:
        raise fail(op, kcache=kcache, vcache=vcache)
    if not qs[2] == ks[2] == vs[2] == os[2] == cs[2] == 1 or table.dtype != torch.float32 or table.stride(1) != 1:
        raise fail(op, q=q, k=k, v=v, kcache=kcache, table=table, out=out)
    if any(x.shape != (t,) or x.dtype != torch.int32 or not x.is_contiguous() for x in (pos, slot)):
        raise fail(op, pos=pos, slot=slot)
    if not 0 < r <= d or r % 2 or any(w is not None and (w.shape != (d,) or not w.is_contiguous()) for w in (wq, wk)):
        raise fail(op, table=table, wq=wq, wk=wk)
    if t == 0 or n == 0:
        return
    half, rest = r // 2, d - r
    together = min(power_of_2(max(n, kv)), max(1, 512 // power_of_2(d)))
    q_blocks = -(-n // together)
    blocks = q_blocks + -(-kv // together)
    launch(
        prepare, (t * blocks,), q, qs[0], qs[1], k, ks[0], ks[1], v, vs[0], vs[1], q if wq is None else wq,
        q if wk is None else wk, pos, table, table.stride(0), slot, kcache, vcache, cs[0], cs[1], kcache.shape[0], out,
        os[0], os[1], n, kv, q_blocks, blocks, half, d, float(eps),
        NORM=wq is not None, HEADS=together, HALF=power_of_2(half), REST=power_of_2(rest) if rest else 0,
        WIDTH=power_of_2(d), num_warps=4,
    )  # fmt: skip
