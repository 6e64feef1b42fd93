# pyright: strict
"""What a kernel declares about itself. A spec is immutable and complete: selection reads nothing but specs, the request
and the machine's facts, so the same request gives the same kernel in every process.

The callable contract: `fn(*inputs, out=..., **attrs) -> None` writes into preallocated `out` (a Tensor, a tuple of
them, or absent for an in-place op). `pack(weight)` turns a loaded weight into the object that `fn` expects, once, at
load.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from tokenspeed.kernels.formats import format_of
from tokenspeed.kernels.ops import Op, op_of

Objective = Literal["default", "latency", "throughput", "portability", "determinism", "debug"]
OBJECTIVES: tuple[Objective, ...] = ("default", "latency", "throughput", "portability", "determinism", "debug")
TAGS = frozenset({"latency", "throughput", "determinism", "portability"})

TraitValue = int | str | bool | tuple[int, int]  # a pair is an inclusive range, proved for a whole bucket


class Priority(IntEnum):
    """Bands between which order is guaranteed; a kernel may take base + 0..3 within its band."""

    REFERENCE = 0
    PORTABLE = 4
    PERFORMANT = 8
    SPECIALIZED = 12
    PLUGIN = 16


@dataclass(frozen=True, slots=True)
class Capability:
    """Where a kernel runs. `device` "any" covers every vendor; archs are compute capabilities times ten (90: sm_90)."""

    device: Literal["cpu", "cuda", "any"] = "any"
    min_arch: int = 0
    max_arch: int | None = None
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Trait:
    """A condition on a fact of the request (head_dim, tokens ...). `text` names it in explanations."""

    text: str
    holds: Callable[[int | str | bool], bool]

    def check(self, value: TraitValue) -> bool:
        """True if every value the request may take satisfies the trait; a range is tested at both ends."""
        if isinstance(value, tuple):
            return self.holds(value[0]) and self.holds(value[1])
        return self.holds(value)


def at_most(limit: int) -> Trait:
    return Trait(f"<= {limit}", lambda value: isinstance(value, int) and value <= limit)


def at_least(limit: int) -> Trait:
    return Trait(f">= {limit}", lambda value: isinstance(value, int) and value >= limit)


def multiple_of(unit: int) -> Trait:
    """For scalar facts; a range that spans several values satisfies it only if unit is 1."""

    def holds(value: int | str | bool) -> bool:
        return isinstance(value, int) and value % unit == 0

    return Trait(f"a multiple of {unit}", holds)


def one_of(*values: int | str | bool) -> Trait:
    return Trait(f"one of {', '.join(map(str, values))}", lambda value: value in values)


def identity(weight: Any) -> Any:
    """The default `pack`: the kernel reads the weight as it was loaded."""
    return weight


def source_hash_of(fn: Callable[..., Any], extra: bytes = b"") -> str:
    """16 hex digits that change with the kernel's source: its module's text and `extra` (native sources)."""
    module = inspect.getmodule(fn)
    try:
        text = inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):
        text = repr(fn.__code__.co_code) if inspect.isfunction(fn) else fn.__qualname__
    return hashlib.sha256(text.encode() + extra).hexdigest()[:16]


def _extension_identity() -> bytes:
    """The hash of the C++ sources that the extension was built from."""
    from tokenspeed import _cpu

    return _cpu.source_hash().encode()


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpec:
    """One registered kernel.

    `signatures`: alternatives, each a map from role to the formats it takes; a role left out takes any.
    `traits`: conditions that the request must state and satisfy, of a fact or of a product of facts
    ("tokens*n"). `flops`, `bytes`: from the request's facts.
    """

    name: str
    op: str
    solution: str
    fn: Callable[..., None]
    signatures: tuple[Mapping[str, frozenset[str]], ...]
    priority: int
    capability: Capability = Capability()
    traits: Mapping[str, Trait] = field(default_factory=dict[str, Trait])
    tags: frozenset[str] = frozenset()
    pack: Callable[[Any], Any] = identity
    flops: Callable[[Mapping[str, int]], int] | None = None
    bytes: Callable[[Mapping[str, int]], int] | None = None
    source_hash: str = ""
    summary: str = ""
    native: bool = (
        False  # all of fn's work is calls of the C++ extension, so capture.record can replay it without Python
    )

    def __post_init__(self) -> None:
        entry = op_of(self.op)
        if not self.name or any(c.isspace() for c in self.name):
            raise ValueError(f"kernel name {self.name!r} must be a word without spaces")
        if not callable(self.fn):
            raise TypeError(f"kernel '{self.name}': fn must be callable, got {type(self.fn).__name__}")
        if not self.signatures:
            raise ValueError(f"kernel '{self.name}': at least one signature is needed")
        for signature in self.signatures:
            for role, formats in signature.items():
                if role not in entry.roles:
                    raise ValueError(f"kernel '{self.name}': op '{self.op}' has no role '{role}' ({entry.roles})")
                for name in formats:
                    format_of(name)
        if not Priority.REFERENCE <= self.priority < Priority.PLUGIN + 4:
            raise ValueError(f"kernel '{self.name}': priority {self.priority} is outside the bands 0..19")
        if unknown := self.tags - TAGS:
            raise ValueError(f"kernel '{self.name}': unknown tags {sorted(unknown)}; known: {sorted(TAGS)}")
        if not self.source_hash:
            extra = _extension_identity() if self.native else b""
            object.__setattr__(self, "source_hash", source_hash_of(self.fn, extra))

    @property
    def entry(self) -> Op:
        return op_of(self.op)

    @property
    def family(self) -> str:
        return self.entry.family

    @property
    def mode(self) -> str:
        return self.entry.mode
