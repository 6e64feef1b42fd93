"""The outcomes as one SVG, written by hand: where prompt tokens came from, the times to the first token and between tokens as
distributions, and what ran and waited over time. Invariant: the same outcomes give the same text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from tokenspeed.runtime.simulate.report import figures
from tokenspeed.runtime.simulate.virtual import TIERS, Outcome

WIDTH, PANEL, LEFT, GAP = 900, 170, 70, 60
COLOURS = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6")
SOURCES = ("#3366cc", "#7fa4e8", "#c5d6f5", "#dddddd")  # device, host, storage, computed


def svg(outcomes: Sequence[tuple[str, Outcome]]) -> str:
    """The document."""
    panels = [
        _sources(outcomes),
        _distribution("time to first token, s", [(n, [s.first - s.submitted for s in o.served]) for n, o in outcomes]),
        _distribution("between tokens, s", [(n, o.gaps) for n, o in outcomes]),
        _timeline("requests running (line) and waiting (dots)", outcomes),
    ]
    height = len(panels) * (PANEL + GAP) + 30 + 18 * len(outcomes)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">'
    ]
    out.append(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    for i, (name, _) in enumerate(outcomes):
        out.append(f'<rect x="{LEFT}" y="{10 + 18 * i}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        out.append(_text(LEFT + 16, 19 + 18 * i, name))
    for i, panel in enumerate(panels):
        out.append(f'<g transform="translate(0,{30 + 18 * len(outcomes) + i * (PANEL + GAP)})">')
        out += panel
        out.append("</g>")
    return "\n".join([*out, "</svg>"]) + "\n"


def _sources(outcomes: Sequence[tuple[str, Outcome]]) -> list[str]:
    out = [_text(LEFT, 0, "prompt tokens from device, host, storage, and computed")]
    bar = min(PANEL / len(outcomes), 30)
    for i, (name, outcome) in enumerate(outcomes):
        f = figures(outcome)
        at = float(LEFT)
        shares = [f[f"hit_{tier}"] for tier in TIERS]
        for share, colour in zip([*shares, 1 - sum(shares)], SOURCES, strict=True):
            width = share * (WIDTH - 2 * LEFT)
            out.append(
                f'<rect x="{at:.1f}" y="{10 + i * bar:.1f}" width="{width:.1f}" height="{bar - 3:.1f}" fill="{colour}"/>'
            )
            at += width
        out.append(_text(LEFT + 4, 10 + i * bar + bar / 2 + 2, f"{name}: {f['hit_total']:.1%} of {f['hit_ideal']:.1%}"))
    return out


def _distribution(title: str, series: Sequence[tuple[str, Sequence[float]]]) -> list[str]:
    """Shares of values up to each, on a logarithmic axis."""
    positive = [v for _, values in series for v in values if v > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)
    scale = (WIDTH - 2 * LEFT) / (high - low)
    out = [*_frame(title)]
    for power in range(low, high + 1):
        x = LEFT + (power - low) * scale
        out.append(f'<line x1="{x:.1f}" y1="10" x2="{x:.1f}" y2="{PANEL}" stroke="#eeeeee"/>')
        out.append(_text(x - 10, PANEL + 14, f"{10.0**power:g}"))
    out += [_text(LEFT - 34, PANEL - share * (PANEL - 10) + 4, f"{share:.0%}") for share in (0.5, 0.9)]
    for i, (_, values) in enumerate(series):
        ranked = sorted(max(v, 10.0**low) for v in values) or [1.0]
        picks = sorted({round(k * (len(ranked) - 1) / 200) for k in range(201)})
        points = (
            (LEFT + (math.log10(ranked[k]) - low) * scale, PANEL - (k + 1) / len(ranked) * (PANEL - 10)) for k in picks
        )
        out.append(_line(points, COLOURS[i % len(COLOURS)]))
    return out


def _timeline(title: str, outcomes: Sequence[tuple[str, Outcome]]) -> list[str]:
    end = max(o.timeline[-1][0] for _, o in outcomes) or 1.0
    most = max(max(running, waiting) for _, o in outcomes for _, running, waiting, _, _ in o.timeline) or 1
    out = [*_frame(title), _text(LEFT - 34, 20, str(most)), _text(LEFT - 20, PANEL, "0")]
    out.append(_text(WIDTH - LEFT - 30, PANEL + 14, f"{end:.0f} s"))

    def at(when: float, count: int) -> tuple[float, float]:
        return LEFT + when / end * (WIDTH - 2 * LEFT), PANEL - count / most * (PANEL - 10)

    for i, (_, outcome) in enumerate(outcomes):
        colour = COLOURS[i % len(COLOURS)]
        thin = outcome.timeline[:: max(len(outcome.timeline) // 400, 1)]
        out.append(_line((at(when, running) for when, running, _, _, _ in thin), colour))
        dots = (at(when, waiting) for when, _, waiting, _, _ in thin if waiting)
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.5" fill="{colour}"/>' for x, y in dots]
    return out


def _frame(title: str) -> list[str]:
    edge = f'<rect x="{LEFT}" y="10" width="{WIDTH - 2 * LEFT}" height="{PANEL - 10}" fill="none" stroke="#999999"/>'
    return [_text(LEFT, 0, title), edge]


def _line(points: Iterable[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
