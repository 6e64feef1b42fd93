"""Recording: author code runs on `Proxy` values, and every op it applies becomes a node of the current frame.

Invariant: nothing is computed and no placement is decided here; a frame only says which op was applied to what, on which
line. A frame that called an annotated module is a composite, any other is a leaf.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.ir.errors import NOWHERE, Origin, PlacementError
from tokenspeed.ir.graph import Node
from tokenspeed.ir.spec import Spec

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NN = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "models", "nn") + os.sep
_SKIP = (_HERE, _NN + "maps.py", _NN + "params.py", _NN + "module.py")


@dataclass(slots=True)
class CallNode:
    """A call of an annotated module: its frame, and the specs its signature declares."""

    frame: Frame
    inputs: list[Any]
    outputs: list[Any]
    origin: Origin


@dataclass(slots=True)
class Frame:
    """One traced module instance: `path` is its place in the tree, `params` what its ops refer to."""

    path: str
    kind: str  # class name
    nodes: list[Node | CallNode] = field(default_factory=list)
    in_names: list[str] = field(default_factory=list)
    in_specs: list[Spec | None] = field(default_factory=list)
    out_names: list[str] = field(default_factory=list)
    out_specs: list[Spec] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)  # absolute name -> declaration object
    origin: Origin = NOWHERE

    @property
    def composite(self) -> bool:
        return any(isinstance(n, CallNode) for n in self.nodes)


class Trace:
    """The open frames of one trace, the name counter of its values, and the variant traced."""

    def __init__(self, variant: str, sharded: bool = False) -> None:
        self.variant = variant  # how the program samples: "gumbel" or "full"
        self.sharded = sharded  # whether the plan shards the vocabulary beside the home axes
        self.exports: dict[str, tuple[str, Spec]] = {}  # further results of the program: name -> value, placement
        self.frames: list[Frame] = []
        self.count = 0

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"


_CURRENT: ContextVar[Trace | None] = ContextVar("tokenspeed_trace", default=None)


def current() -> Trace:
    trace = _CURRENT.get()
    if trace is None:
        raise PlacementError(
            "P005", "this op was called outside a trace; modules are compiled (tokenspeed compile), not run directly"
        )
    return trace


@contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)


def caller() -> Origin:
    """The author's line: the nearest frame outside the recorder and the vocabulary."""
    f = sys._getframe(1)
    while f.f_back and f.f_code.co_filename.startswith(_SKIP):
        f = f.f_back
    return Origin(f.f_code.co_filename, f.f_lineno)


class Proxy:
    """A value of the author's program. It has no data; arithmetic on it records an op."""

    __slots__ = ("name", "origin")

    def __init__(self, name: str, origin: Origin) -> None:
        self.name, self.origin = name, origin

    def __add__(self, other: Any) -> Proxy:
        return apply("add", [self, _proxy(other, "+")])

    def __mul__(self, other: Any) -> Proxy:
        if isinstance(other, int | float):
            return apply("scale", [self], factor=float(other))
        return apply("mul", [self, _proxy(other, "*")])

    __rmul__ = __mul__

    def __bool__(self) -> bool:
        raise PlacementError(
            "P006", f"{caller()}: a body may not branch on a tensor's value; the program must be the same on every rank"
        )

    def __iter__(self) -> Iterator[Any]:
        raise PlacementError(
            "P006", f"{caller()}: one value cannot be unpacked; a linear with several segments returns a tuple"
        )


def _proxy(x: Any, what: str) -> Proxy:
    if not isinstance(x, Proxy):
        raise PlacementError(
            "P005", f"{caller()}: operand of {what} is a {type(x).__name__}, not a value of this program"
        )
    return x


def apply(op: str, inputs: Sequence[Proxy | str], n_out: int = 1, **attrs: Any) -> Any:
    """Records `op`; strings are parameter references. Returns a Proxy, a tuple of them, or None for no output."""
    trace = current()
    at = caller()
    names = tuple(i if isinstance(i, str) else _proxy(i, op).name for i in inputs)
    outs = tuple(trace.fresh() for _ in range(n_out))
    trace.frame.nodes.append(Node(op, names, outs, attrs, at))
    proxies = tuple(Proxy(o, at) for o in outs)
    return None if not proxies else proxies[0] if n_out == 1 else proxies
