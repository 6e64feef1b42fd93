"""The host tier and storage: what is copied where and when, what a hit gives, and what happens when a transfer fails."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.scheduler.harness import Engine
from tests.scheduler.mover import Page
from tokenspeed._scheduler import Config

LONG = [0, 1, 2, 3, 4, 5, 0, 2, 4, 1, 3, 5, 5, 4, 3, 2]


def engine(storage: dict[bytes, Page] | None = None, **changes) -> Engine:
    base = {
        "page_size": 2, "num_pages": 12, "max_requests": 4, "token_buckets": [1, 2, 4, 8, 16], "max_seq_len": 24,
        "host_pages": 24, "write_back_pages": 1, "storage": storage is not None,
    }  # fmt: skip
    return Engine(Config(**(base | changes)), storage={} if storage is None else storage)


def state(e: Engine, id: int) -> str | None:
    return next((i["state"] for i in e.scheduler.snapshot() if i["id"] == id), None)


def turn(e: Engine, id: int, prompt: list[int], new: int = 1, **rest) -> tuple[int, int, int]:
    """A request run to its end: the prompt tokens that the device, the host and storage supplied."""
    e.add(id, prompt, new, **rest)
    e.drain()
    first = e.outputs[id][0]
    return first.cached_device, first.cached_host, first.cached_storage


def test_a_page_evicted_from_the_device_comes_back_from_the_host() -> None:
    e = engine()
    assert turn(e, 0, LONG[:9]) == (0, 0, 0)
    assert turn(e, 1, LONG[:9]) == (8, 0, 0)
    assert e.scheduler.flush_cache("device") == 4
    assert e.scheduler.cached_prefix(np.array(LONG[:9], np.int32)) == 8
    assert turn(e, 2, LONG[:9]) == (0, 8, 0)
    assert turn(e, 3, LONG[:9]) == (8, 0, 0), "what was loaded is cached on the device again"
    stats = e.scheduler.stats()
    assert (stats["write_back_pages"], stats["load_back_pages"]) == (4, 4), "nothing was copied twice"
    assert (stats["hit_tokens_device"], stats["hit_tokens_host"], stats["prefix_hit_tokens"]) == (16, 8, 24)


def test_b77_a_hit_is_counted_once_over_all_tiers() -> None:
    """sglang#26976: tier hits counted once a chunk."""
    storage: dict[bytes, Page] = {}
    turn(engine(storage), 0, LONG[:13])
    e = engine(storage, prefill_chunk=1, token_buckets=[1, 2, 4])
    turn(e, 0, LONG[:5])  # two pages come from storage, and stay on the device
    e.scheduler.flush_cache("device")
    turn(e, 1, LONG[:3])  # of which one is on the device again
    assert turn(e, 2, LONG[:13]) == (2, 2, 8)
    assert e.scheduler.stats()["prefix_hit_tokens"] == 4 + 2 + 12


def test_storage_outlives_the_scheduler() -> None:
    storage: dict[bytes, Page] = {}
    assert turn(engine(storage), 0, LONG[:9], 5) == (0, 0, 0)
    assert len(storage) == 6
    e = engine(storage)
    assert turn(e, 0, LONG[:9], 5) == (0, 0, 8)
    assert e.scheduler.stats()["backup_pages"] == 2, "what came from storage does not go back"
    assert turn(e, 1, LONG[:9], 5, salt=b"other") == (0, 0, 0)


def test_a_long_prompt_is_fetched_in_growing_parts() -> None:
    storage: dict[bytes, Page] = {}
    prompt = [i * i % 6 for i in range(81)]
    sizes = {"num_pages": 60, "host_pages": 100, "max_seq_len": 100}
    turn(engine(storage, **sizes), 0, prompt)
    e = engine(storage, **sizes)
    e.patient = True
    e.add(0, prompt, 1)
    asked = []
    while not e.finished:
        e.step()
        asked += [len(o.transfer.host) for o in e.mover.out.values() if o.transfer.kind == "prefetch"]
        e.settle()
    assert asked == [8, 16, 16]
    assert e.outputs[0][0].cached_storage == 80
    e.drain()


def test_a_prompt_that_storage_does_not_have_takes_few_pages_from_the_host() -> None:
    e = engine({}, num_pages=60, host_pages=100, max_seq_len=100)
    e.patient = True
    e.add(0, [i % 6 for i in range(81)], 1)
    assert e.plan() is None and state(e, 0) == "Prefetching"
    assert e.scheduler.stats()["host_pages_free"] == 92
    e.settle()
    assert e.scheduler.stats()["host_pages_free"] == 100
    assert e.plan() is not None and state(e, 0) == "Prefilling"
    e.drain()


def test_a_short_miss_is_not_asked_of_storage() -> None:
    e = engine({}, storage_min_pages=4)
    e.add(0, LONG[:8], 1)  # three pages could be reused
    assert e.plan() is not None
    e.add(1, LONG[::-1][:9], 1)
    e.plan()
    assert state(e, 1) == "Prefetching"
    e.drain()


def test_a_fetch_takes_the_room_of_copies_of_what_runs() -> None:
    storage: dict[bytes, Page] = {}
    sizes = {"num_pages": 40, "host_pages": 8, "max_seq_len": 40}
    turn(engine(storage, **sizes), 0, LONG[:9])
    e = engine(storage, **sizes)
    e.add(1, [5] * 17, 12)  # its eight copies fill the host
    for _ in range(6):
        e.step()
    assert e.scheduler.stats()["host_pages_pinned"] == 8
    e.add(2, LONG[:9], 2)
    for _ in range(4):
        e.step()
    assert e.outputs[2][0].cached_storage == 8
    (info,) = [i for i in e.scheduler.snapshot() if i["id"] == 1]
    assert info["host_pages"] == 0 and info["transfers"] == 0, "what gave way is not copied again while it runs"
    e.drain()


def test_newer_requests_pass_one_that_is_fetched_and_it_goes_first_then() -> None:
    e = engine({}, max_requests=1)
    e.patient = True
    e.add(0, LONG[:9], 2)
    e.add(1, [1], 1)
    assert e.plan() is not None and state(e, 1) == "Prefilling" and state(e, 0) == "Prefetching"
    e.add(2, [2], 1)
    e.settle()
    assert state(e, 0) == "PrefetchDone"
    e.drain()
    assert e.order == [1, 0, 2]


def test_retraction_gives_pages_to_the_host_and_takes_them_back() -> None:
    e = engine(write_back_pages=100)  # nothing is copied while it runs
    e.patient = True
    e.add(0, LONG[:9], 8)
    for _ in range(3):
        e.step()
    assert e.scheduler.retract(0)
    assert state(e, 0) == "Retracting" and e.plan() is None
    (out,) = e.mover.out.values()
    assert out.transfer.kind == "write_back" and len(out.transfer.host) == 5
    e.settle()
    assert state(e, 0) == "Retracted"
    assert e.scheduler.flush_cache() == 5, "the host's copies are kept for it, the device's are not"
    assert e.scheduler.stats()["host_pages_pinned"] == 5
    plan = e.plan()
    assert plan is not None and len(plan.loads) == 1 and plan.pos[0] == 10 and plan.num_tokens[0] == 2
    e.drain()


def test_a_retracted_request_comes_back_before_newer_ones_and_only_when_it_fits() -> None:
    e = engine(num_pages=10, max_seq_len=20)
    e.add(0, LONG[:8], 10)
    e.add(1, LONG[:7][::-1], 10)
    while e.scheduler.stats()["retractions"] == 0:
        e.step()
    assert state(e, 1) in {"Retracting", "Retracted"}
    e.add(2, [3], 1)
    while 0 not in e.finished:
        assert state(e, 2) == "Submitted", "it would fit, but an older one waits"
        e.step()
    e.drain()
    assert e.order[0] == 0
    assert e.scheduler.stats()["load_back_pages"] > 0


def test_a_broken_load_is_recomputed_and_not_tried_again() -> None:
    e = engine()
    turn(e, 0, LONG[:9])
    e.scheduler.flush_cache("device")
    e.break_loads = True
    assert turn(e, 1, LONG[:9], 3) == (0, 8, 0)
    stats = e.scheduler.stats()
    assert stats["retractions"] == 1 and stats["load_back_missing_pages"] > 0
    e.break_loads = False
    e.scheduler.flush_cache("device")
    assert turn(e, 2, LONG[:9]) == (0, 8, 0), "the host got a copy of the recomputed pages"


def test_a_page_that_cannot_be_loaded_is_given_up_for_all() -> None:
    e = engine()
    turn(e, 0, LONG[:9])
    e.scheduler.flush_cache("device")
    e.break_loads = True
    e.add(1, LONG[:9], 1)
    e.plan()
    e.advance()
    assert e.scheduler.cached_prefix(np.array(LONG[:9], np.int32)) == 6, "the last page is not trusted"
    e.break_loads = False
    e.drain()


def test_a_write_back_that_comes_short_keeps_what_came() -> None:
    e = engine()
    e.patient = True
    e.add(0, LONG[:9], 6)
    e.step()
    e.plan()
    (ticket,) = e.mover.out
    e.mover.finish(ticket, 3)
    stats = e.scheduler.stats()
    assert (stats["host_pages_cached"], stats["host_pages_free"]) == (3, 21)
    while e.scheduler.snapshot():
        e.step()
        assert not e.mover.out, "a host that fails is left alone by this request"
    e.drain()


def test_finished_requests_leave_their_pages_on_the_host() -> None:
    e = engine(write_back_pages=100)
    e.patient = True
    e.add(0, LONG[:9], 1)
    e.plan()
    e.advance()
    assert state(e, 0) == "Draining"
    assert e.scheduler.abort(0) is False and e.scheduler.finish(0) is False, "it has ended"
    e.plan()
    assert state(e, 0) == "WritingBack"
    assert e.scheduler.abort(0) is False and e.scheduler.retract(0) is False
    assert e.scheduler.flush_cache() == 0, "both ends are pinned"
    e.settle()
    assert state(e, 0) is None and e.scheduler.stats()["host_pages_cached"] == 4
    e.assert_empty()


@pytest.mark.parametrize("answer", ["late", "never whole", "twice"])
def test_b82_a_prefetch_of_a_request_that_ended_gives_its_pages_back_when_it_returns(answer: str) -> None:
    """vllm#46283, vllm-ascend#16662: a wait for remote pages was aborted, and its pages were never freed."""
    e = engine({}, max_queued_requests=1)
    e.patient = True
    e.add(0, LONG[:9], 4)
    e.plan()
    (ticket,) = e.mover.out
    e.end(0, "abort")
    assert state(e, 0) == "Aborting"
    e.add(1, [5, 5], 2)  # the bounded queue has room again
    stats = e.scheduler.stats()
    assert (stats["waiting"], stats["leaving"], stats["host_pages_pinned"]) == (1, 1, 4)
    for _ in range(4):
        e.step()
        for other in [t for t in e.mover.out if t != ticket]:
            e.mover.finish(other)
    assert 1 in e.finished
    assert e.scheduler.stats()["host_pages_pinned"] == 4, "storage may still write into them"
    e.mover.finish(ticket, 0 if answer == "never whole" else None)
    assert e.scheduler.stats()["host_pages_pinned"] == 0 and state(e, 0) is None
    assert answer != "twice" or e.scheduler.transferred(ticket, 4) is False
    e.drain()


def test_a_retraction_does_not_need_room_on_the_host() -> None:
    e = engine(host_pages=2, write_back_pages=100)
    e.patient = True
    e.add(0, LONG[:9], 8)
    for _ in range(4):
        e.step()
    assert e.scheduler.retract(0)
    e.plan()
    e.settle()
    assert e.scheduler.stats()["host_pages_cached"] == 2 and state(e, 0) == "Retracting"
    e.plan()  # no more room: given up
    assert state(e, 0) == "Retracted"
    e.drain()


def test_salts_share_no_page_on_any_tier() -> None:
    storage: dict[bytes, Page] = {}
    e = engine(storage)
    turn(e, 0, LONG[:9], salt=b"a")
    for id, salt in enumerate([b"", b"b", b"a\0"], 1):
        assert turn(e, id, LONG[:9], salt=salt) == (0, 0, 0)
    assert len(storage) == 4 * 4
    e.scheduler.flush_cache("device")
    assert turn(e, 8, LONG[:9], salt=b"a") == (0, 8, 0)
    assert turn(engine(storage), 9, LONG[:9], salt=b"b") == (0, 0, 8)


def test_a_shared_prefix_is_copied_once() -> None:
    e = engine(num_pages=40, host_pages=40, max_seq_len=40)
    e.patient = True
    e.add(0, LONG[:9], 8)
    e.step()
    for i in range(1, 4):
        e.add(i, [*LONG[:8], i, i, i], 8)
    for _ in range(5):
        e.step()
    pages = [tuple(o.transfer.device.tolist()) for o in e.mover.out.values()]
    assert len({p for t in pages for p in t}) == sum(len(t) for t in pages)
    e.drain()
    stats = e.scheduler.stats()
    assert stats["write_back_pages"] == stats["kv_pages_cached"] == stats["host_pages_cached"]


def test_two_requests_load_a_shared_prefix_once() -> None:
    e = engine(prefill_chunk=2)
    turn(e, 0, LONG[:13])
    e.scheduler.flush_cache("device")
    for i in (1, 2):
        e.add(i, [*LONG[:12], i], 2)
    e.drain()
    assert e.scheduler.stats()["load_back_pages"] == 6
    assert [e.outputs[i][0].cached_tokens for i in (1, 2)] == [12, 12]


def test_the_host_evicts_the_suffix_first_and_the_oldest_first() -> None:
    e = engine(host_pages=6, num_pages=12)
    turn(e, 0, [0] * 7)
    turn(e, 1, [1] * 7)
    e.scheduler.flush_cache("device")
    turn(e, 2, [0] * 7)  # used again: now the other is older
    turn(e, 3, [2, 2, 2, 2, 2])
    e.scheduler.flush_cache("device")
    hit = lambda token: e.scheduler.cached_prefix(np.full(7, token, np.int32))  # noqa: E731
    assert (hit(0), hit(1), hit(2)) == (6, 2, 4)


def test_a_request_in_use_on_the_device_keeps_its_copy_on_the_host() -> None:
    e = engine(host_pages=6, num_pages=24, max_seq_len=40)
    e.add(0, [0] * 7, 12)
    e.step()
    for i in range(1, 4):
        e.add(i, [i] * 7, 1)
        for _ in range(3):
            e.step()
    e.drain()
    e.scheduler.flush_cache("device")
    assert e.scheduler.cached_prefix(np.zeros(7, np.int32)) >= 6


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_host_that_has_no_room_stops_nothing(in_flight: int) -> None:
    e = engine({}, host_pages=1, max_in_flight=in_flight)
    for i in range(8):
        e.add(i, [i, *LONG[: 3 + i]], 6)
    e.drain()


def test_bootstrapping_waits_for_the_peer() -> None:
    """vllm#46283: a request whose remote side never answers is aborted and holds nothing."""
    e = engine()
    for i in range(3):
        e.scheduler.submit(i, np.array(LONG[:5], np.int32), 2, bootstrap=True)
    assert [i["state"] for i in e.scheduler.snapshot()] == ["Bootstrapping"] * 3
    assert e.scheduler.next_plan() is None and e.scheduler.stats()["waiting"] == 3
    assert e.scheduler.bootstrap_failed(0) and not e.scheduler.bootstrap_failed(0)
    assert e.scheduler.abort(1) and not e.scheduler.bootstrapped(1)
    assert e.scheduler.bootstrapped(2) and not e.scheduler.bootstrapped(2) and not e.scheduler.bootstrap_failed(2)
    e.scheduler.check()
    plan = e.scheduler.next_plan()
    assert plan is not None and plan.request_ids[0] == 2
    assert e.scheduler.stats()["queued_tokens"] == 0


STATES = [
    "Submitted",
    "Prefetching",
    "PrefetchDone",
    "Prefilling",
    "PrefillDone",
    "Decoding",
    "Retracting",
    "Retracted",
]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("how", ["abort", "finish"])
def test_the_end_in_each_state_with_each_transfer_in_flight(how: str, in_flight: int) -> None:
    """Everything is free within one step, or when the transfers return; late and duplicate words are ignored."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for seed in range(150):
        rng = random.Random(seed)
        storage: dict[bytes, Page] = {}
        turn(engine(storage), 0, LONG)
        e = engine(storage if rng.random() < 0.6 else None, max_in_flight=in_flight, prefill_chunk=rng.choice([0, 3]))
        if rng.random() < 0.5:
            turn(e, 1, LONG)
            e.scheduler.flush_cache("device")
        e.patient = True
        e.add(0, LONG, 6)
        for _ in range(rng.randrange(8)):
            e.plan()
            if e.flights and rng.random() < 0.6:
                e.advance()
            if rng.random() < 0.3:
                e.settle()
            if rng.random() < 0.2:
                e.scheduler.retract(0)
        if (now := state(e, 0)) is None or 0 in e.finished:
            e.drain()
            continue
        kinds = tuple(sorted(o.transfer.kind for o in e.mover.out.values()))
        seen.add((now, kinds))
        e.end(0, how)
        while e.flights:
            e.advance()
        if how == "abort" and not any(o.transfer.request_id == 0 for o in e.mover.out.values()):
            assert state(e, 0) is None
        e.drain()
        e.scheduler.flush_cache()
        stats = e.scheduler.stats()
        assert (
            stats["kv_pages_free"] == stats["kv_pages_total"] and stats["host_pages_free"] == stats["host_pages_total"]
        )
    assert {s for s, _ in seen} == set(STATES)
    assert {k for _, kinds in seen for k in kinds} >= {"prefetch", "load_back", "write_back"}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_retraction_at_every_step_gives_the_same_tokens(in_flight: int) -> None:
    e = engine({}, max_in_flight=in_flight)
    e.add(0, LONG[:9], 8)
    e.add(1, [*LONG[:6], 1, 1], 8)
    turns = 0
    while e.scheduler.snapshot() and turns < 400:
        e.step()
        turns += 1
        e.scheduler.retract(turns % 2)
        if turns % 7 == 0:
            e.scheduler.flush_cache("device")
    e.drain()
    assert e.scheduler.stats()["retractions"] > 5


def test_config_of_tiers_names_the_field_that_cannot_work() -> None:
    for changes, message in [
        ({"host_pages": -1}, "host_pages"),
        ({"host_pages": 0, "storage": True}, "storage needs host_pages"),
        ({"prefix_cache": False}, "host_pages needs prefix_cache"),
        ({"state_snapshots": 2}, "recurrent states"),
        ({"storage_min_pages": 0}, "storage_min_pages"),
        ({"write_back_pages": 0}, "write_back_pages"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine(**changes)


def test_an_answer_with_more_pages_than_the_transfer_has_is_refused() -> None:
    e = engine()
    e.patient = True
    e.add(0, LONG[:9], 4)
    e.step()
    e.plan()
    (ticket,) = e.mover.out
    for pages in (-1, 5):
        with pytest.raises(ValueError, match="it has 4"):
            e.scheduler.transferred(ticket, pages)
    with pytest.raises(ValueError, match="tier"):
        e.scheduler.flush_cache("tape")  # pyright: ignore
    e.drain()
