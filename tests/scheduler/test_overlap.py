"""Two steps in flight: optimistic inputs, ends that arrive late, retraction and failure under a step."""

from __future__ import annotations

import numpy as np

from tests.scheduler.harness import Engine
from tokenspeed._scheduler import Config


def engine(**changes) -> Engine:
    base = {
        "page_size": 2,
        "num_pages": 12,
        "max_requests": 4,
        "token_buckets": [1, 2, 4, 8],
        "max_seq_len": 24,
        "max_in_flight": 2,
    }
    return Engine(Config(**(base | changes)))


def state(e: Engine, id: int) -> str | None:
    return next((i["state"] for i in e.scheduler.snapshot() if i["id"] == id), None)


def test_the_input_is_the_token_that_is_being_sampled() -> None:
    e = engine()
    e.add(0, [1], 5)
    first, second = e.plan(), e.plan()
    assert first is not None and second is not None
    assert second.ids[0] == -(second.request_slots[0] + 1) and second.pos[0] == 1 and second.out_pos[0] == 2
    assert e.plan() is None
    e.advance()
    third = e.plan()
    assert third is not None and third.ids[0] == -1 and third.pos[0] == 2
    e.drain()


def test_nothing_is_planned_past_the_length() -> None:
    e = engine()
    e.add(0, [1], 2)
    assert e.plan() is not None and e.plan() is not None
    e.advance()
    assert e.plan() is None
    (output,) = e.advance()
    assert output.finish_reason == "length"
    e.assert_empty()
    assert e.scheduler.stats()["step_tokens"] == 2


def test_a_stop_id_keeps_the_resources_until_the_later_step_is_back() -> None:
    e = engine()
    spec = e.add(0, [1, 2, 3], 9)
    stop = spec.reference()[0][0]
    e.end(0, "abort")
    e.add(1, [1, 2, 3], 9, stop_token_ids=(stop,))
    e.plan()
    e.plan()
    (output,) = e.advance()
    assert output.finish_reason == "stop" and state(e, 1) == "Aborting"
    (info,) = e.scheduler.snapshot()
    assert info["pages"] > 0
    assert e.scheduler.next_plan() is None
    assert e.advance() == []  # its row in the later step is discarded
    assert e.scheduler.snapshot() == []
    e.assert_empty()


def test_abort_under_two_steps() -> None:
    e = engine()
    e.add(0, [1, 2, 3], 9)
    e.plan()
    e.plan()
    e.end(0, "abort")
    assert state(e, 0) == "Aborting"
    assert e.advance() == [] and state(e, 0) == "Aborting"
    assert e.advance() == [] and state(e, 0) is None
    e.assert_empty()


def test_tokens_of_steps_in_flight_reach_a_retracted_request() -> None:
    e = engine()
    e.add(0, [1, 2, 3], 9)
    e.plan()
    e.plan()
    assert e.scheduler.retract(0) and not e.scheduler.retract(0)
    assert state(e, 0) == "Retracting"
    assert len(e.advance()) == 1 and state(e, 0) == "Retracting"
    assert len(e.advance()) == 1 and state(e, 0) == "Retracted"
    plan = e.plan()
    assert plan is not None and plan.new_rows[0] == 1 and plan.ids[0] >= 0
    assert plan.pos[0] == 4  # two full pages of its own were still cached
    e.drain()


def test_a_retracted_request_can_end_with_the_step_in_flight() -> None:
    e = engine()
    e.add(0, [1, 2], 2)
    e.plan()
    e.plan()
    assert e.scheduler.retract(0)
    e.advance()
    (output,) = e.advance()
    assert output.finish_reason == "length" and state(e, 0) is None
    e.assert_empty()


def test_a_failed_step_takes_what_was_built_on_it() -> None:
    e = engine()
    e.add(0, [1, 2, 3], 5)
    e.step()
    e.plan()
    while len(e.flights) < 2:
        e.plan()
    e.fail()
    assert state(e, 0) == "Retracting"
    assert e.advance() == [] and state(e, 0) == "Retracted"
    e.drain()
    assert e.finished[0] == "length" and len(e.outputs[0]) == 5


def test_a_failed_step_spares_the_requests_it_did_not_carry() -> None:
    e = engine()
    e.add(0, [1, 2, 3], 5)
    e.plan()
    e.add(1, [3, 3, 1], 5)
    plan = e.plan()
    assert plan is not None and set(plan.request_ids.tolist()) >= {0, 1}
    e.fail()
    outputs = e.advance()
    assert [o.request_id for o in outputs] == [1]
    assert state(e, 0) == "Retracted" and state(e, 1) == "PrefillDone"
    e.drain()


def test_failing_for_ever_keeps_every_page() -> None:
    e = engine()
    for i in range(5):
        e.add(i, [i, 1, 2], 4)
    for _ in range(60):
        e.plan()
        e.plan()
        e.fail()
    assert not any(e.outputs.values())
    e.drain()


def test_pages_are_short_under_a_step_in_flight() -> None:
    """The victim's pages come back only with its step; meanwhile the oldest waits, and no second victim is taken."""
    e = engine(num_pages=8, max_seq_len=16, page_size=1, max_requests=4)
    for i in range(3):
        e.add(i, [i, 1], 7, salt=b"%d" % i)
    seen = 0
    while e.scheduler.snapshot():
        before = e.scheduler.stats()["retractions"]
        plan = e.plan()
        retracting = [i for i in e.scheduler.snapshot() if i["state"] == "Retracting"]
        assert len(retracting) <= 1 and e.scheduler.stats()["retractions"] - before <= 1
        if retracting and not seen:
            assert retracting[0]["pages"] > 0 and (plan is None or 0 not in plan.request_ids)
            seen += 1
        if plan is None or len(e.flights) == 2:
            e.advance()
    assert seen
    e.assert_empty()
    assert e.order == [0, 1, 2]


def test_slots_are_stable_and_rows_stay_put() -> None:
    e = engine(num_pages=40, max_seq_len=60)
    for i in range(4):
        e.add(i, [i, 1], 12 + 4 * i, salt=b"%d" % i)
    slots: dict[int, set[int]] = {i: set() for i in range(4)}
    rows: dict[int, list[int]] = {i: [] for i in range(4)}
    while e.scheduler.snapshot():
        plan = e.step()
        if plan is None:
            continue
        for row in range(int(plan.num_rows[0])):
            request = int(plan.request_ids[row])
            slots[request].add(int(plan.request_slots[row]))
            rows[request].append(row)
    assert all(len(s) == 1 for s in slots.values())
    moves = sum(int((np.diff(r) != 0).sum()) for r in rows.values())
    assert moves <= 3  # one request ends, one takes its row
