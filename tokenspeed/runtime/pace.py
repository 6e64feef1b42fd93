"""How long the step after the one that runs may still be left unplanned. Invariant: the device does not idle for it, as
long as steps of a bucket take about what the last one took.

A step that is planned early is closed early: a request that arrives a moment later waits for two steps and not for one. So
the next step is planned when most of the running one's time is over, and what has arrived by then is part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.7  # of a step's time that passes before the next one is planned
LEAST = 0.004  # seconds: a shorter step leaves no time to plan behind it


class Pace:
    """Times steps by their bucket. Steps run one after the other, in the order of their launch."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = 0.0  # of the step that runs
        self._took: dict[int, float] = {}  # bucket -> seconds of its last step

    def launched(self, alone: bool) -> None:
        """A step was launched; `alone`: none runs before it."""
        if alone:
            self._began = self._clock()

    def finished(self, bucket: int) -> None:
        """The step that ran has ended; the one behind it, if any, runs from now on."""
        now = self._clock()
        self._took[bucket], self._began = now - self._began, now

    def rest(self, bucket: int) -> float:
        """Seconds until the step after a running one of `bucket` should be planned; 0: now."""
        took = self._took.get(bucket, 0.0)
        if took < LEAST:
            return 0.0
        return max(self._began + SHARE * took - self._clock(), 0.0)
