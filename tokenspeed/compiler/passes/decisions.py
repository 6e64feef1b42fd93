"""What explain asks of a solved bucket: for each repaired edge the runner-up, its gap, or why there is none."""

from __future__ import annotations

from typing import Any

from tokenspeed.compiler.passes.solve import RESULT, RunnerUp, Solution
from tokenspeed.compiler.passes.tactics import Edge, Tactics
from tokenspeed.compiler.passes.trace import Flat


class Decisions:
    """Edges by the names that notes of inserted ops carry: (value, consumer)."""

    def __init__(self, flat: Flat, solution: Solution, tactics: Tactics) -> None:
        self.solution, self.tactics = solution, tactics
        self.said: dict[int, dict[str, Any]] = {}
        self.index = {n.name: i for i, n in enumerate(flat.nodes)} | {"result": RESULT}

    def __call__(self, value: str, consumer: str) -> dict[str, Any]:
        """{runner_up: repair and types in words, gap_us: what the best plan with it costs more a step, or None}."""
        if Edge(value, consumer) in self.tactics.applied:
            return {"runner_up": "pinned by a tactic", "gap_us": None}
        if value not in self.solution.values or consumer not in self.index:
            return {"runner_up": "none: written by the author", "gap_us": None}
        other = self.solution.runner_up(value, self.index[consumer])
        if other is None:
            return {"runner_up": "none: no other placement is legal", "gap_us": None}
        if id(other) not in self.said:  # equal layers have one
            self.said[id(other)] = self._say(other)
        return self.said[id(other)]

    def module(self, path: str) -> dict[str, Any]:
        """As above, of the best plan in which the first argument of module `path` lies otherwise."""
        i, e = self.index[path], self.solution.elimination
        options = self.solution.options[i]
        gaps = [(gap, r) for r, gap in enumerate(e.marginal([i]))] if len(options) > 1 else []
        gap, r = min((x for x in gaps if x[1] != e.chosen[i]), default=(float("inf"), 0))
        if gap == float("inf"):
            return {"runner_up": "none: no other placement is legal", "gap_us": None}
        return {
            "runner_up": f"rows as {options[r].ins[0].text(self.solution.repairs.plan)}",
            "gap_us": round(float(gap), 3),
        }

    def _say(self, other: RunnerUp) -> dict[str, Any]:
        plan = self.solution.repairs.plan
        steps = " + ".join(f"{s.op} over {','.join(plan.fold(s.axes))}" for s in other.path.steps) or "no repair"
        types = f"{other.source.text(plan)} => {other.target.text(plan)}"
        return {"runner_up": f"{steps}, {types}", "gap_us": round(other.gap, 3)}
