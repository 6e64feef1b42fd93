"""Many requests on few pages: all end, no page is lost, nobody is overtaken for long; clients that leave give pages back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Server
from tests.e2e.tiny import tiny_model
from tokenspeed import Engine, SamplingParams
from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import EngineConfig

REQUESTS, POOL, PAGE = 300, 20, 16
HANG = 60  # seconds; a guard against a hang, not a claim of speed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


class Work:
    """300 requests of 10..200 prompt and 5..60 output tokens, and the pages of a pool that holds 20 of them."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.prompts = [[rng.randrange(3, 256) for _ in range(rng.randint(10, 200))] for _ in range(REQUESTS)]
        self.outputs = [rng.randint(5, 60) for _ in range(REQUESTS)]
        self.pages = [math.ceil((len(p) + n - 1) / PAGE) for p, n in zip(self.prompts, self.outputs)]
        self.pool = POOL * sum(self.pages) // REQUESTS

    def overtaken(self, ends: list[int]) -> list[float]:
        """For each request: pools' worth of later arrivals that ended before it did."""
        place = {request: at for at, request in enumerate(ends)}
        return [
            sum(self.pages[j] for j in range(i + 1, REQUESTS) if place[j] < place[i]) / self.pool
            for i in range(REQUESTS)
        ]


async def conserved(llm: AsyncLLM) -> dict[str, Any]:
    """Runs the scheduler's invariant checker, then returns its statistics."""
    await llm.control("check")
    return await llm.control("stats")


@pytest.mark.parametrize(("depth", "prefix"), [(1, True), (0, False)])
async def test_three_hundred_requests_on_a_pool_for_twenty(model: Path, depth: int, prefix: bool) -> None:
    work, ends, tokens = Work(depth), [], {}
    config = EngineConfig(
        str(model), core="inproc", num_pages=work.pool, page_size=PAGE, max_num_seqs=64, max_num_batched_tokens=256, seed=1,
        buckets=[1, 8, 16, 32, 64, 128, 256], overlap_depth=depth, enable_prefix_caching=prefix,
    )  # fmt: skip
    llm = AsyncLLM(config)
    await llm.start()

    async def one(index: int) -> None:
        params = SamplingParams(max_tokens=work.outputs[index], temperature=1.0, ignore_eos=True, detokenize=False)
        stream = await llm.submit(work.prompts[index], params)
        out = await stream.collect()
        assert out.finish_reason == "length"
        tokens[index] = len(out.token_ids)
        ends.append(index)

    idle: list[int] = []  # pages that no request holds, now and then

    async def watch() -> None:
        while len(ends) < REQUESTS:
            stats = await conserved(llm)
            idle.append(stats["kv_pages_free"] + stats["kv_pages_evictable"])
            assert stats["kv_pages_evictable"] <= stats["kv_pages_cached"] <= work.pool - stats["kv_pages_free"]
            await asyncio.sleep(0.02)

    async with asyncio.timeout(HANG):
        await asyncio.gather(watch(), *(one(i) for i in range(REQUESTS)))
    stats = await conserved(llm)
    await llm.close()
    assert tokens == dict(enumerate(work.outputs))
    assert stats["running"] == stats["waiting"] == 0
    assert stats["kv_pages_free"] + stats["kv_pages_cached"] == stats["kv_pages_total"]
    assert min(idle) < work.pool / 5, "the pool was meant to be too small for all"
    assert max(work.overtaken(ends)) <= 3


def test_overtaking_is_measured_in_pools() -> None:
    """The measure itself: a request that waits for all others is overtaken by all of their pages."""
    work = Work(0)
    assert max(work.overtaken(list(range(REQUESTS)))) == 0
    last = work.overtaken([*range(1, REQUESTS), 0])
    assert last[0] == sum(work.pages[1:]) / work.pool > 10 and max(last[1:]) == 0


async def test_a_hundred_clients_that_leave_give_their_pages_back(tmp_path: Path) -> None:
    """Each of 100 streams is cut after a random number of events; those beside them are not disturbed."""
    rng, model = random.Random(4), tiny_model(tmp_path, tokenizer=True, max_position_embeddings=4096)
    options = ("--num-pages", 300, "--max-num-seqs", 32, "--buckets", "1,8,32,64,128", "--max-num-batched-tokens", 128)
    kept = [{"prompt": [rng.randrange(256) for _ in range(20)], "max_tokens": 40} for _ in range(10)]
    common = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}

    async def cut(client: httpx.AsyncClient) -> int:
        body = {"prompt": [rng.randrange(256) for _ in range(rng.randint(1, 100))], "max_tokens": 3000, **common}
        wanted, seen = rng.randint(0, 12), 0
        await asyncio.sleep(rng.random())
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            while seen < wanted:
                seen += (await anext(lines)).startswith("data: {")
        return seen

    async def keep(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str | None]:
        await asyncio.sleep(rng.random())
        async with client.stream("POST", "/v1/completions", json={**body, **common}) as response:
            events = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]

    with Server(model, "--core", "inproc", *options) as server:
        server.ready()
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=HANG, limits=limits) as client, asyncio.timeout(HANG):
            results = await asyncio.gather(*(keep(client, body) for body in kept), *(cut(client) for _ in range(100)))
        deadline = time.monotonic() + HANG
        while any(server.metric(f"tokenspeed:{n}") for n in ("num_requests_running", "num_requests_waiting")):
            assert time.monotonic() < deadline, "a request that nobody reads goes on"
            await asyncio.sleep(0.05)
        assert server.metric("tokenspeed:kv_cache_usage_perc") == 0, "pages of requests that are gone"
        ended = server.finished()
        whole = server.post("/v1/completions", {"prompt": [5] * 4000, "max_tokens": 12, "ignore_eos": True})
        assert whole.json()["usage"]["completion_tokens"] == 12
    assert sum(results[10:]) > 100
    # a client on a busy machine may leave so late that its request has come to its end
    assert ended["abort"] + ended["length"] == 110 and ended["abort"] > 80
    with Engine(str(model), core="inproc", num_pages=100) as engine:
        for body, (text, reason) in zip(kept, results[:10]):
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            assert (text, reason) == (engine.generate(input_ids=body["prompt"], sampling_params=params).text, "length")


async def test_a_burst_of_aborts_in_every_state(model: Path) -> None:
    """Requests aborted before, while and after they run, some twice: the pool is whole and the rest is answered."""
    config = EngineConfig(
        str(model), core="inproc", num_pages=40, max_num_seqs=8, max_num_batched_tokens=64, buckets=[1, 8, 64], prefill_chunk=16,
    )  # fmt: skip
    rng = random.Random(9)
    llm = AsyncLLM(config)
    await llm.start()

    async def one(index: int) -> None:
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 120))]
        stream = await llm.submit(prompt, SamplingParams(max_tokens=50, ignore_eos=True, detokenize=False))
        if index % 4 == 0:
            out = await stream.collect()
            assert len(out.token_ids) == 50
            return
        await asyncio.sleep(rng.choice([0, 0.001, 0.01, 0.1]))
        if index % 4 == 1:
            with contextlib.suppress(StopAsyncIteration):
                await anext(aiter(stream))
        stream.close()
        stream.close()

    async with asyncio.timeout(HANG):
        await asyncio.gather(*(one(i) for i in range(80)))
        while (stats := await conserved(llm))["running"] or stats["waiting"]:
            await asyncio.sleep(0.01)
    await llm.close()
    assert stats["kv_pages_free"] + stats["kv_pages_cached"] == stats["kv_pages_total"] == 40
