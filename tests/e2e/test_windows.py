"""Layers that see a window keep only the pages that they can see, and no token depends on it: not with long contexts, not with
prefixes found on the device, on the host or in storage, not when requests wait again.

`want` is what the model says without any cache, in whole prompts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.interleavings import expected, interleave, sessions, windowed_model
from tests.e2e.test_kv_tiers import PAGE, address, cached, serve, settled, tokens
from tests.e2e.tiny import VOCAB, tiny_model
from tokenspeed import Engine, SamplingParams
from tokenspeed.runtime import cache_sizes
from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.build import find_artifact
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.executor import open_artifact
from tokenspeed.runtime.metrics import Metrics

WINDOW = 24
OPTIONS: dict[str, Any] = {
    "core": "inproc", "page_size": PAGE, "max_num_seqs": 4, "max_num_batched_tokens": 64, "buckets": [1, 4, 16, 64],
    "max_model_len": 448, "num_pages": 120,
}  # fmt: skip
#: of the second: no layer sees everything
MODELS = {"mixed": windowed_model, "all": lambda folder: tiny_model(folder, "mistral", sliding_window=WINDOW)}


def prompts(seed: int = 3) -> list[list[int]]:
    """Of up to 26 pages; some share a prefix of 9 pages, and one is sent again longer."""
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(VOCAB) for _ in range(n)]  # noqa: E731
    shared, long = draw(150), draw(300)
    return [long, shared + draw(40), shared + draw(90), draw(33), long + draw(100), shared + draw(7)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def want(model: Path) -> list[list[int]]:
    options = OPTIONS | {"max_num_batched_tokens": 448, "buckets": [1, 4, 448], "max_num_seqs": 1}
    with Engine(model=str(model), enable_prefix_caching=False, **options) as engine:
        assert engine.control("stats")["window_pages_total"] > 0
        return tokens(serve(engine, prompts()))


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model=str(model), **OPTIONS) as engine:
        yield engine


def test_prefixes_of_every_length_are_found_and_give_the_same_tokens(engine: Engine, want: list[list[int]]) -> None:
    assert tokens(serve(engine, prompts())) == want
    again = serve(engine, prompts())
    assert tokens(again) == want
    for prompt, (_, found) in zip(prompts(), again):
        assert found[0] == (len(prompt) - 1) // PAGE * PAGE
    settled(engine)


@pytest.mark.parametrize(
    "options", [{"prefill_chunk": 7}, {"page_size": 1, "num_pages": 530}, {"overlap_depth": 0, "page_size": 5}]
)
def test_chunks_retraction_and_small_pages(model: Path, want: list[list[int]], options: dict[str, Any]) -> None:
    with Engine(model=str(model), **OPTIONS | options) as engine:
        for _ in range(2):
            assert tokens(serve(engine, prompts())) == want
        stats = settled(engine)["stats"]
    assert (stats["retractions"] > 0) == ("num_pages" in options)


@pytest.mark.parametrize("seed", [1, 2])
def test_seeded_interleavings(model: Path, seed: int) -> None:
    work = sessions(VOCAB, 12)
    interleave(str(model), work, expected(str(model), work), seed)


def test_host_and_storage_give_back_what_the_window_shows(model: Path, want: list[list[int]], tmp_path: Path) -> None:
    given = OPTIONS | {"host_kv_gib": 3e-3, "kv_storage": address(tmp_path)}
    with Engine(model=str(model), **given) as engine:
        assert tokens(serve(engine, prompts())) == want
        settled(engine)
        assert engine.control("flush_cache", tier="device")["pages"] > 0
        again = serve(engine, prompts())
        assert tokens(again) == want and cached(again)[1] > 600
        settled(engine)
    with Engine(model=str(model), **given) as engine:
        restarted = serve(engine, prompts())
        assert tokens(restarted) == want and cached(restarted)[2] > 0
        assert settled(engine)["storage"]["hits"] > 40  # pages


async def test_metrics_tell_of_the_pages_that_windows_see(model: Path) -> None:
    metrics = Metrics("m")
    llm = AsyncLLM(EngineConfig(str(model), **OPTIONS), metrics=metrics)
    await llm.start()
    try:
        stream = await llm.submit([5] * 100, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        held = []
        async for _ in stream:
            lines = re.findall(r'tokenspeed:window_kv_pages\{[^}]*state="(\w+)"\} (\S+)', metrics.render().decode())
            pages = {state: int(float(value)) for state, value in lines}
            assert sum(pages.values()) == (await llm.control("stats"))["window_pages_total"]
            held.append(pages["held"])
    finally:
        await llm.close()
    assert len(held) > 2 and 0 < max(held) <= WINDOW // PAGE + 6  # what a chunk of 64 writes beside what it sees


def test_memory_is_split_among_the_groups(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned fits the share; with less memory fewer run at once, and with too little the start says what is short."""
    config = EngineConfig(str(model), page_size=PAGE, max_model_len=448, max_num_seqs=64, memory_fraction=0.5)
    artifact = open_artifact(str(find_artifact(config)))
    found = []
    for mib in (4, 8, 64):
        monkeypatch.setattr(cache_sizes, "free_memory", lambda mib=mib: mib << 20)
        size = cache_sizes.cache_sizes(config, artifact, 448)
        assert size.window == WINDOW and size.pages_bytes + size.window_bytes <= mib * 2**20 / 2 + 2**13
        found.append((size.pages, size.window_pages))
    assert found == sorted(found) and found[0][1] < found[2][1]
    monkeypatch.setattr(cache_sizes, "free_memory", lambda: 1 << 16)
    with pytest.raises(StartupError, match="pages of windowed layers take"):
        cache_sizes.cache_sizes(config, artifact, 448)
