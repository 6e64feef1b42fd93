"""Nothing waits for ever: order of service, retraction, priorities with ageing, the decode share."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.scheduler.harness import Engine, Spec
from tokenspeed._scheduler import Config


def engine(**changes) -> Engine:
    base = {"page_size": 2, "num_pages": 12, "max_requests": 4, "token_buckets": [1, 2, 4, 8], "max_seq_len": 24}
    return Engine(Config(**(base | changes)))


def running(e: Engine) -> list[int]:
    return [i["id"] for i in e.scheduler.snapshot() if i["state"] in {"Prefilling", "PrefillDone", "Decoding"}]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("dp", "host"), [(1, 0), (2, 0), (1, 30)])
def test_no_request_waits_while_three_pools_of_later_arrivals_finish(in_flight: int, dp: int, host: int) -> None:
    page, pages = 4, 20
    e = Engine(
        Config(
            page_size=page,
            num_pages=pages,
            max_requests=8,
            token_buckets=[8, 16, 32],
            max_seq_len=80,
            dp=dp,
            max_in_flight=in_flight,
            host_pages=host,
            storage=host > 0,
        )
    )
    rng = random.Random(7)
    pool = page * pages * dp
    overtaken: dict[int, int] = {}
    submitted, count = 0, 300
    for _ in range(100_000):
        if submitted < count and rng.random() < 0.7:
            spec = Spec(
                submitted,
                [rng.randrange(6) for _ in range(rng.randint(2, 40))],
                rng.randint(1, 16),
                salt=b"%d" % submitted,
            )
            e.submit(spec)
            overtaken[submitted] = 0
            submitted += 1
        before = len(e.order)
        e.step()
        for done in e.order[before:]:
            overtaken.pop(done)
            for id in overtaken:
                if id < done:
                    overtaken[id] += len(e.specs[done].prompt) + len(e.outputs[done])
                    assert overtaken[id] <= 3 * pool, f"request {id} starves"
        if submitted == count and not e.scheduler.snapshot() and not e.flights:
            break
    e.drain()
    assert len(e.finished) == count
    assert e.scheduler.stats()["retractions"] > 0  # the pool was small enough to matter


@pytest.mark.parametrize("host", [0, 3, 24])
def test_b78_three_requests_in_a_pool_for_two(host: int) -> None:
    """vllm#41951, vllm#25538: the oldest progresses at every step, and nobody resumes without room for its prefill."""
    e = engine(num_pages=12, max_seq_len=22, host_pages=host, write_back_pages=2)
    for i in range(3):
        e.add(i, [i, i, 1, 2, 3], 16, salt=b"%d" % i)
    oldest = waits = 0
    retracted = set()
    while e.scheduler.snapshot():
        live = [i["id"] for i in e.scheduler.snapshot()]
        oldest = live[0]
        had = len(e.outputs[oldest])
        plan = e.step()
        if host and (plan is None or oldest not in plan.request_ids):  # the victim's last pages are being copied
            assert e.scheduler.stats()["retractions"] > 0
            waits += 1
            continue
        assert plan is not None and oldest in plan.request_ids
        assert oldest in e.finished or len(e.outputs[oldest]) == had + 1 or had == 0
        for info in e.scheduler.snapshot():
            if info["state"] == "Retracted":
                retracted.add(info["id"])
                assert info["id"] != oldest
    assert retracted and e.order == [0, 1, 2]
    # Each victim came back at most once: it did not thrash.
    assert e.scheduler.stats()["retractions"] <= 3
    assert waits <= 2 * e.scheduler.stats()["retractions"]
    e.drain()


def test_a_retracted_request_comes_back_before_newer_ones() -> None:
    e = engine(max_requests=2)
    e.add(0, [1, 2, 3], 12)
    e.add(1, [4, 5, 4], 12)
    e.step()
    e.add(2, [0, 0], 2)
    assert e.scheduler.retract(1)
    e.step()
    assert running(e) == [0, 1]
    e.drain()
    assert e.order.index(2) > 0


def test_a_blocked_request_holds_back_newer_ones() -> None:
    e = engine(num_pages=10, max_seq_len=20)
    e.add(0, [1, 2, 3, 4, 5, 0, 1, 2, 3, 4], 8)
    e.step()
    e.add(1, [5, 4, 3, 2, 1, 0, 5, 4, 3, 2, 1, 0], 2)  # needs seven pages, there are four
    e.add(2, [3], 1)  # would fit
    while 0 not in e.finished:
        assert 2 not in running(e)
        e.step()
    e.drain()


def test_a_blocked_request_is_admitted_as_soon_as_its_prefix_is_cached() -> None:
    e = engine(num_pages=10, max_seq_len=20, max_requests=3, prefill_chunk=2)
    shared = [1, 2, 3, 4, 5, 0, 1, 2]
    e.add(0, [*shared, 3], 9)
    e.add(1, [*shared, 4], 3)  # needs five pages, of which four will be shared
    turns = 0
    while 1 not in running(e):
        e.step()
        turns += 1
    assert turns <= 5 and 0 in running(e)
    e.drain()


def test_an_admission_is_not_undone_by_the_next_steps() -> None:
    """A request is admitted with a page to spare for each that runs: filling the pool to the brim would retract it."""
    e = engine(num_pages=8, max_seq_len=16)
    e.add(0, [0, 1, 2, 3, 4], 8)
    e.step()
    e.add(1, [5, 4, 3, 2, 1, 0, 5, 4, 3], 6)  # its five pages are just those that are left
    e.drain()
    assert e.scheduler.stats()["retractions"] == 0 and e.order == [0, 1]


def test_the_newest_is_the_victim() -> None:
    e = engine(num_pages=11, max_seq_len=18)
    for i in range(3):
        e.add(i, [i, 5, 3, 2], 12, salt=b"%d" % i)
    while not e.scheduler.stats()["retractions"]:
        e.step()
    states = {i["id"]: i["state"] for i in e.scheduler.snapshot()}
    assert states[2] == "Retracted" and states[0] == states[1] == "Decoding"
    e.drain()


def test_lower_priority_classes_go_first_and_age() -> None:
    def order(ageing: int) -> list[int]:
        e = engine(max_requests=1, ageing_steps=ageing)
        e.add(0, [1], 4)
        e.step()
        e.add(1, [2], 2, priority=1)
        for i in range(2, 12):
            e.add(i, [3], 2, priority=0)
            e.step()
            e.step()
        e.drain()
        return e.order

    assert order(1000)[-1] == 1  # every request of class 0 goes first
    assert 2 < order(8).index(1) < 10  # after eight steps it has caught up
    assert order(1).index(1) <= 2


def test_decoding_goes_on_while_a_long_prompt_is_prefilled() -> None:
    e = engine(num_pages=60, max_seq_len=100, token_buckets=[4, 8, 16], decode_stall_tokens=3)
    e.add(0, [1, 2], 30)
    e.step()
    e.add(1, [i % 6 for i in range(40)], 2)
    steps = 0
    while 1 in {i["id"] for i in e.scheduler.snapshot() if i["output_tokens"] == 0}:
        had = len(e.outputs[0])
        plan = e.step()
        assert plan is not None and plan.num_tokens[0] <= 1 + 3
        assert len(e.outputs[0]) == had + 1
        steps += 1
    assert steps == -(-40 // 3)
    e.drain()


def test_prefill_takes_the_budget_when_nothing_decodes() -> None:
    e = engine(num_pages=60, max_seq_len=100, token_buckets=[4, 8, 16], decode_stall_tokens=3)
    e.add(1, [i % 6 for i in range(40)], 2)
    assert e.step().num_tokens[0] == 16  # pyright: ignore


def test_prefill_goes_on_when_decoding_fills_the_bucket() -> None:
    """More slots than budget: fewer requests run, so that each gets a token in every step."""
    e = engine(token_buckets=[1, 2], max_requests=8, num_pages=40, max_seq_len=80)
    for i in range(5):
        e.add(i, [i, 1, 2], 6, salt=b"%d" % i)
    while e.scheduler.snapshot():
        plan = e.step()
        assert plan is not None and set(running(e)) <= set(plan.request_ids.tolist())
    e.assert_empty()


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_are_bounded(chunk: int) -> None:
    e = engine(num_pages=60, max_seq_len=100, prefill_chunk=chunk)
    e.add(0, [i % 6 for i in range(20)], 3)
    e.add(1, [i % 5 for i in range(20)], 3)
    while not e.outputs[0] or not e.outputs[1]:
        plan = e.step()
        assert plan is not None
        rows = plan.row[plan.row >= 0]
        assert np.bincount(rows).max() <= chunk
    e.drain()


def test_home_groups_share_the_load_and_keep_prefixes_together() -> None:
    e = engine(dp=2, num_pages=20, max_seq_len=40, max_requests=2)
    for i in range(4):
        e.add(i, [i, 1, 2, 3, 4], 6, salt=b"%d" % i)
    e.plan()
    assert sorted(i["group"] for i in e.scheduler.snapshot()) == [0, 0, 1, 1]
    e.drain()
    group = {0: 0, 1: 1, 2: 0, 3: 1}
    for again in (2, 3, 1):
        e.add(10 + again, [again, 1, 2, 3, 4], 1, salt=b"%d" % again)
        e.plan()
        (info,) = e.scheduler.snapshot()
        assert info["group"] == group[again]
        e.drain()
        assert e.outputs[10 + again][0].cached_tokens == 4


def test_a_retracted_request_stays_in_its_group() -> None:
    e = engine(dp=2)
    e.add(0, [1, 2, 3], 8)
    e.add(1, [3, 2, 1], 8)
    e.step()
    groups = {i["id"]: i["group"] for i in e.scheduler.snapshot()}
    assert e.scheduler.retract(1)
    e.end(0, "abort")
    e.step()
    (info,) = e.scheduler.snapshot()
    assert (info["id"], info["group"]) == (1, groups[1])
    e.drain()
