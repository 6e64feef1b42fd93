"""The kernel registry: every implementation of every op, and the choice among them at compile time.

    spec = select("linear", signature={"x": "bfloat16", "w": "q4_1", "out": "bfloat16"}, device="cpu")
    packed = spec.pack(weight)            # once, at load
    spec.fn(x, packed, None, out=y)       # on the hot path: no lookup, no allocation

Rooms outside import from here only.
"""

from __future__ import annotations

from tokenspeed.kernels.capture import Replay, record
from tokenspeed.kernels.packing import PackedWeight
from tokenspeed.kernels.registry import Registry, default_registry, register_references
from tokenspeed.kernels.select import Candidate, SelectionError, explain, select, selection
from tokenspeed.kernels.spec import (
    Capability,
    KernelSpec,
    Objective,
    Priority,
    Trait,
    at_least,
    at_most,
    multiple_of,
    one_of,
)
from tokenspeed.kernels.weights import QuantWeight


def get(name: str) -> KernelSpec:
    """The registered kernel called `name`; KeyError otherwise. An artifact binds its stored kernels with this."""
    return default_registry().get(name)


__all__ = [
    "Candidate",
    "Capability",
    "KernelSpec",
    "Objective",
    "PackedWeight",
    "Priority",
    "QuantWeight",
    "Registry",
    "Replay",
    "SelectionError",
    "Trait",
    "at_least",
    "at_most",
    "default_registry",
    "explain",
    "get",
    "multiple_of",
    "one_of",
    "record",
    "register_references",
    "select",
    "selection",
]
