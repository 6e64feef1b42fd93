"""What routers and operators see: events of the prefix caches, and the figures of `stats`."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.scheduler.harness import Engine
from tokenspeed._scheduler import Config, KvEvent, page_keys

LONG = [0, 1, 2, 3, 4, 5, 0, 2, 4, 1, 3, 5, 5, 4, 3, 2]


def engine(**changes: Any) -> Engine:
    base: dict[str, Any] = {
        "page_size": 2, "num_pages": 12, "max_requests": 4, "token_buckets": [1, 2, 4, 8, 16], "max_seq_len": 24,
        "host_pages": 12, "write_back_pages": 1, "kv_events": 1000,
    }  # fmt: skip
    return Engine(Config(**(base | changes)))


class Router:
    """Knows the caches from events alone."""

    def __init__(self) -> None:
        self.pages: Counter[tuple[str, int, bytes]] = Counter()
        self.next = 0
        self.gaps = 0

    def read(self, events: list[KvEvent]) -> None:
        for e in events:
            assert e.number >= self.next
            self.gaps += e.number > self.next
            self.next = e.number + 1
            where = (e.tier, e.group, e.key)
            if e.kind == "cleared":
                keep = {} if e.tier == "all" else {p: n for p, n in self.pages.items() if p[:2] != (e.tier, e.group)}
                self.pages = Counter(keep)
            elif e.kind == "stored":
                assert e.parent == bytes(16) or self.gaps or self.pages[(e.tier, e.group, e.parent)] > 0
                self.pages[where] += 1
            else:
                assert self.pages[where] > 0 or self.gaps
                self.pages[where] -= 1
                self.pages = +self.pages

    def count(self, tier: str) -> int:
        return sum(n for (t, _, _), n in self.pages.items() if t == tier)


@pytest.mark.parametrize(("dp", "bits"), [(1, 128), (2, 128), (1, 4)])
def test_a_router_knows_the_caches_from_events_alone(dp: int, bits: int) -> None:
    e, router, rng = engine(dp=dp, hash_bits=bits), Router(), random.Random(dp)
    for i in range(60):
        e.add(i, LONG[: rng.randrange(12)] + [rng.randrange(6) for _ in range(3)], rng.randrange(1, 8))
        for _ in range(3):
            e.step()
        if rng.random() < 0.1:
            e.scheduler.flush_cache(rng.choice(["all", "device", "host"]))
        router.read(e.scheduler.kv_events())
        stats = e.scheduler.stats()
        assert (router.count("device"), router.count("host")) == (stats["kv_pages_cached"], stats["host_pages_cached"])
    e.drain()
    router.read(e.scheduler.kv_events())
    if bits == 128 and dp == 1:
        for id in range(50, 60):
            prompt = np.array(e.specs[id].prompt, np.int32)
            known = 0
            for key in page_keys(prompt, 2)[: (len(prompt) - 1) // 2]:
                if not router.pages[("device", 0, key)] and not router.pages[("host", 0, key)]:
                    break
                known += 2
            assert e.scheduler.cached_prefix(prompt) <= known
    assert router.gaps == 0
    e.scheduler.flush_cache()
    events = e.scheduler.kv_events()
    assert {x.kind for x in events} == {"cleared"} and {x.tier for x in events} == {"device", "host"}
    router.read(events)
    assert not router.pages and e.scheduler.kv_events() == []


def test_a_match_is_no_event() -> None:
    e = engine(host_pages=0)
    e.add(0, LONG[:9], 1)
    e.drain()
    assert [x.kind for x in e.scheduler.kv_events()] == ["stored"] * 4
    e.add(1, LONG[:9], 1)
    e.drain()
    e.scheduler.cached_prefix(np.array(LONG, np.int32))
    assert e.scheduler.kv_events() == []


def test_a_log_that_nobody_reads_forgets_and_says_so() -> None:
    e, router = engine(kv_events=5, host_pages=0), Router()
    for i in range(3):
        e.add(i, [i, *LONG[:8]], 1)
        e.drain()
    events = e.scheduler.kv_events()
    assert len(events) <= 5 and events[0].kind == "cleared" and events[0].tier == "all" and events[0].group == -1
    router.read(events)
    assert router.gaps == 1 and router.count("device") < e.scheduler.stats()["kv_pages_cached"]
    assert engine(kv_events=0).scheduler.kv_events() == []


def test_b81_four_bits_of_a_key_share_nothing_wrongly() -> None:
    """openvino.genai#3722, vllm#12621: pages found by a hash that was not checked. The executor reads every context."""
    e, rng = engine(hash_bits=4, num_pages=20, host_pages=30, max_seq_len=40), random.Random(3)
    for i in range(120):
        e.add(
            i,
            [rng.randrange(6) for _ in range(rng.randrange(1, 20))],
            rng.randrange(1, 9),
            salt=rng.choice([b"", b"a"]),
        )
        for _ in range(3):
            e.step()
        if i % 9 == 0:
            e.scheduler.flush_cache("device")
    e.drain()
    stats = e.scheduler.stats()
    assert stats["hit_tokens_device"] > 0 and stats["hit_tokens_host"] > 0
    with pytest.raises(ValueError, match="hash_bits"):
        engine(hash_bits=4, storage=True)
    with pytest.raises(ValueError, match="hash_bits is 129"):
        engine(hash_bits=129)


def test_figures_of_a_queue_and_of_a_stall() -> None:
    e = engine(host_pages=0, max_requests=1, token_buckets=[1, 2, 4, 8], num_pages=30, max_seq_len=40)
    e.add(0, [1, 2], 9)
    e.step()
    e.add(1, [3], 1)
    for age in range(5):
        assert e.scheduler.stats()["queue_age_steps"] == age
        e.step()
    e.drain()
    stats = e.scheduler.stats()
    assert stats["queue_age_steps"] == 0 and stats["decode_stall_tokens"] == 0
    assert 0 < stats["plan_seconds_max"] <= stats["plan_seconds"]

    e = engine(decode_stall_tokens=3, num_pages=30, max_seq_len=40)
    e.add(0, [1, 2], 9)
    e.step()
    e.add(1, LONG, 1)
    e.drain()
    assert e.scheduler.stats()["decode_stall_tokens"] == 3
    assert e.scheduler.stats()["decode_skips"] == 0


def test_a_decode_that_waits_for_pages_of_a_step_in_flight_is_counted() -> None:
    e = engine(num_pages=8, max_seq_len=16, page_size=1, host_pages=0, max_in_flight=2)
    for i in range(3):
        e.add(i, [i, 1], 7, salt=b"%d" % i)
    e.drain()
    assert e.scheduler.stats()["decode_skips"] > 0
