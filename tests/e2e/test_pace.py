"""When the next step is planned: late enough for what arrives meanwhile, early enough that the device does not wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.e2e.models import write_tiny
from tests.e2e.test_core_faults import _Inbox, _Outbox
from tokenspeed.runtime.build import Built, build_engine
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.core import EngineLoop
from tokenspeed.runtime.executor import StepResult
from tokenspeed.runtime.messages import Control, CoreParams, Deltas, Submit, ToCore, ToFront, packed
from tokenspeed.runtime.pace import LATE, LEAST, MARGIN, SHARE, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_planned_when_most_of_the_running_one_is_over() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.launched(clock.now - 0.001, alone=True)
    assert pace.rest(8) == 0  # no step of this size has been timed
    clock.now += 0.020
    pace.finished(8, waited=True)
    assert pace.rest(8) == pytest.approx(SHARE * 0.020) and pace.rest(16) == 0
    clock.now += 0.012
    assert pace.rest(8) == pytest.approx(SHARE * 0.020 - 0.012)
    clock.now += 0.008
    assert pace.rest(8) == 0
    pace.finished(8, waited=True)
    pace.launched(clock.now - 0.005, alone=False)  # planning takes long: twice that is kept free
    assert pace.rest(8) == pytest.approx(0.020 - 2 * 0.005 - MARGIN)
    clock.now += 0.030
    pace.finished(8, waited=False)  # it had ended before: nobody knows when
    assert pace.rest(8) == pytest.approx(LATE * 0.020 - 2 * 0.005 - MARGIN)
    clock.now += LEAST / 2
    pace.finished(8, waited=True)
    assert pace.rest(8) == 0  # too short to wait for


class _Played:
    """Ranks whose device takes `seconds` for a step, and a host whose planning and reporting take their time, on one clock."""

    tiers = None

    def __init__(self, clock: Clock, seconds: Callable[[Any], float], planning: float) -> None:
        self.clock, self.seconds, self.planning = clock, seconds, planning
        self.free, self.idle, self.busy = 0.0, 0.0, 0.0

    def check(self) -> None: ...

    def publish(self, plan: Any, *_: Any) -> Any:
        return plan

    def launch(self, plan: Any) -> Callable[[], list[StepResult]]:
        self.clock.now += self.planning
        took = self.seconds(plan)
        start = max(self.free, self.clock.now)
        self.idle += start - self.free if self.free else 0.0
        self.free = ends = start + took
        self.busy += took

        def wait() -> list[StepResult]:
            self.clock.now = max(self.clock.now, ends)
            return [StepResult(np.full(len(plan.request_ids), 7, np.int32))]

        return wait


class _Reporting(_Outbox):
    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def put(self, message: ToFront) -> None:
        self.clock.now += self.seconds
        super().put(message)


class _Waiting(_Inbox):
    """Time passes while the loop waits for a message; `later`: (when, message)."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.later: list[tuple[float, ToCore]] = []

    def get(self, timeout: float | None) -> ToCore | None:
        assert timeout is not None
        ends = self.clock.now + timeout
        if self.later and self.later[0][0] <= ends:
            self.clock.now = max(self.clock.now, self.later[0][0])
            return self.later.pop(0)[1]
        self.clock.now = ends
        return None

    def drain(self) -> list[ToCore]:
        out: list[ToCore] = []
        while self.later and self.later[0][0] <= self.clock.now:
            out.append(self.later.pop(0)[1])
        return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("pace")
    model = write_tiny(folder / "model", "llama")
    return build_engine(
        EngineConfig(str(model), num_pages=256, max_num_seqs=4, buckets=[1, 4, 16], artifact_cache=str(folder))
    )


def played(
    built: Built, paced: bool, seconds: Callable[[Any], float], planning: float, reporting: float, arrivals: int = 0
) -> tuple[float, list[float]]:
    """(share of the time in which the device was idle, seconds to the first token of each request that came in between)."""
    clock = Clock()
    inbox, outbox = _Waiting(clock), _Reporting(clock, reporting)
    loop = EngineLoop(built, 1, inbox, outbox)
    loop.pace = Pace(clock)
    if not paced:
        loop.pace.rest = lambda _bucket: 0.0  # type: ignore[method-assign]
    ranks = _Played(clock, seconds, planning)
    loop.ranks = ranks  # type: ignore[assignment]
    for i in (1, 2, 3):
        loop._handle(Submit(i, packed([5, 6, i]), CoreParams(max_tokens=50, temperature=0.0)))
    draw = random.Random(3)
    came = sorted(draw.uniform(100.1, 100.4) for _ in range(arrivals))
    inbox.later = [(t, Submit(10 + i, packed([9, i]), CoreParams(max_tokens=1))) for i, t in enumerate(came)]
    seen: dict[int, float] = {}
    while loop.flying or loop._has_work() or inbox.later:
        sent = len(outbox.sent)
        loop._messages()
        if not loop._waits() and not (len(loop.flying) <= loop.depth and loop._launch()) and loop.flying:
            loop._collect()
        for m in outbox.sent[sent:]:
            if isinstance(m, Deltas):
                seen |= {d.request_id: clock.now for d in m.deltas if d.request_id not in seen}
    loop._handle(Control(1, "check"))
    return ranks.idle / (ranks.idle + ranks.busy), [seen[10 + i] - t for i, t in enumerate(came)]


@pytest.mark.parametrize("step", [0.003, 0.012, 0.020])
@pytest.mark.parametrize("planning", [0.0003, 0.0015, 0.004])
@pytest.mark.parametrize("uneven", [0.0, 0.3])
def test_the_device_idles_no_more_than_without(built: Built, step: float, planning: float, uneven: float) -> None:
    """Also where planning takes as long as a step, and where steps are uneven; whatever the host's part."""
    shares = []
    for paced in (True, False):
        draw = random.Random(1)
        seconds = lambda _plan, draw=draw: step * (1 + draw.uniform(-uneven, uneven))  # noqa: E731
        shares.append(played(built, paced, seconds, planning, reporting=0.001)[0])
    assert shares[0] <= shares[1] + 0.02


def test_what_arrives_while_a_step_runs_is_part_of_the_next_one(built: Built) -> None:
    """A request waits for a step less where the next one is planned late."""
    paced, at_once = (played(built, paced, lambda _: 0.020, 0.0005, 0.0005, arrivals=20)[1] for paced in (True, False))
    assert len(paced) == len(at_once) == 20
    assert sum(paced) / 20 < sum(at_once) / 20 - 0.5 * 0.020
    assert max(paced) < max(at_once)
