"""The Grafana dashboard: fresh, whole, and with queries of metrics that a server exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.runtime.dashboard import ROWS, dashboard
from tokenspeed.runtime.messages import Stats
from tokenspeed.runtime.metrics import Metrics

FILE = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
QUERIES = [query for row in ROWS.values() for panel in row for query, _ in panel.queries]
FUNCTIONS = {"sum", "max", "rate", "histogram_quantile", "by"}
SAMPLE = re.compile(r"^(tokenspeed:\w+)\{([^}]*)\} ", re.MULTILINE)


def exported() -> dict[str, set[str]]:
    """Metric -> its labels, of a server with all tiers that has served something."""
    metrics = Metrics("m")
    metrics.accepted(3, 4)
    metrics.tokens(1, 0.1, first=True)
    metrics.tokens(1, 0.1, first=False)
    metrics.finished("stop", 2, 0.2)
    metrics.step(
        Stats(),
        Stats(
            steps=1,
            page_bytes=1,
            window_pages={"held": 1},
            host={"total": 2, "free": 1},
            hit_tokens={"device": 1},
            storage={"bytes_read": 1, "pages_read": 1},
            transfers={"load": {"pages": 1, "missing_pages": 0, "in_flight": 0}},
        ),
    )
    found: dict[str, set[str]] = {}
    for name, labels in SAMPLE.findall(metrics.render().decode()):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_the_file_is_fresh() -> None:
    assert json.loads(FILE.read_text("utf-8")) == dashboard()


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_reads_what_is_exported(query: str) -> None:
    known = exported()
    names = re.findall(r"tokenspeed:\w+", query)
    assert names and set(names) <= set(known)
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    assert set(re.findall(r"(\w+) ?\(", query)) <= FUNCTIONS
    labels = set(re.findall(r"(\w+)=~", query)) | set(re.findall(r"by \((\w+)\)", query)) - {"instance"}
    assert all(labels <= known[name] for name in names)
    assert all(
        name.endswith(("_total", "_bucket", "_sum", "_count")) for name in re.findall(r"rate\((tokenspeed:\w+)", query)
    )


def test_every_metric_has_its_place() -> None:
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", name) for query in QUERIES for name in re.findall(r"tokenspeed:\w+", query)
    }
    have = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported() if not name.endswith("_created")}
    untold = {"queue_age_steps", "decode_stall_tokens", "kv_transfers_in_flight", "request_max_num_generation_tokens"}
    assert have - shown == {f"tokenspeed:{name}" for name in untold}


def test_panels_have_places_of_their_own() -> None:
    panels: list[dict[str, Any]] = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and all(x < 24 for x, _ in cells)
