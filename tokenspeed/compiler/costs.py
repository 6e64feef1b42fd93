"""The cost model: alpha (fixed, per collective and group size) plus wire bytes over beta; compute by a roofline.

Invariant: a cost is a pure function of the calibration table and local shapes, in microseconds, so equal inputs choose
equal programs. Tables ship in `compiler/calibration/`; another file may be given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.ir.errors import PlanError

_TABLES = Path(__file__).parent / "calibration"


@dataclass(frozen=True)
class CostModel:
    """Times in us, bandwidths in GB/s, arithmetic in TFLOP/s."""

    id: str
    alpha_us: dict[int, float]
    beta_gbs: float
    memory_gbs: float
    tflops: float
    launch_us: float

    def alpha(self, ranks: int) -> float:
        """Fixed cost of one collective over `ranks`: the table's entry, or that of the next larger group it holds."""
        sizes = sorted(self.alpha_us)
        return self.alpha_us[next((n for n in sizes if n >= ranks), sizes[-1])]

    def collective(self, op: str, ranks: int, nbytes: float) -> float:
        """`nbytes`: the tensor whole on the axes that move (ring: bytes sent a rank)."""
        share = (ranks - 1) / ranks * nbytes
        wire = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share}[op]
        return self.alpha(ranks) + wire / (self.beta_gbs * 1e3)

    def wire_bytes(self, op: str, ranks: int, nbytes: float) -> float:
        share = (ranks - 1) / ranks * nbytes
        return {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share}.get(op, 0.0)

    def compute(self, nbytes: float, multiply_adds: float, ops: int) -> float:
        return ops * self.launch_us + max(nbytes / (self.memory_gbs * 1e3), 2 * multiply_adds / (self.tflops * 1e6))


def load_costs(name_or_path: str) -> CostModel:
    """A shipped table by name (cpu, h200) or a JSON file. PlanError names what is missing."""
    path = _TABLES / f"{name_or_path}.json"
    if not path.exists():
        path = Path(name_or_path)
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        return CostModel(
            raw["id"], {int(k): float(v) for k, v in raw["alpha_us"].items()},
            float(raw["beta_gbs"]), float(raw["memory_gbs"]), float(raw["tflops"]), float(raw["launch_us"]),
        )  # fmt: skip
    except FileNotFoundError:
        shipped = ", ".join(sorted(p.stem for p in _TABLES.glob("*.json")))
        raise PlanError(
            "P035", f"no calibration table {name_or_path!r}; shipped: {shipped}; or give a JSON file"
        ) from None
    except (KeyError, ValueError) as e:
        raise PlanError("P035", f"calibration table {path}: {e!r}") from None
