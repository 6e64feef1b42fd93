"""What must hold of bound kernels before a step is captured and replayed.

V12: every call has a kernel that is registered and loaded now, so nothing is looked up, compiled or allocated while a
step is captured. V15: what the kernel demands (target, formats, alignment, head dim, rows) follows from the facts of the
request, which hold for every step of the bucket. Checked from the request keys alone, as the artifact stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenspeed.ir.errors import VerifyError
from tokenspeed.kernels.registry import Registry, default_registry
from tokenspeed.kernels.select import candidates


def verify_kernels(
    kernels: Mapping[str, str], device: str, needed: Iterable[str] = (), registry: Registry | None = None
) -> None:
    """`kernels`: name by request key; `needed`: keys of calls. VerifyError V12 or V15 of the first that does not hold."""
    registry = default_registry() if registry is None else registry
    missing = [key for key in needed if key not in kernels]
    if missing:
        raise VerifyError("V12", f"no kernel is bound to {missing[0]}: it would be chosen while a step is captured")
    for key, name in kernels.items():
        op, signature, facts = parse_key(key)
        if name not in registry:
            raise VerifyError("V12", f"{key} is bound to {name!r}, which is not registered in this process")
        spec = registry.get(name)
        if spec.op != op:
            raise VerifyError("V15", f"{key} is bound to {name!r}, which runs {spec.op}")
        judged = candidates(op, signature=signature, traits=facts, device=device, registry=registry)
        found = next(c for c in judged if c.spec.name == name)
        if not found.eligible:
            raise VerifyError("V15", f"{key} is bound to {name!r}, which {'; '.join(found.reasons)}")


def parse_key(key: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """A request key as (op, formats by role, facts): facts are whole numbers."""
    op, *items = key.split("|")
    pairs = dict(item.split("=", 1) for item in items)
    return op, {k: v for k, v in pairs.items() if not v.isdigit()}, {k: int(v) for k, v in pairs.items() if v.isdigit()}
