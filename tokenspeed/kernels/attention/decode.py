"""Paged decode attention on GPU: one token of a request, the query heads of one KV head, one part of the context a program.

Invariant: the parts of a token leave float32 partial results, and the last one to finish merges them in order, whatever
order they ended in; so results of one shape are the same bits from run to run.

Lengths and pages are ports of the step, which no kernel writes: with dependent launch a program finds its part while the kernel
before it still runs. (To ask for its first keys and values then, into L2, measured slower.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed.kernels.attention.softmax import part_of, settled, span
from tokenspeed.kernels.dependent import await_inputs


@triton.jit
def decode_part(
    q, q_token, q_head, kcache, vcache, c_slot, c_head, pos, row, table, table_stride, out, out_token, out_head,
    partial, stats, counter, heads, factor, cap, sinks,
    KV: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr,
    EXACT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    TOGETHER: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUP query heads a KV head, padded to PACK, in a tile of ROWS rows. TOGETHER parts are merged at once; WIDE >= PARTS."""
    program = tl.program_id(0)
    head = program % KV
    part = (program // KV) % PARTS
    token = (program // (KV * PARTS)).to(tl.int64)
    request = tl.load(row + token)
    length = tl.load(pos + token) + 1
    column = tl.arange(0, WIDTH)
    query = tl.arange(0, ROWS)
    index = head * GROUP + query
    inside = (query < GROUP)[:, None] & (column < D)[None, :]
    kind = out.dtype.element_ty
    o_at = out + token * out_token + index.to(tl.int64)[:, None] * out_head + column[None, :]
    if (request < 0) | (length <= 0):
        await_inputs(PDL)
        if part == 0:
            tl.store(o_at, tl.zeros([ROWS, WIDTH], kind), mask=inside)
        return
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    start, end, used = part_of(first, length, part, KEYS, PARTS, LEAST)  # pyright: ignore[reportGeneralTypeIssues]
    if part >= used:
        await_inputs(PDL)
        return
    keys = kcache + head.to(tl.int64) * c_head
    values = vcache + head.to(tl.int64) * c_head
    pages = table + request.to(tl.int64) * table_stride
    await_inputs(PDL)
    whole = start + (end - start) // KEYS * KEYS
    queries = tl.load(
        q + token * q_token + index.to(tl.int64)[:, None] * q_head + column[None, :], mask=inside, other=0.0
    )
    if EXACT and kcache.dtype.element_ty == tl.float32:
        queries = queries.to(tl.float32)
    place = tl.zeros([ROWS], tl.int32) + length - 1
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    acc, total, most = span(
        acc, total, most, queries, place, keys, values, c_slot, pages, start, whole, length, factor, cap,
        D, WIDTH, PAGE, KEYS, False, EXACT, WINDOW, CAP,
    )  # fmt: skip
    if whole < end:
        acc, total, most = span(
            acc, total, most, queries, place, keys, values, c_slot, pages, whole, end, length, factor, cap,
            D, WIDTH, PAGE, KEYS, True, EXACT, WINDOW, CAP,
        )  # fmt: skip
    if PARTS > 1:  # noqa: SIM102 (the outer condition is a constant, the inner one is not)
        if used > 1:
            at = (token * heads + index) * PARTS
            tl.store(partial + (at + part)[:, None] * D + column[None, :], acc, mask=inside)
            tl.store(stats + (at + part) * 2, most, mask=query < GROUP)
            tl.store(stats + (at + part) * 2 + 1, total, mask=query < GROUP)
            tl.debug_barrier()  # every thread's stores come before the release of the counter
            if tl.atomic_add(counter + token * KV + head, 1, sem="acq_rel") != used - 1:
                return
            tl.store(counter + token * KV + head, 0)
            _merge(
                partial, stats, token * heads + head * GROUP, used, out + token * out_token, head * GROUP, out_head, sinks,
                GROUP, PACK, D, WIDTH, PARTS, SINKS, TOGETHER, WIDE,
            )  # fmt: skip
            return
    tl.store(o_at, settled(acc, total, most, sinks, index, query < GROUP, SINKS).to(kind), mask=inside)


@triton.jit
def _merge(
    partial, stats, first, used, out, head, out_head, sinks,
    GROUP: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    SINKS: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Query heads first .. first + GROUP - 1: their `used` partial results, weighted and summed, to out."""
    query = tl.arange(0, PACK)
    column = tl.arange(0, WIDTH)
    every = tl.arange(0, WIDE)
    at = (first + query) * PARTS
    known = (query < GROUP)[None, :] & (every < used)[:, None]
    places = stats + (at[None, :] + every[:, None]) * 2
    peaks = tl.load(places, mask=known, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(places + 1, mask=known, other=0.0, cache_modifier=".cg")
    top = tl.max(peaks, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(masses * tl.exp2(peaks - top[None, :]), axis=0)
    acc = tl.zeros([PACK, WIDTH], tl.float32)
    lane = tl.arange(0, TOGETHER)
    for base in range(0, used, TOGETHER):
        other = base + lane
        here = (query < GROUP)[None, :] & (other < used)[:, None]
        cell = at[None, :] + other[:, None]
        peak = tl.load(stats + cell * 2, mask=here, other=float("-inf"), cache_modifier=".cg")
        piece = tl.load(
            partial + cell[:, :, None] * D + column[None, None, :], mask=here[:, :, None] & (column < D)[None, None, :],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        acc += tl.sum(piece * tl.exp2(peak - top[None, :])[:, :, None], axis=0)
    result = settled(acc, total, top, sinks, head + query, query < GROUP, SINKS)
    target = out + (head + query).to(tl.int64)[:, None] * out_head + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(query < GROUP)[:, None] & (column < D)[None, :])
