"""The binding called from many threads at once, in a module of its own so that it can be run under ThreadSanitizer.

python -m tests.scheduler.threads [folder of another build of the extension]
"""

from __future__ import annotations

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np


def hammer(scheduler_module: ModuleType, submitters: int = 4, each: int = 40) -> None:
    """Submits, aborts, watches and answers transfers from threads of their own while one plans; every request ends."""
    config = scheduler_module.Config(
        page_size=4, num_pages=8, max_requests=4, token_buckets=[1, 2, 4, 8], max_seq_len=32, max_in_flight=2, host_pages=8,
        storage=True, write_back_pages=1, kv_events=64,
    )  # fmt: skip
    scheduler = scheduler_module.Scheduler(config)
    done, transfers = threading.Event(), threading.Semaphore(0)
    moving: list[tuple[int, int]] = []
    ended: set[int] = set()

    def submit(first: int) -> None:
        for i in range(first, first + each):
            scheduler.submit(i, np.array([i % 5, 1, 2, 3, 4, i % 3], np.int32), 4)
            if i % 8 == 7 and scheduler.abort(i):
                ended.add(i)

    def watch() -> None:
        while not done.is_set():
            scheduler.check()
            stats = scheduler.stats()
            assert stats["kv_pages_free"] + stats["kv_pages_cached"] <= stats["kv_pages_total"]
            scheduler.kv_events()
            scheduler.snapshot()

    def move() -> None:
        while not done.is_set():
            if transfers.acquire(timeout=0.01):
                ticket, pages = moving.pop()
                assert scheduler.transferred(ticket, pages if ticket % 5 else 0)

    with ThreadPoolExecutor(submitters + 2) as pool:
        helpers = [pool.submit(watch), pool.submit(move)]
        submissions = [pool.submit(submit, each * i) for i in range(submitters)]
        while len(ended) < submitters * each or scheduler.snapshot():
            plan = scheduler.next_plan()
            failed = False
            for t in scheduler.transfers():
                failed |= t.kind == "load_back" and t.ticket % 5 == 0  # it will be answered short
                moving.append((t.ticket, len(t.host)))
                transfers.release()
            if plan is None:
                continue
            if failed:
                scheduler.fail(plan.step)
                continue
            for output in scheduler.advance(plan.step, np.zeros(plan.last.size, np.int32)):
                if output.finish_reason is not None:
                    ended.add(output.request_id)
        done.set()
        for future in [*helpers, *submissions]:
            future.result()
    scheduler.check()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.path.insert(0, sys.argv[1])
        hammer(importlib.import_module("_scheduler"))
    else:
        hammer(importlib.import_module("tokenspeed._scheduler"))
