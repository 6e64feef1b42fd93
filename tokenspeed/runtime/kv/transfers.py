"""What moves pages between tiers: an order to a rank, and the count of ranks that have answered it.

Invariant: the core gets each ticket back exactly once, when every rank that holds a part of the pages has answered, with the
number of leading pages that arrived on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

Kind = Literal["write_back", "load_back", "prefetch", "backup"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Order:
    """A scheduler's Transfer as plain data, for one home group.

    write_back: device to host; load_back: host to device; prefetch: storage to host; backup: host to storage.
    """

    ticket: int
    kind: Kind
    group: int
    device: np.ndarray  # int32 [n]; empty for prefetch and backup
    window: np.ndarray  # int32 [n], the window pages beside them, -1: none; empty where there are none at all
    host: np.ndarray  # int32 [n]
    keys: tuple[bytes, ...]  # of 16 bytes, for each page

    @classmethod
    def of(cls, transfer: Any) -> Order:
        """A copy, which outlives the scheduler's arrays."""
        keys = np.asarray(transfer.keys, np.uint8)
        return cls(
            int(transfer.ticket), transfer.kind, int(transfer.group), np.array(transfer.device, np.int32),
            np.array(transfer.window, np.int32), np.array(transfer.host, np.int32), tuple(key.tobytes() for key in keys),
        )  # fmt: skip

    @property
    def pages(self) -> list[np.ndarray]:
        """On the device, of each group of caches that has pages."""
        return [self.device, self.window] if len(self.window) else [self.device]


class Tickets:
    """Tickets out, each with the ranks that have yet to answer."""

    def __init__(self) -> None:
        self._out: dict[int, tuple[int, int]] = {}  # ticket -> ranks to answer, fewest pages so far

    def __len__(self) -> int:
        return len(self._out)

    def add(self, order: Order, ranks: int) -> None:
        self._out[order.ticket] = (ranks, len(order.host))

    def answered(self, ticket: int, pages: int) -> int | None:
        """A rank's answer; the pages to report when it was the last."""
        ranks, fewest = self._out[ticket]
        fewest = min(fewest, pages)
        if ranks > 1:
            self._out[ticket] = (ranks - 1, fewest)
            return None
        del self._out[ticket]
        return fewest
