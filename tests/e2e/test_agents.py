"""Sessions as Codex CLI and Claude Code have them, on the real server and the embedded model, which is made to call.

Each turn sends all that came before; the second finds it in the cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Server

pytest.importorskip("llguidance")

SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": ["ls", "cat a.py", "make test"]},
        "timeout": {"enum": [1, 10]},
    },
    "required": ["command", "timeout"],
    "additionalProperties": False,
}
GUIDE = "\n".join(
    f"Rule {i}: read before you write, and say in one line what you changed in part {i}." for i in range(24)
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = (
        "--dtype", "float32", "--max-model-len", 4000, "--max-num-seqs", 2, "--num-pages", 300, "--buckets", "1,64,256",
        "--max-num-batched-tokens", 256,
    )  # fmt: skip
    with Server("smollm2", *options) as server:
        yield server.ready()


def stream(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def is_a_command(arguments: dict[str, Any]) -> None:
    assert set(arguments) == {"command", "timeout"}
    for name, value in arguments.items():
        assert value in SHELL["properties"][name]["enum"]


def test_a_session_of_codex(server: Server) -> None:
    tool = {"type": "function", "name": "shell", "description": "Runs.", "strict": True, "parameters": SHELL}
    items: list[Any] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the tests."}]}
    ]
    for turn in range(2):
        body = {
            "model": "smollm2", "instructions": GUIDE, "input": items, "tools": [tool], "tool_choice": "required",
            "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
            "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199", "temperature": 0,
        }  # fmt: skip
        final = stream(server, "/v1/responses", body)[-1]
        assert final["type"] == "response.completed", final
        (call,) = final["response"]["output"]
        is_a_command(json.loads(call["arguments"]))
        usage = final["response"]["usage"]
        assert usage["total_tokens"] < 4000
        if turn:
            assert usage["input_tokens_details"]["cached_tokens"] > 0.9 * usage["input_tokens"]
        items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py: 1 failed"}]


def test_a_session_of_claude_code(server: Server) -> None:
    tool = {"name": "Bash", "description": "Runs.", "input_schema": SHELL}
    system = [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": GUIDE}]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Fix the tests."}]}]
    for turn in range(2):
        body = {
            "model": "smollm2", "max_tokens": 32000, "system": system, "messages": messages, "tools": [tool],
            "tool_choice": {"type": "tool", "name": "Bash"}, "metadata": {"user_id": "u"}, "temperature": 0,
        }  # fmt: skip
        found = stream(server, "/v1/messages?beta=true", body)
        assert [found[0]["type"], found[-1]["type"]] == ["message_start", "message_stop"]
        assert found[-2]["delta"]["stop_reason"] == "tool_use"
        (start,) = [event["content_block"] for event in found if event["type"] == "content_block_start"]
        pieces = [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]
        arguments = json.loads("".join(pieces))
        is_a_command(arguments)
        usage = found[-2]["usage"]
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        counted = {"model": "smollm2", "system": system, "messages": messages, "tools": [tool]}
        assert server.post("/v1/messages/count_tokens", counted).json()["input_tokens"] == prompt < 4000
        if turn:
            assert usage["cache_read_input_tokens"] > 0.9 * prompt
        messages += [
            {"role": "assistant", "content": [{**start, "input": arguments}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": start["id"], "content": "1 failed"}]},
        ]


def test_an_answer_of_a_schema_on_each_wire(server: Server) -> None:
    ask = [{"role": "user", "content": "Which command lists files?"}]
    form = {"type": "json_schema", "name": "command", "schema": SHELL}
    answers = [
        server.post("/v1/chat/completions", {
            "messages": ask, "response_format": {"type": "json_schema", "json_schema": form}, "temperature": 0,
        }).json()["choices"][0]["message"]["content"],
        server.post("/v1/responses", {"input": ask, "text": {"format": form}, "temperature": 0}).json()["output"][0]["content"][0]["text"],
        server.post("/v1/messages", {
            "messages": ask, "max_tokens": 500, "output_config": {"format": form}, "temperature": 0,
        }).json()["content"][0]["text"],
    ]  # fmt: skip
    for answer in answers:
        is_a_command(json.loads(answer))
    assert len({json.dumps(json.loads(answer)) for answer in answers}) == 1


def test_a_stored_response_is_gone_on_from(server: Server) -> None:
    first = server.post("/v1/responses", {"input": "What is the capital of France?", "temperature": 0}).json()
    assert "Paris" in first["output"][0]["content"][0]["text"]
    more = {"previous_response_id": first["id"], "input": "And of Italy?", "temperature": 0, "max_output_tokens": 8}
    second = server.post("/v1/responses", more).json()
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"] - 16
    assert httpx.get(f"{server.url}/v1/responses/{second['id']}").json() == second
