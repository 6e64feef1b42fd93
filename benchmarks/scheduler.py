"""What a step of the control plane costs, through the Python binding, on one core.

    python benchmarks/scheduler.py [--json] [--steps N]

Four cases, each 256 running requests with 50,000-token contexts and pages of 16 tokens:
  shared    16 groups of 16 requests share 47,008 tokens: 94,880 pages in a pool of 100,000
  unshared  nothing in common: 800,000 pages in a pool of 1,000,000
  windowed  as shared, with layers that see 1,024 tokens and 40,000 pages of theirs
  tiered    as shared, with as many host pages: the step also hands out and answers the write-backs of what was computed
A step is `next_plan` (+ `transfers`) + `advance` while all 256 decode; `queued` repeats it with 10,000 requests waiting. A
match looks a 50,000-token prompt up in the prefix cache, its 3,125 page hashes included: warm (again and again) and cold
(after the processor's caches were overwritten). Times are microseconds. `allocs_per_step` is counted by a C++ program with a
replaced operator new (`scheduler_cpp/bench/steps.cpp`), which is built on first use.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tokenspeed._scheduler import Config, Scheduler

REQUESTS, CONTEXT, PAGE, GROUPS, SHARED = 256, 50_000, 16, 16, 47_008
VOCABULARY = 150_000
QUEUED = 10_000
CASES = {  # whether prefixes are shared, pages, window, host pages
    "shared": (True, 100_000, 0, 0),
    "unshared": (False, 1_000_000, 0, 0),
    "windowed": (True, 100_000, 1024, 0),
    "tiered": (True, 100_000, 0, 100_000),
}
ROOT = Path(__file__).parents[1]


def prompts(shared: bool) -> list[np.ndarray]:
    """REQUESTS arrays of CONTEXT int32 tokens."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, VOCABULARY, n, dtype=np.int32)  # noqa: E731
    if not shared:
        return [draw(CONTEXT) for _ in range(REQUESTS)]
    heads = [draw(SHARED) for _ in range(GROUPS)]
    return [np.concatenate([heads[i % GROUPS], draw(CONTEXT - SHARED)]) for i in range(REQUESTS)]


def decoding(requests: list[np.ndarray], pages: int, window: int, host: int) -> Scheduler:
    """A scheduler in which every request is in its decode phase."""
    config = Config(
        page_size=PAGE,
        num_pages=pages,
        max_requests=REQUESTS,
        token_buckets=[REQUESTS, 65_536],
        max_seq_len=65_536,
        host_pages=host,
        window=window,
        window_pages=40_000 if window else 0,
    )
    scheduler = Scheduler(config)
    for i, tokens in enumerate(requests):
        scheduler.submit(i, tokens, max_new_tokens=15_000)
    while True:
        plan = scheduler.next_plan()
        assert plan is not None
        move(scheduler)
        scheduler.advance(plan.step, np.zeros(plan.last.size, np.int32))
        if plan.bucket == REQUESTS and plan.num_rows[0] == REQUESTS:
            return scheduler


def move(scheduler: Scheduler) -> None:
    for transfer in scheduler.transfers():
        scheduler.transferred(transfer.ticket, len(transfer.host))


def time_steps(scheduler: Scheduler, steps: int) -> np.ndarray:
    """[2, steps] microseconds of each decode step, by the wall clock and of this thread's processor time (which a busy
    machine does not disturb); the sampled tokens differ from row to row and step to step."""
    rng = np.random.default_rng(1)
    sampled = rng.integers(0, VOCABULARY, (steps, REQUESTS), dtype=np.int32)
    times = np.empty((2, steps))
    tiered = scheduler.config.host_pages > 0
    for i in range(steps):
        start = time.perf_counter_ns(), time.thread_time_ns()
        plan = scheduler.next_plan()
        assert plan is not None
        if tiered:
            move(scheduler)
        scheduler.advance(plan.step, sampled[i])
        times[:, i] = (time.perf_counter_ns() - start[0]) / 1e3, (time.thread_time_ns() - start[1]) / 1e3
    assert scheduler.stats()["retractions"] == 0
    return times


def time_match(scheduler: Scheduler, tokens: np.ndarray, repeats: int, *, cold: bool) -> float:
    """The median, in microseconds."""
    evictor = np.zeros(1 << 25, np.int64)  # 256 MiB
    times = []
    for _ in range(repeats):
        if cold:
            evictor += 1
        start = time.perf_counter_ns()
        found = scheduler.cached_prefix(tokens)
        times.append((time.perf_counter_ns() - start) / 1e3)
        assert found == (CONTEXT - 1) // PAGE * PAGE
    return float(np.median(times))


def case(shared: bool, pages: int, window: int, host: int, steps: int) -> dict[str, float]:
    requests = prompts(shared)
    scheduler = decoding(requests, pages, window, host)
    time_steps(scheduler, 32)
    times = time_steps(scheduler, steps // 2)
    for i in range(QUEUED):
        scheduler.submit(REQUESTS + i, requests[i % REQUESTS][: 16 + i % 64], max_new_tokens=16)
    queued = time_steps(scheduler, steps // 2)
    result = {
        "step_p50_us": float(np.percentile(times[0], 50)),
        "step_p99_us": float(np.percentile(times[0], 99)),
        "step_cpu_p99_us": float(np.percentile(times[1], 99)),
        "step_queued_p50_us": float(np.percentile(queued[0], 50)),
        "match_warm_us": time_match(scheduler, requests[0], 50, cold=False),
        "match_cold_us": time_match(scheduler, requests[1], 10, cold=True),
    }
    scheduler.check()
    return result


def allocations(steps: int) -> dict[str, float]:
    """Mean allocations of a steady decode step, by case."""
    build = ROOT / "build" / "bench"
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(
        ["cmake", "-S", str(ROOT / "scheduler_cpp"), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}"], **quiet
    )
    subprocess.run(["cmake", "--build", str(build), "--target", "scheduler_steps"], **quiet)
    run = lambda name: subprocess.check_output([str(build / "scheduler_steps"), name, str(steps)], text=True)  # noqa: E731
    return {name: float(run(name)) for name in CASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object with flat keys")
    parser.add_argument("--steps", type=int, default=240, help="timed steps a case (the shared pool lasts about 250)")
    arguments = parser.parse_args()
    figures = {}
    counts = allocations(arguments.steps // 4)
    for name, sizes in CASES.items():
        result = case(*sizes, arguments.steps) | {"allocs_per_step": counts[name]}
        figures |= {f"{name}_{key}": round(value, 1) for key, value in result.items()}
    # The headline keys: the worst of the cases.
    for key in [key.removeprefix("shared_") for key in figures if key.startswith("shared_")]:
        figures[key] = max(figures[f"{name}_{key}"] for name in CASES)
    if arguments.json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:32} {value:10.1f}")


if __name__ == "__main__":
    main()
