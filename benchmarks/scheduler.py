"""What a step of the control plane costs, through the Python binding, on one core.

    python benchmarks/scheduler.py [--json] [--steps N]

Two cases, each 256 running requests with 50,000-token contexts and pages of 16 tokens:
  shared    16 groups of 16 requests share 47,008 tokens: 94,880 pages in a pool of 100,000
  unshared  nothing in common: 800,000 pages in a pool of 1,000,000
A step is `next_plan` + `advance` while all 256 decode; `queued` repeats it with 10,000 requests waiting. A match looks
a 50,000-token prompt up in the prefix cache, its 3,125 page hashes included: warm (again and again) and cold (after
the processor's caches were overwritten). All figures are microseconds.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from tokenspeed._scheduler import Config, Scheduler

REQUESTS, CONTEXT, PAGE, GROUPS, SHARED = 256, 50_000, 16, 16, 47_008
VOCABULARY = 150_000
QUEUED = 10_000


def prompts(shared: bool) -> list[np.ndarray]:
    """REQUESTS arrays of CONTEXT int32 tokens."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, VOCABULARY, n, dtype=np.int32)  # noqa: E731
    if not shared:
        return [draw(CONTEXT) for _ in range(REQUESTS)]
    heads = [draw(SHARED) for _ in range(GROUPS)]
    return [np.concatenate([heads[i % GROUPS], draw(CONTEXT - SHARED)]) for i in range(REQUESTS)]


def decoding(requests: list[np.ndarray], pages: int) -> Scheduler:
    """A scheduler in which every request is in its decode phase."""
    config = Config(
        page_size=PAGE, num_pages=pages, max_requests=REQUESTS, token_buckets=[REQUESTS, 65_536], max_seq_len=65_536
    )
    scheduler = Scheduler(config)
    for i, tokens in enumerate(requests):
        scheduler.submit(i, tokens, max_new_tokens=15_000)
    while True:
        plan = scheduler.next_plan()
        assert plan is not None
        scheduler.advance(plan.step, np.zeros(plan.last.size, np.int32))
        if plan.bucket == REQUESTS and plan.num_rows[0] == REQUESTS:
            return scheduler


def time_steps(scheduler: Scheduler, steps: int) -> np.ndarray:
    """[2, steps] microseconds of each decode step, by the wall clock and of this thread's processor time (which a busy
    machine does not disturb); the sampled tokens differ from row to row and step to step."""
    rng = np.random.default_rng(1)
    sampled = rng.integers(0, VOCABULARY, (steps, REQUESTS), dtype=np.int32)
    times = np.empty((2, steps))
    for i in range(steps):
        start = time.perf_counter_ns(), time.thread_time_ns()
        plan = scheduler.next_plan()
        assert plan is not None
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


def case(shared: bool, pages: int, steps: int) -> dict[str, float]:
    requests = prompts(shared)
    scheduler = decoding(requests, pages)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object with flat keys")
    parser.add_argument("--steps", type=int, default=240, help="timed steps a case (the shared pool lasts about 250)")
    arguments = parser.parse_args()
    figures = {}
    for name, shared, pages in (("shared", True, 100_000), ("unshared", False, 1_000_000)):
        figures |= {f"{name}_{key}": round(value, 1) for key, value in case(shared, pages, arguments.steps).items()}
    # The headline keys: the worse of the two cases.
    for key in (
        "step_p50_us",
        "step_p99_us",
        "step_cpu_p99_us",
        "step_queued_p50_us",
        "match_warm_us",
        "match_cold_us",
    ):
        figures[key] = max(figures[f"shared_{key}"], figures[f"unshared_{key}"])
    if arguments.json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:32} {value:10.1f}")


if __name__ == "__main__":
    main()
