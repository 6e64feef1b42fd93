"""One turn of a conversation as every wire format means it: what the model is shown, may call, and how it is sampled.

The converters of the wires (chat, messages, responses) make a `Turn` and nothing else; `run.begin` is its one reader, so
a feature exists for all wires or for none. A Turn that exists is checked as far as can be without the model.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.parsers import Tool
from tokenspeed.runtime.sampling_params import SamplingParams

MAX_TOOLS = 1024
_NAME = re.compile(r"[^\s\x00-\x1f\x7f\"'<>{}\[\]]{1,128}")

Message = dict[str, Any]  # as chat templates take it: role, content, reasoning_content, tool_calls, tool_call_id


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call (auto), must not (none), must (required), or must call the tool `name` (named)."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")


@dataclass(slots=True, kw_only=True)
class Turn:
    """The request. `variables` go to the chat template; reasoning is left out of the answer unless `show_reasoning`."""

    messages: list[Message]
    params: SamplingParams
    tools: list[Tool] = field(default_factory=list)
    choice: ToolChoice = ToolChoice("none")
    parallel: bool = True  # more than one call an answer
    variables: dict[str, Any] = field(default_factory=dict)
    show_reasoning: bool = True
    fit: bool = False  # max_tokens is cut to the room that the prompt leaves, where it asks for more
    priority: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        """Raises RequestError for tools that cannot be told apart and a choice that names none of them."""
        names = [tool.name for tool in self.tools]
        if len(names) > MAX_TOOLS:
            raise RequestError(f"tools has {len(names)} entries, at most {MAX_TOOLS} are taken", param="tools")
        if len(set(names)) < len(names):
            raise RequestError("tools has two tools of one name: rename one", param="tools")
        if self.choice.forced and not names:
            raise RequestError("tool_choice asks for a call but tools is empty: send the tools", param="tool_choice")
        if self.choice.mode == "named" and self.choice.name not in names:
            raise RequestError("tool_choice names a tool that is not in tools", param="tool_choice")
        if self.choice.forced and self.params.structure is not None:
            raise RequestError(
                "a structured output and a tool_choice that asks for a call contradict each other: send one of them",
                param="tool_choice",
            )

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is shown: none where it must not call."""
        return [] if self.choice.mode == "none" else self.tools

    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        shown = [_shown(tool) for tool in self.offered]
        return {**self.variables, "tools": shown} if shown else self.variables


def tool(where: str, name: Any, description: Any, parameters: Any, **more: Any) -> Tool:
    """A tool out of the fields of a wire; `where` is its place in the request. Raises RequestError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.name must be 1 to 128 characters without blanks, quotes and brackets", param=f"{where}.name"
        )
    if not isinstance(description, str | None):
        raise RequestError(f"{where}.description must be a string", param=f"{where}.description")
    if not isinstance(parameters, dict | None):
        raise RequestError(f"{where}: the schema of the parameters must be an object", param=where)
    return Tool(name, parameters or {}, description or "", **more)


def custom_tool(where: str, given: Mapping[str, Any]) -> Tool:
    """A freeform tool (name, description, format): a grammar of its input is told in its description."""
    form = given.get("format")
    description = given.get("description")
    if isinstance(form, dict) and form.get("type") == "grammar":
        nested = form.get("grammar")  # so the chat API has it
        form = nested if isinstance(nested, dict) else form
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            raise RequestError(
                f"{where}.format must have a syntax, lark or regex, and a definition", param=f"{where}.format"
            )
        description = f"{description or ''}\n\nThe input must match this {syntax} grammar:\n{definition}".strip()
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return tool(where, given.get("name"), description, parameters, kind="custom")


def _shown(item: Tool) -> dict[str, Any]:
    """A tool in the one shape that chat templates know."""
    parameters = item.parameters or {"type": "object", "properties": {}}
    function = {"name": item.name, "description": item.description, "parameters": parameters}
    return {"type": "function", "function": function}


def thinking(effort: str | None) -> dict[str, Any]:
    """Template variables for how much the model shall think; the names are those that model families use."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort}


def call_message(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    """A past call as it stands in an assistant message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def freeform_arguments(text: str) -> str:
    """The arguments of a past call of a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """RequestErrors from within name a field as the wire does: `names` maps the engine's names to the wire's."""
    try:
        yield
    except RequestError as fault:
        name = names.get(fault.param or "")
        if name is None:
            raise
        raise RequestError(fault.message.replace(fault.param or "", name, 1), param=name, code=fault.code) from None


def joined(parts: Sequence[str]) -> list[dict[str, Any]] | str:
    """Texts of one message as a content: one text as itself, several as parts, which the template's form joins."""
    return parts[0] if len(parts) == 1 else [{"type": "text", "text": part} for part in parts]
