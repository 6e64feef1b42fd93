"""KV pages in a Redis or Valkey server: one value a page, in the form that a file has (record.py).

Invariant: a server that is away, slow or full costs what it would have kept, and no request. How much it keeps and what it
removes is its own configuration (`maxmemory`, `maxmemory-policy allkeys-lru`).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.kv.record import HEADER_BYTES, Bytes, Damaged, header, opened
from tokenspeed.runtime.kv.store import Tally

T = TypeVar("T")
PAUSE = 1.0  # seconds without a call after one that failed


class RedisStore:
    """See the module. StartupError where the client is not installed or refuses the address; the server itself may come later."""

    def __init__(self, url: str, namespace: bytes, page_bytes: int, timeout: float) -> None:
        try:
            redis: Any = importlib.import_module("redis")
        except ImportError:
            raise StartupError("kv_storage: redis:// needs the Redis client: pip install 'tokenspeed[redis]'") from None
        self._namespace, self._page_bytes = namespace, page_bytes
        self._prefix = b"tokenspeed:kv:" + namespace.hex().encode() + b":"
        self.tally = Tally()
        self._failed: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        self._paused_until = 0.0
        try:
            self._client: Any = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
        except ValueError as fault:
            raise StartupError(f"kv_storage is {url!r}: {fault}") from None

    def get(self, keys: Sequence[bytes]) -> list[memoryview]:
        records: list[bytes | None] = self._call(lambda: self._client.mget(self._names(keys)), []) if keys else []
        pages: list[memoryview] = []
        for key, record in zip(keys, records):
            if (page := self._opened(key, record)) is None:
                break
            pages.append(page)
        record_bytes = HEADER_BYTES + self._page_bytes
        self.tally.add(hits=len(pages), misses=len(keys) - len(pages), bytes_read=len(pages) * record_bytes)
        return pages

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        def send() -> list[bool]:
            pipeline = self._client.pipeline(transaction=False)
            for key, page in zip(keys, pages, strict=True):
                pipeline.set(self._prefix + key.hex().encode(), header(self._namespace, key, page) + bytes(page))
            return [answer is True for answer in pipeline.execute(raise_on_error=False)]

        kept = self._call(send, [False] * len(keys))
        written = sum(kept)
        self.tally.add(written=written, bytes_written=written * (HEADER_BYTES + self._page_bytes))
        if written < len(kept):
            self.tally.add(failures=1)
            self.tally.warn("full", "kv storage: the Redis server did not take %d pages", len(kept) - written)
        return kept

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        def ask() -> list[bool]:
            pipeline = self._client.pipeline(transaction=False)
            for name in self._names(keys):
                pipeline.exists(name)
            return [answer == 1 for answer in pipeline.execute(raise_on_error=False)]

        return self._call(ask, [False] * len(keys))

    def close(self) -> None:
        self._client.close()

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._prefix + key.hex().encode() for key in keys]

    def _opened(self, key: bytes, record: bytes | None) -> memoryview | None:
        if record is None:
            return None
        try:
            return opened(self._namespace, key, record, self._page_bytes)
        except Damaged as fault:
            self.tally.add(damaged=1)
            self.tally.warn("damaged", "kv storage: page %s in Redis is damaged (%s); removed", key.hex(), fault)
            self._call(lambda: self._client.delete(*self._names([key])), 0)
            return None

    def _call(self, call: Callable[[], T], otherwise: T) -> T:
        """What the server answers, `otherwise` where it does not. After a failure it is left alone for a moment, so that a
        server that is away does not cost a time-out a page."""
        if time.monotonic() < self._paused_until:
            return otherwise
        try:
            return call()
        except self._failed as fault:
            self._paused_until = time.monotonic() + PAUSE
            self.tally.add(failures=1)
            self.tally.warn("redis", "kv storage: Redis: %s", fault)
            return otherwise
