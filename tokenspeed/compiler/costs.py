"""The cost model: alpha (fixed, per collective and group size) plus wire bytes over beta; compute by a roofline.

Invariant: a cost is a pure function of the calibration table and local shapes, in microseconds, so equal inputs choose
equal programs; it is a whole multiple of 1 / GRID, so costs add without rounding in any order and equal layers cost the
same. Tables ship in `compiler/calibration/`; `tokenspeed calibrate` measures another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed.ir.errors import PlanError

_TABLES = Path(__file__).parent / "calibration"

#: prices a microsecond can have; with what breaks ties, sums stay exact in float64 up to 2^29 us
GRID = 1 << 12

#: wire bytes a rank sends, in shares (n - 1) / n of the tensor whole on the axes that move (ring)
SHARES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


@dataclass(frozen=True)
class CostModel:
    """Times in us, bandwidths in GB/s, arithmetic in TFLOP/s. `measured`: (alpha, beta) of an op by ranks, where a table
    has them; `alpha_us` and `beta_gbs` stand for the others."""

    id: str
    alpha_us: Mapping[int, float]
    beta_gbs: float
    memory_gbs: float
    tflops: float
    launch_us: float
    measured: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)

    def fit(self, op: str, ranks: int) -> tuple[float, float]:
        """(alpha us, beta GB/s) of one collective over `ranks`: the table's entry, or that of the next larger group."""
        table = self.measured.get(op) or {n: (a, self.beta_gbs) for n, a in self.alpha_us.items()}
        sizes = sorted(table)
        return table[next((n for n in sizes if n >= ranks), sizes[-1])]

    def collective(self, op: str, ranks: int, nbytes: float) -> float:
        """`nbytes`: the tensor whole on the axes that move."""
        alpha, beta = self.fit(op, ranks)
        return _on_grid(alpha + self.wire_bytes(op, ranks, nbytes) / (beta * 1e3))

    def wire_bytes(self, op: str, ranks: int, nbytes: float) -> float:
        """Bytes one rank sends (ring)."""
        return SHARES.get(op, 0) * (ranks - 1) / ranks * nbytes

    def compute(self, nbytes: float, multiply_adds: float, ops: int) -> float:
        """`ops` kernels that move `nbytes` of memory and multiply and add so often."""
        moved, made = nbytes / (self.memory_gbs * 1e3), 2 * multiply_adds / (self.tflops * 1e6)
        return _on_grid(ops * self.launch_us + max(moved, made))


def _on_grid(us: float) -> float:
    return round(us * GRID) / GRID


def load_costs(name_or_path: str) -> CostModel:
    """A shipped table by name (cpu, h200) or a JSON file. PlanError P035 names what is missing."""
    path = _TABLES / f"{name_or_path}.json"
    if not path.exists():
        path = Path(name_or_path)
    try:
        return parse_costs(json.loads(path.read_text()))
    except OSError:
        shipped = ", ".join(sorted(p.stem for p in _TABLES.glob("*.json")))
        raise PlanError(
            "P035", f"no calibration table {name_or_path!r}; shipped: {shipped}; or give a JSON file (tokenspeed calibrate -o FILE)"
        ) from None  # fmt: skip
    except (KeyError, ValueError, TypeError, AttributeError) as e:
        raise PlanError("P035", f"calibration table {path}: {e!r}") from None


def parse_costs(raw: Mapping[str, Any]) -> CostModel:
    """The model of a table as JSON holds it. KeyError, TypeError or ValueError where it is none."""
    measured = {
        op: {int(n): (_positive(f["alpha_us"]), _positive(f["gbs"])) for n, f in by_ranks.items()}
        for op, by_ranks in raw.get("collectives", {}).items()
    }
    if unknown := sorted(set(measured) - set(SHARES)):
        raise ValueError(f"collectives names {unknown[0]!r}; the collectives are {', '.join(SHARES)}")
    alpha = {int(n): _positive(a) for n, a in raw["alpha_us"].items()}
    if not alpha:
        raise ValueError("alpha_us is empty; give a time for at least one group size")
    return CostModel(
        str(raw["id"]), alpha, _positive(raw["beta_gbs"]), _positive(raw["memory_gbs"]), _positive(raw["tflops"]),
        _positive(raw["launch_us"]), measured,
    )  # fmt: skip


def _positive(x: Any) -> float:
    if not (isinstance(x, int | float) and 0 < x < float("inf")):
        raise ValueError(f"{x!r} is no positive number")
    return float(x)
