# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportAssignmentType=false
# (Gluon's types are not Python's)
"""Prefill attention for Hopper, warp-specialised: one warp fetches pages of keys and values by TMA into a ring of shared
memory, two warpgroups of 64 rows each multiply and exponentiate. Invariant: it computes what attend_tile computes, on the
same tiles and parts, and leaves the merge of a tile's parts to `merge`.

Within a warpgroup the scores of the next step are multiplied while the weights of this one meet their values, so the
exponentials of one step hide behind the products of another. Steps run from the last to the first: only the leading ones
need a mask. Rows of the last page that lie past the context are zeroed in shared memory before they are multiplied: what
an earlier owner of the page left there, NaN included, counts for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenspeed.kernels.attention import triton as portable
from tokenspeed.kernels.attention.softmax import merged, part_of, settled
from tokenspeed.kernels.launch import has_chunks, launch, power_of_2, processors, scratch

ROWS = 128  # tokens times packed query heads of a tile: two warpgroups of 64
MERGED = 32  # rows of a tile that one program of `merge` takes
WIDE = 64  # columns of one TMA box: 128 bytes, the width of the shared-memory swizzle
KEYS = {64: 128, 128: 128, 256: 64}  # head width -> positions of a step
STAGES = {64: 3, 128: 3, 256: 2}  # head width -> steps in the ring
LEAST = 4096  # positions below which a context is not cut further
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _fetch(
    desc, pages, ids, column, stage, bar,
    PAGE: gl.constexpr, PAGES: gl.constexpr, CHUNKS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """One step's pages, a box of WIDE columns at a time, into their places of the ring; `bar` counts the bytes."""
    for j in gl.static_range(PAGES):
        for c in gl.static_range(CHUNKS):
            box = pages.index((stage * CHUNKS + c) * PAGES + j)
            tma.async_copy_global_to_shared(desc, [ids[j] * PAGE, column + c * WIDE], bar, box)


@gluon.jit
def _item(
    turn, count, parts, tiles, row, pos, tokens,
    KV: gl.constexpr, PACK: gl.constexpr, KEYS: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """What this program does in its `turn`: (first token, behind the last, request, head, part, parts used, where the part
    starts and ends, steps, steps that need a mask). Programs take turns back and forth over a list sorted by length, so
    that each gets about the same; one that is left without an item has no steps and no tokens."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    at = turn * programs + gl.where(turn % 2 == 1, programs - 1 - program, program)
    head = at % KV
    part = (at // KV) % parts
    tile = at // (KV * parts)
    here = tile < count
    first = gl.load(tiles + gl.maximum(count - tile, 1))  # from the last: later tokens have the longest contexts
    last = gl.where(here, gl.minimum(first - first % (128 // PACK) + 128 // PACK, tokens), 0)
    request = gl.load(row + first)
    lane = gl.arange(0, 128 // PACK, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    same = (first + lane < last) & (gl.load(row + first + lane, mask=first + lane < last, other=-1) == request)
    place = gl.load(pos + first + lane, mask=same & (request >= 0), other=-1)
    length = gl.max(place, axis=0) + 1
    nearest = gl.min(gl.where(same, place, 2147483647), axis=0) + 1
    start, end, used = part_of(0, gl.maximum(length, 1), part, KEYS, parts, LEAST)
    steps = gl.where(length > 0, gl.maximum(end - start + KEYS - 1, 0) // KEYS, 0)
    masked = steps - gl.maximum(gl.minimum(end, nearest) - start, 0) // KEYS
    return first, last, request, head, part, used, start, end, steps, masked


@gluon.jit
def _produce(
    kdesc, vdesc, k_pages, v_pages, v_atoms, kfull, kempty, vfull, vempty, tail,
    row, pos, table, table_stride, c_head, tiles, tokens, parts,
    KV: gl.constexpr, PACK: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    LEAST: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Fills the ring, each item from its last step to its first."""
    PAGES: gl.constexpr = KEYS // PAGE
    CHUNKS: gl.constexpr = D // WIDE
    BYTES: gl.constexpr = KEYS * D * 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    lane = gl.arange(0, 8, gl.SliceLayout(1, layout))
    count = gl.load(tiles)
    done = 0
    tails = 0
    for turn in range(gl.cdiv(count * KV * parts, gl.num_programs(0))):
        _first, _last, request, head, _part, _used, start, end, steps, _masked = _item(
            turn, count, parts, tiles, row, pos, tokens, KV, PACK, KEYS, LEAST
        )
        column = head * c_head
        pages = table + gl.maximum(request, 0).to(gl.int64) * table_stride
        for i in range(steps):
            base = start + (steps - 1 - i) * KEYS
            ids = ()
            for j in gl.static_range(PAGES):
                ids += (gl.load(pages + gl.minimum(base + j * PAGE, end - 1) // PAGE),)
            stage = (done + i) % STAGES
            free = ((done + i) // STAGES) & 1 ^ 1
            mbarrier.wait(kempty.index(stage), free)
            mbarrier.expect(kfull.index(stage), BYTES)
            _fetch(kdesc, k_pages, ids, column, stage, kfull.index(stage), PAGE, PAGES, CHUNKS, WIDE)
            mbarrier.wait(vempty.index(stage), free)
            if base + KEYS > end:
                mbarrier.expect(tail, BYTES)
                _fetch(vdesc, v_pages, ids, column, stage, tail, PAGE, PAGES, CHUNKS, WIDE)
                mbarrier.wait(tail, tails & 1)
                tails += 1
                for late in range((end - base) // 8, KEYS // 8):
                    for c in gl.static_range(CHUNKS):
                        box = v_atoms.index((stage * CHUNKS + c) * (KEYS // 8) + late)
                        inside = (base + late * 8 + lane < end)[:, None]
                        box.store(gl.where(inside, box.load(layout), 0.0))
                fence_async_shared()
                mbarrier.arrive(vfull.index(stage), count=1)
            else:
                mbarrier.expect(vfull.index(stage), BYTES)
                _fetch(vdesc, v_pages, ids, column, stage, vfull.index(stage), PAGE, PAGES, CHUNKS, WIDE)
        done += steps


@gluon.jit
def _weigh(scores, most, total, place, base, factor, KEYS: gl.constexpr, MASKED: gl.constexpr):
    """(weights, most, total, by what the sums so far shrink) after one more step of scores."""
    layout: gl.constexpr = scores.type.layout
    if MASKED:
        at = base + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        scores = gl.where(at[None, :] <= place[:, None], scores, float("-inf"))
    peak = gl.maximum(most, gl.max(scores, axis=1))
    pivot = peak * factor
    if MASKED:  # a row without a visible key so far has peak -inf; keep -inf - -inf out
        pivot = gl.where(peak == float("-inf"), 0.0, pivot)
    shrink = gl.exp2(most * factor - pivot)
    weights = gl.exp2(scores * factor - pivot[:, None])
    return weights, peak, total * shrink + gl.sum(weights, axis=1), shrink


@gluon.jit
def _advance(
    done, i, weights, acc, most, total, place, q, k_ring, v_ring, kfull, kempty, vfull, vempty, start, steps, factor,
    KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Step i's scores beside step i - 1's values. `done`: steps of the items before."""
    stage = (done + i) % STAGES
    mbarrier.wait(kfull.index(stage), ((done + i) // STAGES) & 1)
    blank = gl.zeros([64, KEYS], gl.float32, SCORES)
    pending = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), blank, use_acc=False, is_async=True)
    before = (done + i - 1) % STAGES
    mbarrier.wait(vfull.index(before), ((done + i - 1) // STAGES) & 1)
    sums = warpgroup_mma(weights, v_ring.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[pending])
    mbarrier.arrive(kempty.index(stage), count=1)
    base = start + (steps - 1 - i) * KEYS
    new, most, total, shrink = _weigh(scores, most, total, place, base, factor, KEYS, MASKED)
    acc = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(vempty.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
    weights = gl.convert_layout(new.to(gl.bfloat16), gl.DotOperandLayout(0, SUMS, 2))
    return weights, acc, most, total


@gluon.jit
def _consume(
    HALF: gl.constexpr, q, q_token, q_head, q_tiles, k_ring, v_ring, kfull, kempty, vfull, vempty,
    row, pos, out, out_token, out_head, partial, stats, tiles, tokens, heads, parts, factor,
    KV: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    LEAST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 rows of every item: online softmax over the ring's steps, then their result or their part of it."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    count = gl.load(tiles)
    done = 0
    for turn in range(gl.cdiv(count * KV * parts, gl.num_programs(0))):
        first, last, request, head, part, used, start, _end, steps, masked = _item(
            turn, count, parts, tiles, row, pos, tokens, KV, PACK, KEYS, LEAST
        )
        r = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, LOADED))
        t = first + r // PACK
        there = (t < last) & (r % PACK < GROUP)
        at = t.to(gl.int64) * q_token + (head * GROUP + r % PACK).to(gl.int64) * q_head
        wide = gl.arange(0, D, gl.SliceLayout(0, LOADED))
        rows = gl.load(q + at[:, None] + wide[None, :], mask=there[:, None], other=0.0)
        gl.thread_barrier()  # the item before has been multiplied by every warp
        q_tiles.index(HALF).store(rows)
        fence_async_shared()
        gl.thread_barrier()
        lane = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        token = first + lane // PACK
        query = lane % PACK
        live = token < last
        mine = live & (gl.load(row + token, mask=live, other=-1) == request) & (query < GROUP)
        place = gl.load(pos + token, mask=mine, other=-1)
        acc = gl.zeros([64, D], gl.float32, SUMS)
        most = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        tile = q_tiles.index(HALF)
        if steps > 0:
            stage = done % STAGES
            mbarrier.wait(kfull.index(stage), (done // STAGES) & 1)
            blank = gl.zeros([64, KEYS], gl.float32, SCORES)
            pending = warpgroup_mma(tile, k_ring.index(stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[pending])
            mbarrier.arrive(kempty.index(stage), count=1)
            base = start + (steps - 1) * KEYS
            new, most, total, _shrink = _weigh(scores, most, total, place, base, factor, KEYS, True)
            weights = gl.convert_layout(new.to(gl.bfloat16), gl.DotOperandLayout(0, SUMS, 2))
            for i in range(1, masked):
                weights, acc, most, total = _advance(
                    done, i, weights, acc, most, total, place, tile, k_ring, v_ring, kfull, kempty, vfull, vempty,
                    start, steps, factor, KEYS, STAGES, True, SCORES, SUMS,
                )  # fmt: skip
            for i in range(gl.maximum(masked, 1), steps):
                weights, acc, most, total = _advance(
                    done, i, weights, acc, most, total, place, tile, k_ring, v_ring, kfull, kempty, vfull, vempty,
                    start, steps, factor, KEYS, STAGES, False, SCORES, SUMS,
                )  # fmt: skip
            done += steps
            final = (done - 1) % STAGES
            mbarrier.wait(vfull.index(final), ((done - 1) // STAGES) & 1)
            acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, v_ring.index(final), acc, is_async=True)])
            mbarrier.arrive(vempty.index(final), count=1)
        column = gl.arange(0, D, gl.SliceLayout(0, SUMS))
        o_token = gl.convert_layout(token, gl.SliceLayout(1, SUMS)).to(gl.int64)
        index = head * GROUP + gl.convert_layout(query, gl.SliceLayout(1, SUMS))
        inside = gl.convert_layout(mine, gl.SliceLayout(1, SUMS))[:, None]
        if used > 1:
            cell = (token.to(gl.int64) * heads + head * GROUP + query) * parts + part
            o_cell = (o_token * heads + index) * parts + part
            gl.store(partial + o_cell[:, None] * D + column[None, :], acc, mask=inside & (steps > 0))
            gl.store(stats + cell * 2, most * factor, mask=mine & (steps > 0))
            gl.store(stats + cell * 2 + 1, total, mask=mine & (steps > 0))
        else:
            norm = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, SUMS))
            target = out + o_token[:, None] * out_token + index.to(gl.int64)[:, None] * out_head + column[None, :]
            gl.store(target, (acc * norm[:, None]).to(gl.bfloat16), mask=inside & (part == 0))


@gluon.jit
def attend_hopper(
    q, q_token, q_head, kdesc, vdesc, c_head, pos, row, table, table_stride, out, out_token, out_head,
    partial, stats, tiles, tokens, heads, parts, factor,
    KV: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    KEYS: gl.constexpr, LEAST: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Items, one after the other: a tile of 128 // PACK tokens, the query heads of one KV head, one part of the context.
    One program a multiprocessor. `factor` has log2(e) in it."""
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], shared)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], shared)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], shared)
    k_pages = k_ring._reinterpret(gl.bfloat16, [STAGES * (D // WIDE) * (KEYS // PAGE), PAGE, WIDE], shared)
    v_pages = v_ring._reinterpret(gl.bfloat16, [STAGES * (D // WIDE) * (KEYS // PAGE), PAGE, WIDE], shared)
    v_atoms = v_ring._reinterpret(gl.bfloat16, [STAGES * (D // WIDE) * (KEYS // 8), 8, WIDE], shared)
    kfull = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    vfull = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kempty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    vempty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(kfull.index(s), count=1)
        mbarrier.init(vfull.index(s), count=1)
        mbarrier.init(kempty.index(s), count=2)
        mbarrier.init(vempty.index(s), count=2)
    mbarrier.init(tail, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, q, q_token, q_head, q_tiles, k_ring, v_ring, kfull, kempty, vfull, vempty,
                        row, pos, out, out_token, out_head, partial, stats, tiles, tokens, heads, parts, factor,
                        KV, GROUP, PACK, D, KEYS, LEAST, STAGES)),
            (_consume, (1, q, q_token, q_head, q_tiles, k_ring, v_ring, kfull, kempty, vfull, vempty,
                        row, pos, out, out_token, out_head, partial, stats, tiles, tokens, heads, parts, factor,
                        KV, GROUP, PACK, D, KEYS, LEAST, STAGES)),
            (_produce, (kdesc, vdesc, k_pages, v_pages, v_atoms, kfull, kempty, vfull, vempty, tail,
                        row, pos, table, table_stride, c_head, tiles, tokens, parts,
                        KV, PACK, PAGE, KEYS, D, LEAST, STAGES, WIDE)),
        ],
        [4, 1],
        [232, 48],
    )  # fmt: skip


@triton.jit
def merge(
    partial, stats, pos, row, out, out_token, out_head, tiles, tokens, heads, parts,
    KV: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
    LEAST: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """MERGED rows of a tile: the parts its context was cut into, weighted and summed in order. A tile of one part is done."""
    program = tl.program_id(0)
    head = program % KV
    block = (program // KV) % (128 // MERGED)
    tile = program // (KV * (128 // MERGED))
    count = tl.load(tiles)
    if tile >= count:
        return
    first = tl.load(tiles + count - tile)
    last = tl.minimum(first - first % (128 // PACK) + 128 // PACK, tokens)
    request = tl.load(row + first)
    if request < 0:
        return
    every = first + tl.arange(0, 128 // PACK)
    same = (every < last) & (tl.load(row + every, mask=every < last, other=-1) == request)
    length = tl.max(tl.load(pos + every, mask=same, other=-1), axis=0) + 1
    if length <= 0:
        return
    _, _, used = part_of(0, length, 0, KEYS, parts, LEAST)
    if used == 1:
        return
    lane = block * MERGED + tl.arange(0, MERGED)
    token = first + lane // PACK
    query = lane % PACK
    mine = (token < last) & (tl.load(row + token, mask=token < last, other=-1) == request) & (query < GROUP)
    index = head * GROUP + query
    column = tl.arange(0, D)
    at = (token.to(tl.int64) * heads + index) * parts
    acc, total, most = merged(partial, stats, at, used, column, mine, mine[:, None], MERGED, D, D)
    result = settled(acc, total, most, stats, index, mine, False)
    target = out + token.to(tl.int64)[:, None] * out_token + index.to(tl.int64)[:, None] * out_head + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mine[:, None])


def attend(
    q: Tensor, kcache: Tensor, vcache: Tensor, pos: Tensor, row: Tensor, table: Tensor, sinks: Tensor | None = None,
    *, page: int, scale: float, window: int = 0, softcap: float = 0.0, out: Tensor, parts: int = 0,
) -> None:  # fmt: skip
    """As attention.triton.attend, for bf16 throughout and heads of 64, 128 or 256. `parts`: most parts of a context.

    A step of one token a request, a window, sinks, bent scores, pages that do not divide a step, and rows that
    TMA cannot address take the portable kernels.
    """
    t, n, d = q.shape
    kv, rows, keys = kcache.shape[1], table.shape[0], KEYS[d]
    pack = power_of_2(n // kv)
    plain = sinks is None and window == 0 and softcap == 0
    if not plain or not has_chunks(t, rows) or pack > ROWS or not _fetches(kcache, vcache, page):
        portable.attend(
            q, kcache, vcache, pos, row, table, sinks, page=page, scale=scale, window=window, softcap=softcap, out=out
        )
        return
    portable.check(q, kcache, vcache, pos, row, table, None, page=page, out=out)
    tile = ROWS // pack
    tiles = scratch(q.device, "attend tiles", t + 1, torch.int32)
    count = min(t, -(-t // tile) + 2 * rows + 1)
    # Four waves or more, so that the last one, which is seldom full, weighs little.
    most = parts or min(portable.part_limit(t, n, d), max(1, -(-4 * processors(q.device) // (-(-t // tile) * kv))))
    partial = stats = tiles  # read by no one where a context has one part
    if most > 1:
        partial = scratch(q.device, "attend partial", t * n * most * d, torch.float32)
        stats = scratch(q.device, "attend stats", t * n * most * 2, torch.float32)
    qs, os = q.stride(), out.stride()
    cut = {"KV": kv, "GROUP": n // kv, "PACK": pack, "D": d, "KEYS": keys, "LEAST": LEAST}
    launch(portable.plan, (1,), row, tiles, t, TILE=tile, BLOCK=portable.PLAN_BLOCK, num_warps=8)
    launch(
        attend_hopper, (min(count * kv * most, processors(q.device)),), q, qs[0], qs[1], _pages(kcache, page), _pages(vcache, page),
        kcache.stride(1), pos, row, table, table.stride(0), out, os[0], os[1], partial, stats, tiles, t, n, most,
        scale * portable.LOG2_E, PAGE=page, STAGES=STAGES[d], WIDE=WIDE, num_warps=4, **cut,
    )  # fmt: skip
    if most > 1:
        launch(
            merge, (count * kv * (ROWS // MERGED),), partial, stats, pos, row, out, os[0], os[1], tiles, t, n, most,
            MERGED=MERGED, num_warps=4, **cut,
        )  # fmt: skip


def _pages(cache: Tensor, page: int) -> Any:
    """The TMA descriptor of a cache [slots, KV, D]: boxes of one page and WIDE columns of one head."""
    slots, kv, d = cache.shape
    slot, head, _ = cache.stride()
    return TensorDescriptor(cache, [slots, (kv - 1) * head + d], [slot, 1], [page, WIDE], SHARED)


def _fetches(kcache: Tensor, vcache: Tensor, page: int) -> bool:
    """Whether TMA can fetch pages of these caches: whole swizzle atoms of 8 rows that divide a step, rows on 16 bytes."""
    keys = KEYS[kcache.shape[2]]
    if page < 8 or page & (page - 1) or page > keys:
        return False
    return all(
        c.data_ptr() % 16 == 0 and c.stride(0) % 8 == 0 and c.stride(1) % 8 == 0 and 0 < c.shape[0] < 2**31
        for c in (kcache, vcache)
    )
