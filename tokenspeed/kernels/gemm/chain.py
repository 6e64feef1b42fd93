# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportAssignmentType=false
# (Gluon's types are not Python's)
"""What lies between two attentions of a dense decoder, for few rows, in one persistent kernel for Hopper: the product of the
heads, residual and norm, the gated MLP, residual and norm, and the next layer's product of queries, keys and values.

Invariant: it means the six kernels it stands for (kernels/fused.py, linear_chain). Two things differ within bfloat16: a
norm's weight is applied before the product and its root mean square behind it, so the product need not wait for a norm.

The weights are one stream. A warp fetches a block's own rows of all four weights into a ring of shared memory by TMA and
waits for nothing but room; with dependent launch it starts while attention still runs. Another warp fetches the few rows
of activations, as soon as all blocks have reached the barrier behind the product that makes them; the rest multiply.
Each column is the business of one block over all of K, so there are no partial sums to merge, and the results are the
same bits from run to run. All blocks must run at once: there is one a multiprocessor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenspeed.kernels.arguments import fail
from tokenspeed.kernels.gemm import triton as portable
from tokenspeed.kernels.launch import launch, power_of_2, processors, scratch
from tokenspeed.kernels.norm import triton as norm

MAX_TOKENS = 16
COLUMNS = 16  # of an output: what a block takes at a time
WARPS = 4
RING = 192 << 10  # bytes of shared memory, weights and rows
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@gluon.jit
def _asm(CODE: gl.constexpr):
    gl.inline_asm_elementwise(CODE + " mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _await(counter, target):
    """Until `target` blocks have arrived: what they had written is then seen."""
    while gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    ) < target:  # fmt: skip
        pass


@gluon.jit
def _fetch(desc, row, steps, done, ring, full, empty, STAGES: gl.constexpr, HELD: gl.constexpr, SLICES: gl.constexpr):
    """All of K of HELD rows from `row` on, a step at a time; the steps done after it."""
    for k in range(steps):
        stage = (done + k) % STAGES
        mbarrier.wait(empty.index(stage), ((done + k) // STAGES) & 1 ^ 1)
        mbarrier.expect(full.index(stage), SLICES * HELD * 64 * 2)
        tma.async_copy_global_to_shared(desc, [k * SLICES, row, 0], full.index(stage), ring.index(stage))
    return done + steps


@gluon.jit
def _weights(
    wo, wgu, wd, wq, ring, full, empty, h_units, f_units, q_units, o_steps, h_steps, f_steps, ffn,
    STAGES: gl.constexpr, COLUMNS: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """The stream of this block's rows of the weights, in the order in which they are multiplied."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    done = 0
    for u in range(program, h_units, programs):
        done = _fetch(wo, u * COLUMNS, o_steps, done, ring, full, empty, STAGES, COLUMNS, SLICES)
    for u in range(program, f_units, programs):
        done = _fetch(wgu, u * COLUMNS, h_steps, done, ring, full, empty, STAGES, COLUMNS, SLICES)
        done = _fetch(wgu, ffn + u * COLUMNS, h_steps, done, ring, full, empty, STAGES, COLUMNS, SLICES)
    for u in range(program, h_units, programs):
        done = _fetch(wd, u * COLUMNS, f_steps, done, ring, full, empty, STAGES, COLUMNS, SLICES)
    for u in range(program, q_units, programs):
        done = _fetch(wq, u * COLUMNS, h_steps, done, ring, full, empty, STAGES, COLUMNS, SLICES)


@gluon.jit
def _rows(
    y, normed, act, ring, full, empty, counter, h_units, f_units, q_units, o_steps, h_steps, f_steps,
    PDL: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """The activations beside each step of the weights; those of a product when every block has left the one before."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    done = 0
    if PDL:
        _asm("griddepcontrol.wait;")
    _asm("fence.proxy.async;")
    for _u in range(program, h_units, programs):
        done = _fetch(y, 0, o_steps, done, ring, full, empty, STAGES, TOKENS, SLICES)
    _await(counter, programs)
    _asm("fence.proxy.async;")
    for _u in range(program, f_units, programs):
        done = _fetch(normed, 0, h_steps, done, ring, full, empty, STAGES, TOKENS, SLICES)
        done = _fetch(normed, 0, h_steps, done, ring, full, empty, STAGES, TOKENS, SLICES)
    _await(counter, programs * 2)
    _asm("fence.proxy.async;")
    for _u in range(program, h_units, programs):
        done = _fetch(act, 0, f_steps, done, ring, full, empty, STAGES, TOKENS, SLICES)
    _await(counter, programs * 3)
    _asm("fence.proxy.async;")
    for _u in range(program, q_units, programs):
        done = _fetch(normed, 0, h_steps, done, ring, full, empty, STAGES, TOKENS, SLICES)


@gluon.jit
def _product(
    done, steps, w_ring, w_full, x_ring, x_full, empty,
    STAGES: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """f32 [COLUMNS, TOKENS] of one unit, each warp over its own slices of K, summed at the end; the steps done after it."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    acc = gl.zeros([SLICES, COLUMNS, TOKENS], gl.float32, ACC)
    for k in range(steps):
        stage = (done + k) % STAGES
        phase = ((done + k) // STAGES) & 1
        mbarrier.wait(w_full.index(stage), phase)
        a = w_ring.index(stage).load(gl.DotOperandLayout(0, ACC, 2))
        mbarrier.wait(x_full.index(stage), phase)
        b = x_ring.index(stage).permute((0, 2, 1)).load(gl.DotOperandLayout(1, ACC, 2))
        mbarrier.arrive(empty.index(stage), count=1)
        acc = mma_v2(a, b, acc)
    return gl.sum(acc, axis=0), done + steps


@gluon.jit
def _arrive(counter):
    """After everything that this block has written; how many had arrived before."""
    gl.thread_barrier()
    return gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def _ask(before, weight, unit, tokens, h, COLUMNS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """(residual [COLUMNS, TOKENS], norm's weight [COLUMNS]) of a unit: asked for before the product that `_add` adds."""
    column = unit * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    inside = (token < tokens)[None, :] & (column < h)[:, None]
    old = gl.load(before + token[None, :] * h + column[:, None], mask=inside, other=0.0)
    return old, gl.load(weight + column, mask=column < h, other=0.0)


@gluon.jit
def _add(value, unit, old, factor, total, normed, squares, tokens, h, COLUMNS: gl.constexpr, TOKENS: gl.constexpr):
    """old + value -> total; times the norm's weight -> normed; sums of squares of the unit's columns -> squares [TOKENS]."""
    layout: gl.constexpr = value.type.layout
    column = unit * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    inside = (token < tokens)[None, :] & (column < h)[:, None]
    at = token[None, :] * h + column[:, None]
    new = (old.to(gl.float32) + value.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16)
    gl.store(total + at, new, mask=inside)
    wide = new.to(gl.float32)
    gl.store(normed + at, (wide * factor.to(gl.float32)[:, None]).to(gl.bfloat16), mask=inside)
    gl.store(squares + unit * TOKENS + token, gl.sum(wide * wide, axis=0), mask=token < tokens)


@gluon.jit
def _parts(squares, units, TOKENS: gl.constexpr, UNITS: gl.constexpr):
    """The sums of squares [UNITS, TOKENS] of all blocks, past L1."""
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [32 // (TOKENS // 4), TOKENS // 4], [gl.num_warps(), 1], [1, 0])
    unit = gl.arange(0, UNITS, gl.SliceLayout(1, tile))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, tile))
    at = squares + unit[:, None] * TOKENS + token[None, :]
    return gl.load(at, mask=(unit < units)[:, None], other=0.0, cache_modifier=".cg")


@gluon.jit
def _inverse(parts, h, eps, LAYOUT: gl.constexpr):
    """1 / root mean square of every row, summed over the units in order."""
    return gl.convert_layout(1.0 / gl.sqrt(gl.sum(parts, axis=0) / h + eps), LAYOUT)


@gluon.jit
def _others(mine, done, counter, target, full, STAGES: gl.constexpr):
    """Until all blocks have left the product before. A block with work of its own (`mine`) sees it by the rows that `_rows`
    fetches behind its own wait, so that fewer warps ask the counter."""
    if mine:
        mbarrier.wait(full.index(done % STAGES), (done // STAGES) & 1)
    else:
        _await(counter, target)


@gluon.jit
def _multiply(
    w_ring, w_full, x_ring, x_full, empty, counter, before, weight1, weight2, total, normed, squares, act, out,
    tokens, h, ffn, columns, h_units, f_units, q_units, o_steps, h_steps, f_steps, eps,
    PDL: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr, SLICES: gl.constexpr,
    UNITS: gl.constexpr,
):  # fmt: skip
    """The four products and what follows each. A block without a unit of a product waits for the others all the same, so
    that it is not counted twice in one round."""
    FLAT: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8]))
    ROW: gl.constexpr = gl.SliceLayout(0, FLAT)
    program, programs = gl.program_id(0), gl.num_programs(0)
    token = gl.arange(0, TOKENS, ROW)
    lane = gl.arange(0, COLUMNS, gl.SliceLayout(1, FLAT))
    inverse = gl.zeros([TOKENS], gl.float32, ROW)
    second = squares + h_units * TOKENS
    done = 0
    if PDL:
        _asm("griddepcontrol.wait;")
    for u in range(program, h_units, programs):
        old, factor = _ask(before, weight1, u, tokens, h, COLUMNS, TOKENS, FLAT)
        value, done = _product(
            done, o_steps, w_ring, w_full, x_ring, x_full, empty, STAGES, COLUMNS, TOKENS, SLICES
        )  # fmt: skip
        _add(value, u, old, factor, total, normed, squares, tokens, h, COLUMNS, TOKENS)
    _arrive(counter)
    _others(program < f_units, done, counter, programs, x_full, STAGES)
    parts = _parts(squares, h_units, TOKENS, UNITS)
    for u in range(program, f_units, programs):
        gate, done = _product(done, h_steps, w_ring, w_full, x_ring, x_full, empty, STAGES, COLUMNS, TOKENS, SLICES)
        up, done = _product(done, h_steps, w_ring, w_full, x_ring, x_full, empty, STAGES, COLUMNS, TOKENS, SLICES)
        if u == program:
            inverse = _inverse(parts, h, eps, ROW)
        gate = (gate * inverse[None, :]).to(gl.bfloat16).to(gl.float32)
        up = (up * inverse[None, :]).to(gl.bfloat16).to(gl.float32)
        bent = (gate / (1.0 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32)
        column = u * COLUMNS + lane
        inside = (token < tokens)[None, :] & (column < ffn)[:, None]
        gl.store(act + token[None, :] * ffn + column[:, None], (bent * up).to(gl.bfloat16), mask=inside)
    _arrive(counter)
    for u in range(program, h_units, programs):
        old, factor = _ask(total, weight2, u, tokens, h, COLUMNS, TOKENS, FLAT)
        value, done = _product(
            done, f_steps, w_ring, w_full, x_ring, x_full, empty, STAGES, COLUMNS, TOKENS, SLICES
        )  # fmt: skip
        _add(value, u, old, factor, total, normed, second, tokens, h, COLUMNS, TOKENS)
    if program >= h_units:
        _await(counter, programs * 2)
    _arrive(counter)
    _others(program < q_units, done, counter, programs * 3, x_full, STAGES)
    parts = _parts(second, h_units, TOKENS, UNITS)
    for u in range(program, q_units, programs):
        value, done = _product(
            done, h_steps, w_ring, w_full, x_ring, x_full, empty, STAGES, COLUMNS, TOKENS, SLICES
        )  # fmt: skip
        if u == program:
            inverse = _inverse(parts, h, eps, ROW)
        column = u * COLUMNS + lane
        inside = (token < tokens)[None, :] & (column < columns)[:, None]
        at = token[None, :] * columns + column[:, None]
        gl.store(out + at, (value * inverse[None, :]).to(gl.bfloat16), mask=inside)
    if _arrive(counter) == programs * 4 - 1:  # everyone has passed every wait
        gl.store(counter, 0)


@gluon.jit
def between_attentions(
    before, weight1, weight2, total, normed, squares, act, out, counter, wo, wgu, wd, wq, y_rows, h_rows, f_rows,
    tokens, h, ffn, columns, h_units, f_units, q_units, o_steps, h_steps, f_steps, eps,
    STAGES: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr, SLICES: gl.constexpr, UNITS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """*_units: blocks of COLUMNS columns of h, ffn and `columns`; *_steps: steps of 64 SLICES columns of K. `squares` has two
    halves of h_units rows of TOKENS; `counter` is 0 before and after. UNITS >= h_units, a power of two."""
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SLICES, COLUMNS, 64], shared)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SLICES, TOKENS, 64], shared)
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(w_full.index(s), count=1)
        mbarrier.init(x_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    if PDL:
        _asm("griddepcontrol.launch_dependents;")
    gl.warp_specialize(
        [
            (_multiply, (w_ring, w_full, x_ring, x_full, empty, counter, before, weight1, weight2, total, normed, squares,
                         act, out, tokens, h, ffn, columns, h_units, f_units, q_units, o_steps, h_steps, f_steps, eps,
                         PDL, STAGES, COLUMNS, TOKENS, SLICES, UNITS)),
            (_weights, (wo, wgu, wd, wq, w_ring, w_full, empty, h_units, f_units, q_units, o_steps, h_steps, f_steps, ffn,
                        STAGES, COLUMNS, SLICES)),
            (_rows, (y_rows, h_rows, f_rows, x_ring, x_full, empty, counter, h_units, f_units, q_units,
                     o_steps, h_steps, f_steps, PDL, STAGES, TOKENS, SLICES)),
        ],
        [1, 1],
        [40, 40],
    )  # fmt: skip


def linear_chain(
    y: Tensor, wo: Tensor, x: Tensor, weight1: Tensor, wgu: Tensor, wd: Tensor, weight2: Tensor, wq: Tensor,
    *, eps: float, out: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """out = (total [T, H], next [T, N]), all bf16, T <= 16; K of every product a multiple of 64.

    total = s + linear(silu(gate) * up) with s = x + linear(y, wo) and gate, up = linear(rms_norm(s, weight1), wgu);
    next = linear(rms_norm(total, weight2), wq). y [T, K], x [T, H], wo [H, K], wgu [2 F, H], wd [H, F], wq [N, H].
    Where there is no device it runs the portable kernels, one after the other.
    """
    total, following = out
    y = y.flatten(1)
    (t, k), h, ffn, n = y.shape, wo.shape[0], wd.shape[1], wq.shape[0]
    shapes = (wo.shape == (h, k), x.shape == total.shape == (t, h), weight1.shape == weight2.shape == (h,))
    widths = (wgu.shape == (2 * ffn, h), wd.shape == (h, ffn), wq.shape == (n, h), following.shape == (t, n))
    if not all((*shapes, *widths)) or k % 64 or h % 64 or ffn % 64 or t > MAX_TOKENS:
        raise fail("linear_chain", y=y, wo=wo, x=x, wgu=wgu, wd=wd, wq=wq, total=total, out=following)
    every = (y, wo, x, weight1, wgu, wd, weight2, wq, total, following)
    if any(a.dtype != torch.bfloat16 or not a.is_contiguous() for a in every):
        raise fail("linear_chain", y=y, wo=wo, x=x, wgu=wgu, wd=wd, wq=wq, total=total, out=following)
    if t == 0:
        return
    normed = scratch(y.device, "chain normed", MAX_TOKENS * h, torch.bfloat16)[: t * h].view(t, h)
    act = scratch(y.device, "chain act", MAX_TOKENS * ffn, torch.bfloat16)[: t * ffn].view(t, ffn)
    if y.device.type == "cpu":
        branch = torch.empty_like(x)
        portable.linear(y, wo, out=branch)
        norm.add_rms_norm(x, branch, weight1, eps=eps, out=(total, normed))
        portable.linear_silu_mul(normed, wgu, out=act)
        portable.linear(act, wd, out=branch)
        norm.add_rms_norm(total, branch, weight2, eps=eps, out=(total, normed))
        portable.linear(normed, wq, out=following)
        return
    padded, slices = 8 if t <= 8 else 16, _slices(h)
    stages = RING // (slices * (COLUMNS + padded) * 128)
    units = -(-h // COLUMNS)
    squares = scratch(y.device, "chain squares", 2 * units * MAX_TOKENS, torch.float32)
    counter = scratch(y.device, "chain counter", 1, torch.int32)
    launch(
        between_attentions, (processors(y.device),), x, weight1, weight2, total, normed, squares, act, following, counter,
        *(_boxes(w, slices, COLUMNS) for w in (wo, wgu, wd, wq)), *(_boxes(a, slices, padded) for a in (y, normed, act)),
        t, h, ffn, n, units, -(-ffn // COLUMNS), -(-n // COLUMNS), *(-(-a // (64 * slices)) for a in (k, h, ffn)), eps,
        STAGES=stages, COLUMNS=COLUMNS, TOKENS=padded, SLICES=slices, UNITS=power_of_2(units), num_warps=WARPS,
    )  # fmt: skip


def _slices(h: int) -> int:
    """Of 64 columns of K, in a step of the ring: large steps cost fewer waits, small ones start sooner and leave less over."""
    return 16 if h <= 2048 else 8


def _boxes(a: Tensor, slices: int, rows: int) -> Any:
    """The TMA descriptor of a [R, K] as [K / 64, R, 64]: boxes of `slices` x `rows` x 64, zero beyond the edges."""
    n, k = a.shape
    return TensorDescriptor(a, [k // 64, n, 64], [64, a.stride(0), 1], [slices, rows, 64], LAYOUT)
