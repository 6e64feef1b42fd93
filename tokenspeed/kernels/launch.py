"""Launching Triton kernels. Invariant: every launch of this package passes through `launch`, so what a wrapper would run
at a given shape can be recorded without a device (`recording`) and compiled for any target; and `scratch` hands out the
device memory that kernels need beyond their arguments, from buffers that never move, so a captured graph may hold them.

Scratch is shared by all kernels of a device: they must run in one stream, as a step does.

A kernel with a constant `PDL` takes part in programmatic dependent launch where the device has it: its blocks may start
while the kernel before it still runs, and every one of them waits (dependent.py) before it touches what that one wrote.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DEFAULT_PROCESSORS = 132  # of an H100 or H200; what shapes are planned for where no device is present


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch: the kernel, its grid, its positional arguments and its constants and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any] = field(default_factory=dict[str, Any])


_record: list[Launch] | None = None
dependent_launch = True  # off only to measure what it brings


@contextmanager
def recording() -> Generator[list[Launch]]:
    """Launches under it are listed and not run; tensors may be on the meta device."""
    global _record  # one recorder a process: it serves an ahead-of-time tool, not the replay path
    before, _record = _record, []
    try:
        yield _record
    finally:
        _record = before


_chunks = False


@contextmanager
def with_chunks() -> Generator[None]:
    """Launches under it serve steps in which a request may have several tokens, whatever the bucket's shape allows."""
    global _chunks  # as `_record`: for the time of a capture
    _chunks = True
    try:
        yield
    finally:
        _chunks = False


def has_chunks(tokens: int, rows: int) -> bool:
    """Whether a request of a bucket of `tokens` and `rows` is to be taken for one of several tokens."""
    return tokens > rows or _chunks


_ahead: dict[tuple[Any, ...], Launch] | None = None
_arch = 0  # the architecture that is compiled for where it is not the device's: 90 for sm_90


@contextmanager
def compiling_ahead(arch: int = 0) -> Generator[None]:
    """Under it nothing runs and scratch grows; at its end the kernels that were to run are compiled, as many at once as there
    are processors, and loaded. With an `arch` (90 for sm_90) they are compiled for that one, whatever is here, and not loaded;
    tensors are then on the meta device."""
    from triton import AsyncCompileMode

    global _ahead, _arch  # as `_record`: for the start of an executor
    _ahead, _arch = {}, arch
    try:
        yield
        wanted = list(_ahead.values())
    finally:
        _ahead, _arch = None, 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=_as_device(wanted)) as pool, _driver_of(arch):
        with AsyncCompileMode(pool):
            compiled = [one.kernel.warmup(*one.args, grid=one.grid, **one.meta) for one in wanted]
        for _ in pool.map(_load, () if arch else compiled):
            pass


@contextmanager
def _driver_of(arch: int) -> Generator[None]:
    """Triton takes the device for one of `arch` (0: whatever it is) while kernels are compiled."""
    if not arch:
        yield
        return
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Absent:
        """As much of a driver as compiling asks for; kernels are kept by device, so it has a name of its own."""

        def get_current_device(self) -> str:
            return f"sm_{arch}, absent"

        def get_current_stream(self, device: str) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

    held: Any = driver
    before = held._active
    held.set_active(Absent())
    try:
        yield
    finally:
        held._active = before


def _as_device(launches: list[Launch]) -> Callable[[], None]:
    """What a thread does first, so that what it loads goes to the device of the launches."""
    devices = {a.device for one in launches for a in one.args if isinstance(a, Tensor) and a.device.type == "cuda"}

    def first() -> None:
        for device in devices:
            torch.cuda.set_device(device)

    return first


def _load(kernel: Any) -> None:
    """Makes the launcher of a kernel (a small C module, compiled once a signature) and loads its code."""
    finished = kernel.result() if hasattr(kernel, "result") else kernel
    assert finished.run is not None


def _kind(arg: Any) -> Any:
    """What of an argument tells compiled kernels apart, or more."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, arg.bit_length() > 31
    return type(arg), repr(getattr(arg, "block_shape", None)), str(getattr(getattr(arg, "base", None), "dtype", None))


def is_ahead() -> bool:
    """Whether kernels are only being compiled: one that is compiled already has nothing to do."""
    return _ahead is not None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Runs `kernel` over `grid`; `meta` holds its constants and num_warps, num_stages."""
    if _record is not None:
        _record.append(Launch(kernel, grid, args, meta))
        return
    if "PDL" in kernel.arg_names:
        meta["PDL"] = overlaps(getattr(args[0], "base", args[0]).device)  # of a tensor, or of a descriptor of one
        if meta["PDL"]:
            meta["launch_pdl"] = True
    if _ahead is not None:
        key = id(kernel), tuple(meta.items()), *map(_kind, args)
        _ahead.setdefault(key, Launch(kernel, grid, args, meta))
    else:
        kernel[grid](*args, **meta)


def overlaps(device: torch.device) -> bool:
    """Whether kernels of `device` may start before their predecessor has ended (compute capability 9 and newer)."""
    if _arch and device.type == "meta":
        return dependent_launch and _arch >= 90
    return dependent_launch and device.type == "cuda" and _capability(device) >= 9


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of `device`."""
    if device.type != "cuda":
        return DEFAULT_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


_buffers: dict[tuple[torch.device, str], Tensor] = {}
_retired: list[Tensor] = []  # outgrown buffers: a graph captured earlier still points into them


def scratch(device: torch.device, name: str, count: int, dtype: torch.dtype) -> Tensor:
    """At least `count` elements of `dtype`, zero when first made; the same memory for every call that fits in it.

    RuntimeError if it would have to grow while a graph is being captured.
    """
    key = (device, name)
    buffer = _buffers.get(key)
    if buffer is not None and buffer.numel() >= count:
        return buffer
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"kernel scratch '{name}' must grow to {count} elements during a graph capture; run the program once at "
            "this shape before capturing it"
        )
    if buffer is not None:
        _retired.append(buffer)
    made = torch.zeros(max(count, 1024), dtype=dtype, device=device)
    if _record is None:
        _buffers[key] = made
    return made


def scratch_bytes(device: torch.device) -> int:
    """Bytes of scratch on `device`, outgrown buffers included."""
    held = [b for (where, _), b in _buffers.items() if where == device] + [b for b in _retired if b.device == device]
    return sum(b.numel() * b.element_size() for b in held)


def even_splits(items: int, slots: int, most: int, overhead: float = 0.001) -> int:
    """In how many equal parts to cut each of `items` jobs so that they fill `slots` processors with the least waste.

    The time of a cut into s is its number of waves times that of a part: 1 / s of a job and `overhead` of one more.
    """
    best, least = 1, float("inf")
    for s in range(1, max(1, most) + 1):
        cost = -(-items * s // slots) * (1 / s + overhead)
        if cost < least - 1e-9:
            best, least = s, cost
    return best


def power_of_2(n: int) -> int:
    """The least power of two that is at least n (and 1)."""
    return 1 << max(0, n - 1).bit_length()
