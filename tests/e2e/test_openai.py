"""The real server on the embedded model, asked through the OpenAI client: what it promises, and what it survives."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.e2e.processes import Server
from tests.e2e.tiny import tiny_model

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
CONTEXT = 256


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = (
        "--dtype",
        "float32",
        "--max-model-len",
        CONTEXT,
        "--max-num-seqs",
        8,
        "--num-pages",
        80,
        "--buckets",
        "1,2,4,8,32,64",
    )
    with Server("smollm2", *options, "--max-num-batched-tokens", 64) as server:
        yield server.ready()


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(client: OpenAI, messages: Any = FRANCE, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "smollm2", "messages": messages, "max_tokens": 12, "temperature": 0} | options
    )


def complete(client: OpenAI, prompt: Any = "Once upon a time", **options: Any) -> Any:
    return client.completions.create(
        **{"model": "smollm2", "prompt": prompt, "max_tokens": 12, "temperature": 0} | options
    )


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_the_model_is_listed(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "smollm2" and client.models.retrieve("smollm2").id == "smollm2"
    assert model.model_dump()["max_model_len"] == CONTEXT


def test_a_conversation_whole_and_streamed(client: OpenAI) -> None:
    whole = chat(client)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop" and whole.choices[0].message.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    last = chunks[-1]
    assert not last.choices and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert len({c.id for c in chunks}) == 1


def test_a_text_whole_and_streamed(client: OpenAI) -> None:
    whole = complete(client)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 12
    chunks = list(complete(client, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]


def test_several_prompts_are_answered_in_their_order(client: OpenAI) -> None:
    prompts = ["Once upon a time", "def fibonacci(n):", "The capital of France is"]
    together = complete(client, prompts)
    assert [c.index for c in together.choices] == [0, 1, 2]
    assert [c.text for c in together.choices] == [complete(client, p).choices[0].text for p in prompts]


def test_two_choices(client: OpenAI) -> None:
    whole = chat(client, n=2, temperature=1.5, seed=11)
    assert [c.index for c in whole.choices] == [0, 1]
    first, second = (c.message.content for c in whole.choices)
    assert first != second
    parts = {0: "", 1: ""}
    reasons: dict[int, list[str]] = {0: [], 1: []}
    for chunk in chat(client, n=2, temperature=1.5, seed=11, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert parts == {0: first, 1: second}
    assert all(len(found) == 1 for found in reasons.values())
    assert chat(client, temperature=1.5, seed=12).choices[0].message.content == second, "choice i uses seed + i"


def test_a_seed_makes_an_answer_again(client: OpenAI) -> None:
    def text(seed: int, **options: Any) -> str:
        return complete(client, temperature=1.2, seed=seed, **options).choices[0].text

    assert text(5) == text(5) and text(5, top_p=0.9) == text(5, top_p=0.9)
    assert len({text(seed) for seed in range(5)}) == 5


def test_log_probabilities_of_a_conversation(client: OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=3).choices[0]
    entries = whole.logprobs.content
    assert "".join(e.token for e in entries).startswith(whole.message.content)
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token and math.isclose(entry.logprob, entry.top_logprobs[0].logprob)
        values = [t.logprob for t in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and 0 < sum(map(math.exp, values)) <= 1 + 1e-5
        assert bytes(entry.bytes).decode() == entry.token
    streamed = [
        e
        for c in chat(client, logprobs=True, top_logprobs=3, stream=True)
        for e in (c.choices[0].logprobs or Nothing).content
    ]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in entries]


class Nothing:
    content: tuple[()] = ()


def test_log_probabilities_of_a_text(client: OpenAI) -> None:
    choice = complete(client, logprobs=2).choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text and len(found.tokens) == len(found.token_logprobs) == 12
    assert all(len(top) == 2 and max(top.values()) == lp for top, lp in zip(found.top_logprobs, found.token_logprobs))


def test_a_sampled_token_s_log_probability_is_the_model_s_own(client: OpenAI) -> None:
    """Before temperature and filters: a scoring of the sampled text gives the same numbers."""
    prompt, asked = list(range(500, 520)), {"top_k": 50, "return_token_ids": True}
    sampled = complete(client, prompt, temperature=1.3, seed=3, logprobs=0, extra_body=asked).choices[0]
    ids = sampled.model_dump()["token_ids"]
    scored = complete(client, [*prompt, *ids], echo=True, logprobs=0, max_tokens=0).choices[0].logprobs
    for a, b in zip(sampled.logprobs.token_logprobs, scored.token_logprobs[len(prompt) :], strict=True):
        assert math.isclose(a, b, abs_tol=1e-3)


def test_a_stop_string_is_cut_and_ends(client: OpenAI) -> None:
    plain = complete(client, max_tokens=24).choices[0].text
    word = plain.split()[4]
    stopped = complete(client, max_tokens=24, stop=[word, "never there"]).choices[0]
    assert stopped.text == plain[: plain.index(word)] and stopped.finish_reason == "stop"
    chunks = list(complete(client, max_tokens=24, stop=word, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == stopped.text


def test_min_tokens_and_ignore_eos_outlast_the_end_of_sequence(client: OpenAI) -> None:
    short = chat(client, max_tokens=30)
    assert short.choices[0].finish_reason == "stop" and short.usage.completion_tokens < 15
    longer = chat(client, max_tokens=30, extra_body={"min_tokens": 20})
    assert longer.usage.completion_tokens >= 20
    assert longer.choices[0].message.content.startswith(short.choices[0].message.content)
    ignoring = chat(client, max_tokens=30, extra_body={"ignore_eos": True})
    assert ignoring.usage.completion_tokens == 30 and ignoring.choices[0].finish_reason == "length"


def test_b23_a_banned_token_is_never_sampled_and_a_forced_one_always(client: OpenAI) -> None:  # sglang#3059, #6171
    def ids(**options: Any) -> list[int]:
        return complete(client, extra_body={"return_token_ids": True}, **options).choices[0].model_dump()["token_ids"]

    plain = ids()
    banned = ids(logit_bias={str(plain[0]): -100})
    assert plain[0] not in banned and banned[0] != plain[0]
    for seed in range(3):
        assert plain[0] not in ids(logit_bias={str(plain[0]): -100}, temperature=1, seed=seed)
    assert ids(logit_bias={str(plain[3]): 100}) == [plain[3]] * 12


def test_many_at_once_are_answered_as_alone(client: OpenAI) -> None:
    questions = [f"What is {a} plus {b}?" for a in range(4) for b in range(3)]
    alone = [chat(client, [{"role": "user", "content": q}], max_tokens=8).choices[0].message.content for q in questions]
    found: dict[int, str] = {}

    def ask(at: int) -> None:
        found[at] = chat(client, [{"role": "user", "content": questions[at]}], max_tokens=8).choices[0].message.content

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[at] for at in range(len(questions))] == alone


# ---- what is refused; the server lives after each --------------------------------------------------------------------


def raw(body: str) -> Callable[[Server], httpx.Response]:
    return lambda server: httpx.post(f"{server.url}/v1/chat/completions", content=body.encode(), timeout=60)


def fields(**more: Any) -> str:
    return json.dumps({"model": "smollm2", "messages": FRANCE, "max_tokens": 4} | more)


LONG = [{"role": "user", "content": "word " * 3 * CONTEXT}]
REFUSED = {
    "a prompt three times the context": (fields(messages=LONG), 400, "context_length_exceeded", "256"),  # vllm#12600
    "max_tokens beyond the context": (fields(max_tokens=300), 400, "context_length_exceeded", "300"),
    "NaN temperature": (fields(temperature=float("nan")), 400, "invalid_body", "temperature"),  # sglang#28153
    "infinite temperature": (fields(temperature=float("inf")), 400, "invalid_body", "temperature"),
    "negative temperature": (fields(temperature=-1), 400, None, "temperature"),
    "a temperature of words": (fields(temperature="hot"), 400, None, "temperature"),
    "unknown model": (fields(model="gpt-5"), 404, "model_not_found", "smollm2"),
    "broken JSON": ('{"model": "smollm2", "messages": [', 400, "invalid_body", "JSON"),
    "no JSON object": ("[]", 400, "invalid_body", "object"),
    "no messages": (json.dumps({"model": "smollm2"}), 400, None, "messages"),
    "a bias beyond the vocabulary": (fields(logit_bias={"191222": -100}), 400, None, "logit_bias"),  # vllm#16529
    "a bias of words": (fields(logit_bias={"abc": 1}), 400, None, "logit_bias"),
    "too many choices": (fields(n=1000), 400, None, "n must"),
    "an unknown role": (fields(messages=[{"role": "wizard", "content": "x"}]), 400, None, "role"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_is_a_clear_error_and_the_server_lives(server: Server, client: OpenAI, case: str) -> None:
    body, status, code, named = REFUSED[case]
    response = raw(body)(server)
    error = response.json()["error"]
    assert response.status_code == status and error["code"] == code and named in error["message"]
    assert "Paris" in chat(client).choices[0].message.content


def test_the_client_raises_its_own_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the context holds 256 tokens"):
        chat(client, LONG)
    with pytest.raises(openai.NotFoundError, match="model"):
        chat(client, model="gpt-5")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(client, temperature=1e9)


def test_b09_bytes_that_are_no_text_are_refused(server: Server, client: OpenAI) -> None:  # llama.cpp#6396
    response = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "\xd6\xd0"}', timeout=60)
    assert response.status_code == 400 and response.json()["error"]["message"]
    assert complete(client).choices[0].text


def test_b33_the_longest_prompt_that_fits(client: OpenAI) -> None:  # vllm#16445
    ids = [100] * (CONTEXT - 1)
    done = complete(client, ids, max_tokens=1)
    assert done.usage.completion_tokens == 1 and done.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="context"):
        complete(client, [100] * CONTEXT, max_tokens=1)
    assert chat(client, max_tokens=None).usage.completion_tokens < 30


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_b68_sigterm_drains(tmp_path: Path) -> None:  # vllm#24885, #36666
    """Streams in flight come to their end, new requests are refused, the process ends with 0 and leaves no child."""
    path = tiny_model(tmp_path, tokenizer=True, max_position_embeddings=8192)
    texts: list[str] = [""] * 3
    with Server(
        path, "--max-num-seqs", 4, "--num-pages", 2000, "--buckets", "1,4,16", "--max-num-batched-tokens", 16
    ) as server:
        server.ready()
        begun = threading.Barrier(4)

        def read(at: int) -> None:
            body = {"prompt": [at + 1] * 10, "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=90) as response:
                chunks = response.iter_text()
                texts[at] = next(chunks)
                begun.wait(30)
                for text in chunks:
                    texts[at] += text

        threads = [threading.Thread(target=read, args=(at,)) for at in range(3)]
        for thread in threads:
            thread.start()
        begun.wait(30)
        server.terminate()
        deadline = time.monotonic() + 30
        while (health := httpx.get(f"{server.url}/health")).json()["status"] != "draining":
            assert time.monotonic() < deadline
        assert health.status_code == 503
        refused = server.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
        assert refused.status_code == 503 and float(refused.headers["Retry-After"]) > 0
        for thread in threads:
            thread.join(90)
        assert server.end()[0] == 0
    for text in texts:
        events = [block.removeprefix("data: ") for block in text.strip().split("\n\n")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
