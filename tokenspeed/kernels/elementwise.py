"""Registration shared by the CPU kernels whose output has the format of their activations.

Invariant: one signature a dense format; formats of `x` and `out` agree, further roles take what the caller names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokenspeed.kernels.formats import DENSE
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority


def register_elementwise(
    registry: Registry,
    capability: Capability,
    kernels: Iterable[tuple[str, Callable[..., None]]],
    *,
    native: bool = True,
    **roles: frozenset[str],
) -> None:
    """Registers each (op, function) as `cpu.<op>`; `roles`: formats of roles other than x and out."""
    for op, fn in kernels:
        registry.register(
            KernelSpec(
                name=f"cpu.{op}",
                op=op,
                solution="cpu",
                fn=fn,
                signatures=tuple({"x": frozenset({name}), **roles, "out": frozenset({name})} for name in DENSE),
                priority=Priority.PERFORMANT,
                capability=capability,
                native=native,
                tags=frozenset({"determinism"}),
            )
        )
