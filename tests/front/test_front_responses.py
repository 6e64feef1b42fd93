"""OpenAI's newer wire: what Codex CLI and OpenAI's own client send and take; what is kept of responses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import scripted_core
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serving import AppServer
from wires import CALL, FLAT_TOOLS, NOW, OUTPUTS, RESPONSES, TEXT, THOUGHT, events, fold_responses, request, streamed

from tokenspeed.runtime.config import ServerConfig
from tokenspeed.runtime.server.responses.items import conversation, seal, unseal

PATCH = '*** Begin Patch\n*** Add File: é "x"\n+\\n\n*** End Patch'
PATCHING = f'<tool_call>\n{{"name": "apply_patch", "arguments": {json.dumps({"input": PATCH})}}}\n</tool_call>'
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


@pytest.fixture(scope="module")
def player() -> Iterator[AppServer]:
    server = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3", response_store_mib=1)
    with AppServer(
        scripted_core.run_player, server, max_model_len=4096, max_num_seqs=2, max_queued_requests=1
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    scripted_core.PLAYS.clear()


@pytest.fixture(scope="module")
def client(player: AppServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=player.url + "/v1", api_key="none", max_retries=0)


# What Codex CLI sends in the second turn of a session.
SESSION: dict[str, Any] = {
    "model": "smollm2",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": seal("I list files.")},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Patching."}], "encrypted_content": "gAAA"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I patch it."}]},
        {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH, "call_id": "call_2", "status": "completed"},
        {"type": "local_shell_call", "call_id": "call_3", "status": "completed", "action": {"type": "exec", "command": ["x"]}},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
        {"type": "function_call_output", "call_id": "call_3", "output": [{"type": "input_text", "text": "ok"}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": {"type": "object", "properties": {}}},
        APPLY_PATCH,
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"x-codex-installation-id": "1"},
    "text": {"verbosity": "low"},
}  # fmt: skip


def test_b61_b62_b63_a_session_of_codex(player: AppServer) -> None:
    player.play(f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n{PATCHING}")
    response = player.post(RESPONSES, SESSION, headers={"originator": "codex_cli_rs", "session_id": "0199"})
    found = events(response)
    final = fold_responses(found)
    assert final["status"] == "completed" and final["model"] == "smollm2" and final["created_at"] > 0
    reasoning, message, call = final["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": THOUGHT}] and reasoning["content"] == []
    assert unseal(reasoning["encrypted_content"]) == THOUGHT
    assert message["content"][0]["text"] == TEXT
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    kinds = [event["type"].removeprefix("response.") for event in found]
    order = [kind for i, kind in enumerate(kinds) if kinds[i - 1 : i] != [kind]]
    assert order == [
        "created", "in_progress",
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.done",
        "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    usage = final["usage"]  # sglang#10012
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 0 < usage["output_tokens_details"]["reasoning_tokens"]
    assert httpx.get(f"{player.url}{RESPONSES}/{final['id']}").status_code == 404, "it was not to be stored"


def test_the_conversation_that_a_session_means() -> None:
    messages = conversation(SESSION["instructions"], SESSION["input"])
    roles = ["system", "developer", "user", "assistant", "tool", "assistant", "tool", "tool"]
    assert [message["role"] for message in messages] == roles
    first, second = messages[3], messages[5]
    assert first["reasoning_content"] == "I list files." and first["content"] == ""
    assert first["tool_calls"][0]["function"] == {"name": "shell", "arguments": '{"command":["ls"]}'}
    assert second["reasoning_content"] == "Patching." and second["content"] == "I patch it."
    assert [call["id"] for call in second["tool_calls"]] == ["call_2", "call_3"]
    assert json.loads(second["tool_calls"][0]["function"]["arguments"]) == {"input": PATCH}
    assert messages[7] == {"role": "tool", "tool_call_id": "call_3", "content": "ok"}


def test_b32_a_context_that_is_full_is_an_event_of_a_stream(player: AppServer) -> None:
    body = request(RESPONSES, "word " * 9000)
    found = events(player.post(RESPONSES, {**body, "stream": True}))
    assert [event["type"] for event in found] == ["response.created", "response.in_progress", "response.failed"]
    error = found[-1]["response"]["error"]
    assert error["code"] == "context_length_exceeded" and "4096" in error["message"]
    whole = player.post(RESPONSES, body)
    assert whole.status_code == 400 and whole.json()["error"]["code"] == "context_length_exceeded"


def test_a_full_queue_is_an_event_that_says_when_to_come_back(player: AppServer) -> None:
    url = player.url + RESPONSES
    scripted_core.PLAYS.extend([[scripted_core.SLOW] * 2000] * 3)
    slow = [threading.Thread(target=httpx.post, args=(url,), kwargs={"json": {"input": "x", "max_output_tokens": 60}})
            for _ in range(3)]  # fmt: skip
    for thread in slow:
        thread.start()
    deadline = time.monotonic() + 10
    while player.llm.in_flight < 3:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    found = events(player.post(RESPONSES, request(RESPONSES, stream=True)))
    assert found[-1]["response"]["error"]["code"] == "rate_limit_exceeded"
    assert "Please try again in 1s." in found[-1]["response"]["error"]["message"]
    refused = player.post(RESPONSES, request(RESPONSES))
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
    for thread in slow:
        thread.join(30)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "message", "role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "something"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "x", "call_id": "y"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "y"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "x", "parameters": 5}]}, "tools[0]"),
        ({"tools": [{"type": "surprise"}]}, "tools[0].type"),
        ({"tools": [{**APPLY_PATCH, "format": {"type": "grammar", "syntax": "bnf"}}]}, "tools[0].format"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_output_tokens": 9000}, "max_output_tokens"),
        ({"temperature": 1e9}, "temperature"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"text": {"format": {"type": "poem"}}}, "text.format"),
    ],
)
def test_what_is_wrong_is_named(player: AppServer, more: dict[str, Any], param: str) -> None:
    response = player.post(RESPONSES, request(RESPONSES) | more)
    assert response.status_code == (404 if param == "previous_response_id" else 400), response.text
    assert response.json()["error"]["param"] == param, response.text
    assert param in response.json()["error"]["message"] or param == "previous_response_id"


def test_tools_of_a_namespace(player: AppServer) -> None:
    """As Codex CLI sends those of an MCP server: the model sees one name, the client gets both back."""
    space = {"type": "namespace", "name": "weather", "description": "", "tools": [FLAT_TOOLS[1], APPLY_PATCH]}
    body = request(RESPONSES) | {"tools": [FLAT_TOOLS[0], space]}
    player.play(NOW.replace("now", "weather__now") + PATCHING.replace("apply_patch", "weather__apply_patch") + CALL)
    final = streamed(player, RESPONSES, body)
    assert [(item["name"], item.get("namespace")) for item in final["output"]] == [
        ("now", "weather"), ("apply_patch", "weather"), ("get_weather", None),
    ]  # fmt: skip
    assert final["output"][1]["input"] == PATCH
    for chosen in ({"name": "now", "namespace": "weather"}, {"name": "weather__now"}):
        player.play(NOW.replace("now", "weather__now"))
        answer = player.post(RESPONSES, body | {"tool_choice": {"type": "function", **chosen}})
        assert [item["name"] for item in answer.json()["output"]] == ["now"], answer.text
    unknown = player.post(RESPONSES, body | {"tool_choice": {"type": "function", "name": "now"}})
    assert unknown.status_code == 400 and unknown.json()["error"]["param"] == "tool_choice"
    past = conversation(None, final["output"])
    assert [call["function"]["name"] for call in past[0]["tool_calls"]] == [
        "weather__now", "weather__apply_patch", "get_weather",
    ]  # fmt: skip
    for change, param in (
        ({"tools": [5]}, "tools[0].tools"),
        ({"name": ""}, "tools[0].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].tools[0].name"),
    ):
        wrong = player.post(RESPONSES, request(RESPONSES) | {"tools": [{**space, **change}]})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == param


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_a_stored_response(player: AppServer) -> None:
    player.play(OUTPUTS["all"])
    first = streamed(player, RESPONSES, request(RESPONSES, instructions="Be brief.", metadata={"a": "b"}))
    assert first["store"] is True and first["metadata"] == {"a": "b"}
    url = f"{player.url}{RESPONSES}/{first['id']}"
    assert httpx.get(url).json() == first
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "fine"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    player.play(TEXT, times=2)
    more = {"previous_response_id": first["id"], "input": outputs}
    second = player.post(RESPONSES, request(RESPONSES) | more).json()
    whole = [*request(RESPONSES)["input"], *first["output"], *outputs]
    spelled = player.post(RESPONSES, request(RESPONSES) | {"input": whole}).json()
    assert second["usage"]["input_tokens"] == spelled["usage"]["input_tokens"]
    assert second["previous_response_id"] == first["id"]

    listed = httpx.get(f"{player.url}{RESPONSES}/{second['id']}/input_items", params={"order": "asc"}).json()
    assert [item["type"] for item in listed["data"]] == [
        "message", "reasoning", "message", "function_call", "function_call",
        "function_call_output", "function_call_output",
    ]  # fmt: skip
    assert (listed["first_id"], listed["last_id"]) == (listed["data"][0]["id"], listed["data"][-1]["id"])
    page = httpx.get(
        f"{player.url}{RESPONSES}/{second['id']}/input_items", params={"limit": 2, "after": listed["data"][-2]["id"]}
    ).json()
    assert [item["id"] for item in page["data"]] == [item["id"] for item in listed["data"][-3:-5:-1]] and page[
        "has_more"
    ]

    assert httpx.delete(url).json() == {"id": first["id"], "object": "response", "deleted": True}
    assert httpx.get(url).status_code == httpx.delete(url).status_code == 404
    player.play(TEXT)
    third = player.post(RESPONSES, {"model": "smollm2", "previous_response_id": second["id"], "input": "And?"})
    assert third.status_code == 200, "what led to it was kept with it"


def test_the_store_lets_the_oldest_go(player: AppServer) -> None:
    ids = [player.post(RESPONSES, {"input": "x" * 400, "max_output_tokens": 1, "metadata": {"pad": "y" * 200_000}}).json()["id"]
           for _ in range(7)]  # fmt: skip
    kept = [httpx.get(f"{player.url}{RESPONSES}/{name}").status_code for name in ids]
    assert kept[:2] == [404, 404] and kept[-1] == 200
    huge = player.post(RESPONSES, {"input": "x", "max_output_tokens": 1, "metadata": {"pad": "y" * 2_000_000}}).json()
    assert httpx.get(f"{player.url}{RESPONSES}/{huge['id']}").status_code == 404
    assert httpx.get(f"{player.url}{RESPONSES}/{ids[-1]}").status_code == 200


def test_a_response_in_the_making_can_be_cancelled(player: AppServer) -> None:
    scripted_core.PLAYS.append([scripted_core.SLOW] * 4000)
    with httpx.stream("POST", player.url + RESPONSES, json={"input": "x", "stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        first = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
        url = f"{player.url}{RESPONSES}/{first['response']['id']}"
        while "output_text.delta" not in next(lines):
            pass
        assert httpx.get(url).json()["status"] == "in_progress"
        assert httpx.post(f"{url}/cancel").json()["status"] == "cancelled"
        last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "cancelled"
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert httpx.get(url).json() == httpx.post(f"{url}/cancel").json() == last["response"]


# ---- OpenAI's own client ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("output", [*OUTPUTS, "custom"])
def test_the_client_takes_every_response_and_event(
    player: AppServer, client: openai.OpenAI, output: str, summary: str | None
) -> None:
    player.play(OUTPUTS.get(output, PATCHING), times=3)
    asked: Any = request(RESPONSES, reasoning={"summary": summary}) | {"tools": [*FLAT_TOOLS, APPLY_PATCH]}
    whole = client.responses.create(**asked)
    Response.model_validate(whole.to_dict(), strict=True)
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in client.responses.create(**asked, stream=True):
        adapter.validate_python(event.to_dict(), strict=True)
    with client.responses.stream(**asked) as stream:
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]


def test_the_client_replays_what_it_was_given(player: AppServer, client: openai.OpenAI) -> None:
    player.play(f"{OUTPUTS['reasoning']}\n{CALL}\n{PATCHING}")
    asked: Any = request(RESPONSES) | {"tools": [*FLAT_TOOLS, APPLY_PATCH]}
    first = client.responses.create(**asked)
    results = [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "fine"}
        for item in first.output
        if item.type in ("function_call", "custom_tool_call")
    ]
    player.play(TEXT)
    again = client.responses.create(**asked | {"input": [*asked["input"], *first.output, *results]})
    assert again.output_text == TEXT and len(results) == 2
    listed = client.responses.input_items.list(again.id, order="asc")
    assert [item.type for item in listed][-2:] == ["function_call_output", "custom_tool_call_output"]
    client.responses.delete(again.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(again.id)


def test_the_client_sees_a_failure(player: AppServer, client: openai.OpenAI) -> None:
    player.play(NOW, ends=False)
    last = list(client.responses.create(**request(RESPONSES), stream=True))[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.message == "the play is over"
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(**request(RESPONSES, "word " * 9000))
