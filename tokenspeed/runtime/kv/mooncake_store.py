"""KV pages in a Mooncake store: one object a page, in the form that a file has (record.py), in memory that servers lend.

Invariant: the client reads and writes registered memory alone, by address and size; a buffer is used by one call at a time, and
what a call returns is a copy. A master that is away, or a pool that is full, costs what it would have kept, and no request.
What is there is never overwritten: Mooncake takes a second put of a key as done, so a damaged object is removed first.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.kv.record import HEADER_BYTES, Bytes, Damaged, header, opened
from tokenspeed.runtime.kv.store import Tally

PAUSE = 1.0  # seconds without a call after one that failed
BUFFER_BYTES = 32 << 20  # of pages in one call
CLIENT_BYTES = 16 << 20  # that the client keeps for calls without a registered buffer
ABSENT, TOO_LARGE = -704, -600  # Mooncake's answers: no such object; the object is larger than the memory given


@dataclass(frozen=True)
class _Buffer:
    """Registered memory of one call at a time."""

    view: memoryview
    address: int


class MooncakeStore:
    """See the module. `lent`: bytes of this process's memory that join the pool until `close`. StartupError where the client is
    not installed, or the master does not answer."""

    def __init__(
        self, master: str, namespace: bytes, page_bytes: int, timeout: float, *, host: str, lent: int, protocol: str
    ) -> None:
        try:
            mooncake: Any = importlib.import_module("mooncake.store")
        except ImportError as fault:
            raise StartupError(
                f"kv_storage: mooncake:// needs Mooncake's client ({fault}): pip install 'tokenspeed[mooncake]'"
            ) from None
        _reach(master, timeout)
        self._namespace, self._page_bytes = namespace, page_bytes
        self._record_bytes = HEADER_BYTES + page_bytes
        self._prefix = f"tokenspeed:kv:{namespace.hex()}:"
        self._slots = max(1, BUFFER_BYTES // page_bytes)
        self.tally = Tally()
        self._paused_until = 0.0
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []  # all, and those that no call uses
        self._free: list[_Buffer] = []
        self._client: Any = mooncake.MooncakeDistributedStore()
        if code := self._client.setup(host, "P2PHANDSHAKE", lent, CLIENT_BYTES, protocol, "", master):
            raise StartupError(
                f"kv_storage: Mooncake answered {code} to a client at {host} that lends {lent} bytes over {protocol}: are host "
                "and protocol those of this machine, and is there so much memory?"
            )

    def get(self, keys: Sequence[bytes]) -> list[memoryview]:
        pages: list[memoryview] = []
        for at in range(0, len(keys), self._slots):
            batch = keys[at : at + self._slots]
            pages += (found := self._read(batch))
            if len(found) < len(batch):
                break
        self.tally.add(hits=len(pages), misses=len(keys) - len(pages), bytes_read=len(pages) * self._record_bytes)
        return pages

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        kept: list[bool] = []
        for at in range(0, len(keys), self._slots):
            kept += self._write(keys[at : at + self._slots], pages[at : at + self._slots])
        written = sum(kept)
        self.tally.add(written=written, bytes_written=written * self._record_bytes)
        return kept

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [answer == 1 for answer in self._call(lambda: self._client.batch_is_exist(self._names(keys)), len(keys))]

    def close(self) -> None:
        with self._lock:
            for buffer in self._buffers:
                self._client.unregister_buffer(buffer.address)
            self._buffers, self._free = [], []
        self._client.close()

    def _read(self, keys: Sequence[bytes]) -> list[memoryview]:
        pages: list[memoryview] = []
        with self._buffer() as buffer:
            answers = self._call(
                lambda: self._client.batch_get_into(self._names(keys), *self._places(buffer, len(keys))), len(keys)
            )
            for i, (key, answer) in enumerate(zip(keys, answers)):
                if answer < 0 and answer != TOO_LARGE:
                    break
                start = i * self._record_bytes
                try:
                    if answer == TOO_LARGE:
                        raise Damaged(f"more than {self._record_bytes} bytes")
                    record = bytes(buffer.view[start : start + answer])
                    pages.append(opened(self._namespace, key, record, self._page_bytes))
                except Damaged as fault:
                    self._remove(key, fault)
                    break
        return pages

    def _write(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        with self._buffer() as buffer:
            for i, (key, page) in enumerate(zip(keys, pages, strict=True)):
                start = i * self._record_bytes
                buffer.view[start : start + HEADER_BYTES] = header(self._namespace, key, page)
                buffer.view[start + HEADER_BYTES : start + self._record_bytes] = page
            answers = self._call(
                lambda: self._client.batch_put_from(self._names(keys), *self._places(buffer, len(keys))), len(keys)
            )
        return [answer == 0 for answer in answers]

    def _remove(self, key: bytes, fault: Damaged) -> None:
        self.tally.add(damaged=1)
        self.tally.warn("damaged", "kv storage: page %s in Mooncake is damaged (%s); removed", key.hex(), fault)
        self._call(
            lambda: [self._client.remove(self._prefix + key.hex(), force=True)], 1
        )  # whoever read it has a lease

    @contextmanager
    def _buffer(self) -> Iterator[_Buffer]:
        with self._lock:
            buffer = self._free.pop() if self._free else self._registered()
        try:
            yield buffer
        finally:
            with self._lock:
                self._free.append(buffer)

    def _registered(self) -> _Buffer:
        memory = mmap.mmap(-1, self._slots * self._record_bytes)
        buffer = _Buffer(memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        if code := self._client.register_buffer(buffer.address, len(memory)):
            raise RuntimeError(f"Mooncake answered {code} to the registration of {len(memory)} bytes")
        self._buffers.append(buffer)
        return buffer

    def _places(self, buffer: _Buffer, records: int) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the first records of a buffer."""
        return [buffer.address + i * self._record_bytes for i in range(records)], [self._record_bytes] * records

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _call(self, call: Callable[[], list[int]], count: int) -> list[int]:
        """`count` answers, those of absent objects where the store does not give them. A call that fails as a whole is not
        followed by another one for a moment, as each waits seconds for a master that is away."""
        if not count or time.monotonic() < self._paused_until:
            return [ABSENT] * count
        answers = list(call())
        failed = [answer for answer in answers if answer < 0 and answer not in (ABSENT, TOO_LARGE)]
        if failed:
            self.tally.add(failures=1)
            self.tally.warn(
                "mooncake", "kv storage: Mooncake answered %d for %d of %d pages", failed[0], len(failed), count
            )
            if len(failed) == count:
                self._paused_until = time.monotonic() + PAUSE
        return answers


def _reach(master: str, timeout: float) -> None:
    """StartupError where nothing listens at HOST:PORT."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except OSError as fault:
        raise StartupError(f"kv_storage: no Mooncake master at {master}: {fault}") from None
