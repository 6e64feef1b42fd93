"""Registration shared by the CPU kernels.

Invariant: a CPU kernel is called `cpu.<op>` and is deterministic; one whose output has the format of its activations has one
signature a dense format, in which `x` and `out` agree and further roles take what the caller names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

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
    same = tuple({"x": frozenset({name}), **roles, "out": frozenset({name})} for name in DENSE)
    for op, fn in kernels:
        register_cpu(registry, capability, op, fn, same, native=native)


def register_cpu(
    registry: Registry,
    capability: Capability,
    op: str,
    fn: Callable[..., None],
    signatures: tuple[Mapping[str, frozenset[str]], ...],
    *,
    native: bool = True,
    summary: str = "",
) -> None:
    """Registers one function as `cpu.<op>`, for the formats of `signatures`."""
    registry.register(
        KernelSpec(
            name=f"cpu.{op}",
            op=op,
            solution="cpu",
            fn=fn,
            signatures=signatures,
            priority=Priority.PERFORMANT,
            capability=capability,
            native=native,
            tags=frozenset({"determinism"}),
            summary=summary,
        )
    )
