"""Tokens do not depend on the tier in which a prefix was found, nor on what became of it there.

One tiny model; its device cache holds 16 pages, so prompts push each other out. `want` is what it says without any cache.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.interleavings import Collected, Silent, expected, interleave, sessions
from tests.e2e.processes import Server
from tests.e2e.tiny import VOCAB, tiny_model
from tokenspeed import Engine, SamplingParams
from tokenspeed._scheduler import page_keys
from tokenspeed.runtime.build import build_engine
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.core import EngineLoop
from tokenspeed.runtime.errors import EngineError, StartupError
from tokenspeed.runtime.kv.record import HEADER_BYTES
from tokenspeed.runtime.messages import CoreParams, Submit, packed
from tokenspeed.runtime.options import OptionError

PAGE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
OPTIONS: dict[str, Any] = {
    "num_pages": 16, "page_size": PAGE, "max_num_seqs": 4, "max_num_batched_tokens": 64, "buckets": [1, 4, 16, 64],
    "max_model_len": 160,
}  # fmt: skip
HOST = 2e-3  # GiB: 262 pages of 8 KiB

Served = list[tuple[list[int], tuple[int, int, int]]]


def prompts(seed: int = 1, count: int = 12) -> list[list[int]]:
    """Of 3 to 7 pages; every third begins with what all these share."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    out = [[rng.randrange(VOCAB) for _ in range(rng.randrange(45, 110))] for _ in range(count)]
    return [shared + p[:60] if i % 3 == 0 else p for i, p in enumerate(out)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer=True)


@pytest.fixture(scope="module")
def want(model: Path) -> list[list[int]]:
    with Engine(model=str(model), core="inproc", enable_prefix_caching=False, **OPTIONS) as engine:
        return [tokens for tokens, _ in serve(engine, prompts())]


def serve(engine: Engine, work: list[list[int]]) -> Served:
    """(tokens, cached prompt tokens by tier) of each prompt."""
    results = engine.generate(input_ids=work, sampling_params=GREEDY)
    return [(r.token_ids, (r.usage.cached_device, r.usage.cached_host, r.usage.cached_storage)) for r in results]


def tokens(served: Served) -> list[list[int]]:
    return [t for t, _ in served]


def cached(served: Served) -> tuple[int, int, int]:
    """Over all requests: device, host, storage."""
    device, host, storage = (sum(c[i] for _, c in served) for i in range(3))
    return device, host, storage


def settled(engine: Engine) -> dict[str, Any]:
    """The scheduler's snapshot once nothing runs and nothing moves."""
    for _ in range(2000):
        seen = engine.control("scheduler")
        stats = seen["stats"]
        moving = any(stats[f"{kind}_in_flight"] for kind in ("write_back", "load_back", "prefetch", "backup"))
        if not seen["requests"] and not moving:
            engine.control("check")
            return seen
        time.sleep(0.005)
    raise AssertionError(f"it does not come to rest: {seen}")


def address(folder: Path, limit: str = "64MiB") -> str:
    return f"file://{folder}?limit={limit}"


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_a_prefix_found_in_any_tier_gives_the_same_tokens(
    model: Path, want: list[list[int]], tmp_path: Path, mesh: str
) -> None:
    options = OPTIONS | {"mesh": mesh, "core": "inproc", "host_kv_gib": HOST, "kv_storage": address(tmp_path)}
    ranks = 2 if mesh == "tp=2" else 1  # that keep a part of each page
    with Engine(model=str(model), **options) as engine:
        assert tokens(serve(engine, prompts())) == want
        again = serve(engine, prompts())
        assert tokens(again) == want and cached(again)[1] > 400 and cached(again)[2] == 0, "from the host"
        seen = settled(engine)
        one = serve(engine, prompts()[-1:]), serve(engine, prompts()[-1:])
        assert [tokens(s) for s in one] == [want[-1:]] * 2 and cached(one[1])[0] > 0, "from the device"
        assert seen["stats"]["host_pages_pinned"] == 0 and seen["storage"]["written"] > 40 * ranks
        assert engine.control("flush_cache", tier="device")["pages"] > 0
        settled(engine)
        flushed = serve(engine, prompts()[-1:])
        assert tokens(flushed) == want[-1:] and cached(flushed)[0] == 0 and cached(flushed)[1] > 0
    with Engine(model=str(model), **options) as engine:
        restarted = serve(engine, prompts())
        assert tokens(restarted) == want and cached(restarted)[2] > 200, "from storage"
        seen = settled(engine)
        assert seen["storage"]["damaged"] == seen["storage"]["failures"] == 0
        assert sum(cached(restarted)) == seen["stats"]["prefix_hit_tokens"]


@pytest.mark.parametrize("depth", [0, 1])
def test_retraction_at_every_step_changes_no_token(
    model: Path, want: list[list[int]], tmp_path: Path, depth: int
) -> None:
    """Behind every step all that runs is sent back to wait, and what the device had cached is evicted."""
    config = EngineConfig(str(model), host_kv_gib=HOST, kv_storage=address(tmp_path), overlap_depth=depth, **OPTIONS)
    built, outbox = build_engine(config), Collected()
    loop = EngineLoop(built, depth, Silent(), outbox)
    for i, prompt in enumerate(prompts()):
        loop._handle(Submit(i, packed(prompt), CoreParams(max_tokens=12, temperature=0.0)))
    turns = 0
    while built.scheduler.snapshot():
        turns += 1
        assert turns < 20_000, built.scheduler.snapshot()
        loop._transferred()
        while len(loop.flying) <= depth and loop._launch():
            pass
        if loop.flying:
            loop._collect()
        else:
            time.sleep(0.0005)  # all wait for transfers
        for request in built.scheduler.snapshot():
            built.scheduler.retract(request["id"])
        built.scheduler.flush_cache("device")
        built.scheduler.check()
    loop._settle()
    stats = built.scheduler.stats()
    built.ranks.close()
    assert [outbox.tokens[i] for i in range(len(want))] == want
    assert stats["retractions"] >= 6 * len(want) and stats["load_back_pages"] > 10 * len(want), stats


def test_a_pool_too_small_for_what_runs(model: Path, want: list[list[int]]) -> None:
    """Requests push each other out, and their pages come back from the host."""
    options = OPTIONS | {"num_pages": 11, "max_num_seqs": 8, "host_kv_gib": HOST}
    with Engine(model=str(model), core="inproc", **options) as engine:
        for _ in range(2):
            assert tokens(serve(engine, prompts())) == want
        assert settled(engine)["stats"]["load_back_pages"] > 0


def test_a_host_tier_of_a_few_pages(
    model: Path, want: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = OPTIONS | {"host_kv_gib": 9 * 8192 / 2**30, "kv_storage": address(tmp_path)}
    with Engine(model=str(model), core="inproc", **options) as engine:
        for _ in range(3):
            assert tokens(serve(engine, prompts())) == want
        stats = settled(engine)["stats"]
    assert "holds 9 pages, no more than the device's 16" in caplog.text
    assert stats["host_pages_total"] == 9 and stats["host_evicted_pages"] > 0


def test_events_tell_what_each_tier_holds(model: Path, tmp_path: Path) -> None:
    """A reader that follows them from the start knows every cached page."""
    options = OPTIONS | {"core": "inproc", "host_kv_gib": 12 * 8192 / 2**30, "kv_events": 1000}
    known: dict[str, set[str]] = {"device": set(), "host": set()}
    with Engine(model=str(model), **options) as engine:
        at = 0
        for prompt in prompts():
            serve(engine, [prompt])
            stats = settled(engine)["stats"]
            told = engine.control("kv_events", since=at)
            assert [e["number"] for e in told["events"]] == list(range(at, told["next"]))
            at = told["next"]
            for event in told["events"]:
                pages = known[event["tier"]]
                if event["kind"] == "stored":
                    assert event["key"] not in pages and (event["parent"] in pages or int(event["parent"], 16) == 0)
                    pages.add(event["key"])
                else:
                    pages.remove(event["key"])
            assert len(known["device"]) == stats["kv_pages_cached"] and len(known["host"]) == stats["host_pages_cached"]
        keys = page_keys(np.array(prompts()[-1], np.int32), PAGE)
        assert {key.hex() for key in keys[: len(prompts()[-1]) // PAGE]} <= known["device"]
        assert engine.control("kv_events", since=at - 3)["events"] == told["events"][-3:]
        with pytest.raises(EngineError, match="kv_events needs the argument 'since'"):
            engine.control("kv_events")
        assert stats["host_evicted_pages"] > 0


def test_two_salts_never_share_a_page_in_any_tier(model: Path, tmp_path: Path) -> None:
    from tokenspeed.runtime.async_llm import AsyncLLM

    prompt = prompts()[1]
    options = OPTIONS | {"core": "inproc", "host_kv_gib": HOST, "kv_storage": address(tmp_path)}

    def ask(engine: Engine, salt: str) -> tuple[list[int], int]:
        async def call(llm: AsyncLLM) -> Any:
            return await (await llm.submit(prompt, GREEDY, cache_salt=salt)).collect()

        result = engine._run(call(engine._llm))
        return result.token_ids, result.usage.cached_tokens

    with Engine(model=str(model), **options) as engine:
        first, found = ask(engine, "a")
        assert found == 0 and ask(engine, "b") == (first, 0) and ask(engine, "") == (first, 0)
        assert ask(engine, "a")[1] > 0
        settled(engine)
    with Engine(model=str(model), **options) as engine:
        assert ask(engine, "c") == (first, 0)
        assert ask(engine, "b")[1] > 0
        assert engine.control("scheduler")["storage"]["hits"] > 0


SPOILT: dict[str, Callable[[Path, random.Random], object]] = {
    "truncated": lambda path, rng: os.truncate(path, rng.randrange(path.stat().st_size)),
    "a bit flipped": lambda path, rng: flip(path, rng.randrange(8 * path.stat().st_size)),
    "another page": lambda path, rng: path.write_bytes(rng.choice(stored(path.parents[1])).read_bytes()[::-1]),
    "empty": lambda path, rng: path.write_bytes(b""),
}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def stored(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_damaged_files_are_found_removed_and_computed_again(model: Path, want: list[list[int]], tmp_path: Path) -> None:
    options = OPTIONS | {"core": "inproc", "host_kv_gib": HOST, "kv_storage": address(tmp_path)}
    with Engine(model=str(model), **options) as engine:
        serve(engine, prompts())
        settled(engine)
    rng = random.Random(2)
    for name, spoil in SPOILT.items():
        files = stored(tmp_path)
        assert len(files) > 40 and {f.stat().st_size for f in files} == {8192 + HEADER_BYTES}
        for path in files:
            spoil(path, rng)
        with Engine(model=str(model), **options) as engine:
            assert tokens(serve(engine, prompts())) == want, name
            storage = settled(engine)["storage"]
            assert storage["damaged"] >= 8 and storage["hits"] == 0, (name, storage)
            for path in stored(tmp_path):  # those that lay behind a damaged one
                path.unlink()
            engine.control("flush_cache")
            serve(engine, prompts())
            settled(engine)


def test_storage_that_takes_nothing_fails_no_request(model: Path, want: list[list[int]], tmp_path: Path) -> None:
    """The folder goes while the engine runs, and something else bears its name."""
    options = OPTIONS | {"core": "inproc", "host_kv_gib": HOST, "kv_storage": address(tmp_path / "kv")}
    with Engine(model=str(model), **options) as engine:
        for path in sorted((tmp_path / "kv").rglob("*"), reverse=True):
            path.rmdir()
        (tmp_path / "kv").rmdir()
        (tmp_path / "kv").write_text("a file")
        assert tokens(serve(engine, prompts())) == want
        storage = settled(engine)["storage"]
        assert storage["failures"] > 0 and storage["written"] == 0


def test_sessions_interleaved_at_random_say_what_they_say_alone(model: Path) -> None:
    """A few seeds of `make test-interleavings`."""
    work = sessions(VOCAB)
    alone = expected(str(model), work)
    found = [interleave(str(model), work, alone, seed) for seed in range(4)]
    for tier in ("device", "host", "storage"):
        assert sum(stats[f"hit_tokens_{tier}"] for stats in found) > 0
    assert sum(stats["retractions"] for stats in found) > 20


# ---- the server as a process -----------------------------------------------------------------------------------------


def complete(url: str, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]


def flags(folder: Path) -> list[object]:
    given = OPTIONS | {"buckets": "1,4,16,64", "host_kv_gib": HOST, "kv_storage": address(folder)}
    return [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", value)]


def test_a_server_killed_while_it_writes_leaves_nothing_that_harms_the_next(
    model: Path, want: list[list[int]], tmp_path: Path
) -> None:
    work = prompts()
    server = Server(model, *flags(tmp_path)).ready()
    try:
        for _ in range(2):
            first, details = complete(server.url, work[0])
        assert first == want[0] and details["cached_tokens"] == details["cached_tokens_details"]["device"] > 0
        shown = httpx.get(f"{server.url}/internal/scheduler").json()
        assert shown["requests"] == [] and shown["stats"]["hit_tokens_device"] > 0 and shown["storage"]["failures"] == 0
        told = httpx.get(f"{server.url}/internal/kv_events")
        assert told.status_code == 400 and "--kv-events N" in told.json()["error"]["message"]
        for since in ("x", "-1", str(2**70)):
            assert httpx.get(f"{server.url}/internal/kv_events", params={"since": since}).status_code == 400
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'tokenspeed:prefix_cache_hits_by_tier_total{model_name="tiny",tier="device"}' in metrics
        done = threading.Event()

        def ask() -> None:
            try:
                for prompt in work:
                    complete(server.url, prompt)
            except httpx.TransportError:
                done.set()

        threading.Thread(target=ask, daemon=True).start()
        while len(stored(tmp_path)) < 20:
            time.sleep(0.001)
    finally:
        server.process.send_signal(signal.SIGKILL)  # the engine core goes with it
        server.process.wait()
    assert done.wait(20), "it was meant to be killed before it had answered all"
    assert 20 <= len(stored(tmp_path)) < 58
    options = OPTIONS | {"core": "inproc", "host_kv_gib": HOST, "kv_storage": address(tmp_path)}
    with Engine(model=str(model), **options) as engine:
        served = serve(engine, work)
        assert tokens(served) == want and cached(served)[2] > 0
        storage = settled(engine)["storage"]
        assert storage["damaged"] == storage["failures"] == 0 and storage["hits"] > 0


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"kv_storage": "file:///tmp/kv?limit=1GiB"}, "kv_storage needs host_kv_gib"),
        ({"host_kv_gib": 1.0, "enable_prefix_caching": False}, "host_kv_gib needs enable_prefix_caching"),
        ({"host_kv_gib": 1.0, "kv_storage": "file:///tmp/kv"}, "needs a limit"),
        ({"host_kv_gib": 1e-6}, "less than one page, which takes"),
        ({"host_kv_gib": 1e6}, "GiB of memory are free"),
        ({"host_kv_gib": HOST, "kv_storage": "file:///dev/null/kv?limit=1GiB"}, "cannot make the folder"),
        ({"host_kv_gib": HOST, "kv_storage": "file:///tmp?limit=100KiB"}, "a limit of 102400 bytes is too little"),
    ],
)
def test_what_cannot_be_is_refused_by_name(model: Path, options: dict[str, Any], fault: str) -> None:
    with pytest.raises((OptionError, StartupError), match=fault):
        Engine(model=str(model), core="inproc", **(OPTIONS | options)).close()
