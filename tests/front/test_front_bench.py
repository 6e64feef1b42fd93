"""The benchmark of servers: its load, its client and its figures."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving import AppServer

from tokenspeed.cli import main
from tokenspeed.runtime.bench.http import Http, HttpError
from tokenspeed.runtime.bench.load import Ask, LoadRun, Record
from tokenspeed.runtime.bench.plot import pareto
from tokenspeed.runtime.bench.report import as_table, figures
from tokenspeed.runtime.bench.workload import Conversation, Load, Step, Texts, arrivals, conversations

EVENTS = (
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n: ping\n\n'
    b'data: {"choices": [{"delta": {"reasoning_content": "h\xc3\xa9"}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
    b"data: [DONE]\n\n"
)


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


@asynccontextmanager
async def raw(answer: bytes, *, step: int = 0, then_close: bool = False) -> AsyncIterator[tuple[Http, list[int]]]:
    """A client of a server that gives every request the same bytes, `step` at a time; and how many came on each connection."""
    counts: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counts.append(0)
        at = len(counts) - 1
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            length = next(int(row.split(b":")[1]) for row in head.split(b"\r\n") if row.startswith(b"Content-Length"))
            await reader.readexactly(length)
            counts[at] += 1
            for i in range(0, len(answer), step or len(answer)):
                writer.write(answer[i : i + (step or len(answer))])
                await writer.drain()
                if step:
                    await asyncio.sleep(0)
            if then_close:
                break
        writer.close()

    def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
        return asyncio.ensure_future(_until_gone(serve(reader, writer)))

    server = await asyncio.start_server(quiet, "127.0.0.1", 0)
    http = Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield http, counts
    finally:
        await http.close()
        server.close()


async def _until_gone(work: Any) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        await work


async def one(http: Http, endpoint: Any = "chat") -> Record:
    run = LoadRun(http, Ask(endpoint, "m"), Texts(), 0, lambda record: None)
    await run.run([Conversation(0, [Step((1,), 3, 5)])])
    (record,) = run.records
    return record


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("step", [0, 3])
async def test_a_stream_is_read_however_it_is_cut(size: int, step: int) -> None:
    async with raw(chunked(EVENTS, size), step=step) as (http, _):
        record = await one(http)
    assert (record.text, record.error, len(record.stamps)) == ("lo", "", 2)
    assert (record.prompt_tokens, record.output_tokens, record.cached) == (7, 3, {"all": 4})
    assert record.sent <= record.stamps[0] <= record.stamps[1] <= record.ended


async def test_a_connection_is_used_again_and_replaced_when_it_has_died() -> None:
    async with raw(chunked(EVENTS, 50)) as (http, counts):
        for _ in range(3):
            assert not (await one(http)).error
        assert counts == [3]
    async with raw(chunked(EVENTS, 50), then_close=True) as (http, counts):
        for _ in range(3):
            assert not (await one(http)).error
            await asyncio.sleep(0.01)
        assert counts == [1, 1, 1]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b'HTTP/1.1 429 Busy\r\nContent-Length: 15\r\n\r\n{"error": "no"}', '429: {"error": "no"}'),
        (chunked(b'data: {"error": {"message": "it broke"}}\n\n', 10), "it broke"),
        (chunked(b"data: [DONE]\n\n", 10), "neither output nor usage"),
        (chunked(EVENTS, 10)[:300], "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ndata", "broke off"),
        (b"what\r\n\r\n", "no HTTP"),
        (chunked(b"data: {no json\n\n", 10), "Expecting"),
    ],
)
async def test_a_failure_is_a_record_of_its_own(answer: bytes, told: str) -> None:
    async with raw(answer, then_close=True) as (http, _):
        record = await one(http)
    assert told in record.error
    assert figures([record], 1.0)["failed"] == 1


async def test_a_server_that_is_not_there() -> None:
    with pytest.raises(HttpError, match=r"127\.0\.0\.1:9"):
        await Http("http://127.0.0.1:9").json("GET", "/v1/models")
    with pytest.raises(ValueError, match="no http"):
        Http("127.0.0.1:8000")


@pytest.mark.parametrize("dataset", ["random", "sharegpt", "agentic"])
def test_a_load_is_a_function_of_its_seed(dataset: str) -> None:
    load = Load(dataset, prompts=60, seed=3, input_len=200, output_len=20, prefix_len=50, range_ratio=0.5, context=8000)
    talks = conversations(load)
    assert talks == conversations(load) and sum(len(t.steps) for t in talks) == 60
    assert talks != conversations(Load(dataset, prompts=60, seed=4, context=8000))
    other = conversations(replace(load, salt=1))
    assert other != talks
    assert [[s.tokens for s in t.steps] for t in other] == [[s.tokens for s in t.steps] for t in talks]
    for talk in talks:
        held = talk.prefix_tokens
        for step in talk.steps:
            held = talk.prefix_tokens + int((held - talk.prefix_tokens) * step.kept) + step.tokens + step.output
            assert held <= 8000 and step.tokens > 0 and step.output > 0 and step.gap >= 0


def test_random_lengths_and_shared_prefixes() -> None:
    talks = conversations(Load(prompts=200, input_len=100, output_len=10, prefix_len=7, range_ratio=0.2))
    lengths = [t.steps[0].tokens for t in talks]
    assert min(lengths) >= 80 and max(lengths) <= 120 and len(set(lengths)) > 20
    assert len({t.prefix for t in talks}) == 1 and {t.prefix_tokens for t in talks} == {7}
    agents = conversations(Load("agentic", prompts=300, context=100_000))
    assert 1 <= len({t.prefix for t in agents}) <= 2 and {s.by_user for t in agents for s in t.steps} == {True, False}


def test_texts_have_their_length_and_are_the_same_always() -> None:
    texts = Texts(per_token=0.5)
    assert len(texts.words((1, 2), 100).split()) == 50
    assert texts.words((1, 2), 100) == Texts(0.5).words((1, 2), 100) != texts.words((1, 3), 100)
    assert texts.words((1, 2), 100).startswith(texts.words((1, 2), 60))


def test_arrivals() -> None:
    assert arrivals(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
    even, bursts = (arrivals(2000, 5.0, b, 1) for b in (100.0, 0.1))
    for times in (even, bursts):
        assert times == sorted(times) and times[0] == 0 and abs(times[-1] - 400) < 20

    def spread(times: list[float]) -> float:
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return sum((g - 0.2) ** 2 for g in gaps) / len(gaps)

    assert spread(bursts) > 100 * spread(even)


def record(sent: float, stamps: list[float], tokens: int, **more: Any) -> Record:
    return Record(0, 0, True, sent, stamps, stamps[-1] + 0.1, 100, tokens, {"device": 30, "host": 20}, **more)


def test_figures() -> None:
    records = [record(1.0, [1.5, 1.7, 2.5], 11), record(2.0, [2.25], 1), Record(0, 0, True, 2.0, ended=2.5, error="no")]
    f = figures(records, 10.0, {"ttft": 300.0}, devices=2)
    assert (f["completed"], f["failed"], f["errors"]) == (2, 1, ["no"])
    assert (f["total_input_tokens"], f["total_output_tokens"]) == (200, 12)
    assert f["output_tokens_per_minute_per_device"] == 36 and f["total_tokens_per_minute_per_device"] == 636
    assert f["mean_ttft_ms"] == pytest.approx(375) and f["median_tpot_ms"] == pytest.approx(100)
    assert f["mean_itl_ms"] == pytest.approx(500) and f["tps_per_user"] == pytest.approx(10)
    assert f["mean_e2el_ms"] == pytest.approx((1600 + 350) / 2)
    assert (f["hit_device"], f["hit_host"], f["hit_total"]) == (0.3, 0.2, 0.5)
    assert f["request_goodput"] == 0.1 and f["goodput_share"] == pytest.approx(1 / 3)
    assert f["max_concurrent_requests"] == 3
    assert "mean_ttft_tool_ms" not in f
    for goals, met in (({"tps": 9.9}, 2), ({"tps": 10.1}, 1), ({"tpot": 99.0}, 1), ({"e2el": 400.0, "ttft": 1.0}, 0)):
        assert figures(records, 1.0, goals)["request_goodput"] == met
    assert figures([records[2]], 1.0)["mean_ttft_ms"] == 0


def test_the_plot_is_a_document_with_a_point_a_run() -> None:
    runs = [figures([record(0.0, [0.5, 1.0 + k], 5)], 2.0 + k) | {"name": f"concurrency <{k}>"} for k in range(3)]
    text = pareto([("a & b", runs), ("c", runs[:1])])
    root = ET.fromstring(text)
    assert len(root.findall(".//{*}circle")) == 2 * 4 and text == pareto([("a & b", runs), ("c", runs[:1])])
    assert "concurrency <1>" in as_table(runs)


async def test_closed_and_open_loops() -> None:
    """Never more in flight than asked for; a conversation waits for its answers, one that fails ends."""
    async with raw(chunked(EVENTS, 500)) as (http, _):
        run = LoadRun(http, Ask("chat", "m"), Texts(), 2, lambda record: None)
        await run.run([Conversation(i, [Step((i, k), 2, 3) for k in range(3)]) for i in range(5)])
        assert len(run.records) == 15 and figures(run.records, 1.0)["max_concurrent_requests"] <= 2
        for i in range(5):
            mine = [r for r in run.records if r.conversation == i]
            assert all(a.ended <= b.sent for a, b in itertools.pairwise(mine))
    async with raw(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n") as (http, _):
        run = LoadRun(http, Ask("chat", "m"), Texts(), 0, lambda record: None)
        await run.run([Conversation(0, [Step((0, k), 2, 3) for k in range(3)])])
        assert len(run.records) == 1


# ---- the command ---------------------------------------------------------------------------------------------------

Bench = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def bench(server: AppServer, capsys: pytest.CaptureFixture[str]) -> Bench:
    def run(*arguments: str) -> tuple[int, Any, str]:
        """(exit status, what it printed, also as JSON where it is, standard error)."""
        status = main(["bench", "serve", "--base-url", server.url, "--num-prompts", "6", *arguments])
        out, err = capsys.readouterr()
        return status, json.loads(out) if out.startswith("{") else out, err

    return run


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_command(bench: Bench, endpoint: str, tmp_path: Path) -> None:
    saved, plot = tmp_path / "deep" / "r.json", tmp_path / "p.svg"
    status, out, _ = bench(
        "--endpoint-type", endpoint, "--random-input-len", "40", "--random-output-len", "8", "--max-concurrency", "1,3",
        "--ignore-eos", "--temperature", "0", "--goodput", "ttft:60000", "tps:0.001", "--num-warmups", "1",
        "--save-result", "--result-dir", str(saved.parent), "--result-filename", saved.name, "--plot", str(plot), "--json",
    )  # fmt: skip
    assert status == 0 and out == json.loads(saved.read_text()) and ET.parse(plot)
    for level, run in zip((1, 3), out["runs"]):
        assert (run["completed"], run["failed"], run["total_output_tokens"]) == (6, 0, 48)
        assert run["max_concurrent_requests"] <= level and run["goodput_share"] == 1.0
        assert 6 * 36 <= run["total_input_tokens"] <= 6 * 80  # of words that the server counted, and the template's


def test_sessions_against_a_server(bench: Bench) -> None:
    scales = ("--length-scale", "0.002", "--human-scale", "0", "--tool-scale", "0")
    status, out, _ = bench("--dataset-name", "agentic", *scales, "--request-rate", "50", "--json")
    assert status == 0 and out["completed"] == 6 and out["model_id"] == "smollm2"
    status, out, _ = bench("--dataset-name", "sharegpt", "--human-scale", "0", "--max-model-len", "400")
    assert status == 0 and "TTFT" in out


def test_failed_requests_are_told(bench: Bench) -> None:
    status, out, err = bench("--random-input-len", "4000", "--json")
    assert status == 1 and out["failed"] == 6 and "context_length_exceeded" in err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--max-concurrency", "x"], "--max-concurrency"),
        (["--max-concurrency", "1,-2"], "--max-concurrency"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--random-range-ratio", "2"], "--random-range-ratio"),
        (["--goodput", "ttfb:5"], "ttfb"),
        (["--goodput", "ttft"], "GOAL:VALUE"),
        (["--base-url", "ftp://x"], "ftp://x"),
        (["--base-url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--plot", "/proc/none/x.svg"], "cannot write"),
    ],
)
def test_what_cannot_work_is_told(bench: Bench, arguments: list[str], word: str) -> None:
    status, _, err = bench("--random-input-len", "9", "--random-output-len", "2", *arguments)
    assert status == 1 and word in err
