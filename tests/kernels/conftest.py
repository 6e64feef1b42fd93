"""Every kernel test runs on each instruction set that this machine has, through the `isa` fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tokenspeed import _cpu


@pytest.fixture(params=_cpu.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Selects one instruction set for the test and restores the best one after it."""
    before = _cpu.isa()
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
