"""Transfers without a device: the other half of the null-device executor.

It keeps what every host page and every stored key holds, as the executor keeps it for KV slots, and holds the scheduler to
its word while a transfer is out: the source does not change, no step reads or writes what is being filled, and no page is
in two transfers that would race.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenspeed._scheduler import Plan, Scheduler, Transfer

if TYPE_CHECKING:
    from tests.scheduler.harness import Executor, Flight

WINDOW = 1 << 20  # window page w is kept as page WINDOW + w
Record = tuple[int, int] | None
Page = tuple[
    Record, ...
]  # a record a token; of a host page of a config with a window then those of its window part, if any


@dataclass
class Out:
    """A transfer that was started and not answered."""

    transfer: Transfer
    source: list[Page] = field(default_factory=list)  # as it was at the start; of load_back, write_back and backup
    read: bool = False  # a load_back whose pages a step has read


def named(t: Transfer, tier: str) -> set[int]:
    """Pages of a tier that a transfer names; of the device window pages too."""
    pages = set(getattr(t, tier).tolist())
    return pages | {WINDOW + w for w in t.window.tolist() if w >= 0} if tier == "device" else pages


class Mover:
    """Starts, completes and answers transfers; `storage` may be shared between engines."""

    def __init__(self, scheduler: Scheduler, executor: Executor, storage: dict[bytes, Page]) -> None:
        self.scheduler, self.executor, self.storage = scheduler, executor, storage
        self.host: list[dict[int, Page]] = [{} for _ in range(executor.config.dp)]
        self.out: dict[int, Out] = {}
        self.broken: set[int] = set()  # loads that a step found broken: answered short once the step has failed
        self.last = -1  # ticket

    def device_page(self, group: int, page: int) -> Page:
        size = self.executor.config.page_size
        return tuple(self.executor.kv[group].get(page * size + i) for i in range(size))

    def device_pages(self, t: Transfer) -> list[Page]:
        """What the device holds of a transfer's pages, with the window parts that are copied."""
        parts = [self.device_page(t.group, p) for p in t.device.tolist()]
        near = [() if w < 0 else self.device_page(t.group, WINDOW + w) for w in t.window.tolist()] or [()] * len(parts)
        return [part + more for part, more in zip(parts, near, strict=True)]

    def whole(self, page: Page) -> bool:
        """Whether no layer's part lacks."""
        return len(page) == self.executor.config.page_size * (2 if self.executor.config.window else 1)

    def _touched(self, group: int, tier: str, written: bool) -> set[int]:
        """Pages of a tier that transfers out write, or read and write."""
        writers = {"device": ("load_back",), "host": ("write_back", "prefetch")}[tier]
        pages: set[int] = set()
        for o in self.out.values():
            if o.transfer.group == group and (not written or o.transfer.kind in writers):
                pages |= named(o.transfer, tier)
        return pages

    def start(self, flights: list[Flight]) -> None:
        """Takes what the scheduler wants to be started; `flights`: the steps that were launched before."""
        for t in self.scheduler.transfers():
            assert t.ticket > self.last, "tickets ascend, so none is given twice"
            self.last = t.ticket
            assert t.ticket not in self.out
            n, g = len(t.host), t.group
            assert n > 0 and t.keys.shape == (n, 16)
            assert len(t.device) == (n if t.kind in {"write_back", "load_back"} else 0)
            assert len(set(t.host.tolist())) == n and len(set(t.device.tolist())) == len(t.device)
            assert len(t.window) == (len(t.device) if self.executor.config.window else 0)
            fills, reads = ("device", "host") if t.kind == "load_back" else ("host", "device")
            if t.kind != "backup":
                assert not named(t, fills) & self._touched(g, fills, written=False), "a race"
            if t.kind in {"backup", "load_back"}:
                assert not set(t.host.tolist()) & self._touched(g, "host", written=True), "reads what is being filled"
            elif t.kind == "write_back":
                assert not named(t, "device") & self._touched(g, reads, written=True), "reads what is being filled"
            o = Out(t)
            if t.kind == "write_back":
                o.source = self.device_pages(t)
                assert all(r is not None for page in o.source for r in page), "a write-back of what was not computed"
            elif t.kind in {"load_back", "backup"}:
                o.source = [self.host[g][p] for p in t.host.tolist()]
                assert all(r is not None for page in o.source for r in page), "reads a host page that nobody filled"
                needed = [True] * n if t.kind == "backup" else [w >= 0 for w in t.window.tolist()]
                assert all(self.whole(page) for page, need in zip(o.source, needed) if need), "lacks a window part"
            if t.kind == "load_back":
                size = self.executor.config.page_size
                for flight in flights:
                    assert not flight.pages[g] & named(t, "device"), "a step in flight still uses these pages"
                for p in named(t, "device"):
                    self.executor.kv[g].update(dict.fromkeys(range(p * size, (p + 1) * size)))
            elif t.kind != "backup":
                for p in t.host.tolist():
                    self.host[g][p] = (None,) * self.executor.config.page_size
            self.out[t.ticket] = o

    def read(self, plan: Plan, broken: bool) -> bool:
        """A step reads its loads; whether one is broken."""
        found = False
        for ticket in plan.loads.tolist():
            o = self.out[ticket]  # the scheduler lists a load only while it is out
            assert o.transfer.kind == "load_back" and not o.read
            o.read = True
            if broken:
                self.broken.add(ticket)
                found = True
            else:
                self._fill_device(o, len(o.source))
        return found

    def unread(self, group: int) -> set[int]:
        """Device pages that are being filled and that no step may touch yet."""
        loads = [o for o in self.out.values() if o.transfer.kind == "load_back" and o.transfer.group == group]
        return {p for o in loads if not o.read for p in named(o.transfer, "device")}

    def _fill_device(self, o: Out, pages: int) -> None:
        size, kv = self.executor.config.page_size, self.executor.kv[o.transfer.group]
        near = o.transfer.window.tolist() or [-1] * len(o.source)
        for p, w, page in list(zip(o.transfer.device.tolist(), near, o.source, strict=True))[:pages]:
            kv.update({p * size + i: record for i, record in enumerate(page[:size])})
            if w >= 0:
                kv.update({(WINDOW + w) * size + i: record for i, record in enumerate(page[size:])})

    def finish(self, ticket: int, most: int | None = None) -> None:
        """A transfer ends with at most `most` of its pages (a load that was read is whole or broken)."""
        o = self.out.pop(ticket)
        t, g = o.transfer, o.transfer.group
        pages = len(t.host) if most is None else min(most, len(t.host))
        keys = [bytes(k) for k in t.keys]
        if t.kind != "prefetch":
            now = self.device_pages(t) if t.kind == "write_back" else [self.host[g][p] for p in t.host.tolist()]
            assert now == o.source, "the source of a transfer changed under it"
        if t.kind == "load_back":
            if o.read:
                pages = min(pages, len(t.host) - 1) if ticket in self.broken else len(t.host)
            else:
                self._fill_device(o, pages)
            self.broken.discard(ticket)
        elif t.kind == "prefetch":
            have = next((i for i, k in enumerate(keys) if k not in self.storage), len(keys))
            pages = min(pages, have)
            for p, k in list(zip(t.host.tolist(), keys, strict=True))[:pages]:
                self.host[g][p] = self.storage[k]
        elif t.kind == "write_back":
            for p, page in list(zip(t.host.tolist(), o.source, strict=True))[:pages]:
                self.host[g][p] = page
        else:
            for k, page in list(zip(keys, o.source, strict=True))[:pages]:
                assert self.storage.setdefault(k, page) == page, "two contents under one key"
        before = self.scheduler.snapshot(), self.scheduler.stats()
        for bad in (ticket + 1000, -1):
            assert self.scheduler.transferred(bad, 0) is False
        assert before == (self.scheduler.snapshot(), self.scheduler.stats())
        assert self.scheduler.transferred(ticket, pages) is True
        self.scheduler.check()
        before = self.scheduler.snapshot(), self.scheduler.stats()
        assert self.scheduler.transferred(ticket, pages) is False, "a duplicate"
        assert before == (self.scheduler.snapshot(), self.scheduler.stats())
