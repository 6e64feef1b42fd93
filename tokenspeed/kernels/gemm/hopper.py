# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportAssignmentType=false
# (Gluon's types are not Python's)
"""Products of many rows for Hopper, warp-specialised and persistent: one warp fetches steps of 64 columns of K by TMA into a
ring of shared memory, two warpgroups multiply 64 rows by 256 columns each. Every multiprocessor takes one tile of
128 x 256 after the other; while the end of a tile is written, the ring already fills for the next. Tiles seldom fill the
last round, so its steps of K and those of the round before are shared out evenly (Osama et al., Stream-K, 2301.03598).

linear_silu_mul takes a tile's columns from both halves of the weight, 128 of gate and 128 of up, and rounds where the
separate kernels do. Invariant: what is cut depends on the shape alone and the two parts of a tile are added in order of K,
so results are the same bits from run to run.

With dependent launch the first steps of the weight are fetched while the kernel before still runs.
"""

from __future__ import annotations

from typing import Any

import torch
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

from tokenspeed.kernels.arguments import fail
from tokenspeed.kernels.gemm import triton as portable
from tokenspeed.kernels.launch import launch, processors, scratch

ROWS = 128  # of a tile: two warpgroups of 64
HALF = 128  # columns of half a tile: of gate and of up, or one beside the other
STEP = 64  # columns of K: 128 bytes, the width of the shared-memory swizzle
STAGES = 4
GROUP = 16  # tiles of rows that are taken together, so that what runs at once shares rows and weights in L2
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _asm(CODE: gl.constexpr):
    gl.inline_asm_elementwise(CODE + " mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _await(flag):
    """Until `flag` is set: what was written before it was set is then seen."""
    while gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [flag.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    ) == 0:  # fmt: skip
        pass


@gluon.jit
def _share(tiles, whole, steps):
    """Of this program: (tiles that it takes whole, step from which and to which it takes the rest, pieces in all). The first
    `whole` tiles are taken in turn; the steps of the rest are one line, of which every program has an equal part."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    own = gl.maximum(whole - program + programs - 1, 0) // programs
    line = (tiles - whole) * steps
    start = program * line // programs
    end = (program + 1) * line // programs
    return own, start, end, own + gl.where(end > start, (end - 1) // steps - start // steps + 1, 0)


@gluon.jit
def _piece(i, own, start, end, whole, steps):
    """(tile, its first step, behind its last) of this program's piece i."""
    number = start // steps + i - own
    first = gl.where(i < own, 0, gl.maximum(start - number * steps, 0))
    last = gl.where(i < own, steps, gl.minimum(end - number * steps, steps))
    return gl.where(i < own, gl.program_id(0) + i * gl.num_programs(0), whole + number), first, last


@gluon.jit
def _place(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """(tile of rows, tile of columns) of a tile."""
    before = tile // (GROUP * column_tiles) * GROUP
    high = gl.minimum(row_tiles - before, GROUP)
    inside = tile % (GROUP * column_tiles)
    return before + inside % high, inside // high


@gluon.jit
def _fetch_weight(w, k, column, second, stage, halves, full, STEP: gl.constexpr):
    tma.async_copy_global_to_shared(w, [column, k * STEP], full.index(stage), halves.index(stage * 2))
    tma.async_copy_global_to_shared(w, [second + column, k * STEP], full.index(stage), halves.index(stage * 2 + 1))


@gluon.jit
def _fetch_rows(x, k, row, stage, x_ring, full, STEP: gl.constexpr):
    for half in gl.static_range(2):
        box = x_ring.index(stage * 2 + half)
        tma.async_copy_global_to_shared(x, [row + half * 64, k * STEP], full.index(stage), box)


@gluon.jit
def _fill(
    x, w, x_ring, halves, full, empty, row_tiles, column_tiles, whole, steps, second, columns,
    ROWS: gl.constexpr, HALF: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The steps of this program's pieces, in order. `second`: rows of w from a tile's first half to its second; `columns`:
    of the output in a tile."""
    BYTES: gl.constexpr = (ROWS + 2 * HALF) * STEP * 2
    own, start, end, pieces = _share(row_tiles * column_tiles, whole, steps)
    tile, first, last = _piece(0, own, start, end, whole, steps)
    row, column = _place(tile, row_tiles, column_tiles, GROUP)
    ahead = gl.minimum(last - first, STAGES)
    for k in range(ahead):
        mbarrier.expect(full.index(k), BYTES)
        _fetch_weight(w, first + k, column * columns, second, k, halves, full, STEP)
    if PDL:
        _asm("griddepcontrol.wait;")
    _asm("fence.proxy.async;")
    for k in range(ahead):
        _fetch_rows(x, first + k, row * ROWS, k, x_ring, full, STEP)
    done = 0
    for i in range(pieces):
        tile, first, last = _piece(i, own, start, end, whole, steps)
        row, column = _place(tile, row_tiles, column_tiles, GROUP)
        for k in range(gl.where(i == 0, ahead, 0), last - first):
            stage = (done + k) % STAGES
            mbarrier.wait(empty.index(stage), ((done + k) // STAGES) & 1 ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            _fetch_rows(x, first + k, row * ROWS, stage, x_ring, full, STEP)
            _fetch_weight(w, first + k, column * columns, second, stage, halves, full, STEP)
        done += last - first


@gluon.jit
def _write(value, out, row, column, staged):
    """A warpgroup's [64, HALF] through shared memory; what it wrote before has been read by then."""
    tma.store_wait(0)
    gl.thread_barrier()
    staged.store(value.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [row, column], staged)


@gluon.jit
def _cells(slab, HALF: gl.constexpr, layout: gl.constexpr):
    """Where a warpgroup keeps [64, HALF] of sums."""
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    return slab + row[:, None] * HALF + column[None, :]


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, x_ring, w_ring, full, empty, out, staged, sums, flags, row_tiles, column_tiles, whole, steps, columns,
    ROWS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """64 rows of every piece. One that begins within a tile leaves its sums for the program before, whose last piece begins
    that tile: that one adds them and ends the tile."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF, 16])
    mine = staged.index(WHICH)
    program = gl.program_id(0)
    own, start, end, pieces = _share(row_tiles * column_tiles, whole, steps)
    done = 0
    for i in range(pieces):
        tile, first, last = _piece(i, own, start, end, whole, steps)
        acc = gl.zeros([64, 2 * HALF], gl.float32, ACC)
        for k in range(last - first):
            stage = (done + k) % STAGES
            mbarrier.wait(full.index(stage), ((done + k) // STAGES) & 1)
            acc = warpgroup_mma(
                x_ring.index(stage * 2 + WHICH), w_ring.index(stage).permute((1, 0)), acc, is_async=True
            )  # fmt: skip
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((done + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        done += last - first
        mbarrier.arrive(empty.index((done - 1) % STAGES), count=1)
        left, right = gl.split(acc.reshape([64, 2, HALF]).permute((0, 2, 1)))
        layout: gl.constexpr = left.type.layout
        if first > 0:
            slab = sums + (program * 2 + WHICH) * (2 * 64 * HALF)
            gl.store(_cells(slab, HALF, layout), left)
            gl.store(_cells(slab + 64 * HALF, HALF, layout), right)
            gl.thread_barrier()
            gl.atomic_xchg(flags + program * 2 + WHICH, 1, sem="release", scope="gpu")
        else:
            if last < steps:
                slab = sums + ((program + 1) * 2 + WHICH) * (2 * 64 * HALF)
                flag = flags + (program + 1) * 2 + WHICH
                _await(flag)
                gl.thread_barrier()
                left += gl.load(_cells(slab, HALF, layout), cache_modifier=".cg")
                right += gl.load(_cells(slab + 64 * HALF, HALF, layout), cache_modifier=".cg")
                gl.store(flag, 0)
            row, column = _place(tile, row_tiles, column_tiles, GROUP)
            if GATED:
                gate = left.to(gl.bfloat16).to(gl.float32)
                up = right.to(gl.bfloat16).to(gl.float32)
                bent = (gate / (1.0 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32)
                _write(bent * up, out, row * ROWS + WHICH * 64, column * columns, mine)
            else:
                _write(left, out, row * ROWS + WHICH * 64, column * columns, mine)
                _write(right, out, row * ROWS + WHICH * 64, column * columns + HALF, mine)
    tma.store_wait(0)


@gluon.jit
def many_rows(
    x, w, out, sums, flags, row_tiles, column_tiles, whole, steps, second, columns,
    ROWS: gl.constexpr, HALF: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`whole`: tiles that are not cut. `sums`: two halves of 2 x 64 x HALF a program, `flags`: 2 a program, 0 before and after."""
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, ROWS // 2, STEP], shared)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * HALF, STEP], shared)
    halves = w_ring._reinterpret(gl.bfloat16, [STAGES * 2, HALF, STEP], shared)
    staged = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS // 2, HALF], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    if PDL:
        _asm("griddepcontrol.launch_dependents;")
    gl.warp_specialize(
        [
            (_multiply, (0, x_ring, w_ring, full, empty, out, staged, sums, flags, row_tiles, column_tiles, whole, steps,
                         columns, ROWS, HALF, STAGES, GROUP, GATED)),
            (_multiply, (1, x_ring, w_ring, full, empty, out, staged, sums, flags, row_tiles, column_tiles, whole, steps,
                         columns, ROWS, HALF, STAGES, GROUP, GATED)),
            (_fill, (x, w, x_ring, halves, full, empty, row_tiles, column_tiles, whole, steps, second, columns,
                     ROWS, HALF, STEP, STAGES, GROUP, PDL)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    """x bf16 [T, K] (or [T, ...] flattened), w bf16 [N, K], out bf16 [T, N]; no bias. Rows on 16 bytes."""
    if bias is not None:
        raise fail("linear", bias=bias)
    _run("linear", x, w, out, gated=False)


def linear_silu_mul(x: Tensor, w: Tensor, *, out: Tensor) -> None:
    """silu(x @ w[:F]^T) * (x @ w[F:]^T); x bf16 [T, K], w bf16 [2 F, K], out bf16 [T, F]. Rows on 16 bytes."""
    _run("linear_silu_mul", x, w, out, gated=True)


def _run(op: str, x: Tensor, w: Tensor, out: Tensor, *, gated: bool) -> None:
    x = x.flatten(1) if x.dim() != 2 else x
    y = out if out.dim() == 2 else out.view(out.shape[0], -1)
    t, k = x.shape
    n = w.shape[0] // 2 if gated else w.shape[0]
    if w.shape[1] != k or y.shape != (t, n) or (gated and w.shape[0] % 2):
        raise fail(op, x=x, w=w, out=out)
    if any(a.dtype != torch.bfloat16 or a.stride(1) != 1 or a.stride(0) % 8 for a in (x, w, y)):
        raise fail(op, x=x, w=w, out=out)
    if t == 0 or n == 0:
        return
    if x.device.type == "cpu":  # there is no interpreter for Gluon
        call = portable.linear_silu_mul if gated else portable.linear
        for at in range(0, t, portable.MAX_TOKENS):
            rows = slice(at, at + portable.MAX_TOKENS)
            call(x[rows], w, out=y[rows])
        return
    columns = HALF if gated else 2 * HALF
    row_tiles, column_tiles, steps = -(-t // ROWS), -(-n // columns), -(-k // STEP)
    tiles, programs = row_tiles * column_tiles, processors(x.device)
    whole = _whole(tiles, programs)
    sums = scratch(x.device, "linear sums", programs * ROWS * 2 * HALF, torch.float32)
    flags = scratch(x.device, "linear flags", programs * 2, torch.int32)
    launch(
        many_rows, (min(tiles, programs),), _boxes(x, ROWS // 2, STEP), _boxes(w, HALF, STEP), _boxes(y, ROWS // 2, HALF),
        sums, flags, row_tiles, column_tiles, whole, steps, n if gated else HALF, columns,
        ROWS=ROWS, HALF=HALF, STEP=STEP, STAGES=STAGES, GROUP=GROUP, GATED=gated, num_warps=4,
    )  # fmt: skip


def _whole(tiles: int, programs: int) -> int:
    """Of `tiles`, how many are taken whole. A last round that fills at most four fifths of the device is shared out, with the
    full round before it: then each program has more than one tile's worth, and at most two meet in a tile."""
    left = tiles % programs
    return tiles if tiles < programs or not left or left > 0.8 * programs else tiles - left - programs


def _boxes(a: Tensor, rows: int, columns: int) -> Any:
    """The TMA descriptor of a matrix, in boxes; zero beyond its edges, where nothing is written."""
    return TensorDescriptor(a, list(a.shape), list(a.stride()), [rows, columns], SHARED)
