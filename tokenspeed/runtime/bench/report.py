"""What a run amounts to: one flat object for programs, with vLLM's names where it has one, and a table for people.

TTFT: sent to first output. TPOT: first to last output, over the tokens behind the first. ITL: between two pieces of output.
E2E: sent to end. All in ms. TPS/user is 1000 / TPOT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenspeed.runtime.bench.load import Record

GOALS = ("ttft", "tpot", "e2el", "tps")
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Timing:
    """Of one answered request, in ms."""

    ttft: float
    tpot: float  # 0 where one token came
    e2el: float
    tokens: int

    @property
    def tps(self) -> float:
        """Tokens a second that its reader sees."""
        return 1e3 / self.tpot if self.tpot else float("inf")

    def meets(self, goals: dict[str, float]) -> bool:
        """Whether each goal is met: times at most, tokens a second at least."""
        return all(
            getattr(self, name) >= goal if name == "tps" else getattr(self, name) <= goal
            for name, goal in goals.items()
        )


def timing(r: Record) -> Timing:
    ttft, last = r.stamps[0] - r.sent, r.stamps[-1] - r.sent
    tpot = (last - ttft) / (r.output_tokens - 1) if r.output_tokens > 1 else 0.0
    return Timing(1e3 * ttft, 1e3 * tpot, 1e3 * (r.ended - r.sent), r.output_tokens)


def figures(
    records: Sequence[Record], seconds: float, goals: dict[str, float] | None = None, devices: int = 1
) -> dict[str, Any]:
    """Flat keys. `goals` as in GOALS; `devices` the server runs on."""
    good = [r for r in records if not r.error]
    times = [timing(r) for r in good]
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    gaps = [1e3 * (b - a) for r in good for a, b in zip(r.stamps, r.stamps[1:])]
    out: dict[str, Any] = {
        "duration": seconds, "completed": len(good), "failed": len(records) - len(good),
        "total_input_tokens": prompt, "total_output_tokens": output,
        "request_throughput": len(good) / seconds, "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "output_tokens_per_minute_per_device": 60 * output / seconds / devices,
        "total_tokens_per_minute_per_device": 60 * (prompt + output) / seconds / devices,
        "max_concurrent_requests": _at_once(records),
    }  # fmt: skip
    for name, values in (
        ("ttft_ms", [t.ttft for t in times]),
        ("tpot_ms", [t.tpot for t in times if t.tokens > 1]),
        ("itl_ms", gaps),
        ("e2el_ms", [t.e2el for t in times]),
        ("ttft_user_ms", [t.ttft for t, r in zip(times, good) if r.by_user]),
        ("ttft_tool_ms", [t.ttft for t, r in zip(times, good) if not r.by_user]),
    ):
        if values or not name.startswith(("ttft_user", "ttft_tool")):
            out |= spread(name, values)
    out["tps_per_user"] = 1e3 / out["median_tpot_ms"] if out["median_tpot_ms"] else 0.0
    out["tps_per_user_e2e"] = float(np.median([1e3 * t.tokens / t.e2el for t in times])) if times else 0.0
    for tier in sorted({tier for r in good for tier in r.cached}):
        out[f"hit_{tier}"] = sum(r.cached.get(tier, 0) for r in good) / max(prompt, 1)
    out["hit_total"] = sum(sum(r.cached.values()) for r in good) / max(prompt, 1)
    if goals:
        met = sum(t.meets(goals) for t in times)
        out |= {"goodput": goals, "request_goodput": met / seconds, "goodput_share": met / max(len(records), 1)}
    errors = sorted({r.error for r in records if r.error})
    return out | ({"errors": errors[:10]} if errors else {})


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, median, p90 and p99 of some values; zeros of none."""
    at = np.percentile(values or [0.0], PERCENTILES).tolist()
    named = {f"{'median' if p == 50 else f'p{p}'}_{name}": v for p, v in zip(PERCENTILES, at)}
    return {f"mean_{name}": float(np.mean(values or [0.0])), **named}


def _at_once(records: Sequence[Record]) -> int:
    """The most requests that were in flight together."""
    changes = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])
    return int(np.cumsum([change for _, change in changes]).max()) if changes else 0


_ROWS = (
    ("completed", "requests answered", "{:.0f}"),
    ("failed", "failed", "{:.0f}"),
    ("duration", "time, s", "{:.2f}"),
    ("total_input_tokens", "prompt tokens", "{:.0f}"),
    ("total_output_tokens", "output tokens", "{:.0f}"),
    ("request_throughput", "requests/s", "{:.2f}"),
    ("output_throughput", "output tokens/s", "{:.1f}"),
    ("total_tokens_per_minute_per_device", "tokens/min/device", "{:.0f}"),
    ("output_tokens_per_minute_per_device", "output tokens/min/device", "{:.0f}"),
    ("ttft_ms", "TTFT, ms", "{:.1f}"),
    ("ttft_user_ms", "TTFT of users' steps, ms", "{:.1f}"),
    ("ttft_tool_ms", "TTFT of tools' steps, ms", "{:.1f}"),
    ("tpot_ms", "TPOT, ms", "{:.2f}"),
    ("itl_ms", "ITL, ms", "{:.2f}"),
    ("e2el_ms", "end to end, ms", "{:.1f}"),
    ("tps_per_user", "tokens/s a user", "{:.1f}"),
    ("hit_total", "prompt tokens found in the cache", "{:.1%}"),
    ("hit_device", "on the device", "{:.1%}"),
    ("hit_host", "in host memory", "{:.1%}"),
    ("hit_storage", "in storage", "{:.1%}"),
    ("request_goodput", "goodput, requests/s", "{:.2f}"),
    ("goodput_share", "requests that meet the goals", "{:.1%}"),
)


def as_table(runs: Sequence[dict[str, Any]]) -> str:
    """Text, a column a run; four values are mean, p50, p90 and p99."""

    def cell(run: dict[str, Any], key: str, form: str) -> str:
        if key in run:
            return form.format(run[key])
        return " / ".join(form.format(run[f"{at}_{key}"]) for at in ("mean", "median", "p90", "p99"))

    lines = [["", *(str(run["name"]) for run in runs)]]
    for key, title, form in _ROWS:
        if all(key in run or f"mean_{key}" in run for run in runs):
            lines.append([title, *(cell(run, key, form) for run in runs)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in lines
    )
