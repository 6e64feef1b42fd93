"""Pass 10: the kernel of every call, chosen from the registry once a request key.

Invariant (V15): a kernel is chosen by the facts of the bucket it runs in, so what it demands of them holds for every
step the program is replayed for; a chain is fused only where a kernel that is more than the reference runs all of it.
"""

from __future__ import annotations

from typing import Any

from tokenspeed.compiler.binding import Request, key_of
from tokenspeed.compiler.calls import QUIET, Call, flatten
from tokenspeed.compiler.exchange import CALLS as EXCHANGE
from tokenspeed.ir.graph import Program
from tokenspeed.ir.ops.fused import FUSED
from tokenspeed.kernels.ops import op_of
from tokenspeed.kernels.select import SelectionError, select


class Binder:
    """Kernel name by request key, for one target (`cpu`, `cuda:90`) and objective."""

    def __init__(self, device: str = "cpu", objective: Any = "default") -> None:
        self.device, self.objective = device, objective
        self.kernels: dict[str, str] = {}

    def bind(self, p: Program) -> list[Call]:
        """Binds every call of `p`."""
        calls = flatten(p, self._fused)
        seen: set[int] = set()
        for c in calls:
            if c.request is not QUIET and id(c.request) not in seen:  # equal layers share their requests
                seen.add(id(c.request))
                key = key_of(*c.request)
                if key not in self.kernels:
                    self.kernels[key] = self._select(*c.request).name
        return calls

    def _fused(self, request: Request) -> bool:
        key = key_of(*request)
        if key not in self.kernels:
            chosen = self._select(*request)
            if chosen.solution == "reference":
                return False
            self.kernels[key] = chosen.name
        return True

    def collectives(self, dtype: str) -> frozenset[str]:
        """The fused collectives and the halves of an exchange that a kernel of this target runs on streams of `dtype` (float32,
        bfloat16)."""
        out: set[str] = set()
        for op in (*(f.name for f in FUSED), *EXCHANGE):
            try:
                chosen = self._select(op, dict.fromkeys(op_of(op).roles, dtype), {"tokens": 1})
            except SelectionError:
                continue
            if chosen.solution != "reference":
                out.add(op)
        return frozenset(out)

    def _select(self, op: str, signature: dict[str, str], facts: dict[str, int]) -> Any:
        return select(op, signature=signature, traits=facts, device=self.device, objective=self.objective)
