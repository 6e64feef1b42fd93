"""Recurrent states live in request slots: without a shared prefix every segment of a request starts at position 0, or goes on
where the last step that held the slot left off, whatever chunks, overlap, retraction, failure and aborts do."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.harness import Engine
from tokenspeed._scheduler import Config


def engine(**changes) -> Engine:
    base = {
        "page_size": 2, "num_pages": 14, "max_requests": 3, "token_buckets": [1, 2, 4, 8], "max_seq_len": 24, "prefix_cache": False,
    }  # fmt: skip
    return Engine(Config(**(base | changes)))


@pytest.mark.parametrize(("depth", "dp", "chunk"), [(1, 1, 3), (2, 1, 3), (2, 2, 0), (2, 1, 1)])
def test_segments_go_on_where_the_slot_left_off(depth: int, dp: int, chunk: int) -> None:
    retracted = 0
    for seed in range(12):
        rng = random.Random(seed)
        e = engine(max_in_flight=depth, dp=dp, prefill_chunk=chunk)
        for i in range(14):
            e.add(i, [rng.randrange(6) for _ in range(rng.randrange(1, 14))], rng.randrange(1, 9))
        for _ in range(60):
            e.step()
            live = [i for i in e.specs if i not in e.finished and i not in e.ended]
            what = rng.random()
            if live and what < 0.05:
                e.end(rng.choice(live), "abort")
            elif live and what < 0.1:
                e.end(rng.choice(live), "finish")
            elif live and what < 0.2:
                e.scheduler.retract(rng.choice(live))
            elif e.flights and what < 0.25:
                e.fail()
        e.drain()
        retracted += e.scheduler.stats()["retractions"]
        assert e.scheduler.stats()["prefix_hit_tokens"] == 0
    assert retracted > 20


def test_a_retracted_request_starts_from_the_beginning() -> None:
    e = engine(prefill_chunk=4)
    e.add(0, [1, 2, 3, 4, 5, 1, 2], 4)
    first = e.plan()
    assert first is not None and first.pos[:4].tolist() == [0, 1, 2, 3]
    e.advance()
    assert e.scheduler.retract(0)
    again = e.plan()
    assert again is not None and again.pos[:4].tolist() == [0, 1, 2, 3] and again.new_rows[0] == 1
    e.advance()
    e.drain()


def test_the_harness_sees_a_state_that_another_request_left() -> None:
    e = engine(prefill_chunk=4)
    e.add(0, [1, 2, 3, 4, 5, 1], 1)
    e.step()
    (slot,) = e.executor.states[0]
    e.executor.states[0][slot] = (4, 7)
    with pytest.raises(AssertionError, match="goes on at 4 from the state"):
        e.plan()
