"""Times the kernels of a model's own steps on this device, and finds the fastest where several can run a call.

Invariant: what is timed is what a step runs: the calls of an emitted program, with its tensors, in its order. All calls of
one request (the same op of every layer) are timed together, so that each meets its weights as cold as in a step; on a GPU
in a captured graph. A choice is only made between kernels of one exactness.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenspeed.compiler.binding import parse_key
from tokenspeed.ir.mesh import parse_mesh
from tokenspeed.ir.ops.sampling import PARAM_WORDS, Flag
from tokenspeed.kernels.select import explain, selection
from tokenspeed.kernels.tuned import Entry, TunedTable
from tokenspeed.runtime.build import build_engine
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.executor import Executor, Step
from tokenspeed.runtime.options import OptionError

ROUNDS = 5  # medians of so many
GAIN = 0.97  # a kernel takes the place of the first choice if it takes at most this share of its time
LEAST = 2e-3  # seconds that a timed run takes about
GATED = "linear_silu_mul"  # the fused op that is not always worth it
APART = (
    f"reference.{GATED}"  # a program does not call a fused op's reference: it makes the calls that the op stands for
)


@dataclass(frozen=True, slots=True)
class Timed:
    """`microseconds` one of the `calls` of a request takes in a step of a bucket."""

    bucket: int
    request: str
    kernel: str
    calls: int
    microseconds: float


def step_of(executor: Executor, batch: int, context: int, tokens: int = 1) -> Step:
    """A greedy step for `batch` requests whose last `tokens` tokens end at position `context` - 1, on shuffled pages, in the
    least bucket that holds them; the other rows are holes. OptionError where pages, buckets or the length do not suffice."""
    page = executor.config.page_size
    pages = -(-context // page)
    fitting = [t for t, _ in executor.artifact.buckets if t >= batch * tokens]
    fits = batch * pages <= executor.config.num_pages and batch <= executor.max_s
    if not fitting or not fits or context > executor.config.max_model_len:
        raise OptionError(
            f"{batch} requests of {context} tokens do not fit: {executor.config.num_pages} pages of {page}, "
            f"at most {executor.max_s} requests and {executor.max_t} tokens a step, {executor.config.max_model_len} a request; "
            "give a shorter --context, or more of what is short"
        )
    bucket = min(fitting)
    held = dict(executor.artifact.buckets)[bucket]
    table = np.random.default_rng(0).permutation(executor.config.num_pages)[: batch * pages].astype(np.int32)
    table = table.reshape(batch, pages)
    at = np.arange(batch, dtype=np.int32)
    row = np.full(bucket, -1, np.int32)
    row[: batch * tokens] = np.repeat(at, tokens)
    pos = np.where(row >= 0, context - tokens + np.arange(bucket) % tokens, -1).astype(np.int32)
    slot = np.where(row >= 0, table[row, pos // page] * page + pos % page, -1).astype(np.int32)
    last, slots = np.full((2, held), -1, np.int32)
    last[:batch], slots[:batch] = (at + 1) * tokens - 1, at
    tables = np.zeros((held, pages), np.int32)
    tables[:batch] = table
    arrays = {
        "ids": np.where(row >= 0, 11 + np.arange(bucket) % 1000, -1).astype(np.int32), "pos": pos, "slot": slot,
        "row": row, "last": last, "table": tables, "request_slots": slots,
    }  # fmt: skip
    if near := executor.config.window_pages:  # as many as there are, again and again: what is read decides no time
        arrays["window_table"] = tables % near
        arrays["window_slot"] = np.where(slot < 0, slot, slot // page % near * page + slot % page)
    params = np.zeros((held, PARAM_WORDS), np.int32)
    params[:batch, 0] = int(Flag.VALID | Flag.GREEDY)
    return Step(bucket, held, "gumbel", arrays, params, [])


def measure(executor: Executor, bucket: int, context: int) -> list[Timed]:
    """The kernels of a bucket's step, in the order in which they first run: decodes at `context`, or a prompt's last tokens."""
    rows = dict(executor.artifact.buckets)[bucket]
    step = step_of(executor, *((bucket, context) if bucket <= rows else (1, max(context, bucket), bucket)))
    executor.run(step)  # the ports now hold it
    program = executor.program("gumbel", bucket)
    groups: dict[str, list[Any]] = {}
    for request, call in zip(program.requests, program.calls, strict=True):
        if request and call[0].solution != "reference":
            groups.setdefault(request, []).append(call)
    out = []
    for request, calls in groups.items():
        seconds = _seconds(executor, calls)
        out.append(Timed(bucket, request, calls[0][0].name, len(calls), round(1e6 * seconds / len(calls), 3)))
    return out


def _seconds(executor: Executor, calls: Sequence[Any]) -> float:
    """Of all `calls`, one after the other."""

    def once() -> None:
        for spec, args, attrs in calls:
            spec.fn(*args, **attrs)

    if executor.device.type == "cpu":
        return _median(once, time.perf_counter)
    from tokenspeed.runtime.cuda_executor import CudaExecutor

    assert isinstance(executor, CudaExecutor)
    gpu = executor.gpu
    with gpu.current():
        once()
        gpu.synchronize()
        replay = gpu.capture(once)

        def clock() -> float:
            gpu.synchronize()
            return time.perf_counter()

        def again() -> None:
            for _ in range(repeats):
                replay()

        repeats = 1
        took = _median(again, clock)
        repeats = max(1, min(64, round(LEAST / took)))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(ROUNDS):
            begin.record(gpu.stream)
            again()
            end.record(gpu.stream)
            gpu.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


def _median(run: Callable[[], object], clock: Callable[[], float]) -> float:
    run()
    times = []
    for _ in range(ROUNDS):
        began = clock()
        run()
        times.append(clock() - began)
    return statistics.median(times)


def bench(config: EngineConfig, context: int, say: Callable[[str], None] = lambda _: None) -> list[Timed]:
    """What the kernels of every bucket's step take. StartupError and what else keeps an engine from starting."""
    return _round(config, context, None, say)[0]


def tune(config: EngineConfig, context: int, say: Callable[[str], None] = lambda _: None) -> TunedTable:
    """The fastest kernel of every request of the model's steps for which this device has several of one exactness.

    The model is compiled once for each rank of candidates, and once with gated products taken apart. Times hardly depend on
    weights: load_format dummy will do.
    """
    first, device = _round(config, context, None, say)

    def advised(entries: list[Entry]) -> list[Timed]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "table.json"
            path.write_text(TunedTable(device, tuple(entries)).dump())
            return _round(config, context, path, say)[0]

    candidates = {t.request: _candidates(t, device) for t in first}
    known = {(t.request, t.kernel): t for t in first}
    for turn in range(1, max((len(c) for c in candidates.values()), default=1)):
        found = advised([_entry(r, c[turn], 0.0) for r, c in candidates.items() if turn < len(c)])
        known |= {(t.request, t.kernel): t for t in found}
    if whole := [t for t in first if parse_key(t.request)[0] == GATED]:
        for t in _apart(whole, first, advised([_entry(t.request, APART, 0.0) for t in whole])):
            candidates[t.request].append(APART)
            known[t.request, APART] = t
    best: list[Entry] = []
    for request, names in candidates.items():
        timed = [known[request, name] for name in names if (request, name) in known]
        fastest = min(timed, key=lambda t: t.microseconds)
        if fastest.microseconds > GAIN * timed[0].microseconds:
            fastest = timed[0]
        if len(names) > 1:
            best.append(_entry(request, fastest.kernel, fastest.microseconds))
    return TunedTable(device_name(device), tuple(_ranges(best)))


def _apart(whole: Sequence[Timed], first: Sequence[Timed], found: Sequence[Timed]) -> list[Timed]:
    """What the kernels that a step runs in place of each fused one take together: those that it did not run at `first`."""
    before = {(t.bucket, t.request) for t in first}
    out = []
    for t in whole:
        instead = [f for f in found if f.bucket == t.bucket and (f.bucket, f.request) not in before]
        if instead:
            took = sum(f.microseconds * f.calls for f in instead) / t.calls
            out.append(replace(t, kernel=APART, microseconds=round(took, 3)))
    return out


def _ranges(entries: Sequence[Entry]) -> list[Entry]:
    """Each entry for its own number of tokens and the lesser ones that no other was measured at."""
    alike: dict[Any, list[Entry]] = {}
    for e in entries:
        rest = sorted((name, span) for name, span in e.traits.items() if name != "tokens")
        alike.setdefault((e.op, *sorted(e.signature.items()), *rest), []).append(e)
    out = []
    for group in alike.values():
        below = 0
        for e in sorted(group, key=lambda e: e.traits["tokens"]):
            tokens = e.traits["tokens"][1]
            out.append(replace(e, traits={**e.traits, "tokens": (below + 1, tokens)}))
            below = tokens
    return out


def _round(
    config: EngineConfig, context: int, table: Path | None, say: Callable[[str], None]
) -> tuple[list[Timed], str]:
    """(what every bucket's kernels take with the choices of `table`, device)."""
    if parse_mesh(config.mesh).ranks > 1 or config.tensor_parallel_size > 1:
        raise OptionError(
            "one rank's kernels are timed, and alone it would wait for the others: leave out --mesh and -tp"
        )
    with selection(tuned=table) if table else nullcontext():
        built = build_engine(replace(config, core="inproc"))
    try:
        if built.artifact.plan.mesh.ranks > 1:
            raise OptionError(
                f"{config.model} was compiled for several ranks; one rank's kernels are timed: compile it for one"
            )
        device = str(built.artifact.manifest["device"])
        out: list[Timed] = []
        for bucket, _ in built.artifact.buckets:
            out += measure(built.ranks.executor, bucket, context)
            say(f"{'first choices' if table is None else 'other choices'}: bucket {bucket}")
        return out, device
    finally:
        built.ranks.close()
        del built
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _candidates(timed: Timed, device: str) -> list[str]:
    """The kernel that was timed, then the others that may stand for it."""
    op, signature, facts = parse_key(timed.request)
    judged = explain(op, signature=signature, traits=facts, device=device)
    chosen = next(c.spec for c in judged if c.spec.name == timed.kernel)

    def alike(tag: str, tags: frozenset[str]) -> bool:
        return (tag in tags) == (tag in chosen.tags)

    others = [
        c.spec.name
        for c in judged
        if c.eligible and c.spec is not chosen and c.spec.solution != "reference"
        and all(alike(tag, c.spec.tags) for tag in ("latency", "determinism"))
    ]  # fmt: skip
    return [chosen.name, *others]


def _entry(request: str, kernel: str, microseconds: float) -> Entry:
    op, signature, facts = parse_key(request)
    return Entry(op, signature, {name: (value, value) for name, value in facts.items()}, kernel, microseconds)


def device_name(device: str) -> str:
    """What a table says it was measured on."""
    return torch.cuda.get_device_name() if device.startswith("cuda") and torch.cuda.is_available() else device


def as_json(rows: Sequence[Timed]) -> str:
    """One object a call, with its share of the bucket's step."""
    totals: dict[int, float] = {}
    for r in rows:
        totals[r.bucket] = totals.get(r.bucket, 0.0) + r.calls * r.microseconds
    out = [
        {
            "bucket": r.bucket, "request": r.request, "kernel": r.kernel, "calls": r.calls, "us": r.microseconds,
            "share": round(r.calls * r.microseconds / totals[r.bucket], 4),
        }
        for r in rows
    ]  # fmt: skip
    return json.dumps(out, indent=1)
