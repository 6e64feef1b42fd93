"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and the Turn that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar.fields import from_response_format
from tokenspeed.runtime.parsers import Tool
from tokenspeed.runtime.sampling_params import SamplingParams
from tokenspeed.runtime.server.messages.blocks import conversation
from tokenspeed.runtime.server.protocol import Body
from tokenspeed.runtime.server.turn import ToolChoice, Turn, renamed, thinking, tool

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NAMES = {"stop": "stop_sequences"}  # what the engine calls otherwise than this wire


class CountRequest(Body):
    """POST /v1/messages/count_tokens: what a prompt is made of."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],)}
    IGNORED: ClassVar[tuple[str, ...]] = ("cache_control", "context_management", "metadata", "service_tier")

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def turn(self, params: SamplingParams | None = None) -> Turn:
        """Raises RequestError."""
        self.check_fields()
        tools = [found for at, given in enumerate(self.tools or ()) if (found := _tool(f"tools[{at}]", given))]
        return Turn(
            messages=conversation(self.system, self.messages),
            params=params or SamplingParams(),
            tools=tools,
            choice=self._choice(bool(tools)),
            parallel=(self.tool_choice or {}).get("disable_parallel_tool_use") is not True,
            variables=self._thinking(),
            show_reasoning=(self.thinking or {}).get("type") != "disabled",
            fit=True,
        )

    def _choice(self, offered: bool) -> ToolChoice:
        given = self.tool_choice
        if given is None:
            return ToolChoice("auto" if offered else "none")
        kind, name = given.get("type"), given.get("name")
        if kind == "tool" and isinstance(name, str):
            return ToolChoice("named", name)
        if kind not in _CHOICES:
            raise RequestError(
                "tool_choice.type must be auto, any, none, or tool with a name", param="tool_choice.type"
            )
        return ToolChoice(_CHOICES[kind])  # pyright: ignore[reportArgumentType]

    def _thinking(self) -> dict[str, Any]:
        """A budget is not kept: the model thinks as long as it does, within max_tokens."""
        effort = (self.output_config or {}).get("effort")
        if not isinstance(effort, str | None):
            raise RequestError("output_config.effort must be a string", param="output_config.effort")
        variables = thinking(effort)
        if self.thinking is not None:
            kind = self.thinking.get("type")
            if kind not in ("enabled", "adaptive", "disabled"):
                raise RequestError("thinking.type must be enabled, adaptive or disabled", param="thinking.type")
            variables |= {"enable_thinking": kind != "disabled", "thinking": kind != "disabled"}
        return variables


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def turn(self, params: SamplingParams | None = None) -> Turn:
        """Raises RequestError. A max_tokens beyond the context is cut to it."""
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {self.max_tokens}", param="max_tokens")
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        with renamed(NAMES):
            sampling = SamplingParams(
                max_tokens=self.max_tokens,
                stop=self.stop_sequences or [],
                structure=from_response_format((self.output_config or {}).get("format"), "output_config.format"),
                **{name: value for name, value in given.items() if value is not None},
            )
        return super().turn(sampling)


def _tool(where: str, given: dict[str, Any]) -> Tool | None:
    """A client's tool. None for one that Anthropic's own servers or models define: this model is not shown it."""
    if given.get("type") not in (None, "custom") and "input_schema" not in given:
        return None
    return tool(where, given.get("name"), given.get("description"), given.get("input_schema"))
