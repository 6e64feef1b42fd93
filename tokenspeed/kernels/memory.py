"""CPU memory on huge pages. Invariant: what is returned is ordinary zeroed tensor memory, 64-byte aligned; huge pages
are a request to the kernel that changes speed alone (a decode step walks every weight once, and with 4 KiB pages much
of its time goes into page-table walks, above all under virtualisation).
"""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes
_EXTENSION = importlib.util.find_spec("tokenspeed._cpu") is not None  # which asks the system for them


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A zeroed CPU tensor on huge pages; for weights, KV caches and other large long-lived buffers."""
    return empty(*shape, dtype=dtype).zero_()


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Like `zeros`, not zeroed and not touched: pages are taken from the system as they are first written."""
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE or not _EXTENSION:
        return torch.empty(shape, dtype=dtype)
    return _region(size)[:size].view(dtype).view(shape)


def _region(size: int) -> Tensor:
    """u8 memory of at least `size` bytes on a huge-page boundary; not touched, so huge pages can still back it."""
    from tokenspeed import _cpu

    whole = (size + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
    raw = torch.empty(whole + HUGE_PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE_PAGE
    _cpu.advise_huge_pages(raw.data_ptr() + start, whole)
    return raw[start : start + whole]


class Arena:
    """Hands out pieces of large huge-page regions one after another; a region is freed when all its pieces are.

    Weights of one model are packed one after another, so they lie side by side and share pages.
    """

    def __init__(self, region: int = 64 << 20) -> None:
        self._size = region
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """u8 [size], 64-byte aligned, not zeroed."""
        room = (size + 63) // 64 * 64
        if room > self._size // 2:
            return empty(size, dtype=torch.uint8)
        if room > self._free.numel():
            self._free = _region(self._size)
        piece, self._free = self._free[:size], self._free[room:]
        return piece
