"""The notations of model families by the names that users pass, and the names by what a model's template shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenspeed.runtime.parsers.harmony import Harmony
from tokenspeed.runtime.parsers.json_calls import Llama3, deepseek, hermes, kimi_k2, mistral
from tokenspeed.runtime.parsers.names import reasoning_parser, tool_parser
from tokenspeed.runtime.parsers.notation import Notation
from tokenspeed.runtime.parsers.output import Emitter, OutputParser
from tokenspeed.runtime.parsers.pieces import Tool
from tokenspeed.runtime.parsers.python_calls import Pythonic
from tokenspeed.runtime.parsers.reader import Reader, Step, markers
from tokenspeed.runtime.parsers.reasoning import THINKING
from tokenspeed.runtime.parsers.tagged_calls import deepseek_v32, glm45, minimax_m2, qwen3_coder

_NOTATIONS: dict[str, Callable[[Sequence[Tool]], Notation]] = {
    "deepseek_v3": deepseek,
    "deepseek_v31": deepseek,
    "deepseek_v32": deepseek_v32,
    "glm45": glm45,
    "gpt-oss": Harmony,
    "hermes": hermes,
    "kimi_k2": kimi_k2,
    "llama3_json": Llama3,
    "minimax_m2": minimax_m2,
    "mistral": mistral,
    "pythonic": Pythonic,
    "qwen3_coder": qwen3_coder,
}
TOOL_PARSERS = tuple(_NOTATIONS)
REASONING_PARSERS = tuple(sorted([*THINKING, "gpt_oss"]))

# What a template writes of a family's notation: (texts in it, tool parser, reasoning parser); the first found counts.
_SIGNS: tuple[tuple[tuple[str, ...], str, str | None], ...] = (
    (("<|channel|>",), "gpt-oss", "gpt_oss"),
    (("<minimax:tool_call>",), "minimax_m2", "minimax"),
    (("<|tool_calls_section_begin|>",), "kimi_k2", "kimi_k2"),
    (("DSML",), "deepseek_v32", "deepseek_r1"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3", "deepseek_r1"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31", "deepseek_r1"),
    (("<arg_key>",), "glm45", "glm45"),
    (("<function=",), "qwen3_coder", "qwen3"),
    (("[TOOL_CALLS]",), "mistral", "mistral"),
    (("<tool_call>",), "hermes", "qwen3"),
    (("<|python_start|>",), "pythonic", None),
    (("<|python_tag|>",), "llama3_json", None),
    (('"parameters": dictionary of argument name',), "llama3_json", None),
    (("named SmolLM",), "hermes", None),  # its template writes no calls, and its model card says how it was taught them
)
# Of a model whose template shows none of them, by the beginning of its architecture.
_ARCHITECTURES: tuple[tuple[str, str | None, str | None], ...] = (
    ("GptOss", "gpt-oss", "gpt_oss"),
    ("MiniMaxM2", "minimax_m2", "minimax"),
    ("Kimi", "kimi_k2", "kimi_k2"),
    ("DeepseekV32", "deepseek_v32", "deepseek_r1"),
    ("DeepseekV3", "deepseek_v31", "deepseek_r1"),
    ("Glm4Moe", "glm45", "glm45"),
    ("Mistral", "mistral", "mistral"),
    ("Llama4", "pythonic", None),
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

    `tool` and `reasoning` are names of TOOL_PARSERS and REASONING_PARSERS, or others of names.py, None for none. Without
    `tools` calls stay content. `prompt` is the rendered prompt: its end tells whether the model is already thinking. `forced` says that
    a call must come (tool_choice required or named), so its notation also ends reasoning.
    """
    tool, reasoning = tool and tool_parser(tool), reasoning and reasoning_parser(reasoning)
    notation = _NOTATIONS[tool](tools) if tool and tools else None
    if reasoning == "gpt_oss" or (tool and _NOTATIONS[tool] is Harmony):
        channels = Harmony(tools)
        return OutputParser(channels.read, Emitter(trims_content=False, exact=True), Harmony.special_tokens)
    thinking = THINKING[reasoning] if reasoning else None
    if notation is None and thinking is None:
        return OutputParser()
    special = (thinking.special_tokens if thinking else frozenset()) | (
        notation.special_tokens if notation else frozenset()
    )
    opened = thinking is not None and thinking.opened_by(prompt)
    ends = notation.opens if notation and thinking and (thinking.ends_at_call or forced) else ()

    def grammar(reader: Reader, emitter: Emitter) -> Step[None]:
        if thinking is not None:
            yield from thinking.read(reader, emitter, opened=opened, calls=ends)
        yield from notation.read(reader, emitter) if notation else _content(reader, emitter)

    return OutputParser(grammar, Emitter(trims_content=notation is not None), special)


def _content(reader: Reader, emitter: Emitter) -> Step[None]:
    """Content to the end of the output."""
    yield from reader.until(markers(), emitter.content)


def families(architecture: str, template_source: str) -> tuple[str | None, str | None]:
    """(tool parser, reasoning parser) of a model, by its config's architecture and its chat template's text.

    The template counts, since it says what the model was taught to write; where it shows no calls, the architecture.
    Of thinking the architecture tells only where there is no template.
    """
    thinks = next((name for sign, name in _THINKING_SIGNS if sign in template_source), None)
    for signs, tool, reasoning in _SIGNS:
        if all(sign in template_source for sign in signs):
            keeps = reasoning == "gpt_oss" or (reasoning and thinks and THINKING[reasoning].open in template_source)
            return tool, reasoning if keeps else thinks
    for name, tool, reasoning in _ARCHITECTURES:
        if architecture.startswith(name):
            return tool, thinks if template_source else reasoning
    return None, thinks


# Not deepseek_r1: of a model that may not think at all nothing is thought before it says so.
_THINKING_SIGNS = (("◁think▷", "kimi"), ("[THINK]", "mistral"), ("<think>", "qwen3"), ("</think>", "qwen3"))
