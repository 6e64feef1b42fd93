"""The body of POST /v1/chat/completions, and the Turn that it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.parsers import Tool
from tokenspeed.runtime.sampling_params import MAX_LOGPROBS, SamplingParams
from tokenspeed.runtime.server.protocol import REFUSED, GenerationRequest
from tokenspeed.runtime.server.turn import (
    Message,
    ToolChoice,
    Turn,
    call_message,
    custom_tool,
    freeform_arguments,
    thinking,
    tool,
)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**REFUSED, "echo": (False,)}

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def turn(self) -> Turn:
        """Raises RequestError."""
        self.check_fields()
        tools = [tool_of(f"tools[{at}]", given) for at, given in enumerate(self.tools or ())]
        return Turn(
            messages=[message_of(message) for message in self.messages],
            params=self.sampling(),
            tools=tools,
            choice=tool_choice_of(self.tool_choice) if self.tool_choice is not None or tools else ToolChoice("none"),
            parallel=self.parallel_tool_calls is not False,
            variables=self.template_variables(),
            show_reasoning=self.include_reasoning is not False,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
        )

    def sampling(self) -> SamplingParams:
        """max_tokens null: the rest of the context."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise RequestError(f"top_logprobs must lie in 0..{MAX_LOGPROBS}, not {top}", param="top_logprobs")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._params(max_tokens=limit, logprobs=top if self.logprobs else None)

    def template_variables(self) -> dict[str, Any]:
        """What goes to the chat template beside the messages."""
        variables = dict(self.chat_template_kwargs or {})
        for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
            if name in variables:
                raise RequestError(f"{name} is a field of the request, not one of chat_template_kwargs", param=name)
        variables = thinking(self.reasoning_effort) | variables
        goes_on = bool(self.continue_final_message)
        begins = not goes_on if self.add_generation_prompt is None else self.add_generation_prompt
        return {**variables, "add_generation_prompt": begins, "continue_final_message": goes_on}


def tool_of(where: str, given: dict[str, Any]) -> Tool:
    """A tool as the chat API has it, or as the Responses API does: its fields beside the type. Raises RequestError."""
    kind = given.get("type", "function")
    if kind not in ("function", "custom"):
        raise RequestError(f"{where}.type must be function or custom", param=f"{where}.type")
    inner = given.get(kind, given)
    if not isinstance(inner, dict):
        raise RequestError(f"{where}.{kind} must be an object", param=f"{where}.{kind}")
    if kind == "custom":
        return custom_tool(where, inner)
    strict = inner.get("strict") is True
    return tool(where, inner.get("name"), inner.get("description"), inner.get("parameters"), strict=strict)


def tool_choice_of(given: str | dict[str, Any] | None) -> ToolChoice:
    """Of the chat and the Responses API: a word, or an object that names a tool in either's shape."""
    if given is None or isinstance(given, str):
        for mode in ("auto", "none", "required"):
            if given == mode or given is None:
                return ToolChoice(mode)
    else:
        inner = given.get(given.get("type", ""), given) if given.get("type") in ("function", "custom") else None
        name = inner.get("name") if isinstance(inner, dict) else None
        if isinstance(name, str):
            return ToolChoice("named", name)
    raise RequestError(
        "tool_choice must be none, auto, required, or an object with a type (function, custom) and a name",
        param="tool_choice",
    )


def message_of(given: Message) -> Message:
    """A message with what clients call by several names under one: reasoning_content, function calls."""
    out = dict(given)
    reasoning = out.pop("reasoning", None)
    if isinstance(reasoning, str) and not out.get("reasoning_content"):
        out["reasoning_content"] = reasoning
    if isinstance(calls := out.get("tool_calls"), list):
        out["tool_calls"] = [_call_of(call) for call in calls]
    return out


def _call_of(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict):
        return call
    return call_message(str(custom.get("name")), freeform_arguments(str(custom.get("input", ""))), str(call.get("id")))
