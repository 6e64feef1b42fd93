"""Logging that never blocks who logs: records go through a bounded queue, and what does not fit is counted, not kept.

A stalled terminal or pipe must not stop a rank between a forward and a collective.
"""

from __future__ import annotations

import atexit
import logging
import logging.handlers
import queue
import sys

CAPACITY = 10_000  # records
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class DroppingHandler(logging.handlers.QueueHandler):
    """A queue handler that drops a record rather than wait, and says how many it dropped when there is room again."""

    def __init__(self, records: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(records)
        self.dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self.dropped:
                text = f"{self.dropped} log records were dropped: the log's reader is too slow"
                self.queue.put_nowait(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))
                self.dropped = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


def configure_logging(level: str, stream: logging.Handler | None = None) -> DroppingHandler:
    """Send this process's log to standard error (or `stream`) through a bounded queue. For a program's start."""
    output = stream or logging.StreamHandler(sys.stderr)
    output.setFormatter(logging.Formatter(FORMAT))
    handler = DroppingHandler(queue.Queue(CAPACITY))
    listener = logging.handlers.QueueListener(handler.queue, output)
    listener.start()
    atexit.register(listener.stop)
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [handler]
    return handler
