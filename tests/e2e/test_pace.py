"""When the next step is planned: late enough for what arrives meanwhile, early enough that the device does not wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.models import write_tiny
from tests.e2e.test_core_faults import _Inbox, _Outbox
from tokenspeed.runtime.build import build_engine
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.core import EngineLoop
from tokenspeed.runtime.messages import Control, CoreParams, Submit, ToCore, packed
from tokenspeed.runtime.pace import LEAST, SHARE, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_planned_when_most_of_the_running_one_is_over() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.launched(alone=True)
    assert pace.rest(8) == 0  # no step of this size has been timed
    clock.now += 0.020
    pace.finished(8)
    pace.launched(alone=False)  # behind the one that now runs: that one began when the last one ended
    assert pace.rest(8) == pytest.approx(SHARE * 0.020)
    assert pace.rest(16) == 0
    clock.now += 0.012
    assert pace.rest(8) == pytest.approx(SHARE * 0.020 - 0.012)
    clock.now += 0.004
    assert pace.rest(8) == 0
    clock.now += 0.004
    pace.finished(8)
    clock.now += 5.0  # nothing ran
    pace.launched(alone=True)
    assert pace.rest(8) == pytest.approx(SHARE * 0.020)
    clock.now += LEAST / 2
    pace.finished(8)
    assert pace.rest(8) == 0  # too short to wait for


class _Waiting(_Inbox):
    """Plays what arrives while the loop waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.later: list[ToCore] = []
        self.waited: list[float] = []

    def get(self, timeout: float | None) -> ToCore | None:
        if timeout is not None and timeout < 1:
            self.waited.append(timeout)
            return self.later.pop(0) if self.later else None
        return super().get(timeout)


def test_what_arrives_while_a_step_runs_is_part_of_the_next_one(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "llama")
    built = build_engine(
        EngineConfig(str(model), num_pages=64, max_num_seqs=4, buckets=[1, 4, 16], artifact_cache=str(tmp_path))
    )
    inbox, outbox = _Waiting(), _Outbox()
    loop = EngineLoop(built, 1, inbox, outbox)
    clock = Clock()
    loop.pace = Pace(clock)
    loop._handle(Submit(1, packed([5, 6]), CoreParams(max_tokens=6, temperature=0.0)))
    loop._messages()
    assert not loop._waits() and loop._launch()  # the prompt
    clock.now += 0.05
    loop._collect()
    assert loop._launch()
    first = loop.flying[0][0]
    clock.now += 0.05
    loop._collect()
    assert loop._launch() and loop.flying[0][0].bucket == first.bucket == 1
    inbox.later.append(Submit(2, packed([7, 8]), CoreParams(max_tokens=3, temperature=0.0)))
    assert loop._waits() and inbox.waited == [pytest.approx(SHARE * 0.05)]
    clock.now += 0.04
    assert not loop._waits() and loop._launch()
    assert set(loop.flying[1][0].request_ids[loop.flying[1][0].request_ids >= 0].tolist()) == {1, 2}
    assert not loop._waits()  # two are ahead: nothing to plan
    while loop.flying or loop._has_work():
        loop._launch() if len(loop.flying) < 2 and loop._has_work() else None
        if loop.flying:
            loop._collect()
    loop._handle(Control(1, "check"))
    built.ranks.close()
