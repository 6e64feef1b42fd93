"""What is fetched from storage while requests wait in a queue that is longer than the tiers are large."""

from __future__ import annotations

from tests.scheduler.harness import Engine
from tests.scheduler.mover import Page
from tests.scheduler.test_tiers import LONG, engine, turn

BUSY = [3, 3, 1, 0, 5]  # keeps the only request slot
ONE: dict[str, int] = {"max_requests": 1}


def stored(*prompts: list[int]) -> dict[bytes, Page]:
    storage: dict[bytes, Page] = {}
    for i, prompt in enumerate(prompts):
        turn(engine(storage), i, prompt)
    return storage


def cached(e: Engine, id: int) -> tuple[int, int, int]:
    first = e.outputs[id][0]
    return first.cached_device, first.cached_host, first.cached_storage


def test_what_is_evicted_while_a_request_waits_is_fetched() -> None:
    """At its submission all of the prompt was cached, so storage had not to be asked; in its turn nothing is."""
    e = engine(stored(LONG[:11]), **ONE)
    turn(e, 0, LONG[:11])
    e.add(1, BUSY, 3)
    e.step()
    e.add(2, LONG[:11], 1)
    e.step()
    assert e.scheduler.stats()["prefetch_in_flight"] == 0
    e.scheduler.flush_cache("all")
    e.drain()
    assert cached(e, 2) == (0, 0, 10)


def test_a_fetch_that_finds_no_room_is_made_later() -> None:
    """Two prompts of five pages each wait, the host has six."""
    other = [5, 5, 2, 2, 1, 1, 4, 4, 0, 0, 3]
    e = engine(stored(LONG[:11], other), host_pages=6, **ONE)
    e.add(0, BUSY, 8)
    e.step()
    e.add(1, LONG[:11], 1)
    e.add(2, other, 1)
    e.drain()
    assert (cached(e, 1), cached(e, 2)) == ((0, 0, 10), (0, 0, 10))


def test_the_oldest_request_takes_the_room_of_what_newer_ones_fetched() -> None:
    """The newer one was there first; the older one, of a class that goes first, does not start without its prefix."""
    other = [5, 5, 2, 2, 1, 1, 4, 4, 0, 0, 3]
    e = engine(stored(LONG[:11], other), host_pages=6, **ONE)
    e.add(0, BUSY, 10)
    e.step()
    e.add(1, other, 1)
    for _ in range(3):
        e.step()
    assert e.scheduler.stats()["prefetch_pages"] == 5
    e.add(2, LONG[:11], 1, priority=-1)
    e.drain()
    assert (cached(e, 1), cached(e, 2)) == ((0, 0, 10), (0, 0, 10))
    assert e.order == [0, 2, 1]
