"""One internal request behind three wire formats: whatever the model writes, a stream adds up to the whole, on every wire."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import scripted_core
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import AppServer
from wires import (
    ARGUMENTS,
    CALL,
    CHAT,
    MESSAGES,
    NOW,
    OUTPUTS,
    RESPONSES,
    SCHEMA,
    TEXT,
    THOUGHT,
    comparable,
    events,
    request,
    streamed,
)

from tokenspeed.runtime.config import ServerConfig

WIRES = [CHAT, MESSAGES, RESPONSES]
NOTATION = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture(scope="module", params=["one token a step", "three"])
def player(request: pytest.FixtureRequest) -> Iterator[AppServer]:
    target = scripted_core.run_player if request.param == "one token a step" else scripted_core.run_player_bursts
    with AppServer(target, ServerConfig(**NOTATION), max_model_len=4096) as server:
        yield server


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What a test that fails leaves unplayed is not played to the next."""
    yield
    scripted_core.PLAYS.clear()


def answer(server: AppServer, wire: str, output: str, **more: Any) -> dict[str, Any]:
    server.play(output)
    response = server.post(wire, request(wire, **more))
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_stream_adds_up_to_the_whole(player: AppServer, wire: str, output: str) -> None:
    usage = {"stream_options": {"include_usage": True}} if wire == CHAT else {}
    whole = answer(player, wire, OUTPUTS[output])
    player.play(OUTPUTS[output])
    assert comparable(streamed(player, wire, request(wire, **usage))) == comparable(whole)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("part", [THOUGHT, TEXT, "Paris", "days"])
def test_a_stream_that_is_cut_off_adds_up_to_the_whole(player: AppServer, wire: str, part: str) -> None:
    """At any place, also within a call: what is there comes, and the reason is the length."""
    output = OUTPUTS["all"]
    assert player.llm.tokenizer is not None
    count = len(player.llm.tokenizer.encode(output[: output.index(part) + len(part) - 1], add_special_tokens=False))
    limit = {"max_output_tokens" if wire == RESPONSES else "max_tokens": count}
    whole = answer(player, wire, output, **limit)
    player.play(output)
    usage = {"stream_options": {"include_usage": True}} if wire == CHAT else {}
    body = request(wire, **limit, **usage)
    if wire == MESSAGES:  # a client reads an input that is cut off as far as it goes: here the whole alone does
        player_events = events(player.post(wire, {**body, "stream": True}))
        assert player_events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "max_tokens"
        starts = [event["content_block"] for event in player_events if event["type"] == "content_block_start"]
        assert [block["type"] for block in starts] == [block["type"] for block in whole["content"]]
        return
    assert comparable(streamed(player, wire, body)) == comparable(whole)
    if wire == CHAT:
        assert whole["choices"][0]["finish_reason"] == "length"
    else:
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in whole["output"]] == ["completed"] * (len(whole["output"]) - 1) + [
            "incomplete"
        ]


def test_the_parts_of_an_answer_on_each_wire(player: AppServer) -> None:
    output = OUTPUTS["all"]
    chat = answer(player, CHAT, output)
    message = chat["choices"][0]["message"]
    assert message["content"] == TEXT and message["reasoning_content"] == message["reasoning"] == THOUGHT
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": ARGUMENTS},
        {"name": "now", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    details = chat["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < chat["usage"]["completion_tokens"]

    blocks = answer(player, MESSAGES, output)["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == (THOUGHT, TEXT)
    assert [block["input"] for block in blocks[2:]] == [json.loads(ARGUMENTS), {}]

    response = answer(player, RESPONSES, output)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in response["output"]] == kinds
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert response["output"][2]["arguments"] == ARGUMENTS and response["output"][3]["arguments"] == "{}"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == details["reasoning_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_b41_the_finish_reason_says_whether_a_tool_is_to_be_run(player: AppServer, stream: bool) -> None:
    def reasons(wire: str, output: str, **more: Any) -> Any:
        if stream:
            player.play(output)
            found = streamed(player, wire, request(wire, **more))
        else:
            found = answer(player, wire, output, **more)
        return found["choices"][0]["finish_reason"] if wire == CHAT else found.get("stop_reason", found.get("status"))

    assert reasons(CHAT, CALL) == "tool_calls" and reasons(CHAT, TEXT) == "stop"
    assert reasons(MESSAGES, CALL) == "tool_use" and reasons(MESSAGES, TEXT) == "end_turn"
    assert reasons(RESPONSES, CALL) == reasons(RESPONSES, TEXT) == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_b41_a_call_that_was_named_is_a_plain_stop(player: AppServer, stream: bool) -> None:
    pytest.importorskip("llguidance")

    def reason(choice: Any) -> str:
        player.play(CALL)
        body = request(CHAT, tool_choice=choice)
        found = streamed(player, CHAT, body) if stream else player.post(CHAT, body).json()
        (choice,) = found["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        return choice["finish_reason"]

    assert reason("required") == "tool_calls"
    assert reason({"type": "function", "function": {"name": "get_weather"}}) == "stop"
    assert reason({"type": "function", "name": "get_weather"}) == "stop"


@pytest.mark.parametrize(
    ("wire", "choices"),
    [
        (CHAT, [("required", "required"), ({"type": "function", "function": {"name": "now"}}, "now")]),
        (MESSAGES, [({"type": "any"}, "required"), ({"type": "tool", "name": "now"}, "now")]),
        (RESPONSES, [("required", "required"), ({"type": "function", "name": "now"}, "now")]),
    ],
)
def test_a_forced_call_constrains_the_output(player: AppServer, wire: str, choices: list[tuple[Any, str]]) -> None:
    pytest.importorskip("llguidance")
    for choice, name in choices:
        answer(player, wire, NOW, tool_choice=choice)
        source = player.core_stats()["structures"][-1]
        assert "now" in source and ("get_weather" in source) == (name == "required")
    answer(player, wire, TEXT)
    assert player.core_stats()["structures"][-1] is None


@pytest.mark.parametrize(
    ("wire", "more"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}),
        (CHAT, {"guided_json": SCHEMA}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}}),
    ],
)
def test_a_structure_is_asked_for_on_each_wire(player: AppServer, wire: str, more: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    answer(player, wire, '{"city": "Paris"}', **more, tools=None)
    assert json.loads(player.core_stats()["structures"][-1]) == SCHEMA
    called = answer(player, wire, CALL, **more)  # it may call as well, as long as it has not answered
    source = player.core_stats()["structures"][-1]
    assert '"days"' in source and "get_weather" in source and "get_weather" in json.dumps(called)
    bad = {"structured_outputs": {"regex": "("}} if wire == CHAT else None
    if bad is not None:
        response = player.post(wire, request(wire, **bad))
        assert response.status_code == 400, response.text  # vllm#17248


def test_without_parallel_calls_there_is_one(player: AppServer) -> None:
    both = f"{CALL}\n{NOW}"
    chat = answer(player, CHAT, both, parallel_tool_calls=False)
    assert len(chat["choices"][0]["message"]["tool_calls"]) == 1
    message = answer(player, MESSAGES, both, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert len(answer(player, RESPONSES, both, parallel_tool_calls=False)["output"]) == 1


def test_without_tools_a_call_is_text(player: AppServer) -> None:
    for more in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        message = answer(player, CHAT, CALL, **more)["choices"][0]["message"]
        assert message["content"] == CALL and "tool_calls" not in message
    (block,) = answer(player, MESSAGES, CALL, tool_choice={"type": "none"})["content"]
    assert block["text"] == CALL


def test_reasoning_can_be_left_out(player: AppServer) -> None:
    chat = answer(player, CHAT, OUTPUTS["reasoning"], include_reasoning=False)
    assert set(chat["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    (block,) = answer(player, MESSAGES, OUTPUTS["reasoning"], thinking={"type": "disabled"})["content"]
    assert block == {"type": "text", "text": TEXT}


def test_b53_reasoning_that_is_cut_off_is_reasoning(player: AppServer) -> None:
    chat = answer(player, CHAT, f"<think>\n{THOUGHT}", max_tokens=6)
    (choice,) = chat["choices"]
    assert choice["message"]["content"] is None and THOUGHT.startswith(choice["message"]["reasoning_content"])
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("output", OUTPUTS)
def test_openai_s_client_takes_every_chat_answer_and_chunk(player: AppServer, output: str) -> None:
    client = openai.OpenAI(base_url=player.url + "/v1", api_key="none", max_retries=0)
    player.play(OUTPUTS[output], times=3)
    asked: Any = request(CHAT)
    whole = client.chat.completions.create(**asked)
    ChatCompletion.model_validate(whole.to_dict(), strict=True)
    for chunk in client.chat.completions.create(**asked, stream=True):
        ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.choices[0].finish_reason
    message = whole.choices[0].message
    assert (final.message.content or "") == (message.content or "")
    calls = [[call.to_dict()["function"] for call in m.tool_calls or ()] for m in (final.message, message)]
    assert [[(call["name"], call["arguments"]) for call in found] for found in calls] == [
        [(call["name"], call["arguments"]) for call in calls[1]]
    ] * 2


async def test_the_clients_that_do_not_block(player: AppServer) -> None:
    client = openai.AsyncOpenAI(base_url=player.url + "/v1", api_key="none", max_retries=0)
    player.play(OUTPUTS["all"], times=2)
    response: Any = await client.responses.create(**request(RESPONSES))
    kinds = [event.type async for event in await client.responses.create(**request(RESPONSES), stream=True)]
    assert kinds[-1] == "response.completed" and response.output[1].content[0].text == TEXT
    anthropic = pytest.importorskip("anthropic")
    player.play(OUTPUTS["all"])
    other = anthropic.AsyncAnthropic(base_url=player.url, api_key="none", max_retries=0)
    async with other.messages.stream(**request(MESSAGES)) as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]


def test_b42_every_choice_has_its_own_calls(player: AppServer) -> None:
    player.play(f"{CALL}\n{NOW}", times=6)
    whole = player.post(CHAT, request(CHAT, n=3)).json()
    calls = [choice["message"]["tool_calls"] for choice in whole["choices"]]
    assert [len(found) for found in calls] == [2, 2, 2]
    assert len({call["id"] for found in calls for call in found}) == 6
    folded = streamed(player, CHAT, request(CHAT, n=3, stream_options={"include_usage": True}))
    assert comparable(folded) == comparable(whole)


@pytest.mark.parametrize("wire", WIRES)
def test_a_fault_in_the_middle_ends_a_stream_in_the_wire_s_own_form(player: AppServer, wire: str) -> None:
    player.play(TEXT, ends=False, times=2)
    found = events(player.post(wire, request(wire, stream=True)))
    if wire == RESPONSES:
        assert found[-1]["type"] == "response.failed"
        assert found[-1]["response"]["error"] == {"code": "server_error", "message": "the play is over"}
    else:
        assert found[-1]["error"]["message"] == "the play is over"
        assert found[-1].get("type") == ("error" if wire == MESSAGES else None)
    whole = player.post(wire, request(wire))
    assert whole.status_code == 500 and whole.json()["error"]["message"] == "the play is over"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_b66_a_client_that_leaves_is_noticed(player: AppServer, wire: str, stream: bool) -> None:
    before = player.core_stats()["aborts"]
    scripted_core.PLAYS.append([scripted_core.SLOW] * 3000)
    with (
        pytest.raises(httpx.TimeoutException) if not stream else contextlib.nullcontext(),
        httpx.stream(
            "POST", player.url + wire, json=request(wire, stream=stream, max_tokens=2500), timeout=0.2
        ) as response,
    ):
        next(response.iter_bytes())
    deadline = time.monotonic() + 10
    while player.life.active or player.core_stats()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert player.core_stats()["aborts"] == before + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_what_the_server_ends_is_told_in_the_wire_s_own_form(player: AppServer, wire: str, stream: bool) -> None:
    scripted_core.PLAYS.append([scripted_core.SLOW] * 3000)

    def end() -> None:
        while not player.core_stats()["running"]:
            time.sleep(0.01)
        player.loop.call_soon_threadsafe(player.llm.abort_all)

    ender = threading.Thread(target=end)
    ender.start()
    response = player.post(wire, request(wire, stream=stream, max_tokens=2500))
    ender.join()
    if wire == CHAT:
        ends = [choice["finish_reason"] for event in events(response) for choice in event["choices"]] if stream else [
            response.json()["choices"][0]["finish_reason"]
        ]  # fmt: skip
        assert ends[-1] == "abort"
    elif not stream:
        assert response.status_code == 503, response.text
        assert "ended this request" in response.json()["error"]["message"]
    elif wire == MESSAGES:
        assert events(response)[-1]["error"]["type"] == "overloaded_error"
    else:
        last = events(response)[-1]
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize("wire", WIRES)
def test_a_prompt_of_25_thousand_tokens(wire: str) -> None:
    """As agents begin: a long guide and many tools, of which the next turn finds all but its own in the cache."""
    with AppServer(scripted_core.run_player, ServerConfig(**NOTATION), max_model_len=32768) as server:
        guide = "".join(f"Rule {i}: read the file before you change it.\n" for i in range(2000))
        more = {CHAT: {}, MESSAGES: {"system": guide}, RESPONSES: {"instructions": guide}}[wire]
        body = request(wire, guide if wire == CHAT else "Begin.", **more)
        server.play(OUTPUTS["all"], times=2)
        for cached in (0, 16):
            folded = streamed(
                server, wire, body | ({"stream_options": {"include_usage": True}} if wire == CHAT else {})
            )
            usage = folded["usage"]
            if wire == CHAT:
                counts = (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
            elif wire == RESPONSES:
                counts = (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])
            else:
                hit = usage["cache_read_input_tokens"]
                counts = (usage["input_tokens"] + hit, hit)
            assert counts[0] > 25_000 and counts[1] == cached
