"""The OpenAI surface through OpenAI's own client: shapes, streams, counts, log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import scripted_core
from httpx_sse import connect_sse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import AppServer
from vocabularies import from_metadata, gpt2_metadata

from tokenspeed.runtime.config import ServerConfig

MESSAGES: Any = [{"role": "user", "content": "tell me something"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def client(server: AppServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("smollm2").id == "smollm2"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_completion_tokens=8)
    ChatCompletion.model_validate(answer.to_dict(), strict=True)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == "system\nYou are a helpful AI"
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.usage.completion_tokens_details is not None


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("extra", [{"max_tokens": 8}, {"stop": " helpful"}, {"max_tokens": 8, "stop": [" AI as"]}])
def test_b94_a_chat_stream_equals_the_whole(client: openai.OpenAI, n: int, extra: dict[str, Any]) -> None:
    request: Any = {"model": "smollm2", "messages": MESSAGES, "n": n, "seed": 1, **extra}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
        assert chunk.id == chunks[0].id and chunk.usage is None
    for choice in whole.choices:
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert (mine[0].delta.role, mine[0].delta.content, mine[0].finish_reason) == ("assistant", "", None)
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        reasons = [part.finish_reason for part in mine]
        assert reasons == [None] * (len(mine) - 1) + [choice.finish_reason]  # vllm#27572


def test_b59_b60_usage_in_a_stream(server: AppServer) -> None:  # sglang#954, #3743, #4707
    body = {"messages": [{"role": "user", "content": "usage please"}], "max_tokens": 3}
    whole = [server.post(CHAT, body).json()["usage"] for _ in range(2)]
    events = server.events(CHAT, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole[1]
    assert whole[1]["prompt_tokens_details"]["cached_tokens"] == 16
    assert all(event["usage"] is None for event in events[:-1])
    for options in ({"include_usage": False}, None):
        assert all("usage" not in event for event in server.events(CHAT, {**body, "stream_options": options}))
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(CHAT, {**body, "stream_options": continuous})
    assert [event["usage"]["completion_tokens"] for event in events][-2:] == [3, 3]


def test_b13_chat_logprobs(client: openai.OpenAI, server: AppServer) -> None:
    request: Any = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 5, "logprobs": True}
    for top in (None, 0, 2):  # vllm#4795
        more = {} if top is None else {"top_logprobs": top}
        whole = client.chat.completions.create(**request, **more).choices[0].logprobs
        assert whole is not None and whole.content is not None and len(whole.content) == 5
        assert all(len(entry.top_logprobs) == (top or 0) for entry in whole.content)
        assert bytes(whole.content[1].bytes or []).decode() == whole.content[1].token == "system"
        events = server.events(CHAT, {**request, **more})
        streamed = [
            entry
            for event in events
            for choice in event["choices"]
            for entry in (choice["logprobs"] or {}).get("content", [])
        ]
        assert streamed == [entry.to_dict() for entry in whole.content]


def test_token_ids_on_demand(server: AppServer) -> None:
    body = {"prompt": "one two three", "max_tokens": 4, "return_token_ids": True}
    whole = server.post(TEXT, body).json()["choices"][0]["token_ids"]
    streamed = [token for event in server.events(TEXT, body) for token in event["choices"][0]["token_ids"]]
    assert streamed == whole and len(whole) == 4
    assert "token_ids" not in server.post(TEXT, {**body, "return_token_ids": None}).json()["choices"][0]


def test_b36_the_token_limit_defaults_to_the_rest_of_the_context(server: AppServer) -> None:  # vllm#6707
    chat = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    for body in (chat, {**chat, "max_tokens": None}):
        usage = server.post(CHAT, body).json()["usage"]
        assert usage["total_tokens"] == scripted_core.MAX_LEN
    assert server.post(TEXT, {"prompt": "x"}).json()["usage"]["completion_tokens"] == 16


def test_events_are_sse(server: AppServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": True}
    with httpx.Client() as http, connect_sse(http, "POST", server.url + CHAT, json=body) as source:
        assert source.response.headers["content-type"].startswith("text/event-stream")
        events = list(source.iter_sse())
    assert events[-1].data == "[DONE]" and all(
        event.json()["object"] == "chat.completion.chunk" for event in events[:-1]
    )


# ---- text completions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("one two", ["one twoone"]),
        (["one two", "three"], ["one twoone", "threethreethree"]),
        ([392, 2133], None),
        ([[392, 2133], [5]], None),
    ],
)
def test_prompts_of_every_form(client: openai.OpenAI, prompt: Any, texts: list[str] | None) -> None:
    for n in (1, 2):
        answer = client.completions.create(model="smollm2", prompt=prompt, max_tokens=3, n=n)
        count = len(prompt) if isinstance(prompt[0], str | list) and isinstance(prompt, list) else 1
        assert [choice.index for choice in answer.choices] == list(range(count * n))
        assert answer.usage is not None and answer.usage.completion_tokens == 3 * count * n
        if texts:
            assert [choice.text for choice in answer.choices[::n]] == texts
        chunks = list(client.completions.create(model="smollm2", prompt=prompt, max_tokens=3, n=n, stream=True))
        for choice in answer.choices:
            mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
            assert "".join(part.text for part in mine) == choice.text
            assert [part.finish_reason for part in mine if part.finish_reason] == ["length"]


ECHO = {"prompt": "\n1. Carol has 20 é😀", "echo": True, "logprobs": 1, "max_tokens": 3}


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("prompt", [ECHO["prompt"], [198, 33, 30], [198]])
def test_b10_b11_b12_echo_with_logprobs(
    server: AppServer, prompt: Any, max_tokens: int
) -> None:  # vllm#5334, #2703, #6521
    body = {**ECHO, "prompt": prompt, "max_tokens": max_tokens}
    answer = server.post(TEXT, body).raise_for_status().json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    if isinstance(prompt, str):
        assert choice["text"].startswith(prompt)
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert {len(column) for column in logprobs.values()} == {answer["usage"]["prompt_tokens"] + max_tokens}
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
        assert choice["text"][offset : offset + len(token)] == token
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", max_tokens)

    events = server.events(TEXT, body)
    parts = [event["choices"][0] for event in events]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, column in logprobs.items():
        assert [item for part in parts for item in part["logprobs"][name]] == column
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]


def test_echo_without_logprobs(server: AppServer) -> None:
    choice = server.post(TEXT, {"prompt": "<|im_start|>a b", "echo": True, "max_tokens": 2}).json()["choices"][0]
    assert choice["text"] == "<|im_start|>a ba" and choice["logprobs"] is None


def test_the_added_bos_is_a_token_but_no_text(tmp_path: Path) -> None:
    from_metadata(gpt2_metadata("gpt-2", add_bos_token=True)).save(tmp_path)
    with AppServer(model=str(tmp_path)) as server:
        for prompt, first in (("the the", ""), ("<s>the the", "<s>")):
            body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
            choice = server.post(TEXT, body).raise_for_status().json()["choices"][0]
            assert choice["text"] == prompt
            assert choice["logprobs"]["tokens"] == [first, "the", " the"]
        answer = server.post(CHAT, {"messages": MESSAGES})
        assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


def test_completion_logprobs_count_the_best_and_the_sampled(server: AppServer) -> None:
    for top in (0, 3):
        logprobs = server.post(TEXT, {"prompt": "one two", "max_tokens": 2, "logprobs": top}).json()["choices"][0][
            "logprobs"
        ]
        assert [len(entry) for entry in logprobs["top_logprobs"]] == [max(top, 1)] * 2
        assert logprobs["text_offset"] == [0, 3]


def test_minus_infinity_is_a_number() -> None:
    with AppServer(scripted_core.run_core_minus_infinity) as server:
        body = {"messages": MESSAGES, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
        entry = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"][0]
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
        logprobs = server.post(TEXT, {"prompt": "a", "max_tokens": 1, "logprobs": 1}).json()["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == [-9999.0]


def test_health_and_metrics(server: AppServer) -> None:
    assert httpx.get(server.url + "/health").json() == {"status": "ready"}
    probed = httpx.head(server.url + "/health")
    assert (probed.status_code, probed.text) == (200, "")
    server.post(TEXT, {"prompt": "x", "max_tokens": 1})
    text = httpx.get(server.url + "/metrics").text
    for name in ("num_requests_running", "kv_cache_usage_perc", "prefix_cache_queries_total", "prompt_tokens_total"):
        assert f'tokenspeed:{name}{{model_name="smollm2"}}' in text
    assert 'tokenspeed:request_success_total{finished_reason="length",model_name="smollm2"}' in text


def test_the_key_guards_v1_alone() -> None:
    with AppServer(server=ServerConfig(api_key="secret")) as server:
        url = server.url + "/v1/models"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = httpx.get(url, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(url, headers={"Authorization": "Bearer secret"}).status_code == 200
        assert httpx.get(server.url + "/health").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url + "/v1", api_key="no").models.list()


def test_the_served_name() -> None:
    with AppServer(server=ServerConfig(served_model_name="my/model")) as server:
        assert httpx.get(server.url + "/v1/models/my/model").json()["id"] == "my/model"
        body = {"prompt": "x", "max_tokens": 1}
        assert server.post(TEXT, {**body, "model": "my/model"}).json()["model"] == "my/model"
        assert server.post(TEXT, {**body, "model": "smollm2"}).status_code == 404


def test_the_api_describes_itself(server: AppServer) -> None:
    schema = httpx.get(server.url + "/openapi.json").json()
    assert {CHAT, TEXT, "/v1/models", "/health"} <= set(schema["paths"])
    for path in (CHAT, TEXT):  # and no 422, which this server never answers
        assert set(schema["paths"][path]["post"]["responses"]) == {"200", "4XX", "5XX"}
    assert set(schema["paths"]["/v1/models/{model_id}"]["get"]["responses"]) == {"200", "4XX", "5XX"}
