"""Window pages: a request holds what it can still see, prefixes can be taken up where their ends are kept, and what is kept
longest are the ends that somebody asked for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.scheduler.harness import VOCABULARY, Engine
from tokenspeed._scheduler import Config, window_pages_for

PAGE, WINDOW, BUDGET, LONGEST = 4, 10, 16, 256
SEES = -(-(WINDOW - 1) // PAGE)  # full pages that the next token sees, at a page's start


def sizes(requests: int, in_flight: int = 1, length: int = LONGEST) -> int:
    return window_pages_for(
        requests=requests, window=WINDOW, page_size=PAGE, budget=BUDGET, max_in_flight=in_flight, max_seq_len=length
    )


def engine(spare: int = 0, requests: int = 1, **changes) -> Engine:
    in_flight = changes.get("max_in_flight", 1)
    base = {
        "num_pages": 256, "max_requests": 4, "token_buckets": [1, 4, BUDGET], "max_seq_len": LONGEST, "window": WINDOW,
        "window_pages": sizes(requests, in_flight) + spare,
    }  # fmt: skip
    return Engine(Config(page_size=PAGE, **(base | changes)))


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def cached(e: Engine, id: int, tokens: list[int], new: int = 1) -> int:
    """Serves a request alone; the prompt tokens that came from the cache."""
    e.add(id, tokens, new)
    e.drain()
    return e.outputs[id][0].cached_tokens


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("cache", [True, False])
def test_a_request_holds_what_it_sees(in_flight: int, cache: bool) -> None:
    """200 tokens of context take the pages of 10, in a pool that holds no more."""
    e = engine(max_in_flight=in_flight, prefix_cache=cache)
    e.add(0, prompt(0, 150), 50)
    held = []
    while e.scheduler.snapshot():
        e.step()
        held += [info["window_pages"] for info in e.scheduler.snapshot()]
    e.drain()
    assert SEES <= max(held[-40:]) <= SEES + 2  # of the decodes
    assert max(held) <= e.config.window_pages < 200 // PAGE / 2


def test_as_many_run_as_the_window_pages_hold() -> None:
    e = engine(requests=2)
    for i in range(4):
        e.add(i, prompt(i, 60), 30)
    running = []
    while e.scheduler.snapshot():
        e.step()
        running.append(e.scheduler.stats()["running"])
    assert max(running) == 2 and e.scheduler.stats()["retractions"] == 0
    e.drain()


def test_too_few_window_pages_for_one_request_are_refused() -> None:
    with pytest.raises(
        ValueError, match=f"one request with a window of {WINDOW} positions .* may need {sizes(1)} pages"
    ):
        engine(spare=-1)
    with pytest.raises(ValueError, match="window_pages is 3 but window is 0"):
        engine(window=0, window_pages=3)


def test_a_conversation_goes_on_from_its_end_whatever_came_between() -> None:
    """Requests pass through more pages than there are, and each turn finds all that was said before."""
    e = engine(spare=24)
    talk = prompt(1, 60)
    for turn in range(4):
        found = cached(e, 10 * turn, talk, 21)
        assert found == (0 if turn == 0 else (len(talk) - 1 - 6) // PAGE * PAGE)
        for other in range(1, 4):
            cached(e, 10 * turn + other, prompt(100 * turn + other, 120))
        talk += [o.token for o in e.outputs[10 * turn]] + prompt(turn + 50, 6)
    assert e.scheduler.stats()["window_pages_total"] < 3 * 120 // PAGE / 2


def test_a_fork_is_found_once_it_was_asked_for() -> None:
    """What many share ends in the middle of the first one's prompt: the second computes it again, the others find it."""
    e = engine(spare=12)
    shared = prompt(1, 80)
    found = []
    for i in range(4):
        found.append(cached(e, 2 * i, shared + prompt(10 + i, 90)))
        cached(e, 2 * i + 1, prompt(20 + i, 100))
    assert found == [0, 0, 80, 80]


def test_a_prefix_is_taken_up_only_where_its_end_is_kept() -> None:
    e = engine(spare=2)
    tokens = prompt(1, 120)
    cached(e, 0, tokens, 9)
    assert e.scheduler.stats()["kv_pages_cached"] == 32
    assert e.scheduler.cached_prefix(np.array(tokens, np.int32)) == 116  # the end of the prompt
    assert e.scheduler.cached_prefix(np.array(tokens[:60], np.int32)) == 0  # its middle was passed by
    assert cached(e, 1, tokens[:60]) == 0
    assert e.scheduler.stats()["kv_pages_cached"] == 32  # the same pages of the tree, with window pages again
    assert cached(e, 2, tokens[:60]) == 56


def test_flushing_leaves_no_window_page() -> None:
    e = engine(spare=20)
    cached(e, 0, prompt(0, 70))
    assert e.scheduler.stats()["window_pages_idle"] > 10
    e.scheduler.flush_cache("device")
    stats = e.scheduler.stats()
    assert stats["window_pages_free"] == stats["window_pages_total"]


def test_the_host_gives_back_the_end_alone() -> None:
    """Of a prefix that is loaded, window pages are drawn for what the next token sees, and no more."""
    e = engine(spare=8, host_pages=128, write_back_pages=2)
    tokens = prompt(3, 150)
    cached(e, 0, tokens)
    e.scheduler.flush_cache("device")
    e.add(1, tokens, 1)
    e.plan()
    (load,) = [o.transfer for o in e.mover.out.values() if o.transfer.kind == "load_back"]
    assert len(load.device) == 37 and (load.window >= 0).tolist() == [False] * (37 - SEES) + [True] * SEES
    e.drain()
    assert e.outputs[1][0].cached_host == 148


def test_storage_gives_back_whole_pages() -> None:
    e = engine(spare=8, host_pages=128, storage=True, write_back_pages=4)
    tokens = prompt(4, 150)
    cached(e, 0, tokens)
    again = engine(spare=0, host_pages=128, storage=True)
    again.storage.update(e.storage)
    assert cached(again, 0, tokens) == 148
    assert again.outputs[0][0].cached_storage == 148


def test_a_window_page_that_is_copied_is_not_given_to_others() -> None:
    """A write-back that hangs keeps its window pages; requests wait for them rather than take them."""
    e = engine(host_pages=64, write_back_pages=1)
    e.patient = True
    e.add(0, prompt(5, 100), 20)
    for _ in range(200):
        if e.plan() is None and not e.flights:
            break
        if e.flights:
            e.advance()
    assert e.scheduler.snapshot() and e.moving()  # all window pages are pinned by copies, and it waits
    e.settle()
    e.drain()
