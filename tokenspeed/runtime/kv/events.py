"""What came to and left the caches, for routers that send a prompt where its prefix is. Invariant: events are numbered without a
gap as long as none was forgotten; a reader that finds the first number beyond the one it asked for starts from nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tokenspeed import _scheduler


class EventLog:
    """The last `size` events of a scheduler, kept for readers that ask for them by number; 0: none are kept."""

    def __init__(self, scheduler: Any, size: int) -> None:
        self._scheduler = scheduler
        self._events: deque[dict[str, Any]] = deque(maxlen=size)
        self._next = 0

    def since(self, number: int) -> dict[str, Any]:
        """The events from `number` on that are still kept, and the number to ask for next. Keys are hexadecimal."""
        config = self._scheduler.config
        for event in self._scheduler.kv_events():
            self._next = event.number + 1
            self._events.append(
                {
                    "number": event.number, "kind": event.kind, "tier": event.tier, "group": event.group,
                    "key": event.key.hex(), "parent": event.parent.hex(),
                }
            )  # fmt: skip
        return {
            "key_version": _scheduler.PAGE_KEY_VERSION,
            "page_size": config.page_size,
            "next": self._next,
            "events": [event for event in self._events if event["number"] >= number],
        }
