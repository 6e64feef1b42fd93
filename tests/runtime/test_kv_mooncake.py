"""Pages in a Mooncake store: the real one over TCP where its client is installed, and one of the same shape, which also refuses what
the real one lets pass over TCP: memory that is not registered."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.kv import mooncake_store
from tokenspeed.runtime.kv.record import HEADER_BYTES, header
from tokenspeed.runtime.kv.store import Store, open_store, parse_address

NAMESPACE, OTHER = b"n" * 16, b"m" * 16
SIZE = 512  # bytes of a page
POOL = 16 << 20  # bytes that a lender gives


def key(i: int) -> bytes:
    return i.to_bytes(16, "little")


def page(i: int) -> bytes:
    return bytes([i % 251, i // 251 % 251]) * (SIZE // 2)


class Shaped:
    """What MooncakeStore asks of a client, in one process; a fresh read leases an object against removal."""

    objects: ClassVar[dict[str, bytes]] = {}  # the pool that all clients of a test share
    away = False  # the master
    room = POOL

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def setup(self, host: str, metadata: str, lent: int, local: int, protocol: str, devices: str, master: str) -> int:
        return 0 if host else -600

    def register_buffer(self, address: int, size: int) -> int:
        self.registered[address] = size
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0 if self.registered.pop(address, 0) else -600

    def _owns(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + whole for start, whole in self.registered.items())

    def batch_put_from(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        return [self._put(*each) for each in zip(keys, places, sizes, strict=True)]

    def _put(self, name: str, place: int, size: int) -> int:
        if Shaped.away:
            return -900
        if not self._owns(place, size):
            return -600
        if name not in self.objects and sum(map(len, self.objects.values())) + size > self.room:
            return -200
        self.objects.setdefault(name, ctypes.string_at(place, size))
        return 0

    def batch_get_into(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        return [self._get(*each) for each in zip(keys, places, sizes, strict=True)]

    def _get(self, name: str, place: int, size: int) -> int:
        if Shaped.away:
            return -900
        if (found := self.objects.get(name)) is None:
            return -704
        if len(found) > size or not self._owns(place, size):
            return -600
        ctypes.memmove(place, found, len(found))
        return len(found)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [-900 if Shaped.away else int(name in self.objects) for name in keys]

    def remove(self, name: str, force: bool = False) -> int:
        if not force:
            return -706  # a lease
        return 0 if self.objects.pop(name, None) is not None else -704

    def close(self) -> int:
        assert not self.registered, "memory that is still registered"
        return 0


@pytest.fixture(params=["shaped", "real"])
def master(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Host and port of a master, with a pool that some other server lends memory to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if request.param == "shaped":
            listener.listen()
            module = ModuleType("mooncake.store")
            module.MooncakeDistributedStore = Shaped  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, "mooncake.store", module)
            monkeypatch.setattr(Shaped, "objects", {})
            monkeypatch.setattr(Shaped, "away", False)
            yield f"127.0.0.1:{port}"
            return
    client = pytest.importorskip("mooncake.store", reason="Mooncake's client is not installed")
    command = [str(Path(client.__file__).parent / "mooncake_master"), f"--rpc_port={port}", "--metrics_port=0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        lender: Any = client.MooncakeDistributedStore()
        try:
            for _ in range(500):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.02)
            assert lender.setup("127.0.0.1", "P2PHANDSHAKE", POOL, 1 << 20, "tcp", "", f"127.0.0.1:{port}") == 0
            yield f"127.0.0.1:{port}"
        finally:
            lender.close()
            server.kill()


@pytest.fixture
def opened(master: str) -> Iterator[Callable[[bytes], Store]]:
    stores: list[Store] = []

    def again(namespace: bytes) -> Store:
        stores.append(open_store(parse_address(f"mooncake://{master}?host=127.0.0.1"), namespace, SIZE))
        return stores[-1]

    yield again
    for store in stores:
        store.close()


def test_what_was_written_is_read_by_the_next_client_of_the_namespace(opened: Callable[[bytes], Store]) -> None:
    first, again = opened(NAMESPACE), opened(NAMESPACE)
    assert first.put([key(i) for i in range(5)], [page(i) for i in range(5)]) == [True] * 5
    assert first.tally.totals() | {"bytes_written": 0} == dict.fromkeys(first.tally.totals(), 0) | {"written": 5}
    assert again.exists([key(4), key(5)]) == [True, False] and again.exists([]) == []
    assert [bytes(p) for p in again.get([key(i) for i in range(5)])] == [page(i) for i in range(5)]
    assert again.get([key(3), key(9), key(4)]) == [page(3)], "the leading ones"
    assert (again.tally.hits, again.tally.misses, again.tally.failures) == (6, 2, 0)
    assert opened(OTHER).get([key(0)]) == []


def test_more_pages_than_a_buffer_holds(opened: Callable[[bytes], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_store, "BUFFER_BYTES", 3 * SIZE)
    store = opened(NAMESPACE)
    keys = [key(i) for i in range(10)]
    assert store.put(keys, [page(i) for i in range(10)]) == [True] * 10
    got = store.get([*keys, key(99)])
    assert [bytes(p) for p in got] == [page(i) for i in range(10)], "each a copy, whatever its buffer holds now"
    assert store.get([key(0), key(1), key(50), key(3), key(4)]) == [page(0), page(1)]


@pytest.mark.parametrize(
    "record",
    [
        header(NAMESPACE, key(1), page(1)) + page(1)[:-1],
        header(NAMESPACE, key(1), page(1)) + page(1) + b"x",
        header(NAMESPACE, key(1), page(1)) + page(2),
        header(NAMESPACE, key(2), page(1)) + page(1),
        header(OTHER, key(1), page(1)) + page(1),
    ],
    ids=["short", "long", "bytes", "key", "namespace"],
)
def test_a_damaged_page_is_removed_and_can_be_written_again(opened: Callable[[bytes], Store], record: bytes) -> None:
    store: Any = opened(NAMESPACE)
    (name,) = store._names([key(1)])
    with store._buffer() as buffer:
        buffer.view[: len(record)] = record
        assert store._client.batch_put_from([name], [buffer.address], [len(record)]) == [0]
    assert store.put([key(0)], [page(0)]) == [True]
    assert store.get([key(0), key(1)]) == [page(0)]
    assert store.tally.damaged == 1 and store.exists([key(1)]) == [False]
    assert store.put([key(1)], [page(1)]) == [True] and store.get([key(1)]) == [page(1)]


@pytest.mark.parametrize("master", ["shaped"], indirect=True)  # the real one is not filled here
def test_a_full_pool_fails_no_call(opened: Callable[[bytes], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shaped, "room", 100 * (HEADER_BYTES + SIZE))
    store, many = opened(NAMESPACE), 130
    kept = store.put([key(i) for i in range(many)], [page(i) for i in range(many)])
    assert kept[0] and not all(kept) and store.tally.failures > 0
    assert store.tally.written == sum(kept)


def test_threads_never_share_memory(opened: Callable[[bytes], Store]) -> None:
    store = opened(NAMESPACE)
    wrong: list[int] = []

    def use(base: int) -> None:
        keys = [key(base + i) for i in range(8)]
        for _ in range(20):
            store.put(keys, [page(base + i) for i in range(8)])
            if [bytes(p) for p in store.get(keys)] != [page(base + i) for i in range(8)]:
                wrong.append(base)

    threads = [threading.Thread(target=use, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("master", ["shaped"], indirect=True)
def test_a_master_that_goes_away_is_left_alone_for_a_moment(
    opened: Callable[[bytes], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = opened(NAMESPACE)
    assert store.put([key(1)], [page(1)]) == [True]
    monkeypatch.setattr(Shaped, "away", True)
    assert store.get([key(1)]) == [] and store.put([key(2)], [page(2)]) == [False] and store.exists([key(1)]) == [False]
    assert store.tally.failures == 1, "the calls after the first were not made"
    monkeypatch.setattr(Shaped, "away", False)
    store._paused_until = 0.0
    assert store.get([key(1)]) == [page(1)]


def test_without_a_master_or_a_client_the_server_does_not_start(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    with pytest.raises(StartupError, match=r"no Mooncake master at 127\.0\.0\.1:1"):
        open_store(parse_address("mooncake://127.0.0.1:1?host=127.0.0.1"), NAMESPACE, SIZE)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StartupError, match=r"tokenspeed\[mooncake\]"):
        open_store(parse_address(f"mooncake://{master}?host=127.0.0.1"), NAMESPACE, SIZE)
