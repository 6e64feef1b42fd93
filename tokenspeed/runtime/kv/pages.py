"""Pages of a rank between its caches and its host arena. Invariant: a host page is one row of the arena: what all the rank's
caches hold of one page, cache after cache; so a page is copied, stored and checked as one run of bytes. Where windowed layers
have pages of their own, a row is a device page and behind it a window page, and either part may be copied alone.

On a GPU the arena is registered with the driver and copies run on a stream of their own, beside the steps; on CPU the same
copies are done when the call returns. A group of pages is gathered from all caches on the device and sent row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenspeed.kernels import memory
from tokenspeed.runtime.errors import StartupError

GATHERED = 32 << 20  # bytes on the device that a group of pages may take


class Fence(Protocol):
    """What a copy on a stream leaves behind."""

    def synchronize(self) -> None:
        """Returns when the copy is done."""
        ...


class Pages:
    """See the module. Calls of `out` and `back` come from one thread.

    `groups`: contiguous caches whose leading extents are the same number of slots, and the number of pages that these are; of
    the pages that all layers share, then of window pages, if there are any.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[Tensor], int]], host_pages: int) -> None:
        self._device = next(caches[0].device for caches, _ in groups if caches)
        self._parts: list[_Part] = []
        for caches, pages in groups:
            self._parts.append(_Part(caches, pages, sum(part.width for part in self._parts)))
        self.page_bytes = sum(part.width for part in self._parts)
        try:
            self.arena = memory.empty(host_pages, self.page_bytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as fault:
            raise StartupError(
                f"{host_pages} host pages of {self.page_bytes} bytes cannot be had ({fault}): give a smaller host_kv_gib"
            ) from None
        self._stream: Any = None
        if self._device.type == "cuda":
            _register(self.arena)
            self._stream = torch.cuda.Stream(self._device)
            with self._beside():  # compiles both: page 0 is written over itself
                first = torch.zeros(1, dtype=torch.int64, device=self._device)
                for part in self._parts:
                    if part.width:
                        part.scatter(first, part.gathered(first))
                self._stream.synchronize()

    def row(self, host_page: int) -> memoryview:
        """The bytes of a host page, to be read or written."""
        return self.arena[host_page].numpy().data

    def out(self, pages: Sequence[np.ndarray], host: np.ndarray) -> Fence | None:
        """Copies pages of each group (i32 [n], -1: none) to host pages [n]."""
        with self._beside():
            for part, device, rows in self._groups(pages, host):
                gathered = part.gathered(device)
                for i, row in enumerate(rows):
                    self.arena[row, part.span].copy_(gathered[i], non_blocking=True)
            return self._fence()

    def back(self, host: np.ndarray, pages: Sequence[np.ndarray]) -> Fence | None:
        """Copies host pages [n] to pages of each group (i32 [n], -1: none)."""
        with self._beside():
            for part, device, rows in self._groups(pages, host):
                gathered = torch.empty(len(rows), part.width, dtype=torch.uint8, device=self._device)
                for i, row in enumerate(rows):
                    gathered[i].copy_(self.arena[row, part.span], non_blocking=True)
                part.scatter(device, gathered)
            return self._fence()

    def follow(self, fence: Fence | None) -> None:
        """What the caller's current stream does from now on comes after the copy."""
        if fence is not None:
            torch.cuda.current_stream(self._device).wait_event(fence)  # pyright: ignore[reportArgumentType]

    def _groups(self, pages: Sequence[np.ndarray], host: np.ndarray) -> Iterator[tuple[_Part, Tensor, list[int]]]:
        for part, named in zip(self._parts, pages, strict=True):
            there = named >= 0
            device, rows = torch.as_tensor(named[there].astype(np.int64), device=self._device), host[there].tolist()
            step = max(GATHERED // max(part.width, 1), 1)
            for i in range(0, len(rows) if part.width else 0, step):
                yield part, device[i : i + step], rows[i : i + step]

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _fence(self) -> Fence | None:
        return None if self._stream is None else self._stream.record_event()


class _Part:
    """The caches of one group: their pages, and where those lie in a row."""

    def __init__(self, caches: Sequence[Tensor], pages: int, start: int) -> None:
        self._caches = [cache.view(torch.uint8).view(pages, -1) for cache in caches]
        self.width = sum(cache.shape[1] for cache in self._caches)
        self.span = slice(start, start + self.width)
        self._kernels: Any = None
        if caches and caches[0].device.type == "cuda":
            from tokenspeed.kernels.pages import triton as kernels

            self._kernels, self._table = kernels, kernels.page_table(self._caches, pages)

    def gathered(self, pages: Tensor) -> Tensor:
        """u8 [P, width] on the device: what the caches hold of `pages`."""
        if self._kernels is None:
            return torch.cat([cache.index_select(0, pages) for cache in self._caches], dim=1)
        out = torch.empty(len(pages), self.width, dtype=torch.uint8, device=pages.device)
        self._kernels.gather_pages(*self._table, pages, out=out)
        return out

    def scatter(self, pages: Tensor, rows: Tensor) -> None:
        """The other way."""
        if self._kernels is not None:
            self._kernels.scatter_pages(*self._table, pages, rows)
            return
        parts = rows.split([cache.shape[1] for cache in self._caches], dim=1)
        for cache, part in zip(self._caches, parts, strict=True):
            cache.index_copy_(0, pages, part)


def _register(arena: Tensor) -> None:
    """Makes host memory such that a GPU copies it without the CPU; as large as it is (a pinned tensor is rounded up)."""
    status = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.nbytes, 0)  # pyright: ignore
    if int(status) != 0:
        raise StartupError(
            f"the CUDA driver does not register {arena.nbytes / 2**30:.1f} GiB of host memory (error {int(status)}): "
            "give a smaller host_kv_gib"
        )
