"""Pages of a rank between its caches and its host arena. Invariant: a host page is one row of the arena: what all the rank's
caches hold of one device page, cache after cache; so a page is copied, stored and checked as one run of bytes.

On a GPU the arena is registered with the driver and copies run on a stream of their own, beside the steps; on CPU the same
copies are done when the call returns. A group of pages is gathered from all caches on the device and sent row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    `caches`: contiguous tensors whose leading extents are the same number of slots; `pages` pages of them.
    """

    def __init__(self, caches: Sequence[Tensor], pages: int, host_pages: int) -> None:
        self._caches = [cache.view(torch.uint8).view(pages, -1) for cache in caches]
        self.page_bytes = sum(cache.shape[1] for cache in self._caches)
        self._device = caches[0].device
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
            from tokenspeed.kernels.pages import triton as kernels

            self._kernels, self._table = kernels, kernels.page_table(self._caches, pages)
            with self._beside():  # compiles both: page 0 is written over itself
                first = torch.zeros(1, dtype=torch.int64, device=self._device)
                self._scatter(first, self._gathered(first))
                self._stream.synchronize()

    def row(self, host_page: int) -> memoryview:
        """The bytes of a host page, to be read or written."""
        return self.arena[host_page].numpy().data

    def out(self, device: np.ndarray, host: np.ndarray) -> Fence | None:
        """Copies device pages to host pages."""
        with self._beside():
            for pages, rows in self._groups(device, host):
                gathered = self._gathered(pages)
                for i, row in enumerate(rows):
                    self.arena[row].copy_(gathered[i], non_blocking=True)
            return self._fence()

    def back(self, host: np.ndarray, device: np.ndarray) -> Fence | None:
        """Copies host pages to device pages."""
        with self._beside():
            for pages, rows in self._groups(device, host):
                gathered = torch.empty(len(rows), self.page_bytes, dtype=torch.uint8, device=self._device)
                for i, row in enumerate(rows):
                    gathered[i].copy_(self.arena[row], non_blocking=True)
                self._scatter(pages, gathered)
            return self._fence()

    def _gathered(self, pages: Tensor) -> Tensor:
        """u8 [P, page_bytes] on the device: what its caches hold of `pages`."""
        if self._stream is None:
            return torch.cat([cache.index_select(0, pages) for cache in self._caches], dim=1)
        out = torch.empty(len(pages), self.page_bytes, dtype=torch.uint8, device=self._device)
        self._kernels.gather_pages(*self._table, pages, out=out)
        return out

    def _scatter(self, pages: Tensor, rows: Tensor) -> None:
        """The other way."""
        if self._stream is not None:
            self._kernels.scatter_pages(*self._table, pages, rows)
            return
        parts = rows.split([cache.shape[1] for cache in self._caches], dim=1)
        for cache, part in zip(self._caches, parts, strict=True):
            cache.index_copy_(0, pages, part)

    def follow(self, fence: Fence | None) -> None:
        """What the caller's current stream does from now on comes after the copy."""
        if fence is not None:
            torch.cuda.current_stream(self._device).wait_event(fence)  # pyright: ignore[reportArgumentType]

    def _groups(self, device: np.ndarray, host: np.ndarray) -> list[tuple[Tensor, list[int]]]:
        step = max(GATHERED // self.page_bytes, 1)
        pages = torch.as_tensor(device.astype(np.int64), device=self._device)
        return [(pages[i : i + step], host[i : i + step].tolist()) for i in range(0, len(host), step)]

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _fence(self) -> Fence | None:
        return None if self._stream is None else self._stream.record_event()


def _register(arena: Tensor) -> None:
    """Makes host memory such that a GPU copies it without the CPU; as large as it is (a pinned tensor is rounded up)."""
    status = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.nbytes, 0)  # pyright: ignore
    if int(status) != 0:
        raise StartupError(
            f"the CUDA driver does not register {arena.nbytes / 2**30:.1f} GiB of host memory (error {int(status)}): "
            "give a smaller host_kv_gib"
        )
