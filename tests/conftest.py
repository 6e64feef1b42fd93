"""What all tests share."""

from __future__ import annotations

import os

import pytest

# Kernel choices that were measured on this machine are none of the tests' business.
os.environ["TOKENSPEED_KERNEL_TABLES"] = os.devnull

# Minutes each: they begin first, so that no worker is left with one while the others have nothing to do.
LONG = (
    "tests/e2e/test_matrix.py",
    "tests/kernels/test_triton_interpret.py",
    "tests/e2e/test_layouts.py",
    "tests/compiler/test_mutants.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist: the order of collection, not that of size
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
