# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# (Gluon's types are not Python's)
"""gate and up of many rows for Hopper, with the activation behind them, warp-specialised and persistent: one warp fetches
steps of 64 columns of K by TMA into a ring of shared memory, two warpgroups multiply 64 rows by 256 columns each, 128 of
gate and 128 of up, and round where the separate kernels do. Every multiprocessor takes one tile after the other; while the
end of one is written, the ring already fills for the next.

Invariant: a tile is the business of one block over all of K, so results are the same bits from run to run, and a row's
result depends on its own x alone. (To share out the steps of a last round that is not full, Stream-K, was tried with
256 to 512 rows: within 3 %, since the products are bound by power and what is shared out is read and written again.)

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
from tokenspeed.kernels.launch import launch, processors

ROWS = 128  # of a tile: two warpgroups of 64
COLUMNS = 128  # of the output in a tile, and of gate and of up
STEP = 64  # columns of K: 128 bytes, the width of the shared-memory swizzle
STAGES = 4
GROUP = 16  # tiles of rows that are taken together, so that what runs at once shares rows and weights in L2
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _asm(CODE: gl.constexpr):
    gl.inline_asm_elementwise(CODE + " mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _place(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """(tile of rows, tile of columns) of a tile."""
    before = tile // (GROUP * column_tiles) * GROUP
    high = gl.minimum(row_tiles - before, GROUP)
    inside = tile % (GROUP * column_tiles)
    return before + inside % high, inside // high


@gluon.jit
def _fetch_weight(w, k, column, ffn, stage, halves, full, STEP: gl.constexpr):
    tma.async_copy_global_to_shared(w, [column, k * STEP], full.index(stage), halves.index(stage * 2))
    tma.async_copy_global_to_shared(w, [ffn + column, k * STEP], full.index(stage), halves.index(stage * 2 + 1))


@gluon.jit
def _fetch_rows(x, k, row, stage, x_ring, full, STEP: gl.constexpr):
    for half in gl.static_range(2):
        box = x_ring.index(stage * 2 + half)
        tma.async_copy_global_to_shared(x, [row + half * 64, k * STEP], full.index(stage), box)


@gluon.jit
def _fill(
    x, w, x_ring, halves, full, empty, row_tiles, column_tiles, steps, ffn,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The steps of this block's tiles, in order."""
    BYTES: gl.constexpr = (ROWS + 2 * COLUMNS) * STEP * 2
    program = gl.program_id(0)
    ahead = gl.minimum(steps, STAGES)
    row, column = _place(program, row_tiles, column_tiles, GROUP)
    for k in range(ahead):
        mbarrier.expect(full.index(k), BYTES)
        _fetch_weight(w, k, column * COLUMNS, ffn, k, halves, full, STEP)
    if PDL:
        _asm("griddepcontrol.wait;")
    _asm("fence.proxy.async;")
    for k in range(ahead):
        _fetch_rows(x, k, row * ROWS, k, x_ring, full, STEP)
    done = 0
    for tile in range(program, row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, column_tiles, GROUP)
        for k in range(gl.where(tile == program, ahead, 0), steps):
            stage = (done + k) % STAGES
            mbarrier.wait(empty.index(stage), ((done + k) // STAGES) & 1 ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            _fetch_rows(x, k, row * ROWS, stage, x_ring, full, STEP)
            _fetch_weight(w, k, column * COLUMNS, ffn, stage, halves, full, STEP)
        done += steps


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, x_ring, w_ring, full, empty, out, staged, row_tiles, column_tiles, steps,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile; the result goes through shared memory."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    mine = staged.index(WHICH)
    done = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        acc = gl.zeros([64, 2 * COLUMNS], gl.float32, ACC)
        for k in range(steps):
            stage = (done + k) % STAGES
            mbarrier.wait(full.index(stage), ((done + k) // STAGES) & 1)
            acc = warpgroup_mma(
                x_ring.index(stage * 2 + WHICH), w_ring.index(stage).permute((1, 0)), acc, is_async=True
            )  # fmt: skip
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((done + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        done += steps
        mbarrier.arrive(empty.index((done - 1) % STAGES), count=1)
        gate, up = gl.split(acc.to(gl.bfloat16).to(gl.float32).reshape([64, 2, COLUMNS]).permute((0, 2, 1)))
        bent = (gate / (1.0 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32)
        row, column = _place(tile, row_tiles, column_tiles, GROUP)
        tma.store_wait(0)  # of the tile before
        gl.thread_barrier()
        mine.store((bent * up).to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [row * ROWS + WHICH * 64, column * COLUMNS], mine)
    tma.store_wait(0)


@gluon.jit
def many_rows(
    x, w, out, row_tiles, column_tiles, steps, ffn,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, ROWS // 2, STEP], shared)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * COLUMNS, STEP], shared)
    halves = w_ring._reinterpret(gl.bfloat16, [STAGES * 2, COLUMNS, STEP], shared)
    staged = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS // 2, COLUMNS], shared)
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
            (_multiply, (0, x_ring, w_ring, full, empty, out, staged, row_tiles, column_tiles, steps,
                         ROWS, COLUMNS, STAGES, GROUP)),
            (_multiply, (1, x_ring, w_ring, full, empty, out, staged, row_tiles, column_tiles, steps,
                         ROWS, COLUMNS, STAGES, GROUP)),
            (_fill, (x, w, x_ring, halves, full, empty, row_tiles, column_tiles, steps, ffn,
                     ROWS, COLUMNS, STEP, STAGES, GROUP, PDL)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def linear_silu_mul(x: Tensor, w: Tensor, *, out: Tensor) -> None:
    """silu(x @ w[:F]^T) * (x @ w[F:]^T); x bf16 [T, K], w bf16 [2 F, K], out bf16 [T, F]; rows a multiple of 16 bytes.

    Where there is no device it runs the portable kernel, a few rows at a time.
    """
    (t, k), n = x.shape, out.shape[1]
    if w.shape != (2 * n, k) or out.shape[0] != t:
        raise fail("linear_silu_mul", x=x, w=w, out=out)
    if any(a.dtype != torch.bfloat16 or a.stride(1) != 1 or a.stride(0) % 8 for a in (x, w, out)):
        raise fail("linear_silu_mul", x=x, w=w, out=out)
    if t == 0 or n == 0:
        return
    if x.device.type == "cpu":
        for at in range(0, t, portable.MAX_TOKENS):
            rows = slice(at, at + portable.MAX_TOKENS)
            portable.linear_silu_mul(x[rows], w, out=out[rows])
        return
    row_tiles, column_tiles = -(-t // ROWS), -(-n // COLUMNS)
    launch(
        many_rows, (min(row_tiles * column_tiles, processors(x.device)),),
        _boxes(x, ROWS // 2, STEP), _boxes(w, COLUMNS, STEP), _boxes(out, ROWS // 2, COLUMNS),
        row_tiles, column_tiles, -(-k // STEP), n,
        ROWS=ROWS, COLUMNS=COLUMNS, STEP=STEP, STAGES=STAGES, GROUP=GROUP, num_warps=4,
    )  # fmt: skip


def _boxes(a: Tensor, rows: int, columns: int) -> Any:
    """The TMA descriptor of a matrix, in boxes; zero beyond its edges, where nothing is written."""
    return TensorDescriptor(a, list(a.shape), list(a.stride()), [rows, columns], SHARED)
