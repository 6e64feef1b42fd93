"""Forced calls in a notation whose marks are special tokens, on a random model that would never write one by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.e2e.processes import Server
from tests.e2e.tiny import VOCAB, tiny_model

pytest.importorskip("llguidance")

MARKS = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)  # fmt: skip
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model(
        tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=VOCAB + len(MARKS), max_position_embeddings=2048
    )
    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    backend.save(str(model / "tokenizer.json"))
    with Server(model, "--num-pages", 256, "--max-num-seqs", 2, "--buckets", "1,2,64",
                "--max-num-batched-tokens", 64, "--tool-call-parser", "kimi_k2") as server:  # fmt: skip
        yield server.ready()


def chat(server: Server, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "seed": 3, "max_tokens": 600} | more
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def check(call: dict[str, Any]) -> None:
    function = call["function"]
    arguments = json.loads(function["arguments"])
    assert call["id"].startswith(f"functions.{function['name']}:")
    if function["name"] == "now":
        assert arguments == {}
    else:
        assert set(arguments) == {"city", "days"} and arguments["days"] in (1, 2) and len(arguments["city"]) <= 5


@pytest.mark.parametrize("seed", [1, 2])
def test_a_call_of_the_tools_comes(server: Server, seed: int) -> None:
    choice = chat(server, tool_choice="required", parallel_tool_calls=False, seed=seed)
    (call,) = choice["message"]["tool_calls"]
    check(call)
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]


def test_the_named_tool_is_called(server: Server) -> None:
    choice = chat(server, tool_choice={"type": "function", "function": {"name": "weather"}})
    (call,) = choice["message"]["tool_calls"]
    check(call)
    assert call["function"]["name"] == "weather"


def test_calls_go_on_while_the_model_likes(server: Server) -> None:
    choice = chat(server, tool_choice="required", max_tokens=200, seed=5)
    calls = choice["message"]["tool_calls"]
    for call in calls[: len(calls) - (choice["finish_reason"] == "length")]:
        check(call)


def test_special_tokens_that_are_no_marks_are_hidden(server: Server) -> None:
    """A random model writes some of them in a long text."""
    bias = {"logit_bias": {"258": 4, "259": 4}}  # the marks of turns
    choice = chat(server, tool_choice="auto", max_tokens=300, ignore_eos=True, return_token_ids=True, **bias)
    assert 258 in choice["token_ids"] and 259 in choice["token_ids"]
    assert "<|start|>" not in choice["message"]["content"] and "<|end|>" not in choice["message"]["content"]
