"""Sampling on GPU. Invariant: a token depends on its row's logits, its parameters and (seed, position, token id) alone,
so the batch, the grid and the sharding of the vocabulary change nothing (Gumbel-max over a counter RNG).

NaN never wins; ties go to the lowest id. A row without anything above -inf gives -inf and id -1. A row is cut
into parts; the last part to finish merges them in order and resets the row's counter, so one launch does it all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import fail
from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.launch import even_splits, launch, power_of_2, processors, scratch

PARAM_WORDS = 16
BLOCK = 2048  # logits a step of a program
MOST_PARTS = 64


@triton.jit
def philox_words(ids, position, key_low, key_high):
    """Philox4x32-10 at counters (ids, position, 0, 0); ids u32 [N] -> u32 [4 N], the four words of an id side by side."""
    c0 = ids
    c1 = tl.zeros_like(ids) + position
    c2 = tl.zeros_like(ids)
    c3 = tl.zeros_like(ids)
    k0 = tl.zeros_like(ids) + key_low
    k1 = tl.zeros_like(ids) + key_high
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, tl.full(ids.shape, 0xD2511F53, tl.uint32))
        low0 = c0 * tl.full(ids.shape, 0xD2511F53, tl.uint32)
        high1 = tl.umulhi(c2, tl.full(ids.shape, 0xCD9E8D57, tl.uint32))
        low1 = c2 * tl.full(ids.shape, 0xCD9E8D57, tl.uint32)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += tl.full(ids.shape, 0x9E3779B9, tl.uint32)
        k1 += tl.full(ids.shape, 0xBB67AE85, tl.uint32)
    return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))


@triton.jit
def noise_of(word):
    """-ln(-ln u), u = (2 k + 1) / 2^25 with k the top 24 bits of the word; float32, every u exact.

    Near 1, where u itself would round to 1, -ln u = 2 atanh(v / (2 - v)) of v = 1 - u, by its series (v <= 1/2).
    """
    k = (word >> 8).to(tl.int32)
    upper = k >= 8388608
    odd = tl.where(upper, 33554431 - 2 * k, 2 * k + 1)  # of v above 1/2, of u below; at most 2^24
    fraction = odd.to(tl.float32) * 2.9802322387695312e-08
    s = tl.math.div_rn(fraction, 2.0 - fraction)
    s2 = s * s
    series = tl.zeros_like(s2) + 1.0 / 15
    for step in tl.static_range(7):
        series = series * s2 + 1.0 / (13 - 2 * step)
    near = 2.0 * s * series
    below = -tl.log(tl.where(upper, 0.5, fraction))
    return -tl.log(tl.where(upper, near, below))


@triton.jit
def shaped(z, words, at, offset, first, V, TEMPER: tl.constexpr, GUMBEL: tl.constexpr, COUNT: tl.constexpr):
    """Logits of COUNT global ids from `first` (a multiple of 4) on, tempered and with noise; -inf outside the row.

    `at` points to column 0 of the row, id `offset`; `words` to the row's words.
    """
    column = first + tl.arange(0, COUNT) - offset
    inside = (column >= 0) & (column < V)
    value = tl.load(at + column, mask=inside, other=float("-inf"))
    if TEMPER or GUMBEL:
        greedy = (tl.load(words) & 1) != 0
        if TEMPER:
            temperature = tl.load(words + 4).to(tl.float32, bitcast=True)
            divisor = tl.where(greedy, 1.0, temperature)
            value = tl.math.div_rn(value, tl.zeros_like(value) + divisor)
        if GUMBEL:
            low = tl.load(words + 1).to(tl.uint32, bitcast=True)
            high = tl.load(words + 2).to(tl.uint32, bitcast=True)
            position = tl.load(words + 3).to(tl.uint32, bitcast=True)
            if not greedy:
                quotient = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
                value += noise_of(philox_words(quotient, position, low, high))
    return value, column, inside


@triton.jit
def map_logits(
    z, z_stride, words, out, out_stride, V, offset, base, blocks,
    TEMPER: tl.constexpr, GUMBEL: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    first = base + (program % blocks) * COUNT
    value, column, inside = shaped(  # pyright: ignore[reportGeneralTypeIssues]
        z, words + row * 16, z + row * z_stride, offset, first, V, TEMPER, GUMBEL, COUNT
    )  # fmt: skip
    tl.store(out + row * out_stride + column, value, mask=inside)


@triton.jit
def pick(
    z, z_stride, words, value_out, index_out, part_value, part_index, counter, V, offset, base, steps,
    PARTS: tl.constexpr, WIDE: tl.constexpr, TEMPER: tl.constexpr, GUMBEL: tl.constexpr, COUNT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The largest value of a row and its lowest id. A part covers `steps` blocks of COUNT ids; WIDE >= PARTS."""
    await_inputs(PDL)
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    part = program % PARTS
    start = base + part * steps * COUNT
    best = tl.full([COUNT], float("-inf"), tl.float32)
    where = tl.maximum(start - offset, 0) + tl.arange(0, COUNT)
    for step in range(steps):
        value, column, inside = shaped(  # pyright: ignore[reportGeneralTypeIssues]
            z, words + row * 16, z + row * z_stride, offset, start + step * COUNT, V, TEMPER, GUMBEL, COUNT
        )  # fmt: skip
        better = inside & (value > best)  # false for NaN
        best = tl.where(better, value, best)
        where = tl.where(better, column, where)
    top = tl.max(best, axis=0)
    at = tl.min(tl.where(best == top, where, 2147483647), axis=0)
    if PARTS == 1:
        tl.store(value_out + row, top)
        tl.store(index_out + row, tl.where(top > float("-inf"), at + offset, -1))
    else:
        tl.store(part_value + row * PARTS + part, top)
        tl.store(part_index + row * PARTS + part, at)
        tl.debug_barrier()
        if tl.atomic_add(counter + row, 1, sem="acq_rel") == PARTS - 1:
            lane = tl.arange(0, WIDE)
            values = tl.load(
                part_value + row * PARTS + lane, mask=lane < PARTS, other=float("-inf"), cache_modifier=".cg"
            )
            places = tl.load(part_index + row * PARTS + lane, mask=lane < PARTS, other=2147483647, cache_modifier=".cg")
            most = tl.max(values, axis=0)
            tl.store(value_out + row, most)
            place = tl.min(tl.where(values == most, places, 2147483647), axis=0)
            tl.store(index_out + row, tl.where(most > float("-inf"), place + offset, -1))
            tl.store(counter + row, 0)


def checked(op: str, z: Tensor, params: Tensor | None) -> tuple[int, int]:
    """The extents of logits z f32 [S, V]; ValueError where they, or the rows' parameters i32 [S, 16], do not fit `op`."""
    s, v = z.shape
    if z.dtype != torch.float32 or (z.stride(1) != 1 and v != 1):
        raise fail(op, z=z)
    if params is not None and (
        params.dtype != torch.int32 or params.shape != (s, PARAM_WORDS) or not params.is_contiguous()
    ):
        raise fail(op, z=z, params=params)
    return s, v


def _map(op: str, z: Tensor, params: Tensor, offset: int, out: Tensor, temper_: bool, gumbel_: bool) -> None:
    s, v = checked(op, z, params)
    if out.dtype != torch.float32 or out.shape != z.shape or (out.stride(1) != 1 and v != 1):
        raise fail(op, z=z, out=out)
    if s == 0 or v == 0:
        return
    base = offset // 4 * 4
    count = min(1024, max(16, power_of_2(v)))
    blocks = -(-(offset + v - base) // count)
    launch(
        map_logits, (s * blocks,), z, z.stride(0), params, out, out.stride(0), v, offset, base, blocks,
        TEMPER=temper_, GUMBEL=gumbel_, COUNT=count, num_warps=4,
    )  # fmt: skip


def _pick(
    op: str, z: Tensor, params: Tensor | None, offset: int, out: tuple[Tensor, Tensor], temper_: bool, gumbel_: bool
) -> None:
    s, v = checked(op, z, params)
    value, index = out
    if value.dtype != torch.float32 or index.dtype != torch.int32 or value.shape != (s,) or index.shape != (s,):
        raise fail(op, z=z, value=value, index=index)
    if not (value.is_contiguous() and index.is_contiguous()) or (s and not v):
        raise fail(op, z=z, value=value, index=index)
    if s == 0:
        return
    base = offset // 4 * 4
    count = min(BLOCK, max(16, power_of_2(v)))
    blocks = -(-(offset + v - base) // count)
    parts = even_splits(s, 6 * processors(z.device), min(MOST_PARTS, blocks))
    steps = -(-blocks // parts)
    parts = -(-blocks // steps)
    values = scratch(z.device, "argmax values", s * parts, torch.float32)
    places = scratch(z.device, "argmax places", s * parts, torch.int32)
    counter = scratch(z.device, "argmax counter", s, torch.int32)
    launch(
        pick, (s * parts,), z, z.stride(0), z if params is None else params, value, index, values, places, counter, v,
        offset, base, steps, PARTS=parts, WIDE=power_of_2(parts), TEMPER=temper_, GUMBEL=gumbel_, COUNT=count,
        num_warps=4,
    )  # fmt: skip


def temper(z: Tensor, params: Tensor, *, out: Tensor) -> None:
    """z f32 [S, V] / temperature; greedy rows unchanged; params i32 [S, 16]; out may be z."""
    _map("temper", z, params, 0, out, True, False)


def add_gumbel(z: Tensor, params: Tensor, *, offset: int = 0, out: Tensor) -> None:
    """z f32 [S, V] + noise of the global ids offset..; greedy rows unchanged; out may be z."""
    _map("add_gumbel", z, params, offset, out, False, True)


def argmax(z: Tensor, *, offset: int = 0, out: tuple[Tensor, Tensor]) -> None:
    """out = (value f32 [S], global id i32 [S]) of each row's largest logit."""
    _pick("argmax", z, None, offset, out, False, False)


def gumbel_argmax(z: Tensor, params: Tensor, *, offset: int = 0, out: tuple[Tensor, Tensor]) -> None:
    """temper, add_gumbel and argmax in one pass; the same bits as the three."""
    _pick("gumbel_argmax", z, params, offset, out, True, True)
