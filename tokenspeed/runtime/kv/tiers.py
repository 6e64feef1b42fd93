"""The host and storage tiers of one rank: it does what orders say and answers each of them once.

Copies between device and host run in the order of their start, on one thread. Storage has threads of its own, so that a slow
disk holds up no copy; what storage does begins when the copies started before it are done. A storage order that takes longer
than the store's time-out is given up: it is answered with the pages that arrived, and what comes later touches nothing, as
storage reads into memory of its own and only an order that is not answered yet may touch a host page. While one that was given
up still hangs, storage is not asked again: further orders are answered at once, so that a dead disk costs one time-out.

Invariant: once an order is answered, nothing of it reads or writes a host or device page any more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tokenspeed.runtime.kv.pages import Fence, Pages
from tokenspeed.runtime.kv.store import Store
from tokenspeed.runtime.kv.transfers import Order

log = logging.getLogger(__name__)

READERS, WRITERS = 4, 2  # orders that read from storage at once, threads that read for them; threads that write to it
BATCH_BYTES = 32 << 20  # of pages in one call to the store
CLOSING = 2.0  # seconds that what was started may take to end at the close

Report = Callable[[int, int], None]  # ticket, pages that arrived


class RankTiers:
    """See the module. `report` is called from several threads."""

    def __init__(self, pages: Pages, store: Store | None, timeout: float, report: Report) -> None:
        self.pages, self.store = pages, store
        self._report, self._timeout = report, timeout
        self._copies = Lane("copies", 1)
        self._last_copy: _Copy | None = None
        self._loads: dict[int, _Copy] = {}  # load_backs under way
        self._parts = Lane("kv-parts", READERS)
        self._reads, self._writes, self._watch = (
            Lane("kv-reads", READERS),
            Lane("kv-writes", WRITERS),
            Lane("kv-watch", 1),
        )
        self._fault: BaseException | None = None
        self._hanging: list[_StorageJob] = []  # given up, and not back from storage

    def start(self, orders: Sequence[Order]) -> None:
        """Begins orders, in this order."""
        for order in orders:
            if order.kind in ("write_back", "load_back"):
                self._last_copy = copy = _Copy(order)
                if order.kind == "load_back":
                    self._loads[order.ticket] = copy
                self._copies.put(lambda copy=copy: self._run_copy(copy))
            else:
                job = _StorageJob(order, self._report)
                if self._storage_hangs():
                    job.finish()
                    continue
                lane, work = (self._reads, self._prefetch) if order.kind == "prefetch" else (self._writes, self._backup)
                lane.put(lambda job=job, work=work, behind=self._last_copy: self._run_job(job, work, behind))
                deadline = time.monotonic() + self._timeout
                self._watch.put(lambda job=job, deadline=deadline: self._watch_job(job, deadline))

    def wait(self, tickets: Iterable[int]) -> None:
        """Returns when the pages of load_backs are there for the caller's current stream. Raises what a copy raised."""
        for ticket in tickets:
            copy = self._loads.pop(ticket, None)  # none: it is done, or of another home group
            if copy is not None:
                copy.enqueued.wait()
                self.pages.follow(copy.fence)
        self.check()

    def check(self) -> None:
        """Raises what a copy between memories raised: like a step that raises, it leaves no engine to go on with."""
        if self._fault is not None:
            raise RuntimeError("a copy between device and host pages failed") from self._fault

    def totals(self) -> dict[str, int]:
        """What storage has done so far, by name; nothing where there is none."""
        return {} if self.store is None else self.store.tally.totals()

    def close(self) -> None:
        """Lets what was started end, for a while: what is written to storage now is found by the next start."""
        deadline = time.monotonic() + CLOSING
        for lane in (self._copies, self._writes):
            lane.close(max(deadline - time.monotonic(), 0))
        for lane in (self._reads, self._parts, self._watch):
            lane.close(0)
        if self.store is not None:
            self.store.close()

    # ---- copies between device and host ----

    def _run_copy(self, copy: _Copy) -> None:
        order = copy.order
        try:
            if order.kind == "write_back":
                copy.fence = self.pages.out(order.pages, order.host)
            else:
                copy.fence = self.pages.back(order.host, order.pages)
            copy.enqueued.set()
            if copy.fence is not None:
                copy.fence.synchronize()
        except BaseException as fault:
            self._fault = fault
            log.error("a copy of %d pages (%s) failed: %s", len(order.host), order.kind, fault)
        finally:
            copy.enqueued.set()
            copy.done.set()
            self._loads.pop(order.ticket, None)
        if self._fault is None:
            self._report(order.ticket, len(order.host))

    # ---- storage ----

    def _storage_hangs(self) -> bool:
        self._hanging = [job for job in self._hanging if not job.ended.is_set()]
        return bool(self._hanging)

    def _watch_job(self, job: _StorageJob, deadline: float) -> None:
        """Gives an order up at its deadline. All have one time-out, so waiting for the oldest is right."""
        if job.ended.wait(max(deadline - time.monotonic(), 0)):
            return
        assert self.store is not None
        self._hanging = [*self._hanging, job]
        self.store.tally.add(failures=1)
        what, pages = job.order.kind, len(job.order.host)
        self.store.tally.warn(
            "hangs",
            "kv storage: a %s of %d pages given up after %g s; not asked until it is back",
            what,
            pages,
            self._timeout,
        )
        job.answer()

    def _run_job(self, job: _StorageJob, work: Callable[[_StorageJob], None], behind: _Copy | None) -> None:
        try:
            if behind is not None:
                behind.done.wait()
            if not job.answered:
                work(job)
        except Exception as fault:
            log.error("kv storage: %s of %d pages failed: %s", job.order.kind, len(job.order.host), fault)
        finally:
            job.finish()

    def _prefetch(self, job: _StorageJob) -> None:
        """Storage to host, up to the first page that is absent."""
        assert self.store is not None
        for batch in self._batches(job.order):
            keys, hosts = job.order.keys[batch], job.order.host[batch].tolist()
            found = self._found(keys)
            for host, page in zip(hosts, found):
                if not job.fill(self.pages.row(host), page):
                    return
            if len(found) < len(keys):
                return

    def _found(self, keys: Sequence[bytes]) -> list[memoryview]:
        """The leading pages that storage has, read and checked by several threads."""
        assert self.store is not None
        size = -(-len(keys) // READERS)
        parts = [_Part(self.store, keys[i : i + size]) for i in range(0, len(keys), size)]
        for part in parts[1:]:
            self._parts.put(part.read)
        parts[0].read()
        pages: list[memoryview] = []
        for part in parts:
            pages += part.result()
            if len(part.pages) < len(part.keys):
                break
        return pages

    def _backup(self, job: _StorageJob) -> None:
        """Host to storage: a page that is there already is not written again."""
        assert self.store is not None
        for batch in self._batches(job.order):
            keys, hosts = job.order.keys[batch], job.order.host[batch].tolist()
            there = self.store.exists(keys)
            missing = [i for i, known in enumerate(there) if not known]
            copies: list[bytes] = []
            for i in missing:
                if (copy := job.take(self.pages.row(hosts[i]))) is None:
                    return
                copies.append(copy)
            for i, kept in zip(missing, self.store.put([keys[i] for i in missing], copies), strict=True):
                there[i] = kept
            leading = there.index(False) if False in there else len(there)
            job.arrived(leading)
            if leading < len(there):
                return

    def _batches(self, order: Order) -> list[slice]:
        step = max(BATCH_BYTES // self.pages.page_bytes, 1)
        return [slice(i, i + step) for i in range(0, len(order.host), step)]


class _Copy:
    """A copy between device and host: `enqueued` when a stream may be made to wait for it, `done` when its pages are there."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.fence: Fence | None = None
        self.enqueued, self.done = threading.Event(), threading.Event()


class _StorageJob:
    """An order to storage under way. It is answered once: by its end, or by the time-out, whichever comes first."""

    def __init__(self, order: Order, report: Report) -> None:
        self.order = order
        self.answered = False
        self._report = report
        self._pages = 0
        self._lock = threading.Lock()
        self.ended = threading.Event()  # nothing is done for it any more

    def fill(self, row: memoryview, page: memoryview) -> bool:
        """Writes a host page, which has arrived then; False, and nothing is written, when the order has been answered."""
        with self._lock:
            if not self.answered:
                row[:] = page
                self._pages += 1
            return not self.answered

    def take(self, row: memoryview) -> bytes | None:
        """A copy of a host page; None when the order has been answered, as the page may be another's by now."""
        with self._lock:
            return None if self.answered else bytes(row)

    def arrived(self, pages: int) -> None:
        """So many more pages are in storage."""
        with self._lock:
            self._pages += pages

    def answer(self) -> None:
        with self._lock:
            if not self.answered:
                self.answered = True
                self._report(self.order.ticket, self._pages)

    def finish(self) -> None:
        """Its end; an order that has been given up is not answered again."""
        self.ended.set()
        self.answer()


class _Part:
    """Some of the keys of a batch, read by whatever thread comes to it."""

    def __init__(self, store: Store, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.pages: list[memoryview] = []
        self._store = store
        self._fault: BaseException | None = None
        self._done = threading.Event()

    def read(self) -> None:
        try:
            self.pages = self._store.get(self.keys)
        except BaseException as fault:
            self._fault = fault
        self._done.set()

    def result(self) -> list[memoryview]:
        """The leading pages, once they are read. Raises what reading raised."""
        self._done.wait()
        if self._fault is not None:
            raise self._fault
        return self.pages


class Lane:
    """Daemon threads that do calls in the order given: one that hangs in a dead file system does not keep the process."""

    def __init__(self, name: str, threads: int) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._main, name=f"tokenspeed-{name}", daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, call: Callable[[], object]) -> None:
        self._calls.put(call)

    def close(self, timeout: float) -> None:
        """Waits so long at most (seconds) for what was put."""
        deadline = time.monotonic() + timeout
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
