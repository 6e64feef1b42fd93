# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# (CuTe DSL is an extra, and its types are not Python's)
"""RMS norm in CuTe DSL, with and without a residual add. Invariant: a block holds a row in registers, reads it once in
vectors of 16 bytes, and rounds where norm/triton.py rounds. Imported only where kernels are made.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

from tokenspeed.kernels.cute import Build
from tokenspeed.kernels.norm.cute import VECTOR, threads_of

WIDTHS = (1024, 2048, 2560, 3072, 4096, 5120, 7168, 8192)  # hidden sizes of the models that are here


@cute.kernel
def rms_rows(
    x: cute.Pointer, y: cute.Pointer, w: cute.Pointer, total: cute.Pointer, normed: cute.Pointer, eps: Float32,
    width: cutlass.Constexpr, threads: cutlass.Constexpr, add: cutlass.Constexpr,
):  # fmt: skip
    """A block a row of bf16 [rows, width]. add: x + y -> total, and the norm is that of the sum as rounded."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    warp = cute.arch.warp_idx()  # asks the whole warp, so never where lanes have parted
    sums = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((32,)))
    turns = width // (threads * VECTOR)
    dealt = cute.make_layout((VECTOR, threads, turns), stride=(1, VECTOR, VECTOR * threads))
    start = cute.assume(Int64(row) * width, divby=VECTOR)
    source, target = cute.make_tensor(x + start, dealt), cute.make_tensor(normed + start, dealt)
    weight = cute.make_tensor(w, dealt)
    held = cute.make_rmem_tensor((VECTOR, turns), BFloat16)
    factor = cute.make_rmem_tensor((VECTOR, turns), BFloat16)
    for j in cutlass.range_constexpr(turns):
        cute.autovec_copy(source[None, thread, j], held[None, j])
    if cutlass.const_expr(add):
        other, into = cute.make_tensor(y + start, dealt), cute.make_tensor(total + start, dealt)
        for j in cutlass.range_constexpr(turns):
            cute.autovec_copy(other[None, thread, j], factor[None, j])
        held.store((held.load().to(Float32) + factor.load().to(Float32)).to(BFloat16))
        for j in cutlass.range_constexpr(turns):
            cute.autovec_copy(held[None, j], into[None, thread, j])
    for j in cutlass.range_constexpr(turns):
        cute.autovec_copy(weight[None, thread, j], factor[None, j])
    wide = held.load().to(Float32)
    mine = cute.arch.warp_reduction_sum((wide * wide).reduce(cute.ReductionOp.ADD, Float32(0.0), 0))
    if cute.arch.lane_idx() == 0:
        sums[warp] = mine
    cute.arch.sync_threads()
    squares = Float32(0.0)
    for i in cutlass.range_constexpr(threads // 32):
        squares += sums[i]
    inverse = cute.math.rsqrt(squares / width + eps)
    rounded = (wide * inverse).to(BFloat16).to(Float32)
    held.store((rounded * factor.load().to(Float32)).to(BFloat16))
    for j in cutlass.range_constexpr(turns):
        cute.autovec_copy(held[None, j], target[None, thread, j])


def rms(width: int, add: int) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches rms_rows at a width, and arguments of its types."""
    threads = threads_of(width)

    @cute.jit
    def over_rows(
        x: cute.Pointer, y: cute.Pointer, w: cute.Pointer, total: cute.Pointer, normed: cute.Pointer, eps: Float32,
        rows: Int32,
    ):  # fmt: skip
        kernel = rms_rows(x, y, w, total, normed, eps, width, threads, bool(add))
        kernel.launch(grid=(rows, 1, 1), block=(threads, 1, 1))

    pointers = [make_ptr(BFloat16, 16, cute.AddressSpace.gmem, assumed_align=16) for _ in range(5)]
    return over_rows, (*pointers, Float32(1e-6), Int32(1))


BUILDS = {"rms": Build(rms, tuple((width, add) for width in WIDTHS for add in (0, 1)))}
