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


@pytest.mark.parametrize("snapshots", [0, 1, 3, 12])
@pytest.mark.parametrize(("depth", "dp", "chunk"), [(1, 1, 3), (2, 1, 3), (2, 2, 0), (2, 1, 1)])
def test_segments_go_on_where_the_slot_left_off(depth: int, dp: int, chunk: int, snapshots: int) -> None:
    retracted = hits = 0
    for seed in range(12):
        rng = random.Random(seed)
        e = engine(
            max_in_flight=depth, dp=dp, prefill_chunk=chunk, prefix_cache=snapshots > 0, state_snapshots=snapshots
        )
        shared = [rng.randrange(6) for _ in range(9)]
        for i in range(14):
            own = [rng.randrange(6) for _ in range(rng.randrange(1, 5))]
            e.add(i, shared[: rng.randrange(10)] + own, rng.randrange(1, 9))
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
        hits += e.scheduler.stats()["prefix_hit_tokens"]
    assert retracted > 10
    assert (hits > 0) == (snapshots > 0)


def turn(e: Engine, id: int, prompt: list[int], new: int) -> tuple[list[int], int]:
    """A request run to its end: its tokens, and how many of the prompt's were found."""
    e.add(id, prompt, new)
    e.drain()
    return prompt + [o.token for o in e.outputs[id]], e.outputs[id][0].cached_tokens


def test_the_next_turn_goes_on_from_the_last_page_of_the_output() -> None:
    e = engine(prefix_cache=True, state_snapshots=4, max_seq_len=40, num_pages=30)
    said, found = turn(e, 0, [1, 2, 3, 4, 5], 6)
    assert found == 0
    assert turn(e, 1, [*said, 1, 2, 3], 2)[1] == 10  # 10 of its 11 tokens were computed: five pages
    assert turn(e, 2, [*said, 3], 1)[1] == 10


def test_chunks_of_a_prompt_are_shared_between_requests() -> None:
    e = engine(prefix_cache=True, state_snapshots=4, max_seq_len=40, num_pages=30, prefill_chunk=5)
    prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
    turn(e, 0, prompt, 1)  # in chunks that end with pages: 4, 8 and 12 of 13 tokens
    assert turn(e, 1, [*prompt[:9], 0, 0], 1)[1] == 8
    assert turn(e, 2, [*prompt[:7], 0], 1)[1] == 4
    assert turn(e, 3, prompt[:3], 1)[1] == 0


def test_an_output_keeps_one_snapshot_and_the_oldest_make_room() -> None:
    e = engine(
        prefix_cache=True, state_snapshots=4, max_seq_len=40, num_pages=60
    )  # a request: of its prompt, of its output
    said = [turn(e, i, [i, i, i], 9)[0] for i in range(3)]
    assert turn(e, 3, [*said[2], 4], 1)[1] == 10 and turn(e, 4, [*said[1], 4], 1)[1] == 10
    assert turn(e, 5, [*said[0], 4], 1)[1] == 0, "the first request's were used longest ago"
    e.scheduler.flush_cache()
    assert turn(e, 6, [*said[2], 4], 1)[1] == 0
    e.scheduler.check()


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
