"""The outcomes as one SVG: where prompt tokens came from, the times to the first token and between tokens as distributions, and
what ran and waited over time. Invariant: the same outcomes give the same text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.runtime.simulate.report import figures
from tokenspeed.runtime.simulate.virtual import TIERS, Outcome
from tokenspeed.runtime.svg import LEFT, PANEL, WIDTH, colour, distribution, document, dot, frame, line, text

SOURCES = ("#3366cc", "#7fa4e8", "#c5d6f5", "#dddddd")  # device, host, storage, computed


def svg(outcomes: Sequence[tuple[str, Outcome]]) -> str:
    """The document."""
    panels = [
        _sources(outcomes),
        distribution("time to first token, s", [(n, [s.first - s.submitted for s in o.served]) for n, o in outcomes]),
        distribution("between tokens, s", [(n, o.gaps) for n, o in outcomes]),
        _timeline("requests running (line) and waiting (dots)", outcomes),
    ]
    return document([name for name, _ in outcomes], panels)


def _sources(outcomes: Sequence[tuple[str, Outcome]]) -> list[str]:
    out = [text(LEFT, 0, "prompt tokens from device, host, storage, and computed")]
    bar = min(PANEL / len(outcomes), 30)
    for i, (name, outcome) in enumerate(outcomes):
        f = figures(outcome)
        at = float(LEFT)
        shares = [f[f"hit_{tier}"] for tier in TIERS]
        for share, source in zip([*shares, 1 - sum(shares)], SOURCES, strict=True):
            width = share * (WIDTH - 2 * LEFT)
            out.append(
                f'<rect x="{at:.1f}" y="{10 + i * bar:.1f}" width="{width:.1f}" height="{bar - 3:.1f}" fill="{source}"/>'
            )
            at += width
        out.append(text(LEFT + 4, 10 + i * bar + bar / 2 + 2, f"{name}: {f['hit_total']:.1%} of {f['hit_ideal']:.1%}"))
    return out


def _timeline(title: str, outcomes: Sequence[tuple[str, Outcome]]) -> list[str]:
    end = max(o.timeline[-1][0] for _, o in outcomes) or 1.0
    most = max(max(running, waiting) for _, o in outcomes for _, running, waiting, _, _ in o.timeline) or 1
    out = [*frame(title), text(LEFT - 34, 20, str(most)), text(LEFT - 20, PANEL, "0")]
    out.append(text(WIDTH - LEFT - 30, PANEL + 14, f"{end:.0f} s"))

    def at(when: float, count: int) -> tuple[float, float]:
        return LEFT + when / end * (WIDTH - 2 * LEFT), PANEL - count / most * (PANEL - 10)

    for i, (_, outcome) in enumerate(outcomes):
        thin = outcome.timeline[:: max(len(outcome.timeline) // 400, 1)]
        out.append(line((at(when, running) for when, running, _, _, _ in thin), colour(i)))
        dots = (at(when, waiting) for when, _, waiting, _, _ in thin if waiting)
        out += [dot(x, y, colour(i)) for x, y in dots]
    return out
