"""Pass 10: the kernel of every call, chosen from the registry once a request key.

Invariant (V15): a kernel is chosen by the facts of the bucket it runs in, so what it demands of them holds for every
step the program is replayed for; a chain is fused only where a kernel that is more than the reference runs all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenspeed.compiler.binding import Call, Request, in_bucket, key_of
from tokenspeed.compiler.calls import QUIET, flatten
from tokenspeed.compiler.exchange import CALLS as EXCHANGE
from tokenspeed.ir.graph import Program
from tokenspeed.ir.ops.fused import FUSED
from tokenspeed.kernels.ops import op_of
from tokenspeed.kernels.select import SelectionError, select


@dataclass
class _Bound:
    """What binding found of one body: its calls, one of each request, and what was asked of fused ones."""

    program: Program
    calls: list[Call]
    distinct: list[Call]
    asked: list[tuple[Call, bool]]


class Binder:
    """Kernel name by request key, for one target (`cpu`, `cuda:90`) and objective."""

    def __init__(self, device: str = "cpu", objective: Any = "default") -> None:
        self.device, self.objective = device, objective
        self.kernels: dict[str, str] = {}
        self.bodies: dict[int, _Bound] = {}

    def bind(self, p: Program) -> list[Call]:
        """Binds every call of `p`; the calls of a body that several buckets share may tell the facts of another of them."""
        known = self.bodies.get(id(p.nodes))
        if known is None or not all(self._fused(in_bucket(c, p)) == fused for c, fused in known.asked):
            asked: list[tuple[Call, bool]] = []

            def ask(c: Call) -> bool:
                asked.append((c, self._fused(c.request)))
                return asked[-1][1]

            calls = flatten(p, ask)
            distinct = {id(c.request): c for c in calls if c.request is not QUIET}  # equal layers share their requests
            known = self.bodies[id(p.nodes)] = _Bound(p, calls, list(distinct.values()), asked)
        for c in known.distinct:
            request = in_bucket(c, p)
            key = key_of(*request)
            if key not in self.kernels:
                self.kernels[key] = self._select(*request).name
        return known.calls

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
