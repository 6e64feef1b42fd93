"""The full sampler on GPU: bias, penalties, temperature, top-k, top-p, min-p, Gumbel-max, log-probabilities.

Invariant: a program takes a whole row, so a token depends on its row, its parameters and its request slot's state alone;
a threshold is found by bisection over the bit patterns of float32, so it is exact, and ties at it are kept. What a row
does not ask for is skipped on the device. The same order and rules as the op's reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import fail
from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.launch import launch, power_of_2, scratch
from tokenspeed.kernels.sampling.triton import PARAM_WORDS, checked, noise_of, philox_words

BLOCK = 4096  # logits a step
TOP = 20  # alternatives reported a row, at most


@triton.jit
def ordered(x):
    """float32 as int32 in the same order; -inf is the least of what is not NaN."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def middle(low, high):
    """Between low and high (low < high), nearer to low; without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def raw(z, at, V):
    """Logits of a step, NaN as -inf, -inf past the vocabulary."""
    x = tl.load(z + at, mask=at < V, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def least_of_top_k(x, V, k, BLOCK: tl.constexpr):
    """The ordered bits of the k-th largest value of x[:V]."""
    low = -2139095041  # of -inf
    high = 2139095040  # of +inf
    while low < high:  # the largest bits that at least k values reach
        probe = middle(low, high) + 1
        count = 0
        for base in range(0, V, BLOCK):
            at = base + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < V, other=float("-inf"))
            count += tl.sum(((ordered(value) >= probe) & (at < V)).to(tl.int32), axis=0)
        if count >= k:
            low = probe
        else:
            high = probe - 1
    return low


@triton.jit
def least_of_top_p(x, V, kept, peak, share, BLOCK: tl.constexpr):
    """The least ordered bits, not below `kept`, above which lies less than `share` of the mass of what is kept."""
    total = 0.0
    for base in range(0, V, BLOCK):
        at = base + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < V, other=float("-inf"))
        total += tl.sum(tl.where(ordered(value) >= kept, tl.exp(value - peak), 0.0), axis=0)
    wanted = share * total
    low = kept
    high = ordered(peak)
    while low < high:  # the least bits with less than the wanted mass above
        probe = middle(low, high)
        mass = 0.0
        for base in range(0, V, BLOCK):
            at = base + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < V, other=float("-inf"))
            mass += tl.sum(tl.where(ordered(value) > probe, tl.exp(value - peak), 0.0), axis=0)
        if mass < wanted:
            high = probe
        else:
            low = probe + 1
    return low


@triton.jit
def sample_row(
    z, z_stride, words, counts, counts_stride, seen, seen_stride, bias, bias_stride, slots, shaped, shaped_stride,
    token_out, logprob_out, ids_out, logprobs_out, V,
    WORDS: tl.constexpr, TOP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    p = words + row * WORDS
    flags = tl.load(p)
    place = tl.arange(0, WIDE)
    tl.store(token_out + row, -1)
    tl.store(logprob_out + row, 0.0)
    tl.store(ids_out + row * TOP + place, tl.full([WIDE], -1, tl.int32), mask=place < TOP)
    tl.store(logprobs_out + row * TOP + place, tl.zeros([WIDE], tl.float32), mask=place < TOP)
    slot = tl.load(p + 12).to(tl.int64)
    valid = (flags & 32) != 0
    if valid & ((flags & 6) != 0):
        valid = (slot >= 0) & (slot < slots)
    if valid:
        z += row * z_stride
        x = shaped + row * shaped_stride
        mine = counts + slot * counts_stride
        greedy = (flags & 1) != 0
        temperature = tl.where(greedy, 1.0, tl.load(p + 4).to(tl.float32, bitcast=True))
        peak = float("-inf")
        for base in range(0, V, BLOCK):
            at = base + tl.arange(0, BLOCK)
            inside = at < V
            value = raw(z, at, V)
            if flags & 4:
                value += tl.load(bias + slot * bias_stride + at, mask=inside, other=0.0)
            if flags & 2:
                repetition = tl.load(p + 8).to(tl.float32, bitcast=True)
                met = tl.load(mine + at, mask=inside, other=0)
                known = (met > 0) | (tl.load(seen + slot * seen_stride + at, mask=inside, other=0) > 0)
                by = tl.zeros_like(value) + repetition
                value = tl.where(known, tl.where(value > 0, tl.math.div_rn(value, by), value * by), value)
                value -= tl.load(p + 9).to(tl.float32, bitcast=True) * (met > 0).to(tl.float32)
                value -= tl.load(p + 10).to(tl.float32, bitcast=True) * met.to(tl.float32)
            value = tl.math.div_rn(value, tl.zeros_like(value) + temperature)
            peak = tl.maximum(peak, tl.max(tl.where(inside, value, float("-inf")), axis=0))
            tl.store(x + at, value, mask=inside)
        tl.debug_barrier()  # later passes read what other threads wrote
        if (peak > float("-inf")) & (peak < float("inf")):
            kept = -2139095041
            if ((flags & 16) != 0) & (greedy == 0):
                k = tl.load(p + 5)
                if (k > 0) & (k < V):
                    kept = least_of_top_k(x, V, k, BLOCK)
                share = tl.load(p + 6).to(tl.float32, bitcast=True)
                if share < 1.0:
                    kept = least_of_top_p(x, V, kept, peak, share, BLOCK)
                floor = tl.load(p + 7).to(tl.float32, bitcast=True)
            else:
                floor = 0.0
            low = tl.load(p + 1).to(tl.uint32, bitcast=True)
            high = tl.load(p + 2).to(tl.uint32, bitcast=True)
            position = tl.load(p + 3).to(tl.uint32, bitcast=True)
            best = tl.full([BLOCK], float("-inf"), tl.float32)
            where = tl.arange(0, BLOCK)
            for base in range(0, V, BLOCK):
                at = base + tl.arange(0, BLOCK)
                value = tl.load(x + at, mask=at < V, other=float("-inf"))
                live = (ordered(value) >= kept) & (at < V)
                if floor > 0.0:
                    live = live & (tl.exp(value - peak) >= floor)
                if greedy == 0:
                    quotient = (base // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
                    value += noise_of(philox_words(quotient, position, low, high))
                better = live & (value > best)
                best = tl.where(better, value, best)
                where = tl.where(better, at, where)
            top = tl.max(best, axis=0)
            token = tl.min(tl.where(best == top, where, 2147483647), axis=0)
            tl.store(token_out + row, token)
            if flags & 2:
                tl.store(mine + token, tl.load(mine + token) + 1)
            if flags & 8:
                most = float("-inf")
                for base in range(0, V, BLOCK):
                    most = tl.maximum(most, tl.max(raw(z, base + tl.arange(0, BLOCK), V), axis=0))
                mass = 0.0
                for base in range(0, V, BLOCK):
                    mass += tl.sum(tl.exp(raw(z, base + tl.arange(0, BLOCK), V) - most), axis=0)
                shift = most + tl.log(mass)
                tl.store(logprob_out + row, raw(z, token, V) - shift)
                above, last = (
                    float("inf"),
                    -1,
                )  # the alternatives in order: lower value, or the same value and a higher id
                wanted = tl.minimum(tl.minimum(tl.load(p + 11), TOP), V)
                for i in range(0, wanted):
                    best = tl.full([BLOCK], float("-inf"), tl.float32)
                    where = tl.full([BLOCK], 2147483647, tl.int32)
                    for base in range(0, V, BLOCK):
                        at = base + tl.arange(0, BLOCK)
                        value = raw(z, at, V)
                        after = (value < above) | ((value == above) & (at > last))
                        better = after & (at < V) & ((value > best) | (where == 2147483647))
                        best = tl.where(better, value, best)
                        where = tl.where(better, at, where)
                    above = tl.max(best, axis=0)
                    last = tl.min(tl.where(best == above, where, 2147483647), axis=0)
                    tl.store(ids_out + row * TOP + i, last)
                    tl.store(logprobs_out + row * TOP + i, above - shift)


def sample(
    z: Tensor, params: Tensor, counts: Tensor, seen: Tensor, bias: Tensor,
    *, vocab: int, out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """z f32 [S, V], params i32 [S, 16], state by request slot counts i32, seen u8, bias f32 [R, >= vocab].

    out = (token i32 [S], logprob f32 [S], top ids i32 [S, 20], top logprobs f32 [S, 20]); an unused place holds id -1.
    Adds the drawn token to `counts` where the row has the penalties flag.
    """
    s, v = checked("sample", z, params)
    token, logprob, ids, logprobs = out
    if not 0 < vocab <= v:
        raise fail("sample", z=z, vocab=vocab)
    if (counts.dtype, seen.dtype, bias.dtype) != (torch.int32, torch.uint8, torch.float32):
        raise fail("sample", counts=counts, seen=seen, bias=bias)
    if any(t.shape[0] != counts.shape[0] or t.shape[1] < vocab or t.stride(1) != 1 for t in (counts, seen, bias)):
        raise fail("sample", counts=counts, seen=seen, bias=bias, vocab=vocab)
    shapes = ((token, (s,)), (logprob, (s,)), (ids, (s, TOP)), (logprobs, (s, TOP)))
    if any(t.shape != shape or not t.is_contiguous() for t, shape in shapes):
        raise fail("sample", token=token, logprob=logprob, top_ids=ids, top_logprobs=logprobs)
    if s == 0:
        return
    shaped = scratch(z.device, "sample logits", s * vocab, torch.float32)
    block = min(BLOCK, max(16, power_of_2(vocab)))
    launch(
        sample_row, (s,), z, z.stride(0), params, counts, counts.stride(0), seen, seen.stride(0), bias, bias.stride(0),
        counts.shape[0], shaped, vocab, token, logprob, ids, logprobs, vocab,
        WORDS=PARAM_WORDS, TOP=TOP, WIDE=power_of_2(TOP), BLOCK=block, num_warps=16 if block >= 4096 else 4,
    )  # fmt: skip
