"""The log never makes a writer wait."""

from __future__ import annotations

import logging
import queue
import threading

import pytest

from tokenspeed.runtime import logs


class Stuck(logging.Handler):
    """An output that blocks until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.lines: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.gate.wait(10)
        self.lines.put(self.format(record))


@pytest.mark.usefixtures("root_logger")
def test_a_stuck_output_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CAPACITY", 5)
    output = Stuck()
    handler = logs.configure_logging("info", output)
    log = logging.getLogger("test")
    for number in range(50):
        log.info("line %d", number)
    log.debug("not this one")
    dropped = handler.dropped
    assert 43 <= dropped <= 45  # five wait in the queue, one or none is at the output
    output.gate.set()
    kept = [output.lines.get(timeout=10) for _ in range(50 - dropped)]
    assert kept[0].endswith("INFO test: line 0")
    log.info("after")
    assert f"{dropped} log records were dropped" in output.lines.get(timeout=10)
    assert output.lines.get(timeout=10).endswith("after")
