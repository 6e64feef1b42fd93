"""The Pareto plot: what a user sees (tokens a second) against what a device gives (tokens a minute), a point a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenspeed.runtime.svg import LEFT, WIDTH, colour, document, dot, frame, line, text

TALL = 300
AXES = (
    ("total_tokens_per_minute_per_device", "tokens (prompt and output) a minute a device"),
    ("output_tokens_per_minute_per_device", "output tokens a minute a device"),
)


def pareto(series: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> str:
    """The document of some series of runs, each a sweep of one server."""
    return document([name for name, _ in series], [_panel(key, title, series) for key, title in AXES], TALL)


def _panel(key: str, title: str, series: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> list[str]:
    most = max((run[key] for _, runs in series for run in runs), default=0.0) or 1.0
    best = max((run["tps_per_user"] for _, runs in series for run in runs), default=0.0) or 1.0
    out = [*frame(f"tokens/s a user (up) against {title} (right)", TALL), text(LEFT - 60, 20, f"{best:.4g}")]
    out.append(text(WIDTH - LEFT - 40, TALL + 14, f"{most:.4g}"))

    def at(run: dict[str, Any]) -> tuple[float, float]:
        room = WIDTH - 2 * LEFT - 40
        return LEFT + run[key] / most * room, TALL - run["tps_per_user"] / best * (TALL - 30)

    for i, (_, runs) in enumerate(series):
        points = sorted((*at(run), str(run["name"])) for run in runs)
        out.append(line([(x, y) for x, y, _ in points], colour(i)))
        for x, y, name in points:
            out += [dot(x, y, colour(i), 3), text(x + 5, y - 4, name)]
    return out
