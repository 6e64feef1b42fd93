"""Static memory plan: where each buffer lies in one arena, from live ranges over program order.

Invariant (V13): two buffers whose live ranges meet do not overlap. First fit, largest first, ties by birth: the plan is
a pure function of its input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenspeed.ir.errors import VerifyError

ALIGN = 64  # bytes; a cache line and a full vector register


class Buffer(NamedTuple):
    nbytes: int
    birth: int  # index of the node that writes it
    death: int  # index of the last node that reads it

    @property
    def held(self) -> int:
        """Bytes with the alignment of the next one."""
        return -(-self.nbytes // ALIGN) * ALIGN


class _Live:
    """Buffers by the nodes at which they are live, to find those that meet a range without looking at all."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self.at: list[list[int]] = [[] for _ in range(max((b.death for b in buffers), default=-1) + 1)]

    def add(self, i: int) -> None:
        for there in self.at[self.buffers[i].birth : self.buffers[i].death + 1]:
            there.append(i)

    def meeting(self, b: Buffer) -> set[int]:
        return set().union(*self.at[b.birth : b.death + 1])


def plan_memory(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
    """Offsets in bytes, and the peak."""
    order = sorted(range(len(buffers)), key=lambda i: (-buffers[i].nbytes, buffers[i].birth, i))
    offsets = [0] * len(buffers)
    held = [b.held for b in buffers]
    live = _Live(buffers)
    peak = 0
    for i in order:
        size = held[i]
        at = 0
        for start, end in sorted([(offsets[j], offsets[j] + held[j]) for j in live.meeting(buffers[i])]):
            if at + size <= start:
                break
            at = max(at, end)
        offsets[i] = at
        live.add(i)
        peak = max(peak, at + size)
    return offsets, peak


def verify_memory(buffers: Sequence[Buffer], offsets: Sequence[int], peak: int) -> None:
    """VerifyError V13 where two live buffers overlap, one is misaligned, or one ends beyond the peak."""
    live = _Live(buffers)
    for i, (b, at) in enumerate(zip(buffers, offsets, strict=True)):
        if at % ALIGN or at < 0 or at + b.nbytes > peak:
            raise VerifyError("V13", f"buffer {i} lies at {at}..{at + b.nbytes} of {peak} bytes, in steps of {ALIGN}")
        for j in live.meeting(b):
            if at < offsets[j] + buffers[j].nbytes and offsets[j] < at + b.nbytes:
                raise VerifyError(
                    "V13", f"buffers {j} and {i} are live at once, at calls {b.birth}..{b.death}, and overlap"
                )
        live.add(i)


def live_bytes(buffers: Sequence[Buffer]) -> Iterator[int]:
    """Bytes held at each node: no plan needs less than the largest."""
    change: dict[int, int] = defaultdict(int)
    for b in buffers:
        change[b.birth] += b.held
        change[b.death + 1] -= b.held
    total = 0
    for node in sorted(change):
        total += change[node]
        yield total
