"""What the tests of the front share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from serving import AppServer


@pytest.fixture(scope="session")
def server() -> Iterator[AppServer]:
    """One server for the tests that only ask it things."""
    with AppServer() as server:
        yield server


@pytest.fixture
def root_logger() -> Iterator[None]:
    """The root logger is put back as it was."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
