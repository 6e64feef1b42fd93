"""Compiling ahead: what a step would launch is compiled once a kind, nothing of it runs, and scratch has grown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tokenspeed.kernels import launch as launching


class Kernel:
    """Notes what is asked of it."""

    arg_names = ("x", "n")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.ran: list[tuple[int, ...]] = []
        self.loaded = 0

    def warmup(self, *args: Any, grid: tuple[int, ...], **meta: Any) -> Kernel:
        self.compiled.append((*args, grid, meta))
        return self

    @property
    def run(self) -> Any:
        self.loaded += 1
        return self.__getitem__

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **meta: self.ran.append(grid)


def test_what_is_compiled_ahead_is_compiled_once_a_kind() -> None:
    one, other = Kernel(), Kernel()
    x, odd = torch.zeros(64), torch.zeros(65)[1:]
    with launching.compiling_ahead():
        assert launching.is_ahead()
        for n in (16, 32, 48):  # one kind: all are multiples of 16
            launching.launch(one, (n,), x, n, num_warps=4)
        launching.launch(one, (1,), x, 17, num_warps=4)
        launching.launch(one, (1,), x, 1, num_warps=4)
        launching.launch(one, (1,), odd, 16, num_warps=4)  # not aligned
        launching.launch(one, (1,), x.bfloat16(), 16, num_warps=4)
        launching.launch(one, (1,), x, 16, num_warps=8)
        launching.launch(other, (1,), x, 16, num_warps=4)
        grown = launching.scratch(x.device, "of a test", 5000, torch.float32)
        assert not one.compiled and not other.compiled
    assert not launching.is_ahead()
    assert (len(one.compiled), len(other.compiled)) == (one.loaded, other.loaded) == (6, 1)
    assert not one.ran and not other.ran
    assert launching.scratch(x.device, "of a test", 4000, torch.float32).data_ptr() == grown.data_ptr()
    launching.launch(one, (3,), x, 16, num_warps=4)
    assert one.ran == [(3,)]


def test_a_fault_ahead_compiles_nothing_and_is_over() -> None:
    one = Kernel()
    with pytest.raises(ValueError, match="no"), launching.compiling_ahead():
        launching.launch(one, (1,), torch.zeros(4), 1)
        raise ValueError("no")
    assert not one.compiled and not launching.is_ahead()
