"""What decode and prefill attention on GPU share: how a context is cut into parts, and the online softmax over one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """a @ b accumulated in float32. EXACT: float32 products, of operands that keep the rounding of their dtype."""
    if EXACT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def span(
    acc, total, most, q, place, keys, values, c_slot, table, start, end, length, factor, cap,
    D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    EXACT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Online softmax over positions start..end in steps of KEYS. MASKED: some may lie past a token's own position, or before
    its last WINDOW. CAP: scores are bent by `cap`, and `factor` has been divided by it."""
    column = tl.arange(0, WIDTH)
    lane = tl.arange(0, KEYS)
    # A step's pages are loaded a step ahead, so that the loads of keys and values wait for nothing and can be pipelined.
    page = tl.load(table + (start + lane) // PAGE, mask=start + lane < end, other=0)
    for base in range(start, end, KEYS):
        at = base + lane
        slot = page.to(tl.int64) * PAGE + at % PAGE
        page = tl.load(table + (at + KEYS) // PAGE, mask=at + KEYS < end, other=0)
        k_at = keys + slot[None, :] * c_slot + column[:, None]
        v_at = values + slot[:, None] * c_slot + column[None, :]
        if MASKED:
            k = tl.load(k_at, mask=(at < length)[None, :] & (column < D)[:, None], other=0.0)
        elif D < WIDTH:
            k = tl.load(k_at, mask=(column < D)[:, None], other=0.0)
        else:
            k = tl.load(k_at)
        scores = product(q, k.to(q.dtype), EXACT) * factor
        if CAP:  # tanh x = 1 - 2 / (1 + e^2x)
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * 2.8853900817779268))
        if MASKED:
            seen = at[None, :] <= place[:, None]
            if WINDOW > 0:
                seen &= at[None, :] > place[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(most, tl.max(scores, axis=1))
        if MASKED:  # a row without a visible key so far has peak -inf; keep -inf - -inf out
            pivot = tl.where(peak == float("-inf"), 0.0, peak)
        else:
            pivot = peak
        shrink = tl.exp2(most - pivot)
        weights = tl.exp2(scores - pivot[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        if MASKED:
            v = tl.load(v_at, mask=(at < length)[:, None] & (column < D)[None, :], other=0.0)
        elif D < WIDTH:
            v = tl.load(v_at, mask=(column < D)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        acc = acc * shrink[:, None] + product(weights.to(q.dtype), v.to(q.dtype), EXACT)
        most = peak
    return acc, total, most


@triton.jit
def merged(
    partial, stats, at, used, column, mine, inside, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """(acc, total, most) of ROWS rows from the `used` parts of their contexts, in order; the first lies in cell `at` of each.
    Read past L1: other programs wrote them."""
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    for other in range(used):
        cell = at + other
        peak = tl.load(stats + cell * 2, mask=mine, other=float("-inf"), cache_modifier=".cg")
        mass = tl.load(stats + cell * 2 + 1, mask=mine, other=0.0, cache_modifier=".cg")
        piece = tl.load(partial + cell[:, None] * D + column[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        joint = tl.maximum(most, peak)
        pivot = tl.where(joint == float("-inf"), 0.0, joint)
        old, new = tl.exp2(most - pivot), tl.exp2(peak - pivot)
        acc = acc * old[:, None] + piece * new[:, None]
        total = total * old + mass * new
        most = joint
    return acc, total, most


@triton.jit
def settled(acc, total, most, sinks, index, live, SINKS: tl.constexpr):
    """acc over its denominator. SINKS: those of heads `index` are a part of it."""
    if SINKS:
        sink = tl.load(sinks + index, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(most, sink)
        shrink = tl.exp2(most - top)
        total = total * shrink + tl.exp2(sink - top)
        acc = acc * shrink[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def part_of(first, end, part, KEYS: tl.constexpr, parts, LEAST: tl.constexpr):
    """(start, end, parts used) of a part of positions first .. end - 1: at most `parts` of at least LEAST positions, each
    whole steps of KEYS, so that only the last one may end within a step. A part past the used ones starts at or behind its end."""
    length = end - first
    chunk = tl.cdiv(tl.cdiv(length, tl.minimum(tl.cdiv(length, LEAST), parts)), KEYS) * KEYS
    start = first + part * chunk
    return start, tl.minimum(start + chunk, end), tl.cdiv(length, chunk)
