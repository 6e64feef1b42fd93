"""linear on GPU for few rows: out[T, N] = x[T, K] @ w[N, K]^T + bias with T <= 64. Invariant: the weight is read once,
in tiles of output columns by parts of K that fill the device; parts leave float32 sums and the last one to finish adds
them in order, so results of one shape are the same bits from run to run, and a row's result depends on its own x alone.

The weight's tile is the left operand of the matrix product, so 16 columns of its right one serve a single row. (To ask
for the weight ahead, while the kernel before still runs, measured slower: it passes through L2 twice.)

linear_silu_mul is the product with a weight of two halves, gate and up, and silu(gate) * up of it: a tile takes its
columns from both halves in turn and rounds where the separate kernels do. (An RMS norm on the way in, and a residual add
behind, were tried and measured slower than their own kernels.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.attention.softmax import product
from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.launch import launch, power_of_2, processors, scratch

MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Tiling:
    """`columns` of the output and `depth` of K a step, at most `parts` parts of K."""

    columns: int
    depth: int
    parts: int
    warps: int
    stages: int


@triton.jit
def few_rows(
    x, x_stride, w, w_stride, bias, out, out_stride, partial, counter, tokens, columns, K, chunk,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    WHOLE: tl.constexpr, EXACT: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part p of K is [p * chunk, (p + 1) * chunk). WHOLE: columns and K are multiples of the tile. GATED: w is gate and up,
    `columns` rows each, taken in turn."""
    program = tl.program_id(0)
    tile = program // PARTS
    part = program % PARTS
    lane_c = tl.arange(0, COLUMNS)
    if GATED:
        column = tile * (COLUMNS // 2) + lane_c // 2
        place = column + lane_c % 2 * columns
    else:
        column = tile * COLUMNS + lane_c
        place = column
    token = tl.arange(0, TOKENS)
    lane = tl.arange(0, DEPTH)
    here = column < columns
    there = token < tokens
    w_row = w + place.to(tl.int64) * w_stride
    await_inputs(PDL)
    w_at = w_row[:, None] + lane[None, :]
    x_at = x + token.to(tl.int64)[None, :] * x_stride + lane[:, None]
    acc = tl.zeros([COLUMNS, TOKENS], tl.float32)
    for k in range(part * chunk, tl.minimum(part * chunk + chunk, K), DEPTH):
        if WHOLE:
            weights = tl.load(w_at + k, eviction_policy="evict_first")
            rows = tl.load(x_at + k, mask=there[None, :], other=0.0)
        else:
            left = lane < K - k
            weights = tl.load(w_at + k, mask=here[:, None] & left[None, :], other=0.0, eviction_policy="evict_first")
            rows = tl.load(x_at + k, mask=there[None, :] & left[:, None], other=0.0)
        acc += product(weights, rows, EXACT)
    inside = here[:, None] & there[None, :]
    if PARTS > 1:
        size = tokens * COLUMNS
        slab = partial + tile.to(tl.int64) * PARTS * size
        cell = token[None, :] * COLUMNS + lane_c[:, None]
        tl.store(slab + part * size + cell, acc, mask=there[None, :])
        tl.debug_barrier()  # every thread's stores come before the release of the counter
        if tl.atomic_add(counter + tile, 1, sem="acq_rel") != PARTS - 1:
            return
        tl.store(counter + tile, 0)
        acc = tl.zeros([COLUMNS, TOKENS], tl.float32)
        for other in tl.static_range(PARTS):
            acc += tl.load(slab + other * size + cell, mask=there[None, :], other=0.0, cache_modifier=".cg")
    if BIAS:
        acc += tl.load(bias + place, mask=here, other=0.0).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    if GATED:
        both = acc.to(kind).to(tl.float32).reshape(COLUMNS // 2, 2, TOKENS).permute(0, 2, 1)
        gate, up = tl.split(both)
        act = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        half = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        target = out + token.to(tl.int64)[None, :] * out_stride + half[:, None]
        tl.store(target, (act * up).to(kind), mask=(half < columns)[:, None] & there[None, :])
    else:
        target = out + token.to(tl.int64)[None, :] * out_stride + column[:, None]
        tl.store(target, acc.to(kind), mask=inside)


STREAM, DEVICE = 48.0, 4000.0  # KB/us that one block takes in, and all together (measured on an H200)


def tiling_of(tokens: int, n: int, k: int, exact: bool, slots: int) -> Tiling:
    """The tiling of a product of `tokens` rows with an [n, k] weight on a device of `slots` multiprocessors.

    Parts of K cost their merge, so there are no more of them than keep the memory busy.
    """
    if exact:
        columns, depth, warps, stages = 32, 32, 8, 1
    elif tokens > 16 and n >= 128 * slots:
        columns, depth, warps, stages = 128, 64, 4, 4
    else:
        columns, depth, warps, stages = 64, 128, 4, 4
    tiles = -(-n // columns)
    least, best = float("inf"), 1
    for parts in range(1, min(16, -(-k // depth)) + 1):
        waves = -(-tiles * parts // (2 * slots))
        block = 2 * columns * k / parts / 1024  # KB of weight
        merge = 1.3 + 0.03 * tokens + 0.05 * parts if parts > 1 else 0.0
        cost = max(2 * n * k / 1024 / DEVICE, waves * block / STREAM) + merge
        if cost < least:
            least, best = cost, parts
    return Tiling(columns, depth, best, warps, stages)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Tensor, tiling: Tiling | None = None) -> None:
    """x f32|bf16 [T, K], T <= 64 (or [T, ...] flattened), w f32|bf16 [N, K], bias [N] or None, out f32|bf16 [T, N]."""
    _run("linear", x, w, out, tiling, bias=bias)


def linear_silu_mul(x: Tensor, w: Tensor, *, out: Tensor, tiling: Tiling | None = None) -> None:
    """silu(x @ w[:F]^T) * (x @ w[F:]^T); x f32|bf16 [T, K], T <= 64, w f32|bf16 [2 F, K], out f32|bf16 [T, F]."""
    _run("linear_silu_mul", x, w, out, tiling, gated=True)


def _run(
    op: str, x: Tensor, w: Tensor, out: Tensor, tiling: Tiling | None, *, bias: Tensor | None = None, gated: bool = False,
) -> None:  # fmt: skip
    x = x.flatten(1) if x.dim() != 2 else x
    y = out if out.dim() == 2 else out.view(out.shape[0], -1)
    t, k = x.shape
    n = w.shape[0] // 2 if gated else w.shape[0]
    if w.shape[1] != k or y.shape != (t, n) or t > MAX_TOKENS or (gated and w.shape[0] % 2):
        raise fail(op, x=x, w=w, out=out)
    if x.dtype not in CODE or w.dtype not in CODE or y.dtype not in CODE:
        raise fail(op, x=x, w=w, out=out)
    if (k > 1 and not x.stride(1) == w.stride(1) == 1) or (n > 1 and y.stride(1) != 1):
        raise fail(op, x=x, w=w, out=out)
    if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
        raise fail(op, bias=bias, w=w)
    if t == 0 or n == 0:
        return
    exact = x.dtype != w.dtype or x.dtype == torch.float32 or x.device.type == "cpu"
    cut = tiling or tiling_of(t, w.shape[0], k, exact, processors(x.device))
    own = cut.columns // 2 if gated else cut.columns  # columns of the output in a tile
    tiles = -(-n // own)
    padded = max(16, power_of_2(t))
    steps = -(-max(1, k) // cut.depth)
    chunk = -(-steps // cut.parts) * cut.depth
    parts = max(1, -(-k // chunk))
    if parts > 1:
        partial = scratch(x.device, "linear partial", tiles * parts * cut.columns * t, torch.float32)
        counter = scratch(x.device, "linear counter", tiles, torch.int32)
    else:
        partial = counter = y
    whole = n % own == 0 and k % cut.depth == 0
    launch(
        few_rows, (tiles * parts,), x, x.stride(0), w, w.stride(0), w if bias is None else bias,
        y, y.stride(0), partial, counter, t, n, k, chunk,
        TOKENS=padded, COLUMNS=cut.columns, DEPTH=cut.depth, PARTS=parts, BIAS=bias is not None, WHOLE=whole,
        EXACT=exact, GATED=gated,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
