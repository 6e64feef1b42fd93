"""The prefix cache through the binding: what is shared, what is recomputed, what is counted."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.scheduler.harness import Engine
from tokenspeed._scheduler import PAGE_KEY_VERSION, Config, page_keys

LONG = [0, 1, 2, 3, 4, 5, 0, 2, 4, 1, 3, 5, 5, 4, 3, 2]


def engine(page_size: int = 4, **changes) -> Engine:
    base = {"num_pages": 24, "max_requests": 4, "token_buckets": [1, 4, 64], "max_seq_len": 64}
    return Engine(Config(page_size=page_size, **(base | changes)))


def cached(e: Engine, id: int, prompt: list[int], **rest) -> int:
    """Serves a request alone; the prompt tokens that came from the cache."""
    e.add(id, prompt, 1, **rest)
    e.drain()
    return e.outputs[id][0].cached_tokens


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("length", range(1, 17))
def test_b71_a_hit_leaves_one_token(page_size: int, length: int) -> None:
    """nano-vllm#144, dynamo#13312: k * page tokens sent twice; 13 tokens with page 4 reuse 12."""
    e = engine(page_size)
    prompt = LONG[:length]
    assert cached(e, 0, prompt) == 0
    assert cached(e, 1, prompt) == (length - 1) // page_size * page_size
    assert e.scheduler.cached_prefix(np.array(prompt, np.int32)) == (length - 1) // page_size * page_size


def test_b76_reuse_of_13_tokens_with_page_4_is_12() -> None:
    e = engine(4)
    cached(e, 0, LONG[:13])
    assert cached(e, 1, LONG[:13]) == 12


def test_b73_b75_keys_shorter_than_a_page_match_nothing() -> None:
    """sglang#10637, sglang#28692: a key cut to nothing matched, a partial page made an empty node."""
    e = engine(8)
    cached(e, 0, LONG[:16])
    assert cached(e, 1, LONG[:7]) == 0
    assert cached(e, 2, [*LONG[:7], 9, 9, 9]) == 0  # 7 of 8
    assert cached(e, 3, [*LONG[:15], 9, 9, 9]) == 8  # 15 of 16
    assert e.scheduler.stats()["kv_pages_cached"] == 2 + 1 + 1  # no node for a part of a page


def test_b74_branches_share_their_stem_once() -> None:
    """sglang#35270: pages shared by two branches were counted twice as evictable."""
    e = engine(4)
    for i, tail in enumerate(([9, 9, 9, 9, 9], [8, 8, 8, 8, 8])):
        cached(e, i, LONG[:8] + tail)
    stats = e.scheduler.stats()
    assert stats["kv_pages_cached"] == stats["kv_pages_evictable"] == 4
    assert stats["kv_pages_free"] == 20
    assert e.scheduler.flush_cache() == 4
    assert e.scheduler.stats()["kv_pages_free"] == 24


def test_generated_tokens_are_cached() -> None:
    e = engine(4)
    e.add(0, LONG[:6], 8)
    e.drain()
    turn = LONG[:6] + [o.token for o in e.outputs[0]]
    assert cached(e, 1, [*turn, 1, 1]) == 12  # 13 positions were computed: three full pages


def test_finish_keeps_the_pages() -> None:
    e = engine(4)
    e.add(0, LONG[:9], 8)
    e.step()
    e.end(0, "finish")
    assert cached(e, 1, LONG[:9]) == 8


def test_equal_prompts_in_one_batch_are_computed_once() -> None:
    """MinivLLM#98: a hit on a live block that is not computed yet."""
    e = engine(4, max_requests=4, prefill_chunk=4)
    for i in range(4):
        e.add(i, LONG[:14], 3)
    e.drain()
    assert [e.outputs[i][0].cached_tokens for i in range(4)] == [0, 12, 12, 12]
    assert [o.token for o in e.outputs[0]] == [o.token for o in e.outputs[3]]
    assert e.scheduler.stats()["step_tokens"] == 14 + 3 * 2 + 4 * 2  # prompt once, three tails, two decodes each


def test_a_twin_waits_only_for_the_shared_part() -> None:
    e = engine(4, prefill_chunk=4)
    e.add(0, LONG[:16], 2)
    e.add(1, [*LONG[:8], 9, 9, 9, 9], 2)
    e.add(2, [7, 7, 7], 2)  # shares nothing, so it passes
    plan = e.plan()
    assert plan is not None and plan.request_ids[:3].tolist() == [0, 2, -1]
    e.advance()
    assert [r for r in e.plan().request_ids.tolist() if r >= 0] == [0, 2]  # pyright: ignore
    e.advance()
    assert 1 in e.plan().request_ids.tolist()  # pyright: ignore
    e.drain()
    assert e.outputs[1][0].cached_tokens == 8


def test_a_twin_takes_over_when_the_first_is_aborted() -> None:
    e = engine(4, prefill_chunk=4)
    e.add(0, LONG[:16], 2)
    e.add(1, LONG[:16], 2)
    e.step()
    e.end(0, "abort")
    e.drain()
    assert e.outputs[1][0].cached_tokens == 4 and 1 in e.finished


@pytest.mark.parametrize("in_flight", [1, 2])
def test_pages_computed_twice_are_merged(in_flight: int) -> None:
    """Two requests that meet while they decode: the copy is given back and the block table points to the original."""
    e = engine(4, max_in_flight=in_flight)
    e.add(0, LONG[:3], 9)
    e.add(1, LONG[:3], 9)
    for _ in range(8):
        e.step()
    pages = [set(row[row >= 0].tolist()) for row in e.plan().table[:2]]  # pyright: ignore
    assert len(pages[0] & pages[1]) >= 1
    e.drain()
    assert e.scheduler.stats()["kv_pages_cached"] == 2  # 11 positions


def test_salts_do_not_share() -> None:
    e = engine(4)
    assert cached(e, 0, LONG[:9]) == 0
    assert cached(e, 1, LONG[:9], salt=b"tenant") == 0
    assert cached(e, 2, LONG[:9], salt=b"tenant") == 8
    assert e.scheduler.cached_prefix(np.array(LONG[:9], np.int32), b"other") == 0


def test_off_means_off() -> None:
    e = engine(4, prefix_cache=False)
    assert cached(e, 0, LONG[:9]) == 0 and cached(e, 1, LONG[:9]) == 0
    assert e.scheduler.stats()["kv_pages_cached"] == 0


def test_cached_tokens_are_counted_once() -> None:
    """sglang#26976: hits counted once a chunk. Also once over a retraction."""
    e = engine(2, prefill_chunk=1)
    cached(e, 0, LONG[:9])
    e.add(1, LONG[:12], 6)
    for _ in range(6):
        e.step()
    assert e.scheduler.retract(1)
    e.drain()
    assert {o.cached_tokens for o in e.outputs[1]} == {8}
    stats = e.scheduler.stats()
    assert (stats["prefix_query_tokens"], stats["prefix_hit_tokens"]) == (9 + 12, 8)


def test_b72_the_used_prefix_survives_eviction() -> None:
    """mini-sglang#52: the lock skipped the node itself, which was then evicted in use."""
    e = engine(4, num_pages=6, max_seq_len=24)
    cached(e, 0, LONG[:13])
    e.add(1, LONG[:13], 8)  # pins three pages
    e.step()
    for i in range(2, 8):
        e.add(i, [i % 6, 3, i % 5, 1], 2)  # what is left is too small: evictions
    e.drain()
    assert e.scheduler.stats()["evicted_pages"] > 0


def test_the_least_recently_used_suffix_goes_first() -> None:
    e = engine(2, num_pages=8, max_seq_len=16)
    cached(e, 0, [1, 1, 1, 1, 1])
    cached(e, 1, [2, 2, 2, 2, 2])
    cached(e, 2, [1, 1, 1, 1, 1])  # used again: now the other is older
    e.add(3, [3, 3, 3, 3, 3, 3, 3, 3, 3], 2)  # takes five pages of eight, of which four are cached
    e.drain()
    hit = lambda *p: e.scheduler.cached_prefix(np.array([*p], np.int32))  # noqa: E731
    assert hit(1, 1, 1, 1, 1) == 4
    assert hit(2, 2, 2, 2, 2) == 2


def test_b80_page_keys_are_bytes_for_ever() -> None:
    """LMCache#2136, LMCache#2979: keys that differ from process to process."""
    code = (
        "import numpy as np; from tokenspeed._scheduler import page_keys;"
        "print([k.hex() for k in page_keys(np.arange(9, dtype=np.int32), 3, b'salt')])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = [key.hex() for key in page_keys(np.arange(9, dtype=np.int32), 3, b"salt")]
    assert other.strip() == str(here)
    assert PAGE_KEY_VERSION == 1
    assert here == GOLDEN, "a change of the key needs a new version"
    prefix = page_keys(np.arange(8, dtype=np.int32), 3, b"salt")
    assert [key.hex() for key in prefix] == here[:2]
    assert page_keys(np.arange(9, dtype=np.int32), 3)[0].hex() != here[0]
    assert page_keys(np.array([3, 4, 5, 0, 1, 2], np.int32), 3, b"salt")[1].hex() not in here


GOLDEN = ["bae74469cb5939a926a5aa01b7d3e979", "4f073501052dc109c1c26f22605c852c", "3bc844c55aec76a8cb3b3e115910636a"]
