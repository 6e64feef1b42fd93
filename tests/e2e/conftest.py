"""What the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Options of every engine here, also in child processes, where a test does not say otherwise.

    Compiled artifacts go into a directory of their own. A rank has one thread: tests run side by side, and two teams
    of threads on two cores spend their time waiting for a member that does not run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENSPEED_ARTIFACT_CACHE", str(tmp_path_factory.mktemp("artifacts")))
        patch.setenv("TOKENSPEED_THREADS", "1")
        yield
