"""Pass 10: the kernel of every call, chosen from the registry once a request key.

Invariant (V15): a kernel is chosen by the facts of the bucket it runs in, so what it demands of them holds for every
step the program is replayed for; a chain is fused only where a kernel that is more than the reference runs all of it.
"""

from __future__ import annotations

from typing import Any

from tokenspeed.compiler.binding import kernel_nodes, key_of
from tokenspeed.ir.graph import Program
from tokenspeed.kernels.select import select


class Binder:
    """Kernel name by request key, for one target (`cpu`, `cuda:90`) and objective."""

    def __init__(self, device: str = "cpu", objective: Any = "default") -> None:
        self.device, self.objective = device, objective
        self.kernels: dict[str, str] = {}

    def bind(self, p: Program) -> tuple[str, ...]:
        """Binds every call of `p`; their ops, which say what was fused."""
        ops: list[str] = []
        for op, signature, facts in kernel_nodes(p, self._fused):
            key = key_of(op, signature, facts)
            if key not in self.kernels:
                self.kernels[key] = self._select(op, signature, facts).name
            ops.append(op)
        return tuple(ops)

    def _fused(self, op: str, signature: dict[str, str], facts: dict[str, int]) -> bool:
        key = key_of(op, signature, facts)
        if key not in self.kernels:
            chosen = self._select(op, signature, facts)
            if chosen.solution == "reference":
                return False
            self.kernels[key] = chosen.name
        return True

    def _select(self, op: str, signature: dict[str, str], facts: dict[str, int]) -> Any:
        return select(op, signature=signature, traits=facts, device=self.device, objective=self.objective)
