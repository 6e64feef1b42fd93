"""The two ends of a captured step on GPU. Invariant: a step's graph takes no argument: it reads its inputs from, and writes
its tokens to, the slot of a ring in pinned host memory that a counter on the device names; `end_step` moves the counter
on, so that as many steps may be in flight as the ring has slots, less one.

A slot of the inputs is int32: `HEADER` words (the first is the width w of the block table), then of T tokens and S rows
ids, pos, slot, row [T], last, request slots [S], params [S, 16], table [S, w]; where layers see a window, window slot [T] behind
row, and window table [S, w] behind table.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.dependent import await_inputs
from tokenspeed.kernels.launch import launch, power_of_2

HEADER = 16
PARAM_WORDS = 16
BLOCK = 1024


def slot_words(tokens: int, rows: int, width: int, windowed: bool = False) -> int:
    """int32 words that the inputs of a step take at most."""
    return HEADER + (4 + windowed) * tokens + (2 + PARAM_WORDS + (1 + windowed) * width) * rows


@triton.jit
def unpack(
    counter, ring, slot_size, slots, ids, pos, slot, row, last, request, words, table, table_stride, window_slot,
    window_table, sampled, T, S, blocks,
    HEAD: tl.constexpr, WORDS: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. blocks - 1 take a block of tokens each, the others one row."""
    await_inputs(PDL)
    program = tl.program_id(0)
    source = ring + (tl.load(counter) % slots).to(tl.int64) * slot_size
    lane = tl.arange(0, BLOCK)
    tokens = source + HEAD
    if program < blocks:
        t = program * BLOCK + lane
        inside = t < T
        token = tl.load(tokens + t, mask=inside, other=-1)
        waits = inside & (token < 0)  # sampled by a step that may still be in flight, for request slot -1 - token
        tl.store(ids + t, tl.where(waits, tl.load(sampled - token - 1, mask=waits, other=0), token), mask=inside)
        tl.store(pos + t, tl.load(tokens + T + t, mask=inside, other=-1), mask=inside)
        tl.store(slot + t, tl.load(tokens + 2 * T + t, mask=inside, other=-1), mask=inside)
        tl.store(row + t, tl.load(tokens + 3 * T + t, mask=inside, other=-1), mask=inside)
        if WINDOWED:
            tl.store(window_slot + t, tl.load(tokens + 4 * T + t, mask=inside, other=-1), mask=inside)
    else:
        s = program - blocks
        rows = tokens + (4 + WINDOWED) * T
        tl.store(last + s, tl.load(rows + s))
        tl.store(request + s, tl.load(rows + S + s))
        word = tl.arange(0, WORDS)
        tl.store(words + s * WORDS + word, tl.load(rows + 2 * S + s * WORDS + word))
        width = tl.load(source)
        pages = rows + (2 + WORDS) * S + s * width
        for base in range(0, width, BLOCK):
            page = tl.load(pages + base + lane, mask=base + lane < width, other=0)
            tl.store(table + s.to(tl.int64) * table_stride + base + lane, page, mask=base + lane < width)
            if WINDOWED:
                page = tl.load(pages + S * width + base + lane, mask=base + lane < width, other=0)
                tl.store(window_table + s.to(tl.int64) * table_stride + base + lane, page, mask=base + lane < width)


@triton.jit
def finish(tokens, last, request, sampled, ring, slot_size, slots, counter, S, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: tokens to the host and, for rows that sampled, to their request slots; the counter moves on."""
    await_inputs(PDL)
    turn = tl.load(counter)
    s = tl.arange(0, BLOCK)
    inside = s < S
    token = tl.load(tokens + s, mask=inside, other=0)
    place = tl.load(request + s, mask=inside, other=-1)
    samples = inside & (place >= 0) & (tl.load(last + s, mask=inside, other=-1) >= 0)
    tl.store(sampled + place, token, mask=samples)
    tl.store(ring + (turn % slots).to(tl.int64) * slot_size + s, token, mask=inside)
    tl.debug_barrier()
    tl.store(counter, (turn + 1) % slots)


def begin_step(
    ring: Tensor, counter: Tensor, ports: dict[str, Tensor], sampled: Tensor, tokens: int, rows: int
) -> None:
    """Slot `counter` of ring i32 [slots, words] (pinned) into the ports' first `tokens` and `rows` entries.

    ports: ids, pos, slot, row i32 [>= T], last, request_slots [>= S], params [>= S, 16], table [>= S, L], and where layers see a
    window window_slot and window_table, as slot and table; an id -1 - r stands for sampled[r], i32. counter i32 [1].
    """
    blocks = -(-tokens // BLOCK)
    p, windowed = ports, "window_table" in ports
    near = (p["window_slot"], p["window_table"]) if windowed else (p["slot"], p["table"])
    launch(
        unpack, (blocks + rows,), counter, ring, ring.stride(0), ring.shape[0], p["ids"], p["pos"], p["slot"], p["row"],
        p["last"], p["request_slots"], p["params"], p["table"], p["table"].stride(0), *near, sampled, tokens, rows,
        blocks, HEAD=HEADER, WORDS=PARAM_WORDS, WINDOWED=windowed, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def end_step(tokens: Tensor, ports: dict[str, Tensor], sampled: Tensor, ring: Tensor, counter: Tensor) -> None:
    """tokens i32 [S] to slot `counter` of ring i32 [slots, >= S] (pinned) and to sampled[request slot]; counter + 1."""
    rows = tokens.shape[0]
    launch(
        finish, (1,), tokens, ports["last"], ports["request_slots"], sampled, ring, ring.stride(0), ring.shape[0], counter,
        rows, BLOCK=max(16, power_of_2(rows)), num_warps=4,
    )  # fmt: skip
