"""How long the step after the one that runs may still be left unplanned. Invariant: the device does not idle for it, as
long as steps of a bucket take about what the last ones took.

A step that is planned early is closed early: a request that arrives a moment later waits for two steps and not for one. So
the next step is planned when most of the running one's time is over, and what has arrived by then is part of it; early
enough that twice the time of planning and launching is left.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

SHARE = 0.7  # of a step's time that passes at most before the next one is planned
LEAST = 0.010  # seconds: behind a shorter step the next one is planned at once, as there is little to gain
MARGIN = 0.0005  # seconds beside twice the planning: clocks and wake-ups
KEPT = 4  # steps of a bucket that are remembered
LATE = 0.8  # what is left of an estimate when a step had ended before anyone looked


class Pace:
    """Times steps by their bucket. Steps run one after the other, in the order of their launch."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._began = 0.0  # of the step that runs
        self._took: dict[int, deque[float]] = {}  # bucket -> seconds of its last steps
        self._planning = 0.0  # seconds of planning and launching, of late at most

    def launched(self, since: float, alone: bool) -> None:
        """A step was launched, whose planning began at `since`; `alone`: none runs before it."""
        now = self.clock()
        self._planning = max(now - since, 0.9 * self._planning)
        if alone:
            self._began = now

    def finished(self, bucket: int, waited: bool) -> None:
        """The step that ran has ended, and the one behind it, if any, runs from now on. `waited`: this was seen as it happened;
        a step that had ended before may have left the device idle, and how long it took is not known."""
        now = self.clock()
        took = now - self._began
        if not waited:
            took = min(took, LATE * self._least(bucket))
        self._took.setdefault(bucket, deque(maxlen=KEPT)).append(took)
        self._began = now

    def rest(self, bucket: int) -> float:
        """Seconds until the step after a running one of `bucket` should be planned; 0: now."""
        took = self._least(bucket)
        if took < LEAST:
            return 0.0
        due = min(SHARE * took, took - 2 * self._planning - MARGIN)
        return max(self._began + due - self.clock(), 0.0)

    def _least(self, bucket: int) -> float:
        """What a step of a bucket takes at least, judging by the last ones; 0: not known."""
        return min(self._took.get(bucket, ()), default=0.0)
