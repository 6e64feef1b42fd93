"""What verification and timing of GPU kernels share: the record of a run, operands amid NaN, and a clock of captured
graphs."""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenspeed import kernels as K
from tokenspeed.ir.ops import REFERENCES
from tokenspeed.kernels.tolerance import tolerance

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
NAN = float("nan")
DEVICE = torch.device("cuda")
COLD_BYTES = 256 << 20  # about four times the L2 of an H200


class Run:
    """What is known so far, written to the JSON file after every part."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.path, self.end, self.began = path, time.monotonic() + seconds, time.monotonic()
        self.data: dict[str, Any] = {"verify": [], "bench": [], "sweep": [], "skipped": []}
        self.later: list[tuple[str, Callable[[], tuple[float, float, float]], str]] = []  # run if time is left

    def left(self) -> float:
        return self.end - time.monotonic()

    def save(self) -> None:
        self.data["seconds"] = round(time.monotonic() - self.began, 1)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.data, indent=1))

    def verify(self, name: str, case: Callable[[], float]) -> None:
        """Runs a case, which gives its largest error as a multiple of what is allowed."""
        if self.left() < 0:
            self.data["skipped"].append(name)
            return
        try:
            excess = case()
            torch.cuda.synchronize()
            entry: dict[str, Any] = {"name": name, "ok": excess <= 1, "excess": round(excess, 4)}
        except Exception as error:
            text = traceback.format_exc()
            entry = {
                "name": name,
                "ok": False,
                "error": f"{type(error).__name__}: {error}"[:500],
                "trace": text[-2000:],
            }
            if "CUDA error" in str(error) or "illegal" in str(error):
                entry["fatal"] = True
        self.data["verify"].append(entry)
        if not entry["ok"]:
            print(f"FAILED {name}: {entry.get('error', entry.get('excess'))}", flush=True)
        if entry.get("fatal"):
            self.save()
            sys.exit(f"the device is lost after '{name}'")

    def bench(self, kind: str, name: str, case: Callable[[], tuple[float, float, float]], **facts: Any) -> None:
        """Times a case: (seconds a call, bytes, FLOPs)."""
        if self.left() < 15:
            self.data["skipped"].append(name)
            return
        try:
            seconds, moved, flops = case()
        except Exception as error:
            self.data[kind].append({"name": name, "error": f"{type(error).__name__}: {error}"[:500], **facts})
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            torch.cuda.empty_cache()
            return
        copy = self.data.get("copy_gbps")
        entry = {"name": name, "us": round(seconds * 1e6, 2), "gbps": round(moved / seconds / 1e9, 1), **facts}
        if copy:
            entry["of_copy"] = round(entry["gbps"] / copy, 3)
        if flops:
            entry["tflops"] = round(flops / seconds / 1e12, 1)
        self.data[kind].append(entry)
        rate = f"{entry['tflops']:7.1f} TF/s" if moved * 200 < flops else f"{entry['gbps']:7.0f} GB/s"
        share = f"{100 * entry.get('of_copy', 0):4.0f} %" if moved * 200 >= flops else ""
        extra = " ".join(f"{k}={v}" for k, v in facts.items() if k in ("tiling", "solution"))
        print(f"{name:52} {entry['us']:9.2f} us {rate} {share:6} {extra}", flush=True)


def ints(values: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=I32, device=DEVICE)


def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def strided(value: Tensor, spare: int = 8) -> Tensor:
    """`value` inside a wider buffer of NaN; rows stay aligned to 16 bytes."""
    wide = torch.full((*value.shape[:-1], value.shape[-1] + spare), NAN, dtype=value.dtype, device=value.device)
    out = wide[..., : value.shape[-1]]
    out.copy_(value)
    return out


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return strided(torch.full(shape, NAN, dtype=dtype, device=DEVICE))


def reference(op: str, *args: Any, **attrs: Any) -> Any:
    with DEVICE:  # references make index tensors on the default device
        return REFERENCES[op](*args, **attrs)


def same(a: Tensor, b: Tensor) -> None:
    if not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)):
        raise AssertionError(f"two runs differ in {int((a != b).sum())} of {a.numel()} values")


def checked(op: str, *args: Any, terms: int = 1, exact: bool = False, **attrs: Any) -> float:
    """Twice into poisoned buffers: the same bits, within tolerance, nothing written beside the output."""
    want = reference(op, *args, **attrs)
    outs = []
    for _ in range(2):
        out = poisoned(*want.shape, dtype=want.dtype)
        K.get(f"triton.{op}").fn(*args, **attrs, out=out)
        outs.append(out)
        beside = out._base
        assert beside is None or bool(beside[..., want.shape[-1] :].isnan().all()), "wrote beside the output"
    same(*outs)
    if exact:
        return 0.0 if torch.equal(outs[0].nan_to_num(7.0), want.nan_to_num(7.0)) else float("inf")
    return tolerance(op, want.dtype, terms=terms).excess(outs[0], want) if want.numel() else 0.0


def timed(calls: Sequence[Callable[[], object]], replays: int = 9, least: float = 1.5e-3) -> float:
    """Seconds a call: the median over replays of a graph that runs `calls` in turn until it takes about `least`."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    calls[0]()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(200, int(least * 1e3 / max(2e-3, begin.elapsed_time(end)) / len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    graph.replay()
    times = []
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) / 1e3 / (rounds * len(calls))


def sets_for(moved: int, most: int = 64) -> int:
    """How many sets of operands of `moved` bytes a round must have to go past the L2."""
    return max(1, min(most, -(-COLD_BYTES // max(1, moved))))


def copy_rate(run: Run) -> None:
    a = torch.randn(1 << 29, device=DEVICE)
    b = torch.empty_like(a)
    copy = lambda: torch.neg(a, out=b)  # noqa: E731 (a kernel's copy: in a graph the copy engine's reaches two thirds of it)
    for _ in range(400):  # half a second: the clocks of an idle card are low
        copy()
    seconds = min(timed([copy], least=2e-3) for _ in range(3))
    run.data["copy_gbps"] = round(2 * a.nbytes / seconds / 1e9, 1)
    print(f"copy of 2 GiB: {run.data['copy_gbps']} GB/s read and written", flush=True)
