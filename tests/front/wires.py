"""What the tests of the wire formats share: tools, outputs of a model, and streams folded to the whole that they mean."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
from serving import AppServer

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]  # as the Responses API has them
MESSAGES_TOOLS = [
    {"name": tool["name"], "description": tool.get("description", ""), "input_schema": tool["parameters"]}
    for tool in FLAT_TOOLS
]
THOUGHT, TEXT = "Let me see: the city is Paris.", "I look it up — déjà 😀."
ARGUMENTS = '{"city": "Paris \\u00e9 \\"x\\"", "days": 3}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
OUTPUTS = {
    "text": TEXT,
    "nothing": "",
    "reasoning": f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}",
    "reasoning alone": f"<think>\n{THOUGHT}\n</think>",
    "a call": CALL,
    "text and two calls": f"{TEXT}\n{CALL}\n{NOW}",
    "all": f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n{CALL}\n{NOW}",
}


def request(wire: str, /, said: str = "What is the weather in Paris?", **more: Any) -> dict[str, Any]:
    """A request of one user message with the tools."""
    message = [{"role": "user", "content": said}]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": message, "tools": CHAT_TOOLS},
        MESSAGES: {"messages": message, "tools": MESSAGES_TOOLS, "max_tokens": 500},
        RESPONSES: {"input": message, "tools": FLAT_TOOLS},
    }
    return {"model": "smollm2", **bodies[wire], **more}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream: where they are named, the name is the payload's type."""
    found: list[dict[str, Any]] = []
    for block in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines.get("data", "[DONE]") == "[DONE]":
            continue
        payload = json.loads(lines["data"])
        assert lines.get("event", payload.get("type")) == payload.get("type")
        found.append(payload)
    return found


def streamed(server: AppServer, wire: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer that a stream adds up to."""
    response = server.post(wire, {**body, "stream": True})
    assert response.status_code == 200, response.text
    return {CHAT: fold_chat, MESSAGES: fold_messages, RESPONSES: fold_responses}[wire](events(response))


def fold_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """chat.completion out of chunks."""
    whole = {key: value for key, value in chunks[0].items() if key != "choices"} | {"object": "chat.completion"}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert chunk["id"] == whole["id"] and chunk["object"] == "chat.completion.chunk"
        if chunk.get("usage"):
            whole["usage"] = chunk["usage"]
        for part in chunk["choices"]:
            delta = part["delta"]
            choice = choices.setdefault(
                part["index"],
                {"index": part["index"], "message": {"content": None, "refusal": None}, "logprobs": None},
            )
            assert "finish_reason" not in choice, "nothing comes behind the end"
            message = choice["message"]
            if "role" in delta:
                assert delta == {"role": "assistant", "content": ""} and "role" not in message
                message["role"] = "assistant"
                continue
            for name in ("content", "reasoning", "reasoning_content"):
                if name in delta:
                    message[name] = (message.get(name) or "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                kind = "custom" if "custom" in piece else "function"
                inner, text = piece[kind], "input" if kind == "custom" else "arguments"
                if piece["index"] == len(calls):
                    assert set(piece) == {"index", "id", "type", kind} and inner[text] == ""
                    calls.append({"id": piece["id"], "type": piece["type"], kind: dict(inner)})
                else:
                    assert set(piece) == {"index", kind} and set(inner) == {text}
                    calls[piece["index"]][kind][text] += inner[text]
            if part["finish_reason"] is not None:
                choice |= {"finish_reason": part["finish_reason"], "stop_reason": part["stop_reason"]}
    for choice in choices.values():
        if choice["message"]["content"] is None and set(choice["message"]) == {"role", "content", "refusal"}:
            choice["message"]["content"] = ""
    return {**whole, "choices": [choices[index] for index in sorted(choices)]}


def fold_messages(found: list[dict[str, Any]]) -> dict[str, Any]:
    """A message out of events."""
    found = [event for event in found if event["type"] != "ping"]
    assert [found[0]["type"], found[-2]["type"], found[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    message = found[0]["message"]
    open_block, partial = None, ""
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"])
            open_block, partial = event["content_block"], ""
            message["content"].append(open_block)
            continue
        assert open_block is not None and event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            if open_block["type"] == "tool_use" and partial:
                open_block["input"] = json.loads(partial)
            open_block = None
            continue
        (kind, text) = (value for value in event["delta"].values())
        name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(kind)
        if name is None:
            partial += text
        else:
            open_block[name] += text
    assert open_block is None
    return message | found[-2]["delta"] | {"usage": found[-2]["usage"]}


def fold_responses(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The response of the terminal event, after all events before it were found to add up to it."""
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    final = found[-1]["response"]
    assert found[-1]["type"] == f"response.{final['status']}"
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in found[2:-1]:
        kind, at = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert at == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts.append("")
        elif kind == "output_item.done":
            assert at == len(items) - 1 and event["item"] == final["output"][at]
            assert event["item"]["id"] == items[at]["id"]
            items[at] = event["item"]
        else:
            assert at == len(items) - 1 and event["item_id"] == items[at]["id"]
            if kind.endswith(".delta"):
                texts[at] += event["delta"]
            elif "part" in event:
                assert event["part"]["text"] == texts[at]
            else:
                (name,) = {"text", "arguments", "input"} & set(event)
                assert kind.endswith(".done") and event[name] == texts[at]
    assert items == final["output"]
    return final


_NAMES = re.compile(r'"(?:id|call_id|created|created_at|completed_at|item_id|signature)":\s*(?:"[^"]*"|[\d.]+|null)')


def comparable(answer: dict[str, Any]) -> Any:
    """An answer without what differs each time: ids and times; cached tokens."""
    text = _NAMES.sub('"x": 0', json.dumps(answer))
    return json.loads(re.sub(r'"(?:cached_tokens|device|input_tokens|cache_read_input_tokens)": \d+', '"y": 0', text))
