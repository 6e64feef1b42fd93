"""Storage of KV pages: the interface that a folder, a Redis or a Mooncake store has, and the address that names one.

Invariant: a store never fails a request. What it cannot read is absent, what it cannot write is not there later; both are
counted, and logged rarely. Its methods may be called from several threads.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from tokenspeed.runtime.kv.record import Bytes

log = logging.getLogger(__name__)

TIMEOUT = 10.0  # seconds that a transfer may take where the address names none
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS["TB"] = 10**12
_SETTINGS = {
    "file": ("limit", "timeout"),
    "redis": ("timeout",),
    "rediss": ("timeout",),
    "mooncake": ("host", "memory", "protocol", "timeout"),
}
_QUIET = 60.0  # seconds between two warnings of one kind


class Store(Protocol):
    """Pages of one namespace by their 16-byte keys."""

    tally: Tally

    def get(self, keys: Sequence[bytes]) -> list[memoryview]:
        """The leading pages that are there, each checked: a prefix is of no use behind its first gap. A damaged page is
        removed, and absent."""
        ...

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Keeps pages; whether each is there now."""
        ...

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each page is there, as far as can be said without reading it."""
        ...

    def close(self) -> None: ...


@dataclass
class Tally:
    """What a store has done since it was opened."""

    hits: int = 0  # pages read
    misses: int = 0
    written: int = 0  # pages
    damaged: int = 0  # records that were not the page they should be
    failures: int = 0  # reads and writes that the store refused
    removed: int = 0  # pages, to keep the limit
    bytes_read: int = 0
    bytes_written: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _warned: dict[str, float] = field(default_factory=dict, repr=False)

    def add(self, **amounts: int) -> None:
        """Adds to fields by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Logs a warning unless one of its kind was logged a short while ago."""
        now = time.monotonic()
        with self._lock:
            if now - self._warned.get(kind, -_QUIET) < _QUIET:
                return
            self._warned[kind] = now
        log.warning(message, *args)

    def totals(self) -> dict[str, int]:
        names = ("hits", "misses", "written", "damaged", "failures", "removed", "bytes_read", "bytes_written")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Address:
    """A parsed `--kv-storage`."""

    scheme: str  # file, redis, rediss or mooncake
    location: str  # the folder, the server's URL, or host and port of the master
    limit: int  # bytes at most, 0: the server's own; of mooncake, bytes that a rank lends
    timeout: float  # seconds after which a transfer is given up
    host: str = ""  # of mooncake: the name that others reach this machine by
    protocol: str = ""  # of mooncake: tcp or rdma

    @property
    def shown(self) -> str:
        """For a log: without user and password."""
        if self.scheme == "file":
            return f"{self.location}, at most {self.limit / 2**30:.1f} GiB"
        if self.scheme == "mooncake":
            return (
                f"mooncake://{self.location} over {self.protocol}, to which a rank lends {self.limit / 2**30:.1f} GiB"
            )
        parts = urlsplit(self.location)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def parse_address(text: str) -> Address:
    """`file:///folder?limit=100GiB`, `redis://host:port/0` or `mooncake://host:port?host=NAME&memory=16GiB&protocol=rdma`, each
    with `timeout=SECONDS`. ValueError says what is wrong."""
    parts = urlsplit(text)
    if parts.scheme not in _SETTINGS:
        raise ValueError("expected file:///FOLDER?limit=100GiB, redis://HOST:PORT/0 or mooncake://HOST:PORT?host=NAME")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    given = dict(pairs)
    if len(given) < len(pairs):
        raise ValueError("each setting is given once")
    if parts.fragment or "\0" in unquote(text):
        raise ValueError("a # in it is written %23, and no name holds a NUL")
    known = _SETTINGS[parts.scheme]
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(f"{parts.scheme} takes {' and '.join(known)}, not {unknown[0]}")
    timeout = _seconds(given.get("timeout", ""))
    if parts.scheme == "mooncake":
        return _mooncake(parts, given, timeout)
    if parts.scheme != "file":
        return Address(parts.scheme, urlunsplit(parts._replace(query="")), 0, timeout)
    folder = os.path.normpath(unquote(parts.path))
    if parts.netloc or not folder.strip("/."):
        raise ValueError(
            "a folder is written with three slashes and its whole path, as in file:///var/cache/kv?limit=100GiB"
        )
    if "limit" not in given:
        raise ValueError("a folder needs a limit, or it fills the disk: add ?limit=100GiB")
    return Address("file", folder, _size(given["limit"]), timeout)


def check_address(text: str) -> str | None:
    """What is wrong with an address, if anything."""
    try:
        if text:
            parse_address(text)
    except ValueError as fault:
        return str(fault)
    return None


def open_store(address: Address, namespace: bytes, page_bytes: int) -> Store:
    """Raises StartupError where it cannot be had at all."""
    if address.scheme == "file":
        from tokenspeed.runtime.kv.file_store import FileStore

        return FileStore(address.location, namespace, page_bytes, address.limit)
    if address.scheme == "mooncake":
        from tokenspeed.runtime.kv.mooncake_store import MooncakeStore

        return MooncakeStore(
            address.location, namespace, page_bytes, address.timeout,
            host=address.host, lent=address.limit, protocol=address.protocol,
        )  # fmt: skip
    from tokenspeed.runtime.kv.redis_store import RedisStore

    return RedisStore(address.location, namespace, page_bytes, address.timeout)


def _mooncake(parts: SplitResult, given: dict[str, str], timeout: float) -> Address:
    if not parts.hostname or not parts.port or parts.path.strip("/") or parts.username is not None:
        raise ValueError("a Mooncake master is written mooncake://HOST:PORT?host=NAME")
    if not given.get("host"):
        raise ValueError("add host=NAME, by which other servers reach this machine")
    if (protocol := given.get("protocol", "tcp")) not in ("tcp", "rdma"):
        raise ValueError(f"protocol is {protocol!r}: tcp or rdma")
    lent = _size(given["memory"], "memory") if "memory" in given else 0
    return Address("mooncake", parts.netloc, lent, timeout, given["host"], protocol)


def _size(text: str, name: str = "limit") -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)?", text.strip(), re.IGNORECASE)
    if found is None or (size := int(float(found[1]) * _UNITS[(found[2] or "").upper()])) < 1:
        raise ValueError(f"{name} is {text!r}: give bytes with a unit, as in 100GiB")
    return size


def _seconds(text: str) -> float:
    try:
        value = float(text) if text else TIMEOUT
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ValueError(f"timeout is {text!r}: give seconds, as in timeout=10")
    return value
