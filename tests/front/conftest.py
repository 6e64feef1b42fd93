"""One server for the tests that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import AppServer


@pytest.fixture(scope="session")
def server() -> Iterator[AppServer]:
    with AppServer() as server:
        yield server
