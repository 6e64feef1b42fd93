"""Replays: a fixed sequence of kernel calls as one callable. Invariant: a replay makes the same calls in the same order
on the same tensors as running them one by one; runs of C++ kernels between two Python ones become one native call, so a
decode step pays for Python once and not once an op.

The tensors are static (ports, weights, an arena), as in a captured graph: their contents may change between replays,
their addresses may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.kernels.spec import KernelSpec


@dataclass(slots=True)
class Replay:
    """A recorded sequence; call it to run it. `native_calls` of its `calls` run without Python."""

    steps: list[Callable[[], object]] = field(default_factory=list)
    calls: int = 0
    native_calls: int = 0
    _alive: list[object] = field(default_factory=list)  # arguments: their memory must outlive the replay

    def __call__(self) -> None:
        for step in self.steps:
            step()


def record(calls: Iterable[tuple[KernelSpec, Sequence[Any], Mapping[str, Any]]]) -> Replay:
    """Records (kernel, positional arguments, keyword arguments) triples; nothing runs yet.

    A kernel with `native` set is recorded through the C++ extension, any other stays a Python call.
    """
    replay = Replay()
    native: list[tuple[KernelSpec, Sequence[Any], Mapping[str, Any]]] = []

    def flush() -> None:
        if native:
            replay.steps.append(_captured(native))
            native.clear()

    for spec, args, kwargs in calls:
        replay.calls += 1
        replay._alive.append((args, kwargs))
        if spec.native:
            replay.native_calls += 1
            native.append((spec, args, kwargs))
        else:
            flush()
            replay.steps.append(_bound(spec.fn, args, kwargs))
    flush()
    return replay


def _bound(fn: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], object]:
    return lambda: fn(*args, **kwargs)


def _captured(calls: Iterable[tuple[KernelSpec, Sequence[Any], Mapping[str, Any]]]) -> Callable[[], object]:
    from tokenspeed import _cpu

    _cpu.begin_capture()
    try:
        for spec, args, kwargs in calls:
            spec.fn(*args, **kwargs)
    finally:
        program = _cpu.end_capture()
    return program.run
