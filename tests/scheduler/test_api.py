"""The binding's contract: what is refused and how, what the arrays look like, what the answers mean."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scheduler.harness import Engine
from tests.scheduler.threads import hammer
from tokenspeed import _scheduler
from tokenspeed._scheduler import Config, Plan, QueueFull, Scheduler

ROOT = Path(__file__).parents[2]


def config(**changes: Any) -> Config:
    base: dict[str, Any] = {
        "page_size": 4,
        "num_pages": 8,
        "max_requests": 4,
        "token_buckets": [1, 2, 4, 8],
        "max_seq_len": 32,
    }
    return Config(**(base | changes))


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0),
        ("num_pages", 0),
        ("max_requests", 0),
        ("token_buckets", []),
        ("token_buckets", [4, 4]),
        ("token_buckets", [0, 4]),
        ("max_seq_len", 1),
        ("dp", 0),
        ("prefill_chunk", -1),
        ("max_in_flight", 0),
        ("max_in_flight", 3),
        ("decode_stall_tokens", -1),
        ("ageing_steps", 0),
        ("max_queued_requests", -1),
        ("max_queued_tokens", -1),
        ("num_pages", 2**30),
        ("dp", 2**30),
    ],
)
def test_config_names_the_field_that_cannot_work(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        config(**{field: value})


def test_config_is_readable_and_keyword_only() -> None:
    assert config(dp=2).dp == 2 and config().token_buckets == [1, 2, 4, 8] and config().prefix_cache is True
    with pytest.raises(TypeError):
        Config(4, 8, 4, [1], 32)  # pyright: ignore
    assert Scheduler(config(page_size=2)).config.page_size == 2


@pytest.mark.parametrize(
    ("arguments", "rest", "message"),
    [
        ((1, tokens(), 1), {}, "prompt is empty"),
        ((7, tokens(1), 1), {}, "id is in use"),
        ((-1, tokens(1), 1), {}, "id is negative"),
        ((1, tokens(1), 0), {}, "max_new_tokens is 0"),
        ((1, tokens(1), 2), {"min_new_tokens": 3}, "min_new_tokens is 3"),
        ((1, tokens(1), 2), {"min_new_tokens": -1}, "min_new_tokens is -1"),
        ((1, tokens(1, -1), 2), {}, "token 1 of the prompt is -1"),
        ((1, np.zeros(30, np.int32), 3), {}, r"come to 33 tokens, but max_seq_len is 32"),
        ((1, np.zeros((2, 2), np.int32), 3), {}, "2 dimensions"),
    ],
)
def test_submit_refuses(arguments: tuple, rest: dict, message: str) -> None:
    scheduler = Scheduler(config())
    scheduler.submit(7, tokens(1), 1)
    before = scheduler.snapshot(), scheduler.stats()
    with pytest.raises(ValueError, match=message):
        scheduler.submit(*arguments, **rest)
    assert before == (scheduler.snapshot(), scheduler.stats())
    scheduler.check()


def test_submit_refuses_what_can_never_fit_with_both_numbers() -> None:
    scheduler = Scheduler(config(num_pages=5))
    with pytest.raises(ValueError, match=r"needs 6 pages of 4 tokens .* the pool has 5"):
        scheduler.submit(1, np.zeros(18, np.int32), 4)
    scheduler.submit(1, np.zeros(18, np.int32), 3)  # 20 positions: the last token needs no KV


def test_submit_does_not_cast() -> None:
    for array in (np.zeros(3), np.zeros(3, np.int64)):
        with pytest.raises(TypeError):
            Scheduler(config()).submit(1, array, 1)  # pyright: ignore


def test_queue_is_bounded() -> None:
    scheduler = Scheduler(config(max_queued_requests=2))
    scheduler.submit(0, tokens(1), 1)
    scheduler.submit(1, tokens(1), 1)
    with pytest.raises(QueueFull, match="2 requests wait and max_queued_requests is 2"):
        scheduler.submit(2, tokens(1), 1)
    assert issubclass(QueueFull, RuntimeError)
    assert scheduler.next_plan() is not None  # admits; the queue has room again
    scheduler.submit(2, tokens(1), 1)

    scheduler = Scheduler(config(max_queued_tokens=4))
    scheduler.submit(0, tokens(1, 2, 3, 4, 5), 1)  # alone it may be longer than the bound
    with pytest.raises(QueueFull, match="5 prompt tokens wait, this one has 1, and max_queued_tokens is 4"):
        scheduler.submit(1, tokens(1), 1)
    assert scheduler.abort(0)
    scheduler.submit(1, tokens(1), 1)
    assert scheduler.stats()["queued_tokens"] == 1
    scheduler.check()


def test_plan_of_a_prefill_and_a_decode() -> None:
    scheduler = Scheduler(config())
    scheduler.submit(5, tokens(10, 11, 12), 4)
    plan = scheduler.next_plan()
    assert plan is not None
    assert (plan.step, plan.dp, plan.bucket, plan.rows) == (0, 1, 4, 4)
    assert plan.ids.tolist() == [10, 11, 12, 0] and plan.pos.tolist() == [0, 1, 2, -1]
    assert plan.slot.tolist() == [0, 1, 2, -1] and plan.row.tolist() == [0, 0, 0, -1]
    assert plan.last.tolist() == [2, -1, -1, -1] and plan.out_pos.tolist() == [3, -1, -1, -1]
    assert plan.request_ids.tolist() == [5, -1, -1, -1] and plan.request_ids.dtype == np.int64
    assert plan.request_slots.tolist() == [0, -1, -1, -1]
    assert plan.new_rows.tolist() == [1, 0, 0, 0] and plan.new_rows.dtype == np.uint8
    assert plan.num_tokens.tolist() == [3] and plan.num_rows.tolist() == [1]
    assert plan.table[0, 0] == 0 and plan.table[0, 1:].tolist() == [-1] * (plan.width - 1)
    (output,) = scheduler.advance(0, tokens(13, 0, 0, 0))
    assert (output.request_id, output.token, output.num_output, output.cached_tokens) == (5, 13, 1, 0)
    assert output.finish_reason is None
    assert repr(output) == "Output(request_id=5, token=13, finish_reason=None, cached_tokens=0, num_output=1)"
    plan = scheduler.next_plan()
    assert plan is not None
    assert (plan.bucket, plan.rows) == (1, 1)
    assert (plan.ids[0], plan.pos[0], plan.slot[0], plan.new_rows[0]) == (13, 3, 3, 0)


def test_next_plan_gives_none_when_nothing_runs_and_when_enough_is_out() -> None:
    scheduler = Scheduler(config())
    assert scheduler.next_plan() is None
    scheduler.submit(0, tokens(1), 2)
    assert scheduler.next_plan() is not None
    assert scheduler.next_plan() is None


def test_advance_refuses_and_changes_nothing() -> None:
    scheduler = Scheduler(config(max_in_flight=2))
    with pytest.raises(ValueError, match="step 0 is not in flight; no step is"):
        scheduler.advance(0, tokens(1))
    scheduler.submit(0, tokens(1), 9)
    assert scheduler.next_plan() and scheduler.next_plan()
    before = scheduler.snapshot(), scheduler.stats()
    for step, answer, message in [
        (1, tokens(1), "step 0 is the oldest in flight"),
        (0, tokens(1, 2), r"returned 2 tokens; its plan has dp \* rows = 1"),
        (0, tokens(-1), "returned token -1 in row 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            scheduler.advance(step, answer)
        assert before == (scheduler.snapshot(), scheduler.stats())
    assert len(scheduler.advance(0, tokens(3))) == 1
    with pytest.raises(ValueError, match="step 1 is the oldest"):
        scheduler.advance(0, tokens(3))  # a duplicate


def test_views_keep_a_plan_alive_and_cannot_be_written() -> None:
    scheduler = Scheduler(config())
    scheduler.submit(0, tokens(10, 11, 12), 9)
    plan = scheduler.next_plan()
    assert plan is not None
    ids, table = plan.ids, plan.table
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1
    del plan
    gc.collect()
    for step in range(8):  # would overwrite a recycled buffer
        scheduler.advance(step, np.full(4 if step == 0 else 1, 13, np.int32))
        assert scheduler.next_plan() is not None
    assert ids.tolist() == [10, 11, 12, 0] and table[0, 0] == 0 and table[0, 1] == -1


def test_packed_plan_comes_back_whole() -> None:
    engine = Engine(config(dp=2, max_in_flight=2))
    for i in range(6):
        engine.add(i, [i % 5, 1, 2, 3, 4][: 3 + i % 3], 6)
    names = ["ids", "pos", "slot", "row", "last", "table", "num_tokens", "num_rows", "new_rows", "out_pos"]
    names += ["request_ids", "request_slots"]
    for _ in range(12):
        plan = engine.step()
        if plan is None:
            continue
        buffer = bytearray(plan.packed_size + 7)
        assert plan.pack_into(buffer) == plan.packed_size
        assert bytes(buffer[: plan.packed_size]) == plan.pack()
        copy = Plan.unpack(memoryview(buffer))
        for name in names:
            assert np.array_equal(getattr(copy, name), getattr(plan, name)), name
        header = [(p.step, p.dp, p.bucket, p.rows, p.width, p.digest) for p in (plan, copy)]
        assert header[0] == header[1]


def test_unpack_refuses_every_changed_byte() -> None:
    scheduler = Scheduler(config())
    scheduler.submit(0, tokens(10, 11, 12, 13, 14), 9)
    plan = scheduler.next_plan()
    assert plan is not None
    packed = plan.pack()
    for at in range(len(packed)):
        for flip in (1, 0x80):
            changed = bytearray(packed)
            changed[at] ^= flip
            with pytest.raises(ValueError, match="not a packed plan"):
                Plan.unpack(changed)
    for length in (0, 10, 47, 48, len(packed) - 1):
        with pytest.raises(ValueError, match="not a packed plan"):
            Plan.unpack(packed[:length])
    with pytest.raises(ValueError, match="does not fit"):
        plan.pack_into(bytearray(len(packed) - 1))
    with pytest.raises(ValueError, match="not contiguous"):
        Plan.unpack(np.zeros((8, 8), np.int32)[:, :4])


def test_same_calls_same_plans() -> None:
    def run(hold: bool) -> list[bytes]:
        engine = Engine(config(num_pages=6, max_seq_len=24, max_in_flight=2))
        held, packed = [], []
        for i in range(9):
            engine.add(i, [0, 1, 2, 3, 4, 5, i % 3][: 2 + i % 6], 8)
        while engine.scheduler.snapshot():
            plan = engine.step()
            if plan is not None:
                packed.append(plan.pack())
                if hold:  # the buffers in use must not matter
                    held.append(plan)
        assert engine.scheduler.stats()["retractions"] > 0
        return packed

    assert run(hold=False) == run(hold=True)


def test_stop_ids_count_from_min_new_tokens() -> None:
    def outputs(least: int) -> list[tuple[int, str | None]]:
        scheduler = Scheduler(config())
        scheduler.submit(0, tokens(1), 5, min_new_tokens=least, stop_token_ids=[9, 3])
        got = []
        while (plan := scheduler.next_plan()) is not None:
            got += [(o.num_output, o.finish_reason) for o in scheduler.advance(plan.step, tokens(3))]
        scheduler.check()
        return got

    assert outputs(0) == [(1, "stop")]
    assert outputs(3) == [(1, None), (2, None), (3, "stop")]
    assert outputs(5)[-1] == (5, "stop")


def test_end_in_every_state_is_idempotent() -> None:
    """vllm#18485, vllm#25067: abort before the first schedule or after the end raised."""
    for how in ("abort", "finish"):
        for state in ("Submitted", "Prefilling", "PrefillDone", "Decoding", "Retracting", "Retracted", "Aborting"):
            engine = Engine(config(max_in_flight=2, prefill_chunk=1))
            engine.add(0, [1, 2], 8)
            find = {
                "Submitted": lambda e: None,
                "Prefilling": lambda e: e.plan(),
                "PrefillDone": lambda e: [e.step() for _ in range(3)],
                "Decoding": lambda e: [e.step() for _ in range(6)],
                "Retracting": lambda e: (e.plan(), e.scheduler.retract(0)),
                "Retracted": lambda e: (e.plan(), e.scheduler.retract(0), e.advance()),
                "Aborting": lambda e: (e.plan(), e.end(0, "abort")),
            }
            find[state](engine)
            (info,) = engine.scheduler.snapshot()
            assert info["state"] == state
            assert engine.end(0, how) is (state != "Aborting")
            while engine.flights:
                engine.advance()
            assert engine.scheduler.snapshot() == []
            engine.assert_empty()
            assert engine.scheduler.abort(0) is False and engine.scheduler.abort(99) is False
            engine.add(1, [1, 2], 2)  # and its id, slot and pages serve again
            engine.drain()


def test_calls_from_many_threads() -> None:
    hammer(_scheduler)


def test_states_page_is_fresh() -> None:
    page = (ROOT / "docs" / "scheduler-states.md").read_text()
    assert page == _scheduler.states_markdown(), "docs/scheduler-states.md is stale: run `make docs`"
