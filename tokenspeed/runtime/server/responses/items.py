"""Input items of the Responses API to messages of the chat-template shape.

The items of one assistant turn (reasoning, message, calls) become one message, as templates want it. Items that name
calls of tools which only OpenAI's servers have are skipped; any other unknown item is refused by its place.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.server.turn import Message, call_message, freeform_arguments, joined

Item = dict[str, Any]

_SEAL = "ts1:"  # before reasoning that travels through the client as encrypted_content
_FOREIGN = (
    "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction", "computer_call",
    "computer_call_output", "file_search_call", "image_generation_call", "mcp_approval_request", "mcp_approval_response",
    "mcp_call", "mcp_list_tools", "web_search_call",
)  # fmt: skip
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def as_items(given: str | Sequence[Item]) -> list[Item]:
    """The input as items; a text is one message of the user."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given)


def joined_name(item: Item) -> Any:
    """The name that the model knows a call's tool by: a tool of a namespace has it in its name."""
    name, namespace = item.get("name"), item.get("namespace")
    named = isinstance(name, str) and isinstance(namespace, str) and namespace
    return f"{namespace}__{name}" if named else name


class _Conversation:
    """Messages as they grow; the assistant's last one stays open for more of its turn."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._open: Message | None = None

    def add(self, message: Message) -> None:
        self._open = None
        self.messages.append(message)

    def assistant(self, *closed_by: str) -> Message:
        """The assistant's open message, a new one if it has one of these fields already."""
        if self._open is None or any(self._open.get(name) for name in closed_by):
            self._open = {"role": "assistant", "content": ""}
            self.messages.append(self._open)
        return self._open

    def call(self, name: str, arguments: str, call_id: str) -> None:
        self.assistant().setdefault("tool_calls", []).append(call_message(name, arguments, call_id))


def conversation(instructions: str | None, items: Sequence[Item]) -> list[Message]:
    """All messages, the instructions first. Raises RequestError, naming the place of what is wrong."""
    out = _Conversation()
    if instructions:
        out.add({"role": "system", "content": instructions})
    for at, item in enumerate(items):
        _add(out, f"input[{at}]", item)
    if not out.messages:
        raise RequestError("input is empty: send a text or at least one item", param="input")
    return out.messages


def _add(out: _Conversation, where: str, item: Item) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _message(out, where, item)
    elif kind == "reasoning":
        if thought := _thought(where, item):
            out.assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = thought
    elif kind == "function_call":
        out.call(
            _string(where, {"name": joined_name(item)}, "name"),
            _string(where, item, "arguments"),
            _string(where, item, "call_id"),
        )
    elif kind == "custom_tool_call":
        arguments = freeform_arguments(_string(where, item, "input"))
        out.call(_string(where, {"name": joined_name(item)}, "name"), arguments, _string(where, item, "call_id"))
    elif kind == "local_shell_call":
        action = item.get("action")
        if not isinstance(action, dict):
            raise RequestError(f"{where}.action must be an object", param=f"{where}.action")
        call_id = item.get("call_id") or item.get("id")
        out.call("local_shell", json.dumps(action, ensure_ascii=False), str(call_id or ""))
    elif kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        name = "id" if kind.startswith("local") and "call_id" not in item else "call_id"
        texts = _texts(f"{where}.output", item.get("output"))
        out.add({"role": "tool", "tool_call_id": _string(where, item, name), "content": "\n".join(texts)})
    elif kind not in _FOREIGN:
        raise RequestError(f"{where}.type is no item that this server knows", param=f"{where}.type")


def _message(out: _Conversation, where: str, item: Item) -> None:
    role = item.get("role")
    content = joined(_texts(f"{where}.content", item.get("content")) or [""])
    if role == "assistant":
        out.assistant("content", "tool_calls")["content"] = content
    elif role in ("user", "system", "developer"):
        out.add({"role": role, "content": content})
    else:
        raise RequestError(f"{where}.role must be user, assistant, system or developer", param=f"{where}.role")


def _thought(where: str, item: Item) -> str:
    """What a reasoning item says: its own text, else what this server sealed in it, else its summary."""
    text = "".join(_texts(f"{where}.content", item.get("content") or []))
    return (
        text or unseal(item.get("encrypted_content")) or "".join(_texts(f"{where}.summary", item.get("summary") or []))
    )


def seal(thought: str) -> str:
    """Reasoning as a client that keeps only `encrypted_content` gives it back. It is encoded, not secret."""
    return _SEAL + base64.b64encode(thought.encode()).decode()


def unseal(sealed: Any) -> str:
    """The reasoning in it; "" for what another server sealed."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _texts(where: str, content: Any) -> list[str]:
    """The texts of a content: a string, or a list of parts that hold text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts", param=where)
    texts: list[str] = []
    for at, part in enumerate(content):
        place = f"{where}[{at}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            texts.append(_string(place, part, "refusal"))
        elif kind in _TEXTS:
            texts.append(_string(place, part, "text"))
        else:
            known = kind if kind in ("input_image", "input_file", "input_audio") else "such"
            raise RequestError(
                f"{place}.type: {known} parts are not supported, this model reads text alone",
                param=f"{place}.type",
                code="unsupported_parameter",
            )
    return texts


def _string(where: str, item: Item, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
