"""Anthropic's content blocks to messages of the chat-template shape.

Nothing of a conversation is dropped but what no other model can read: redacted thinking, the calls of Anthropic's own
server tools, and the billing line that Claude Code writes first, whose ever new figures would spoil every cached prefix.
"""

from __future__ import annotations

import json
from typing import Any

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.server.turn import Message, call_message, joined

_BILLING = "x-anthropic-billing-header:"
_UNREADABLE = ("redacted_thinking", "server_tool_use")


def conversation(system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]) -> list[Message]:
    """All messages, the system's first. Raises RequestError, naming the place of what is wrong."""
    out: list[Message] = []
    texts = _texts("system", system) if system is not None else []
    if texts := [text for text in texts if not text.startswith(_BILLING)]:
        out.append({"role": "system", "content": joined(texts)})
    if not messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    for at, message in enumerate(messages):
        where, role, content = f"messages[{at}]", message.get("role"), message.get("content")
        if role == "assistant":
            out.append(_assistant(where, content))
        elif role == "user":
            out += _user(where, content)
        elif role == "system":
            out.append({"role": "system", "content": joined(_texts(f"{where}.content", content) or [""])})
        else:
            raise RequestError(f"{where}.role must be user, assistant or system", param=f"{where}.role")
    return out


def _user(where: str, content: Any) -> list[Message]:
    """Tool results are messages of their own, in the order in which they stand among the texts."""
    out: list[Message] = []
    texts: list[str] = []
    for place, block in _blocks(f"{where}.content", content):
        if block["type"] != "tool_result":
            texts.append(_text(place, block))
            continue
        if texts:
            out.append({"role": "user", "content": joined(texts)})
            texts = []
        out.append(_tool_result(place, block))
    if texts or not out:
        out.append({"role": "user", "content": joined(texts or [""])})
    return out


def _tool_result(where: str, block: dict[str, Any]) -> Message:
    text = "\n".join(_texts(f"{where}.content", block.get("content") or ""))
    if block.get("is_error") is True and "error" not in text[:64].lower():
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _string(where, block, "tool_use_id"), "content": text}


def _assistant(where: str, content: Any) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in _blocks(f"{where}.content", content):
        kind = block["type"]
        if kind == "thinking":
            thoughts.append(_string(place, block, "thinking"))
        elif kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise RequestError(f"{place}.input must be an object", param=f"{place}.input")
            arguments = json.dumps(given, ensure_ascii=False)
            calls.append(call_message(_string(place, block, "name"), arguments, _string(place, block, "id")))
        elif kind not in _UNREADABLE and not kind.endswith("_tool_result"):
            texts.append(_text(place, block))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(where: str, content: Any) -> list[str]:
    """The texts of a content that can hold nothing else."""
    return [_text(place, block) for place, block in _blocks(where, content)]


def _blocks(where: str, content: Any) -> list[tuple[str, dict[str, Any]]]:
    """(place, block) of each block; a text is one block."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of blocks", param=where)
    found: list[tuple[str, dict[str, Any]]] = []
    for at, block in enumerate(content):
        place = f"{where}[{at}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(f"{place} must be an object with a type", param=place)
        found.append((place, block))
    return found


def _text(where: str, block: dict[str, Any]) -> str:
    """The text of a text block, or of a document that is one."""
    source = block.get("source")
    if block["type"] == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _string(f"{where}.source", source, "data")
    if block["type"] != "text":
        known = block["type"] if block["type"] in ("image", "document") else "such"
        raise RequestError(
            f"{where}.type: {known} blocks are not supported, this model reads text alone",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    return _string(where, block, "text")


def _string(where: str, block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
