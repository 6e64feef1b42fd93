"""The tiers of all ranks, as the core sees them: it hands each transfer to the ranks of its home group and learns when the last
of them has answered. Invariant: orders reach a worker rank on the pipe of its steps, so one is begun before any step that
was published after it.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tokenspeed.runtime.kv.tiers import RankTiers
from tokenspeed.runtime.kv.transfers import Order, Tickets

Answer = tuple[int, int, dict[str, int]]  # ticket, pages, the rank's storage totals


@dataclass(frozen=True)
class Worker:
    """A worker rank: its home group, how orders are sent to it, and the pipe on which it answers."""

    home: int
    send: Callable[[list[Order]], None]
    answers: Connection


class MeshTiers:
    """See the module. `own`: makes the tiers of this process's rank, of home group `home`, given where it answers."""

    def __init__(
        self, own: Callable[[Callable[[int, int], None]], RankTiers], home: int, workers: Sequence[Worker]
    ) -> None:
        self._arrived: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.own = own(lambda ticket, pages: self._arrived.put((ticket, pages, self.own.totals())))
        self._home, self._workers = home, list(workers)
        self._ranks = Counter([home, *(w.home for w in workers)])
        self._tickets = Tickets()
        self._totals: dict[int, dict[str, int]] = {}  # of storage, by worker; -1: this process's rank

    @property
    def page_bytes(self) -> int:
        """Of a host page over all ranks of a home group, which hold equal parts."""
        return self.own.pages.page_bytes * self._ranks[self._home]

    @property
    def busy(self) -> bool:
        """Whether a transfer has not been answered."""
        return len(self._tickets) > 0

    def start(self, transfers: Sequence[Any]) -> None:
        """Begins a scheduler's transfers, in their order."""
        orders = [Order.of(t) for t in transfers]
        for order in orders:
            self._tickets.add(order, self._ranks[order.group])
        for worker in self._workers:
            if theirs := [o for o in orders if o.group == worker.home]:
                worker.send(theirs)
        self.own.start([o for o in orders if o.group == self._home])

    def answered(self) -> list[tuple[int, int]]:
        """(ticket, pages that arrived) of the transfers that have ended since the last call. Raises what a copy raised, and
        EOFError or OSError when a worker is gone."""
        self.own.check()
        out: list[tuple[int, int]] = []
        while not self._arrived.empty():
            self._count(out, -1, self._arrived.get())
        for i, worker in enumerate(self._workers):
            while self.busy and worker.answers.poll():
                self._count(out, i, worker.answers.recv())
        return out

    def _count(self, out: list[tuple[int, int]], rank: int, answer: Answer) -> None:
        ticket, pages, self._totals[rank] = answer
        if (fewest := self._tickets.answered(ticket, pages)) is not None:
            out.append((ticket, fewest))

    def totals(self) -> dict[str, int]:
        """What storage has done, summed over the ranks (of workers: as of their last answer)."""
        self._totals[-1] = self.own.totals()
        return {name: sum(t[name] for t in self._totals.values()) for name in self._totals[-1]}

    def close(self) -> None:
        self.own.close()
