"""KV pages in a folder: one file a page, which several servers may share.

Invariant: a file bears a page's name only when it was written whole (a temporary file is renamed over it), and is believed
only as far as its checksum goes. Nothing is synced to the disk: a process that dies loses no file, and what a power cut leaves
half-written is found by its checksum, removed and computed again.

The folder holds at most `limit` bytes of pages, of all namespaces: after every sixteenth of it that this server writes, the
folder is looked through and the pages that were used least lately (their modification time; reading a page renews it) are
removed. So several servers may together exceed it by a sixteenth for each beyond the first. What else lies in the folder is
not ours: only files where a page of ours would lie, under a name that a page of ours would have, are counted and removed.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.kv.record import FORMAT, HEADER_BYTES, Bytes, Damaged, header, opened
from tokenspeed.runtime.kv.store import Tally

SHARES = 16  # of the limit; one is written between two looks at the folder, two are made free by the second
PAUSE = 10.0  # seconds without writing after the folder refused one
ABANDONED = 600.0  # seconds after which a temporary file is nobody's any more
_TEMPORARY = ".tmp"
#: what the folders on the way to a page are called, and the page
_LEVELS = tuple(
    map(re.compile, (r"v\d+", r"[0-9a-f]{32}", r"[0-9a-f]{2}", rf"[0-9a-f]{{32}}(\.\d+\.\d+{re.escape(_TEMPORARY)})?"))
)


class FileStore:
    """See the module. StartupError where the folder cannot be had, or `limit` bytes are too few."""

    def __init__(self, folder: str | Path, namespace: bytes, page_bytes: int, limit: int) -> None:
        self._root, self._namespace, self._page_bytes, self._limit = Path(folder), namespace, page_bytes, limit
        record = page_bytes + HEADER_BYTES
        if limit // SHARES < record:
            raise StartupError(
                f"kv_storage: a limit of {limit} bytes is too little, as one page takes {record}: give at least {SHARES * record}"
            )
        self.tally = Tally()
        self._pages = self._root / f"v{FORMAT}" / namespace.hex()
        self._numbers = itertools.count()
        self._unswept = limit  # bytes written since the folder was looked through; so the first write does it
        self._sweeping = threading.Lock()
        self._paused_until = 0.0
        try:
            self._pages.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            if not self._pages.is_dir():
                raise StartupError(f"kv_storage: cannot make the folder {self._pages}: {fault.strerror}") from None

    def get(self, keys: Sequence[bytes]) -> list[memoryview]:
        pages = [page for page in itertools.takewhile(lambda page: page is not None, map(self._read, keys)) if page]
        record = HEADER_BYTES + self._page_bytes
        self.tally.add(hits=len(pages), misses=len(keys) - len(pages), bytes_read=len(pages) * record)
        return pages

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        return [self._write(key, page) for key, page in zip(keys, pages, strict=True)]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._path(key).exists() for key in keys]

    def close(self) -> None:
        """Nothing is held open."""

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._pages / name[:2] / name

    def _read(self, key: bytes) -> memoryview | None:
        path = self._path(key)
        try:
            record = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as fault:
            self.tally.add(failures=1)
            self.tally.warn("read", "kv storage: cannot read %s: %s", path, fault.strerror)
            return None
        try:
            page = opened(self._namespace, key, record, self._page_bytes)
        except Damaged as fault:
            self.tally.add(damaged=1)
            self.tally.warn("damaged", "kv storage: %s is damaged (%s); removed", path, fault)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):  # a folder that may only be read ages by the time of writing
            os.utime(path)
        return page

    def _write(self, key: bytes, page: Bytes) -> bool:
        path = self._path(key)
        if path.exists():
            with suppress(OSError):
                os.utime(path)
            return True
        if time.monotonic() < self._paused_until:
            return False
        if len(page) != self._page_bytes:
            raise ValueError(f"a page of {len(page)} bytes, where pages have {self._page_bytes}")
        self._make_room(HEADER_BYTES + len(page))
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{next(self._numbers)}{_TEMPORARY}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(header(self._namespace, key, page))
                file.write(page)
            os.replace(temporary, path)
        except OSError as fault:
            with suppress(OSError):
                temporary.unlink()
            self._paused_until = time.monotonic() + PAUSE
            self.tally.add(failures=1)
            self.tally.warn(
                "write", "kv storage: cannot write to %s: %s; pages are not kept", self._root, fault.strerror
            )
            return False
        self.tally.add(written=1, bytes_written=HEADER_BYTES + len(page))
        return True

    def _make_room(self, size: int) -> None:
        """Counts `size` bytes that are about to be written; looks through the folder where a share of the limit is full."""
        with self._sweeping:
            self._unswept += size
            if self._unswept <= self._limit // SHARES:
                return
            self._unswept = size
            self._sweep()

    def _sweep(self) -> None:
        now, total, files = time.time(), 0, []
        for entry in _pages(self._root):
            with suppress(OSError):  # another server removed it
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_TEMPORARY) and now - status.st_mtime > ABANDONED:
                    os.unlink(entry.path)
                    continue
                total += status.st_size
                files.append((status.st_mtime_ns, status.st_size, entry.path))
        share = self._limit // SHARES
        if total <= self._limit - share:
            return
        removed = 0
        for _, size, path in sorted(files):
            if total <= self._limit - 2 * share:
                break
            with suppress(OSError):
                os.unlink(path)
                removed += 1
            total -= size
        self.tally.add(removed=removed)


def _pages(root: Path) -> Iterator[os.DirEntry[str]]:
    """The files of pages, and temporary ones, of all formats and namespaces below a folder: v1/NAMESPACE/ab/abcd...; what cannot
    be read, or goes meanwhile, is left out, and no link is followed."""
    folders = [(str(root), 0)]
    while folders:
        folder, depth = folders.pop()
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if not _LEVELS[depth].fullmatch(entry.name):
                    continue
                if depth < len(_LEVELS) - 1 and entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, depth + 1))
                elif depth == len(_LEVELS) - 1 and entry.is_file(follow_symlinks=False):
                    yield entry
