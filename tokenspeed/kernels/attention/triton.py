"""Paged attention and KV append on GPU. Invariant: the grid depends on shapes alone (tokens, rows of the table) and every
length is read on the device, so a captured graph serves any batch of its bucket; a hole (row, position or slot -1) never
touches the cache; results of one shape are the same bits from run to run.

A program takes one KV head, a tile of tokens of one request with the query heads of that KV head packed beside each other
(GQA), and one part of the context. In a step of one token a request a tile is one token (decode.py); otherwise
`plan` lists the tiles first: blocks of the token axis, cut where the row changes. The parts of a tile leave float32
partial results; the last one to finish merges them in order and resets the tile's counter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.attention.decode import decode_part
from tokenspeed.kernels.attention.softmax import merged, part_of, settled, span
from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.launch import even_splits, has_chunks, launch, power_of_2, processors, scratch

LOG2_E = 1.4426950408889634
PARTIAL_BYTES = 128 << 20  # bound of the partial results of one call
PLAN_BLOCK = 1024
MERGE_ROWS = 32  # rows of partial results that a merge of decode holds at once


@dataclass(frozen=True, slots=True)
class Tiling:
    """How `attend` cuts its work. `rows`: tokens times padded heads a tile; `keys`: positions a step of the loop;
    `parts`: most parts of a context; `least`: positions below which a context is not cut further."""

    rows: int
    keys: int
    parts: int
    least: int
    warps: int
    stages: int


@triton.jit
def copy_rows(
    k, k_token, k_head, v, v_token, v_head, slot, kcache, vcache, c_slot, c_head, slots, heads, width, blocks,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    head = (program % blocks) * HEADS + tl.arange(0, HEADS).to(tl.int64)
    column = tl.arange(0, WIDTH)
    place = tl.load(slot + token).to(tl.int64)
    inside = ((head < heads) & (place >= 0) & (place < slots))[:, None] & (column < width)[None, :]
    target = place * c_slot + head[:, None] * c_head + column[None, :]
    keys = tl.load(k + token * k_token + head[:, None] * k_head + column[None, :], mask=inside, other=0.0)
    values = tl.load(v + token * v_token + head[:, None] * v_head + column[None, :], mask=inside, other=0.0)
    tl.store(kcache + target, keys.to(kcache.dtype.element_ty), mask=inside)
    tl.store(vcache + target, values.to(vcache.dtype.element_ty), mask=inside)


def append(k: Tensor, v: Tensor, slot: Tensor, kcache: Tensor, vcache: Tensor) -> None:
    """k, v f32|bf16 [T, KV, D] into slots slot i32 [T] of the caches f32|bf16 [slots, KV, D]; slot -1 is skipped."""
    t, kv, d = k.shape
    ks, vs, cs = k.stride(), v.stride(), kcache.stride()
    if v.shape != k.shape or v.dtype != k.dtype or kcache.shape[1:] != (kv, d) or vcache.shape != kcache.shape:
        raise fail("append", k=k, v=v, slot=slot, kcache=kcache, vcache=vcache)
    if k.dtype not in CODE or kcache.dtype not in CODE or vcache.dtype != kcache.dtype or vcache.stride() != cs:
        raise fail("append", k=k, v=v, slot=slot, kcache=kcache, vcache=vcache)
    if not ks[2] == vs[2] == cs[2] == 1 or slot.shape != (t,) or slot.dtype != torch.int32 or not slot.is_contiguous():
        raise fail("append", k=k, v=v, slot=slot, kcache=kcache, vcache=vcache)
    if t == 0 or kv == 0:
        return
    wide = power_of_2(d)
    together = min(power_of_2(kv), max(1, 1024 // wide))
    blocks = -(-kv // together)
    launch(
        copy_rows, (t * blocks,), k, ks[0], ks[1], v, vs[0], vs[1], slot, kcache, vcache, cs[0], cs[1],
        kcache.shape[0], kv, d, blocks, HEADS=together, WIDTH=wide, num_warps=4,
    )  # fmt: skip


@triton.jit
def plan(row, tiles, tokens, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """tiles[0] = count, tiles[1..] = first token of each tile: where t % TILE is 0 or the row changes. One program."""
    await_inputs(PDL)
    count = 0
    for base in range(0, tokens, BLOCK):
        t = base + tl.arange(0, BLOCK)
        live = t < tokens
        mine = tl.load(row + t, mask=live, other=-1)
        before = tl.load(row + t - 1, mask=live & (t > 0), other=-1)
        opens = (live & ((mine != before) | (t % TILE == 0))).to(tl.int32)
        at = count + tl.cumsum(opens, axis=0)
        tl.store(tiles + at, t, mask=opens != 0)
        count += tl.sum(opens, axis=0)
    tl.store(tiles, count)


@triton.jit
def attend_tile(
    q, q_token, q_head, kcache, vcache, c_slot, c_head, pos, row, table, table_stride, out, out_token, out_head,
    partial, stats, counter, tiles, tokens, heads, factor, cap, sinks,
    KV: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr,
    EXACT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """KV heads of GROUP query heads, padded to PACK; a tile is ROWS // PACK tokens."""
    await_inputs(PDL)
    program = tl.program_id(0)
    head = program % KV
    part = (program // KV) % PARTS
    tile = program // (KV * PARTS)
    count = tl.load(tiles)
    if tile >= count:
        return
    first = tl.load(tiles + count - tile)  # from the last: later tokens of a prompt have the longest contexts
    last = tl.minimum(first - first % (ROWS // PACK) + ROWS // PACK, tokens)
    request = tl.load(row + first)
    lane = tl.arange(0, ROWS)
    token = first + lane // PACK
    query = lane % PACK
    live = token < last
    mine = live & (tl.load(row + token, mask=live, other=-1) == request) & (query < GROUP)
    place = tl.load(pos + token, mask=mine, other=-1)
    column = tl.arange(0, WIDTH)
    inside = mine[:, None] & (column < D)[None, :]
    index = head * GROUP + query
    o_at = out + token.to(tl.int64)[:, None] * out_token + index.to(tl.int64)[:, None] * out_head + column[None, :]
    kind = out.dtype.element_ty
    length = tl.max(place, axis=0) + 1
    if (request < 0) | (length <= 0):
        if part == 0:
            tl.store(o_at, tl.zeros([ROWS, WIDTH], kind), mask=inside)
        return
    nearest = tl.min(tl.where(mine, place, 2147483647), axis=0) + 1
    first_seen = tl.maximum(nearest - WINDOW, 0) if WINDOW > 0 else 0
    start, end, used = part_of(first_seen, length, part, KEYS, PARTS, LEAST)
    if part >= used:
        return
    # Steps up to `whole` are visible to every token of the tile; of a window's, none is taken to be.
    whole = start if WINDOW > 0 else start + tl.maximum(tl.minimum(end, nearest) - start, 0) // KEYS * KEYS
    q_at = q + token.to(tl.int64)[:, None] * q_token + index.to(tl.int64)[:, None] * q_head + column[None, :]
    queries = tl.load(q_at, mask=inside, other=0.0)
    if EXACT and kcache.dtype.element_ty == tl.float32:
        queries = queries.to(tl.float32)
    keys = kcache + head.to(tl.int64) * c_head
    values = vcache + head.to(tl.int64) * c_head
    pages = table + request.to(tl.int64) * table_stride
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    acc, total, most = span(
        acc, total, most, queries, place, keys, values, c_slot, pages, start, whole, length, factor, cap,
        D, WIDTH, PAGE, KEYS, False, EXACT, WINDOW, CAP,
    )  # fmt: skip
    acc, total, most = span(
        acc, total, most, queries, place, keys, values, c_slot, pages, whole, end, length, factor, cap,
        D, WIDTH, PAGE, KEYS, True, EXACT, WINDOW, CAP,
    )  # fmt: skip
    if PARTS > 1:  # noqa: SIM102 (the outer condition is a constant, the inner one is not)
        if used > 1:
            at = (token.to(tl.int64) * heads + index) * PARTS
            tl.store(partial + (at + part)[:, None] * D + column[None, :], acc, mask=inside)
            tl.store(stats + (at + part) * 2, most, mask=mine)
            tl.store(stats + (at + part) * 2 + 1, total, mask=mine)
            tl.debug_barrier()  # every thread's stores come before the release of the counter
            if tl.atomic_add(counter + first * KV + head, 1, sem="acq_rel") != used - 1:
                return
            tl.store(counter + first * KV + head, 0)
            acc, total, most = merged(partial, stats, at, used, column, mine, inside, ROWS, D, WIDTH)
    tl.store(o_at, settled(acc, total, most, sinks, index, mine, SINKS).to(kind), mask=inside)


#: Many contexts at once: blocks that a multiprocessor holds -> the rest of the tiling (heads of 128 columns). Contexts of
#: about one length end together, so the last round of blocks should be full.
HELD = {4: (32, 1, 2048, 2, 4), 5: (32, 1, 2048, 2, 3), 3: (64, 1, 2048, 4, 3)}


def fullness(items: int, slots: int) -> float:
    """What part of the blocks' rounds has work."""
    return items / (-(-items // slots) * slots)


def tiling_of(tokens: int, alone: bool, n: int, kv: int, d: int, exact: bool, slots: int) -> Tiling:
    """The tiling of a bucket of `tokens` tokens on a device of `slots` multiprocessors. `alone`: each token is a tile."""
    pack = power_of_2(n // kv)
    wide = power_of_2(d)
    limit = part_limit(tokens, n, d)
    if alone:
        keys = 16 if exact else (64 if wide <= 128 else 32)
        items = tokens * kv
        rows, wanting = max(16, pack), 4 * items < 3 * slots  # wanting: too few items for the device
        # One and a half blocks a multiprocessor, or two: with more the merge costs more than it gains, and one without work
        # costs its start. Short contexts are cut into fewer parts, the more so the more query heads a merge holds at once.
        if exact or wanting:
            short = keys if exact else (3 if pack >= 4 else 2) * keys
            parts = min(limit, 64, max(1, 3 * slots // (2 * items)))
            return Tiling(rows, keys, parts, short if wanting else 2048, 4, 1 if exact else 3)
        if items < slots:
            return Tiling(rows, min(keys, 32), min(limit, 4), 256, 2, 4)
        parts = min(limit, 64, max(1, 2 * slots // items))
        if items < 2 * slots:
            return Tiling(rows, keys, parts, 2048, 4, 4)
        held = max(HELD, key=lambda b: fullness(items, b * slots)) if wide == 128 else 4
        return Tiling(rows, *((min(keys, 32), parts, 2048, 2, 4) if held == 4 else HELD[held]))
    tile = max(pack, 16 if exact else (128 if wide <= 128 else 64))
    tiles = -(-tokens * pack // tile)
    parts = min(limit, even_splits(tiles * kv, slots, 8))
    if exact:
        return Tiling(tile, 16, parts, 1024, 8, 1)
    return Tiling(tile, 64, parts, 1024, 8 if tile >= 128 else 4, 3)


def check(
    q: Tensor, kcache: Tensor, vcache: Tensor, pos: Tensor, row: Tensor, table: Tensor, sinks: Tensor | None,
    *, page: int, out: Tensor,
) -> None:  # fmt: skip
    """ValueError that names the operands of `attend` whose shapes, dtypes or strides do not fit."""
    t, n, d = q.shape
    cs, ts = kcache.stride(), table.stride()
    if out.shape != q.shape or out.dtype != q.dtype or kcache.shape[2] != d or vcache.shape != kcache.shape:
        raise fail("attend", q=q, kcache=kcache, vcache=vcache, out=out)
    if n % kcache.shape[1] or q.dtype not in CODE or kcache.dtype not in CODE or vcache.dtype != kcache.dtype:
        raise fail("attend", q=q, kcache=kcache, vcache=vcache)
    if vcache.stride() != cs or not q.stride(2) == out.stride(2) == cs[2] == 1 or page < 1:
        raise fail("attend", q=q, kcache=kcache, vcache=vcache, out=out, page=page)
    if not pos.dtype == row.dtype == table.dtype == torch.int32 or pos.shape != (t,) or row.shape != (t,):
        raise fail("attend", pos=pos, row=row, table=table)
    if not (pos.is_contiguous() and row.is_contiguous() and (ts[1] == 1 or table.shape[1] == 1)):
        raise fail("attend", pos=pos, row=row, table=table)
    if sinks is not None and (sinks.shape != (n,) or sinks.dtype not in CODE or not sinks.is_contiguous()):
        raise fail("attend", q=q, sinks=sinks)


def part_limit(tokens: int, n: int, d: int) -> int:
    """The most parts a context may be cut into so that the partial results of a call stay within PARTIAL_BYTES."""
    return max(1, PARTIAL_BYTES // (4 * (d + 2) * max(1, tokens * n)))


def attend(
    q: Tensor, kcache: Tensor, vcache: Tensor, pos: Tensor, row: Tensor, table: Tensor, sinks: Tensor | None = None,
    *, page: int, scale: float, window: int = 0, softcap: float = 0.0, out: Tensor, tiling: Tiling | None = None,
) -> None:  # fmt: skip
    """q, out f32|bf16 [T, n, D]; caches f32|bf16 [slots, KV, D]; pos, row i32 [T]; table i32 [S, L]; sinks f32|bf16 [n].

    Token t attends positions 0..pos[t] of request row[t], of a `window` above 0 the last ones; position p lies in slot
    table[row, p // page] * page + p % page. A token with row or position -1 gets zeros. Softmax in float32, scores bent by a
    `softcap` above 0. The tokens of one row are adjacent; where T <= S, and no chunks were
    announced (launch.with_chunks), each token is taken alone. `tiling` overrides the
    choice for the shape.
    """
    t, n, d = q.shape
    kv = kcache.shape[1]
    qs, os, cs, ts = q.stride(), out.stride(), kcache.stride(), table.stride()
    check(q, kcache, vcache, pos, row, table, sinks, page=page, out=out)
    if t == 0 or n == 0:
        return
    rows = table.shape[0]
    pack = power_of_2(n // kv)
    exact = q.dtype == torch.float32 or kcache.dtype == torch.float32 or q.device.type == "cpu"
    planned = has_chunks(t, rows)
    cut = tiling or tiling_of(t, not planned, n, kv, d, exact, processors(q.device))
    if cut.parts > 1:
        partial = scratch(q.device, "attend partial", t * n * cut.parts * d, torch.float32)
        stats = scratch(q.device, "attend stats", t * n * cut.parts * 2, torch.float32)
        counter = scratch(q.device, "attend counter", t * kv, torch.int32)
    else:
        partial = stats = counter = row
    shape = {
        "KV": kv, "GROUP": n // kv, "PACK": pack, "D": d, "WIDTH": max(16, power_of_2(d)), "PAGE": page, "ROWS": cut.rows,
        "KEYS": cut.keys, "PARTS": cut.parts, "LEAST": cut.least, "EXACT": exact, "num_warps": cut.warps,
        "num_stages": cut.stages, "WINDOW": window, "CAP": softcap > 0, "SINKS": sinks is not None,
    }  # fmt: skip
    factor, cap = (scale / softcap, softcap * LOG2_E) if softcap > 0 else (scale * LOG2_E, 0.0)
    beside = q if sinks is None else sinks
    if not planned:
        launch(
            decode_part, (t * kv * cut.parts,), q, qs[0], qs[1], kcache, vcache, cs[0], cs[1], pos, row, table, ts[0],
            out, os[0], os[1], partial, stats, counter, n, factor, cap, beside,
            TOGETHER=max(1, MERGE_ROWS // pack), WIDE=power_of_2(cut.parts), **shape,
        )  # fmt: skip
        return
    tile = max(1, cut.rows // pack)
    tiles = scratch(q.device, "attend tiles", t + 1, torch.int32)
    count = min(t, -(-t // tile) + 2 * rows + 1)
    launch(plan, (1,), row, tiles, t, TILE=tile, BLOCK=PLAN_BLOCK, num_warps=8)
    launch(
        attend_tile, (count * kv * cut.parts,), q, qs[0], qs[1], kcache, vcache, cs[0], cs[1], pos, row, table, ts[0],
        out, os[0], os[1], partial, stats, counter, tiles, t, n, factor, cap, beside, **shape,
    )  # fmt: skip
