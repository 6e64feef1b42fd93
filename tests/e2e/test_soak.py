"""The soak (soak.py) for a few seconds; minutes by `make soak`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.processes import Server
from tests.e2e.soak import OPTIONS, faults, soak
from tests.e2e.tiny import tiny_model

SECONDS = 10


def test_overload_with_disconnects_bad_requests_and_aborts(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    with Server(tiny_model(tmp_path / "model", tokenizer=True), *OPTIONS) as server:
        server.ready()
        seen = asyncio.run(soak(server, SECONDS, seed=1))
        assert faults(server, seen) == []
    assert seen.statuses[429] > 0 < seen.statuses[200] and seen.left > 0
    assert {"stop", "length", "abort"} <= set(seen.ends)
