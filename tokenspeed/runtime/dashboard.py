"""The Grafana dashboard of a server, as one table of panels: docs/grafana-dashboard.json is generated from it.

    python -m tokenspeed.runtime.dashboard > docs/grafana-dashboard.json

Every query reads metrics that a server exports (metrics.py) under the variable `$model`, over Grafana's own interval.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

PREFIX = "tokenspeed:"
_ONE = '{model_name=~"$model"}'
_RATE = _ONE + "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `queries`: (PromQL, legend) each; `unit` is Grafana's name of it."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False


def gauge(name: str, legend: str = "") -> tuple[str, str]:
    return f"sum({PREFIX}{name}{_ONE})", legend or name


def rate(name: str, legend: str, by: str = "") -> tuple[str, str]:
    """A counter's growth a second, over all servers of the model, or by a label of it."""
    return f"sum{f' by ({by})' if by else ''} (rate({PREFIX}{name}_total{_RATE}))", f"{{{{{by}}}}}" if by else legend


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """The 50th, 95th and 99th percentile of a histogram."""
    return tuple(
        (f"histogram_quantile({share}, sum by (le) (rate({PREFIX}{name}_bucket{_RATE})))", f"p{share * 100:g}")
        for share in (0.5, 0.95, 0.99)
    )


def mean(name: str, legend: str) -> tuple[str, str]:
    """The mean of what a histogram saw."""
    return f"sum(rate({PREFIX}{name}_sum{_RATE})) / sum(rate({PREFIX}{name}_count{_RATE}))", legend


def ratio(part: str, whole: str, legend: str) -> tuple[str, str]:
    return f"sum(rate({PREFIX}{part}_total{_RATE})) / sum(rate({PREFIX}{whole}_total{_RATE}))", legend


ROWS: dict[str, tuple[Panel, ...]] = {
    "What clients feel": (
        Panel("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        Panel("Between tokens", "s", quantiles("inter_token_latency_seconds")),
        Panel("Whole request", "s", quantiles("e2e_request_latency_seconds")),
        Panel("Requests ended a second", "reqps", (rate("request_success", "", by="finished_reason"),), stacked=True),
    ),
    "Work": (
        Panel(
            "Tokens a second", "short", (rate("generation_tokens", "generated"), rate("prompt_tokens", "of prompts"))
        ),
        Panel(
            "Requests", "short", (gauge("num_requests_running", "running"), gauge("num_requests_waiting", "waiting"))
        ),
        Panel(
            "Tokens of a request",
            "short",
            (mean("request_prompt_tokens", "prompt, mean"), mean("request_generation_tokens", "output, mean")),
        ),
        Panel(
            "Engine steps", "short", (rate("engine_steps", "a second"), mean("iteration_tokens_total", "tokens of one"))
        ),
        Panel(
            "Retractions and skipped tokens a second",
            "short",
            (rate("num_preemptions", "requests retracted"), rate("decode_skips", "tokens skipped")),
        ),
        Panel("Share of time spent on planning", "percentunit", (rate("plan_seconds", "planning"),)),
    ),
    "KV cache": (
        Panel(
            "Pages that requests hold", "percentunit", ((f"max by (instance) ({PREFIX}kv_cache_usage_perc{_ONE})", ""),)
        ),
        Panel(
            "Prompt tokens found", "percentunit", (ratio("prefix_cache_hits", "prefix_cache_queries", "of all tokens"),)
        ),
        Panel(
            "Prompt tokens found a second, by tier",
            "short",
            (rate("prefix_cache_hits_by_tier", "", by="tier"),),
            stacked=True,
        ),
        Panel(
            "Pages of windowed layers",
            "short",
            ((f"sum by (state) ({PREFIX}window_kv_pages{_ONE})", ""),),
            stacked=True,
        ),
        Panel("Host memory", "bytes", (gauge("host_kv_bytes", "held"), gauge("host_kv_capacity_bytes", "capacity"))),
        Panel("Transfers", "Bps", (rate("kv_transfer_bytes", "", by="kind"),)),
        Panel("Pages that did not arrive, a second", "short", (rate("kv_transfer_missing_pages", "", by="kind"),)),
        Panel("Storage", "Bps", (rate("kv_storage_bytes", "", by="direction"),)),
        Panel("Storage events a second", "short", (rate("kv_storage_events", "", by="event"),)),
    ),
}


def dashboard() -> dict[str, Any]:
    """Grafana's model of it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(_placed(len(panels), {"type": "row", "title": title, "collapsed": False}, 0, top, 24, 1))
        top += 1
        for at, panel in enumerate(row):
            panels.append(_placed(len(panels), _graph(panel), 8 * (at % 3), top + 8 * (at // 3), 8, 8))
        top += 8 * -(-len(row) // 3)
    return {
        "title": "TokenSpeed",
        "uid": "tokenspeed",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source(), _model()]},
        "panels": panels,
    }


def _placed(number: int, panel: dict[str, Any], x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"id": number + 1, "gridPos": {"x": x, "y": y, "w": width, "h": height}, **panel}


def _graph(panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": query, "legendFormat": legend or "__auto"}
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _model() -> dict[str, Any]:
    query = f"label_values({PREFIX}num_requests_running, model_name)"
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "name": "model", "type": "query", "label": "Model", "datasource": source, "query": query, "refresh": 2,
        "includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
