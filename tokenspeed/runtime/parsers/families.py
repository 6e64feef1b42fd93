"""The notations of model families by the names that users pass."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.runtime.parsers.output import OutputParser
from tokenspeed.runtime.parsers.pieces import Tool

TOOL_PARSERS: tuple[str, ...] = (
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "glm45",
    "glm47",
    "gpt-oss",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "minimax_m2",
    "mistral",
    "openai",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
)
REASONING_PARSERS: tuple[str, ...] = (
    "deepseek_r1",
    "glm45",
    "gpt_oss",
    "kimi",
    "kimi_k2",
    "minimax",
    "mistral",
    "qwen3",
)


def make_parser(
    tool: str | None,
    reasoning: str | None,
    *,
    tools: Sequence[Tool] = (),
    prompt: str = "",
    forced: bool = False,
) -> OutputParser:
    """The parser of one choice.

    `tool` and `reasoning` are names of TOOL_PARSERS and REASONING_PARSERS, None for none. Without `tools` calls stay
    content. `prompt` is the rendered prompt: its end tells whether the model is already thinking. `forced` says that
    a call must come (tool_choice required or named), so its notation also ends reasoning.
    """
    return OutputParser()


def families(architecture: str, template_source: str) -> tuple[str | None, str | None]:
    """(tool parser, reasoning parser) of a model, by its config's architecture and its chat template's text."""
    return None, None
