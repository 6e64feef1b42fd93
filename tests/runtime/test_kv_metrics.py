"""What the tiers do is seen in the metrics, under names that say what is counted."""

from __future__ import annotations

from tokenspeed.runtime.messages import Stats
from tokenspeed.runtime.metrics import Metrics


def shown(stats: Stats) -> dict[str, float]:
    metrics = Metrics("m")
    metrics.step(Stats(), stats)
    lines = metrics.render().decode().splitlines()
    return {
        line.rpartition(" ")[0].removeprefix("tokenspeed:"): float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("tokenspeed:")
    }


def test_tiers_by_kind() -> None:
    kinds = {
        "write_back": {"in_flight": 2, "pages": 5, "missing_pages": 1},
        "prefetch": {"in_flight": 0, "pages": 3, "missing_pages": 7},
    }
    seen = shown(
        Stats(
            steps=4, queue_age_steps=9, decode_skips=2, decode_stall_tokens=31, plan_seconds=0.25,
            hit_tokens={"device": 10, "host": 20, "storage": 30}, host={"total": 8, "free": 3, "cached": 4}, page_bytes=100,
            transfers=kinds, storage={"hits": 6, "damaged": 1, "bytes_read": 640, "bytes_written": 70},
        )
    )  # fmt: skip
    labels = 'model_name="m"'
    assert seen[f'prefix_cache_hits_by_tier_total{{{labels},tier="storage"}}'] == 30
    assert seen[f"host_kv_bytes{{{labels}}}"] == 500 and seen[f"host_kv_capacity_bytes{{{labels}}}"] == 800
    assert seen[f'kv_transfer_bytes_total{{kind="write_back",{labels}}}'] == 500
    assert seen[f'kv_transfer_missing_pages_total{{kind="prefetch",{labels}}}'] == 7
    assert seen[f'kv_transfers_in_flight{{kind="write_back",{labels}}}'] == 2
    assert seen[f'kv_storage_events_total{{event="damaged",{labels}}}'] == 1
    assert seen[f'kv_storage_bytes_total{{direction="read",{labels}}}'] == 640
    assert seen[f"queue_age_steps{{{labels}}}"] == 9 and seen[f"decode_stall_tokens{{{labels}}}"] == 31
    assert seen[f"plan_seconds_total{{{labels}}}"] == 0.25 and seen[f"decode_skips_total{{{labels}}}"] == 2


def test_an_engine_without_tiers_and_windows_shows_none() -> None:
    names = shown(Stats(steps=1))
    assert not any("host" in name or "storage" in name or "transfer" in name or "window" in name for name in names)


def test_pages_of_windowed_layers_by_state() -> None:
    seen = shown(Stats(steps=1, window_pages={"held": 3, "cached": 5, "free": 2}))
    assert [seen[f'window_kv_pages{{model_name="m",state="{state}"}}'] for state in ("held", "cached", "free")] == [
        3,
        5,
        2,
    ]
