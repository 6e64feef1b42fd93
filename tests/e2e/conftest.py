"""What the end-to-end tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def artifact_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled artifacts of the tests go into a directory of their own, also those of child processes."""
    name = "TOKENSPEED_ARTIFACT_CACHE"
    before = os.environ.get(name)
    os.environ[name] = str(tmp_path_factory.mktemp("artifacts"))
    yield
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before
