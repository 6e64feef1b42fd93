"""Measures the figures of a calibration table on this machine: collectives over gloo, memory, arithmetic, a call.

Invariant: what is timed is what an executor would call (the registered kernels), with warm caches, and the lower quartile
of several runs (others use the machine too); a fit is alpha (the time of 4 KiB) and the bandwidth that the time of 4 MiB
leaves for its wire bytes.
Processes are started by the command line; here is what one rank does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tokenspeed.compiler.costs import SHARES
from tokenspeed.kernels.comm import distributed

SMALL, LARGE = 4 << 10, 4 << 20  # bytes of the tensor, whole on the axis


def measure_collectives(ranks: int, runs: int) -> dict[str, dict[str, float]]:
    """(alpha_us, gbs) of each collective over the default group; the same on each rank only roughly: rank 0's counts."""
    out: dict[str, dict[str, float]] = {}
    for op, shares in SHARES.items():
        small, large = (_time(_call(op, ranks, n), runs) for n in (SMALL, LARGE))
        wire = shares * (ranks - 1) / ranks * (LARGE - SMALL)
        moving = max(large - small, large / 2)  # of a large one at least half is moving bytes, whatever noise says
        out[op] = {"alpha_us": round(min(small, large), 2), "gbs": round(wire / moving / 1e3, 4)}
    return out


def _call(op: str, ranks: int, nbytes: int) -> Callable[[], object]:
    rows = nbytes // 4 // 64 // ranks * ranks
    whole, part = torch.ones(rows, 64), torch.ones(rows // ranks, 64)
    if op == "all_to_all":  # as the halves of an exchange call it: with the rows for each rank counted out
        got, counts = torch.empty_like(whole), [rows // ranks] * ranks
        return lambda: dist.all_to_all_single(got, whole, counts, counts)
    x, y = (part, whole) if op == "all_gather" else (whole, part if op == "reduce_scatter" else torch.empty_like(whole))
    kernel = getattr(distributed, op)
    return lambda: kernel(x, out=y)


def measure_machine(runs: int) -> dict[str, float]:
    """memory_gbs (a copy's read and write), tflops (a float32 product), launch_us (a kernel on one row)."""
    a, b = torch.ones(16 << 20), torch.empty(16 << 20)
    m = torch.ones(768, 768)
    product = torch.empty_like(m)
    tiny = torch.ones(64)
    return {
        "memory_gbs": round(2 * a.numel() * 4 / _time(lambda: b.copy_(a), runs) / 1e3, 3),
        "tflops": round(2 * 768**3 / _time(lambda: torch.mm(m, m, out=product), runs) / 1e6, 4),
        "launch_us": round(_time(lambda: [tiny.mul_(1.0) for _ in range(100)], runs) / 100, 3),
    }


def _time(call: Callable[[], object], runs: int) -> float:
    """us of one call."""
    times: list[float] = []
    for k in range(runs + 3):
        started = time.perf_counter()
        call()
        if k >= 3:
            times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 4] * 1e6


def run_rank(rank: int, ranks: int, store: str, runs: int) -> dict[str, dict[str, float]]:
    """One rank's part: joins a gloo group through a file and measures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        return measure_collectives(ranks, runs)
    finally:
        dist.destroy_process_group()


def table(
    name: str, machine: Mapping[str, float], collectives: Mapping[int, Mapping[str, Mapping[str, float]]], source: str
) -> dict[str, Any]:
    """A calibration table as `load_costs` reads it; `collectives` by group size."""
    sizes: Sequence[int] = sorted(collectives)
    by_op = {op: {str(n): dict(collectives[n][op]) for n in sizes} for op in SHARES}
    return {
        "id": name, "source": source,
        "alpha_us": {str(n): collectives[n]["all_reduce"]["alpha_us"] for n in sizes},
        "beta_gbs": min(collectives[n]["all_reduce"]["gbs"] for n in sizes),
        **machine, "collectives": by_op,
    }  # fmt: skip
