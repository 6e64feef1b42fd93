"""SVG written by hand, for plots: panels of one width below each other. Invariant: the same figures give the same text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

WIDTH, PANEL, LEFT, GAP = 900, 170, 70, 60
COLOURS = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6")


def document(names: Sequence[str], panels: Sequence[Sequence[str]], tall: int = PANEL) -> str:
    """The panels, each `tall` pixels high, under a legend of the series' names."""
    head = 30 + 18 * len(names)
    height = len(panels) * (tall + GAP) + head
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">'
    ]
    out.append(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    for i, name in enumerate(names):
        out.append(f'<rect x="{LEFT}" y="{10 + 18 * i}" width="10" height="10" fill="{colour(i)}"/>')
        out.append(text(LEFT + 16, 19 + 18 * i, name))
    for i, panel in enumerate(panels):
        out.append(f'<g transform="translate(0,{head + i * (tall + GAP)})">')
        out += panel
        out.append("</g>")
    return "\n".join([*out, "</svg>"]) + "\n"


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def frame(title: str, tall: int = PANEL) -> list[str]:
    edge = f'<rect x="{LEFT}" y="10" width="{WIDTH - 2 * LEFT}" height="{tall - 10}" fill="none" stroke="#999999"/>'
    return [text(LEFT, 0, title), edge]


def line(points: Iterable[tuple[float, float]], stroke: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="1.5"/>'


def dot(x: float, y: float, fill: str, radius: float = 1.5) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"/>'


def text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def distribution(title: str, series: Sequence[tuple[str, Sequence[float]]]) -> list[str]:
    """A panel: shares of values up to each, on a logarithmic axis."""
    positive = [v for _, values in series for v in values if v > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)
    scale = (WIDTH - 2 * LEFT) / (high - low)
    out = [*frame(title)]
    for power in range(low, high + 1):
        x = LEFT + (power - low) * scale
        out.append(f'<line x1="{x:.1f}" y1="10" x2="{x:.1f}" y2="{PANEL}" stroke="#eeeeee"/>')
        out.append(text(x - 10, PANEL + 14, f"{10.0**power:g}"))
    out += [text(LEFT - 34, PANEL - share * (PANEL - 10) + 4, f"{share:.0%}") for share in (0.5, 0.9)]
    for i, (_, values) in enumerate(series):
        ranked = sorted(max(v, 10.0**low) for v in values) or [1.0]
        picks = sorted({round(k * (len(ranked) - 1) / 200) for k in range(201)})
        points = (
            (LEFT + (math.log10(ranked[k]) - low) * scale, PANEL - (k + 1) / len(ranked) * (PANEL - 10)) for k in picks
        )
        out.append(line(points, colour(i)))
    return out
