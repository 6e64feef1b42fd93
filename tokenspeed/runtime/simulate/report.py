"""What an outcome amounts to: one flat object a policy for programs, one table for people. Times in seconds but for gaps, in ms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from tokenspeed.runtime.kv.transfers import KINDS
from tokenspeed.runtime.simulate.virtual import TIERS, Outcome, Policy

STALL = 0.2  # seconds between two tokens that a reader notices


def figures(outcome: Outcome) -> dict[str, Any]:
    """Flat keys."""
    served, stats = outcome.served, outcome.stats
    prompt = sum(s.prompt for s in served)
    slow = np.array([(s.last - s.submitted) / s.alone for s in served])
    by_session: dict[int, list[float]] = defaultdict(list)
    for s, slowdown in zip(served, slow.tolist(), strict=True):
        by_session[s.session].append(slowdown)
    means = np.array([np.mean(v) for v in by_session.values()])
    gaps = np.array(outcome.gaps or [0.0])
    found = {tier: sum(s.cached[tier] for s in served) for tier in TIERS}
    out: dict[str, Any] = {
        "requests": len(served),
        "prompt_tokens": prompt,
        "output_tokens": sum(s.output for s in served),
        "virtual_s": outcome.seconds,
        "simulation_s": outcome.took,
        "device_busy": outcome.busy / outcome.seconds,
        "device_loading": outcome.loading / outcome.seconds,
        "output_tokens_per_s": sum(s.output for s in served) / outcome.seconds,
        **{f"hit_{tier}": tokens / prompt for tier, tokens in found.items()},
        "hit_total": sum(found.values()) / prompt,
        "hit_ideal": sum(s.ideal for s in served) / prompt,
    }
    for who, chosen in (
        ("", served),
        ("_tool", [s for s in served if not s.by_user]),
        ("_user", [s for s in served if s.by_user]),
    ):
        out |= _percentiles(f"ttft{who}_s", [s.first - s.submitted for s in chosen])
    out |= _percentiles("gap_ms", (1e3 * gaps).tolist()) | {
        "gap_ms_max": float(1e3 * gaps.max()),
        "stalled": float((gaps > STALL).mean()),
        **_percentiles("slowdown", slow.tolist()),
        "fairness": float(means.sum() ** 2 / (len(means) * (means**2).sum())),
        "retractions": stats["retractions"],
    }
    for kind in KINDS:
        out[f"{kind}_gib"] = stats[f"{kind}_pages"] * outcome.page_bytes / 2**30
    return out


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    at = np.percentile(values or [0.0], (50, 90, 99))
    return {f"{name}_p{p}": float(v) for p, v in zip((50, 90, 99), at, strict=True)}


def name_of(policy: Policy, base: Policy) -> str:
    """What a policy has different from the base."""
    changed = [
        f"{f.name}={getattr(policy, f.name):g}"
        for f in fields(policy)
        if getattr(policy, f.name) != getattr(base, f.name)
    ]
    return ", ".join(changed) or "base"


def as_json(outcomes: Sequence[tuple[str, Outcome]]) -> list[dict[str, Any]]:
    return [{"name": name, "policy": asdict(outcome.policy), **figures(outcome)} for name, outcome in outcomes]


_ROWS = (
    ("requests", "requests", "{:.0f}"),
    ("virtual_s", "virtual time, s", "{:.0f}"),
    ("simulation_s", "time of the simulation, s", "{:.1f}"),
    ("device_busy", "device busy", "{:.1%}"),
    ("device_loading", "waiting for pages", "{:.1%}"),
    ("output_tokens_per_s", "output tokens/s", "{:.0f}"),
    ("hit_device", "prompt tokens found on the device", "{:.1%}"),
    ("hit_host", "in host memory", "{:.1%}"),
    ("hit_storage", "in storage", "{:.1%}"),
    ("hit_total", "in all", "{:.1%}"),
    ("hit_ideal", "by a cache without end", "{:.1%}"),
    ("ttft_tool_s", "TTFT of tools' steps, s", "{:.2f}"),
    ("ttft_user_s", "TTFT of users' steps, s", "{:.2f}"),
    ("gap_ms", "between tokens, ms", "{:.1f}"),
    ("stalled", f"tokens more than {STALL * 1e3:.0f} ms late", "{:.2%}"),
    ("slowdown", "times as long as alone", "{:.2f}"),
    ("fairness", "fairness over sessions (Jain, 1 is even)", "{:.3f}"),
    ("retractions", "retractions", "{:.0f}"),
    *((f"{kind}_gib", f"{kind.replace('_', ' ')}, GiB", "{:.1f}") for kind in KINDS),
)


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Text; three values are p50, p90 and p99."""

    def cell(row: dict[str, Any], key: str, form: str) -> str:
        if key in row:
            return form.format(row[key])
        return " / ".join(form.format(row[f"{key}_p{p}"]) for p in (50, 90, 99))

    lines = [["", *(str(row["name"]) for row in rows)]]
    lines += [[text, *(cell(row, key, form) for row in rows)] for key, text, form in _ROWS]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in lines
    )
