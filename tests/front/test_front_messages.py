"""Anthropic's wire: what Claude Code and Anthropic's own client send and take, and what is refused in which words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import scripted_core
from serving import AppServer
from wires import CALL, MESSAGES, MESSAGES_TOOLS, NOW, OUTPUTS, TEXT, THOUGHT, events, request

from tokenspeed.runtime.config import ServerConfig
from tokenspeed.runtime.server import sse
from tokenspeed.runtime.server.messages.blocks import conversation

COUNT = "/v1/messages/count_tokens"


@pytest.fixture(scope="module")
def player() -> Iterator[AppServer]:
    server = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3", served_model_name="smollm2,claude-haiku")
    with AppServer(scripted_core.run_player, server, max_model_len=4096) as server:
        yield server


# What Claude Code sends in the second turn of a session.
SESSION: dict[str, Any] = {
    "model": "claude-haiku",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=1a2b3;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "abc"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I look it up."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Mind the time."},
        {"role": "user", "content": "Now."},
    ],
    "tools": [*MESSAGES_TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": []},
    "temperature": 1,
    "stream": True,
}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-app": "cli"}


def test_a_session_of_claude_code(player: AppServer) -> None:
    player.play(OUTPUTS["all"], times=2)
    response = player.post(f"{MESSAGES}?beta=true", SESSION, headers={**HEADERS, "X-Api-Key": "any"})
    assert response.headers["content-type"].startswith("text/event-stream") and response.headers["request-id"]
    found = events(response)
    start = found[0]["message"]
    assert set(start) == {
        "id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "stop_details", "usage",
    }  # fmt: skip
    deltas = [event["delta"]["type"] for event in found if event["type"] == "content_block_delta"]
    assert [kind for i, kind in enumerate(deltas) if deltas[i - 1 : i] != [kind]] == [
        "thinking_delta", "signature_delta", "text_delta", "input_json_delta",
    ]  # fmt: skip
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    again = events(player.post(MESSAGES, SESSION, headers=HEADERS))[-2]["usage"]
    assert again["cache_read_input_tokens"] == 16 and again["cache_creation_input_tokens"] == 0
    count = player.post(COUNT, {key: SESSION[key] for key in ("model", "messages", "system", "tools", "thinking")})
    assert count.json() == {"input_tokens": again["input_tokens"] + 16}
    assert httpx.head(player.url).status_code == 200, "Claude Code asks before it begins"


def test_the_conversation_that_a_session_means() -> None:
    messages = conversation(SESSION["system"], SESSION["messages"])
    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "tool", "tool", "user", "system", "user",
    ]  # fmt: skip
    assert [part["text"] for part in messages[0]["content"]] == ["You are an agent.", "Be brief."]
    assert messages[2] == {
        "role": "assistant",
        "content": "I look it up.",
        "reasoning_content": "I look.",
        "tool_calls": [
            {
                "id": "toolu_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            },
            {"id": "toolu_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }
    assert messages[3] == {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"}
    assert messages[4] == {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no clock"}
    assert messages[5]["content"] == "Go on."


@pytest.mark.parametrize("stream", [False, True])
def test_why_a_message_ended(player: AppServer, stream: bool) -> None:
    def reason(output: str, **more: Any) -> tuple[str, str | None]:
        player.play(output)
        response = player.post(MESSAGES, request(MESSAGES, stream=stream, **more))
        found = events(response)[-2]["delta"] if stream else response.json()
        return found["stop_reason"], found["stop_sequence"]

    assert reason(TEXT) == ("end_turn", None) and reason(CALL) == ("tool_use", None)
    assert reason(TEXT, max_tokens=2) == ("max_tokens", None)
    assert reason(TEXT, stop_sequences=["up", "never"]) == ("stop_sequence", "up")
    assert reason("word " * 5000, max_tokens=64000) == ("model_context_window_exceeded", None)


@pytest.mark.parametrize(
    ("more", "status", "kind", "words"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages is empty"),
        ({"messages": None}, 400, "invalid_request_error", "messages"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": "hot"}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": ["", "a"]}, 400, "invalid_request_error", "stop_sequences holds an empty string"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "invalid_request_error", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_request_error", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, 400, "invalid_request_error", "content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].type: image blocks are not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            400,
            "invalid_request_error",
            "tool_use_id",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 1}]}
                ]
            },
            400,
            "invalid_request_error",
            "input must be an object",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, 400, "invalid_request_error", "tools[0].name"),
        ({"tools": [MESSAGES_TOOLS[0]] * 2}, 400, "invalid_request_error", "two tools of one name"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tool_choice": {"type": "some"}}, 400, "invalid_request_error", "tool_choice.type"),
        ({"tools": [], "tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"thinking": {"type": "deep"}}, 400, "invalid_request_error", "thinking.type"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers is not supported"),
        ({"model": "claude-opus"}, 404, "not_found_error", "smollm2, claude-haiku"),
        (
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            400,
            "invalid_request_error",
            "prompt is too long",
        ),
    ],
)
def test_what_is_wrong_is_named_in_anthropic_s_form(
    player: AppServer, more: dict[str, Any], status: int, kind: str, words: str
) -> None:
    response = player.post(MESSAGES, request(MESSAGES) | more)
    error = response.json()
    assert response.status_code == status and error["type"] == "error", response.text
    assert error["error"]["type"] == kind and words in error["error"]["message"], response.text


def test_errors_before_the_route_are_in_anthropic_s_form_too() -> None:
    with AppServer(server=ServerConfig(api_key="secret", max_body_bytes=2000)) as server:
        body = request(MESSAGES, tools=None)
        assert server.post(MESSAGES, body).json()["error"]["type"] == "authentication_error"
        key = {"X-Api-Key": "secret"}
        assert server.post(MESSAGES, body, headers=key).status_code == 200
        assert (
            server.post(MESSAGES, body | {"x": "y" * 3000}, headers=key).json()["error"]["type"] == "request_too_large"
        )
        broken = httpx.post(server.url + MESSAGES, content=b"{", headers=key)
        assert broken.status_code == 400 and broken.json()["error"]["type"] == "invalid_request_error"
        server.life.phase = "draining"
        refused = server.post(MESSAGES, body, headers=key)
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "overloaded_error"


def test_pings_are_events(player: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.002)
    scripted_core.PLAYS.append([scripted_core.SLOW] * 20)
    found = events(player.post(MESSAGES, request(MESSAGES, stream=True, max_tokens=20)))
    kinds = [event["type"] for event in found]
    assert "ping" in kinds[kinds.index("content_block_delta") :] and kinds[-1] == "message_stop"


# ---- Anthropic's own client ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(player: AppServer) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=player.url, api_key="none", max_retries=0)


def ask(**more: Any) -> Any:
    body = request(MESSAGES, **more)
    return {key: value for key, value in body.items() if key != "stream"}


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_client_takes_every_message_and_event(player: AppServer, client: Any, output: str) -> None:
    from anthropic.types import Message, RawMessageStreamEvent
    from pydantic import TypeAdapter

    player.play(OUTPUTS[output], times=3)
    whole = client.messages.create(**ask())
    Message.model_validate(whole.to_dict(), strict=True)
    adapter = TypeAdapter(RawMessageStreamEvent)
    for event in client.messages.create(**ask(), stream=True):
        adapter.validate_python(event.to_dict(), strict=True)
    with client.messages.stream(**ask()) as stream:
        final = stream.get_final_message()
    bare = {"id", "usage"}
    blocks = [
        [{k: v for k, v in block.items() if k != "id"} for block in m.to_dict()["content"]] for m in (final, whole)
    ]
    assert blocks[0] == blocks[1]
    assert {k: v for k, v in final.to_dict().items() if k not in bare | {"content"}} == {
        k: v for k, v in whole.to_dict().items() if k not in bare | {"content"}
    }


def test_the_client_replays_what_it_was_given(player: AppServer, client: Any) -> None:
    player.play(OUTPUTS["all"])
    first = client.messages.create(**ask())
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "fine"}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages = [
        *ask()["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    player.play(TEXT)
    assert client.messages.create(**ask(messages=messages)).content[0].text == TEXT
    assert client.messages.count_tokens(model="smollm2", messages=messages).input_tokens > 50
    means = conversation(None, json.loads(json.dumps(messages, default=lambda block: block.to_dict())))
    assert means[1]["reasoning_content"] == THOUGHT and len(means[1]["tool_calls"]) == len(means[2:]) == 2


def test_the_client_lists_the_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2", "claude-haiku"]
    model = client.models.retrieve("claude-haiku")
    assert (model.type, model.display_name) == ("model", "claude-haiku") and model.created_at.year >= 2024


def test_the_client_raises_its_own_errors(player: AppServer, client: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**ask(messages=[{"role": "user", "content": "word " * 9000}]))
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ask(model="claude-opus"))
    player.play(NOW, ends=False)
    with pytest.raises(anthropic.APIStatusError, match="the play is over"):
        for _ in client.messages.create(**ask(), stream=True):
            pass
