"""Static memory plan: where each buffer lies in one arena, from live ranges over program order.

Invariant (V13): two buffers whose live ranges meet do not overlap. First fit, largest first, ties by birth: the plan is
a pure function of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64  # bytes; a cache line and a full vector register


@dataclass(frozen=True)
class Buffer:
    nbytes: int
    birth: int  # index of the node that writes it
    death: int  # index of the last node that reads it


def plan_memory(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
    """Offsets in bytes, and the peak."""
    order = sorted(range(len(buffers)), key=lambda i: (-buffers[i].nbytes, buffers[i].birth, i))
    offsets = [0] * len(buffers)
    placed: list[int] = []
    peak = 0
    for i in order:
        b = buffers[i]
        size = -(-b.nbytes // ALIGN) * ALIGN
        at = 0
        for j in sorted((j for j in placed if _meet(b, buffers[j])), key=lambda j: offsets[j]):
            if at + size <= offsets[j]:
                break
            at = max(at, offsets[j] + -(-buffers[j].nbytes // ALIGN) * ALIGN)
        offsets[i] = at
        placed.append(i)
        peak = max(peak, at + size)
    return offsets, peak


def _meet(a: Buffer, b: Buffer) -> bool:
    return a.birth <= b.death and b.birth <= a.death
