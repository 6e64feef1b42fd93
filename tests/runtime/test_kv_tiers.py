"""The tiers of a rank: bytes arrive where orders say, every order is answered once, and nothing is touched after its answer."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.e2e.tiny import tiny_model
from tokenspeed.runtime import ranks
from tokenspeed.runtime.checkpoint import DummyCheckpoint, SafetensorsCheckpoint
from tokenspeed.runtime.kv.file_store import FileStore
from tokenspeed.runtime.kv.identity import namespace, weights_digest
from tokenspeed.runtime.kv.mesh import MeshTiers, Worker
from tokenspeed.runtime.kv.pages import Fence, Pages
from tokenspeed.runtime.kv.record import Bytes
from tokenspeed.runtime.kv.store import Store, Tally
from tokenspeed.runtime.kv.tiers import RankTiers
from tokenspeed.runtime.kv.transfers import Kind, Order

PAGES, HOST, PAGE = 12, 10, 4
NAMESPACE = b"n" * 16
EMPTY = np.array([], np.int32)


def caches(seed: int = 0) -> list[torch.Tensor]:
    """Of different dtypes and extents, as layers may have them."""
    g = torch.Generator().manual_seed(seed)
    shapes = [((2, 8), torch.float32), ((2, 8), torch.bfloat16), ((5,), torch.bfloat16), ((3,), torch.uint8)]
    return [(torch.randn(PAGES * PAGE, *shape, generator=g) * 50).to(dtype) for shape, dtype in shapes]


def content(tensors: Sequence[torch.Tensor], page: int) -> bytes:
    return b"".join(
        t[page * PAGE : (page + 1) * PAGE].contiguous().view(torch.uint8).numpy().tobytes() for t in tensors
    )


def order(ticket: int, kind: Kind, device: Sequence[int], host: Sequence[int], group: int = 0) -> Order:
    keys = tuple(h.to_bytes(16, "little") for h in host)
    return Order(ticket, kind, group, np.array(device, np.int32), EMPTY, np.array(host, np.int32), keys)


def transfers(*orders: Order) -> list[SimpleNamespace]:
    """As the scheduler has them."""
    return [
        SimpleNamespace(**{**vars(o), "keys": np.frombuffer(b"".join(o.keys), np.uint8).reshape(-1, 16)})
        for o in orders
    ]


class Rank:
    """A rank's tiers and its answers."""

    def __init__(self, store: Store | None = None, timeout: float = 20.0, seed: int = 0) -> None:
        self.caches = caches(seed)
        self.answers: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.pages = Pages([(self.caches, PAGES)], HOST)
        self.tiers = RankTiers(self.pages, store, timeout, lambda ticket, pages: self.answers.put((ticket, pages)))

    def do(self, *orders: Order) -> list[tuple[int, int]]:
        """Starts orders and waits for as many answers."""
        self.tiers.start(orders)
        return sorted(self.answers.get(timeout=20) for _ in orders)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path, NAMESPACE, Pages([(caches(), PAGES)], 1).page_bytes, 1 << 20)


def test_pages_go_out_and_come_back(store: FileStore) -> None:
    rank = Rank(store)
    before = [content(rank.caches, p) for p in range(PAGES)]
    assert rank.do(order(1, "write_back", [3, 11, 0], [9, 0, 4])) == [(1, 3)]
    assert [bytes(rank.pages.row(h)) for h in (9, 0, 4)] == [before[3], before[11], before[0]]
    for t in rank.caches:
        t.zero_()
    rank.tiers.start([order(2, "load_back", [5, 6], [4, 9])])
    rank.tiers.wait([2, 77])  # 77: of another home group
    assert [content(rank.caches, p) for p in (5, 6)] == [before[0], before[3]]
    assert set(content(rank.caches, 7)) == {0} and rank.answers.get(timeout=20) == (2, 2)
    rank.tiers.wait([2])  # done long since
    assert rank.do(order(3, "backup", [], [9, 0, 4])) == [(3, 3)]
    again = Rank(store, seed=1)
    keys = order(4, "prefetch", [], [9, 0, 4]).keys
    moved = Order(4, "prefetch", 0, EMPTY, EMPTY, np.array([1, 2, 3], np.int32), keys)
    assert again.do(moved) == [(4, 3)]
    assert [bytes(again.pages.row(h)) for h in (1, 2, 3)] == [before[3], before[11], before[0]]
    assert store.tally.written == 3 and rank.do(order(5, "backup", [], [9, 0])) == [(5, 2)] and store.tally.written == 3
    assert again.do(order(6, "prefetch", [], [9, 5, 0])) == [(6, 1)], "up to the first that is absent"
    rank.tiers.close(), again.tiers.close()


def test_groups_larger_than_the_gathering_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    monkeypatch.setattr("tokenspeed.runtime.kv.pages.GATHERED", 2 * rank.pages.page_bytes)
    before = [content(rank.caches, p) for p in range(PAGES)]
    rank.do(order(1, "write_back", range(7), range(7)))
    rank.do(order(2, "load_back", range(11, 4, -1), range(7)))
    assert [content(rank.caches, 11 - i) for i in range(7)] == before[:7]


def test_random_orders_keep_every_byte(store: FileStore) -> None:
    """Against a model of pages as bytes: orders in flight together touch disjoint pages, as the scheduler sees to."""
    rank, rng, ticket = Rank(store), random.Random(4), 0
    device = [content(rank.caches, p) for p in range(PAGES)]
    host: dict[int, bytes] = {}
    stored: dict[int, bytes] = {}
    for _ in range(60):
        free_device, free_host, batch = list(range(PAGES)), list(range(HOST)), []
        rng.shuffle(free_device), rng.shuffle(free_host)
        while free_host and free_device and rng.random() < 0.7:
            n = rng.randint(1, min(3, len(free_host), len(free_device)))
            d, h = [free_device.pop() for _ in range(n)], [free_host.pop() for _ in range(n)]
            kind: Kind = rng.choice(["write_back", "load_back", "backup", "prefetch"])
            if kind in ("load_back", "backup") and not all(p in host for p in h):
                kind = "write_back"
            ticket += 1
            batch.append(order(ticket, kind, d if "back" in kind and kind != "backup" else [], h))
            if kind == "write_back":
                host |= {b: device[a] for a, b in zip(d, h)}
            elif kind == "load_back":
                for a, b in zip(d, h):
                    device[a] = host[b]
            elif kind == "backup":
                for b in h:
                    stored.setdefault(b, host[b])  # a key stands for its content: the first stays
            else:
                for b in h:
                    if b not in stored:
                        break
                    host[b] = stored[b]
        assert [t for t, _ in rank.do(*batch)] == [o.ticket for o in batch]
        assert [content(rank.caches, p) for p in range(PAGES)] == device
        assert {p: bytes(rank.pages.row(p)) for p in host} == host


class Gate:
    """A store that answers when it is let."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.open, self.inside = threading.Event(), threading.Event()
        self.written: list[bytes] = []

    def get(self, keys: Sequence[bytes]) -> list[memoryview]:
        self.inside.set()
        self.open.wait(20)
        return [memoryview(b"\xee" * Pages([(caches(), PAGES)], 1).page_bytes) for _ in keys]

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        self.inside.set()
        self.open.wait(20)
        self.written += [bytes(p) for p in pages]
        return [True] * len(keys)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def close(self) -> None: ...


@pytest.mark.parametrize("kind", ["prefetch", "backup"])
def test_storage_that_stalls_is_given_up_and_touches_nothing_later(kind: Kind) -> None:
    gate = Gate()
    rank = Rank(gate, timeout=0.05)
    rank.pages.arena.fill_(7)
    assert rank.do(order(1, kind, [], [2, 3])) == [(1, 0)]
    assert gate.inside.is_set()
    assert rank.do(order(2, "write_back", [1], [2])) == [(2, 1)], "copies go on, and the host page is another's now"
    held = bytes(rank.pages.row(2))
    gate.open.set()
    rank.tiers.close()
    assert bytes(rank.pages.row(2)) == held == content(rank.caches, 1)
    assert set(rank.pages.row(3)) == {7} and rank.answers.empty(), "answered once"
    assert all(set(p) == {7} for p in gate.written), "what was read of the page before it was given up"


def test_storage_that_hangs_costs_one_time_out(caplog: pytest.LogCaptureFixture) -> None:
    """Orders behind one that hangs are answered at once, counted once, told of once; when it is back, storage is asked again."""
    gate = Gate()
    rank = Rank(gate, timeout=0.05)
    assert rank.do(order(1, "prefetch", [], [2, 3])) == [(1, 0)]
    gate.inside.clear()
    later = [order(n, kind, [], [4, 5]) for n in range(2, 12) for kind in ("prefetch", "backup")]
    assert [pages for _, pages in rank.do(*later)] == [0] * 20
    assert not gate.inside.is_set() and gate.tally.failures == 1
    assert sum("not asked until it is back" in line for line in caplog.messages) == 1
    gate.open.set()
    for n in range(100, 300):
        time.sleep(0.01)
        if rank.do(order(n, "backup", [], [6])) == [(n, 1)]:
            return
    raise AssertionError("storage is not asked again")


def test_a_store_that_raises_fails_its_order_alone() -> None:
    class Broken(Gate):
        def get(self, keys: Sequence[bytes]) -> list[memoryview]:
            raise MemoryError("no memory")

    rank = Rank(Broken())
    assert rank.do(order(1, "prefetch", [], [2, 3]), order(2, "write_back", [1], [2])) == [(1, 0), (2, 1)]
    rank.tiers.check()


def test_storage_comes_after_the_copies_started_before(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(store)
    out = rank.pages.out

    def late(pages: Sequence[np.ndarray], host: np.ndarray) -> Fence | None:
        time.sleep(0.05)
        return out(pages, host)

    monkeypatch.setattr(rank.pages, "out", late)
    assert rank.do(order(1, "write_back", [8], [1]), order(2, "backup", [], [1])) == [(1, 1), (2, 1)]
    assert [bytes(p) for p in store.get(order(2, "backup", [], [1]).keys)] == [content(rank.caches, 8)]


def test_a_copy_that_raises_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()

    def broken(*_: object) -> None:
        raise RuntimeError("bus error")

    monkeypatch.setattr(rank.pages, "back", broken)
    rank.tiers.start([order(1, "load_back", [1], [2])])
    with pytest.raises(RuntimeError, match="between device and host pages failed"):
        rank.tiers.wait([1])
    with pytest.raises(RuntimeError, match="between device and host pages failed"):
        rank.tiers.check()
    assert rank.answers.empty()


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[tuple[MeshTiers, list[Rank]]]:
    """Home groups 0, 0, 1: the first rank is the core's own, the others answer on pipes."""
    size = Pages([(caches(), PAGES)], 1).page_bytes
    made: list[Rank] = []
    workers: list[Worker] = []
    for home in (0, 1):
        ours, theirs = Pipe(duplex=False)
        rank = Rank(FileStore(tmp_path, bytes([home]) * 16, size, 1 << 20), seed=home + 1)

        def report(ticket: int, pages: int, rank: Rank = rank, pipe: Connection = theirs) -> None:
            pipe.send((ticket, pages, rank.tiers.totals()))

        rank.tiers._report = report
        made.append(rank)
        workers.append(Worker(home, rank.tiers.start, ours))
    own = Rank(FileStore(tmp_path, b"o" * 16, size, 1 << 20))

    def start_own(report: Callable[[int, int], None]) -> RankTiers:
        own.tiers._report = report
        return own.tiers

    yield MeshTiers(start_own, 0, workers), [own, *made]
    for rank in (own, *made):
        rank.tiers.close()


def answers(tiers: MeshTiers, count: int) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    deadline = time.monotonic() + 20
    while len(out) < count and time.monotonic() < deadline:
        out += tiers.answered()
    return sorted(out)


def test_a_transfer_is_answered_when_all_its_ranks_have_with_the_fewest_pages(
    mesh: tuple[MeshTiers, list[Rank]],
) -> None:
    tiers, (own, same, other) = mesh
    tiers.start(transfers(order(1, "write_back", [1, 2, 3], [1, 2, 3]), order(2, "write_back", [4], [4], group=1)))
    assert tiers.busy and answers(tiers, 2) == [(1, 3), (2, 1)] and not tiers.busy
    assert [bytes(r.pages.row(2)) for r in (own, same)] == [content(r.caches, 2) for r in (own, same)]
    assert bytes(other.pages.row(4)) == content(other.caches, 4)
    tiers.start(transfers(order(3, "backup", [], [1, 2, 3]), order(4, "backup", [], [4], group=1)))
    assert answers(tiers, 2) == [(3, 3), (4, 1)] and tiers.totals()["written"] == 7
    for path in Path(same.tiers.store._pages).rglob("*2" + "0" * 30):  # pyright: ignore
        path.unlink()
    tiers.start(transfers(order(5, "prefetch", [], [1, 2, 3])))
    assert answers(tiers, 1) == [(5, 1)]
    # One of them lies behind the gap: its thread may still read when the order, which does not need it, is answered.
    deadline = time.monotonic() + 20
    while (hits := sum(r.tiers.totals()["hits"] for r in (own, same, other))) < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert hits == 5 and tiers.answered() == []


def test_a_worker_goes_on_while_nobody_reads_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core reads between steps; a step that waits for a copy must not wait for the core."""
    ours, theirs = Pipe(duplex=False)
    rank = Rank()

    def start(config: object, executor: object, report: Callable[[int, int], None]) -> RankTiers:
        rank.tiers._report = report
        return rank.tiers

    monkeypatch.setattr(ranks, "rank_tiers", start)
    ranks._answering(None, None, theirs)  # pyright: ignore[reportArgumentType]
    rank.tiers.start([order(i, "write_back", [1], [1]) for i in range(5000)])  # more than a pipe holds
    rank.tiers.start([order(5000, "load_back", [2], [1])])
    waiting = threading.Thread(target=rank.tiers.wait, args=([5000],), daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive() and content(rank.caches, 2) == content(rank.caches, 1)
    assert [ours.recv()[0] for _ in range(5001)] == list(range(5001))


# ---- whose pages -----------------------------------------------------------------------------------------------------


def test_a_namespace_is_of_one_model_part_and_layout(tmp_path: Path) -> None:
    part = {"tp": 0}
    first = weights_digest(SafetensorsCheckpoint(tiny_model(tmp_path / "a")))
    assert first == weights_digest(SafetensorsCheckpoint(tiny_model(tmp_path / "copy")))
    spoilt = tiny_model(tmp_path / "b") / "model.safetensors"
    data = bytearray(spoilt.read_bytes())
    data[-20:] = bytes(20)
    spoilt.write_bytes(data)
    digests = {
        first,
        weights_digest(SafetensorsCheckpoint(spoilt.parent)),
        weights_digest(SafetensorsCheckpoint(tiny_model(tmp_path / "c", seed=1))),
        weights_digest(DummyCheckpoint({"hidden_size": 4})),
        weights_digest(DummyCheckpoint({"hidden_size": 4}, seed=1)),
    }
    names = {namespace({"weights": d}, part, caches(), PAGE) for d in digests}
    names |= {
        namespace({"weights": first}, {"tp": 1}, caches(), PAGE),
        namespace({"weights": first}, part, caches()[:3], PAGE),
        namespace({"weights": first}, part, [c.half() for c in caches()], PAGE),
        namespace({"weights": first}, part, caches(), PAGE * 2),
        namespace({"weights": first, "max_model_len": 5}, part, caches(), PAGE),
    }
    assert len(digests) == 5 and len(names) == 10
    assert namespace({"weights": first}, part, caches(), PAGE) in names
