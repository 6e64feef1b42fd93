"""The body of POST /v1/responses, and the Turn that it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar.fields import from_response_format
from tokenspeed.runtime.parsers import Tool
from tokenspeed.runtime.sampling_params import SamplingParams
from tokenspeed.runtime.server.chat.request import tool_choice_of, tool_of
from tokenspeed.runtime.server.protocol import ACCEPTED_WITHOUT_EFFECT, Body
from tokenspeed.runtime.server.responses.items import Item, as_items, conversation, joined_name
from tokenspeed.runtime.server.turn import ToolChoice, Turn, renamed, thinking

NAMES = {"max_tokens": "max_output_tokens", "prompt": "input", "messages": "input"}
# Tools that OpenAI's servers run: the model is not shown them, so it never calls one.
BUILT_IN = (
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation", "local_shell",
    "mcp", "shell", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview",
    "web_search_preview_2025_03_11",
)  # fmt: skip


class ResponsesRequest(Body):
    """POST /v1/responses."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    IGNORED: ClassVar[tuple[str, ...]] = (
        *ACCEPTED_WITHOUT_EFFECT,
        "max_tool_calls",
        "prompt_cache_retention",
        "stream_options",
    )

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: float | None = None
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_p: float | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None

    @property
    def items(self) -> list[Item]:
        """The input."""
        return as_items(self.input or ())

    @property
    def sealed(self) -> bool:
        """Whether reasoning items shall bear their text in a form that comes back through any client."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def summarised(self) -> bool:
        """Whether reasoning shall come as its summary (the model's own words stand for one), not as its text."""
        given = self.reasoning or {}
        return (given.get("summary") or given.get("generate_summary")) is not None

    def turn(self, history: Sequence[Item]) -> Turn:
        """`history`: the items of the responses before this one. Raises RequestError."""
        self.check_fields()
        tools = self._tools()
        given = {name: value for name in ("temperature", "top_p") if (value := getattr(self, name)) is not None}
        effort = (self.reasoning or {}).get("effort")
        if not isinstance(effort, str | None):
            raise RequestError("reasoning.effort must be a string", param="reasoning.effort")
        with renamed(NAMES):
            params = SamplingParams(
                max_tokens=self.max_output_tokens,
                structure=from_response_format((self.text or {}).get("format"), "text.format"),
                **given,
            )
        return Turn(
            messages=conversation(self.instructions, [*history, *self.items]),
            params=params,
            tools=tools,
            choice=self._choice(bool(tools)),
            parallel=self.parallel_tool_calls is not False,
            variables=thinking(effort),
        )

    def _choice(self, offered: bool) -> ToolChoice:
        if self.tool_choice is None:
            return ToolChoice("auto" if offered else "none")
        given = self.tool_choice
        choice = tool_choice_of({**given, "name": joined_name(given)} if isinstance(given, dict) else given)
        return ToolChoice("none") if choice.mode == "auto" and not offered else choice

    def _tools(self) -> list[Tool]:
        """The tools that the model is shown; those of a namespace (an MCP server, say) bear its name in theirs."""
        return [
            tool_of(where, {**given, "name": joined_name({**given, "namespace": space})} if space else given)
            for where, given, space in self._given_tools()
            if given.get("type") not in BUILT_IN
        ]

    def namespace_of(self, name: str) -> tuple[str | None, str]:
        """(namespace, name within it) of a tool by the name that the model knows it by."""
        for _, given, space in self._given_tools():
            if space and joined_name({**given, "namespace": space}) == name:
                return space, given["name"]
        return None, name

    def _given_tools(self) -> Iterator[tuple[str, dict[str, Any], str | None]]:
        """(place in the request, tool, its namespace). Raises RequestError."""
        for at, given in enumerate(self.tools or ()):
            where = f"tools[{at}]"
            if given.get("type") != "namespace":
                yield where, given, None
                continue
            space, inner = given.get("name"), given.get("tools")
            if not isinstance(space, str) or not space:
                raise RequestError(f"{where}.name must be the namespace's name", param=f"{where}.name")
            if not isinstance(inner, list) or not all(isinstance(item, dict) for item in inner):
                raise RequestError(f"{where}.tools must be a list of tools", param=f"{where}.tools")
            for i, item in enumerate(inner):
                yield f"{where}.tools[{i}]", item, space
