"""How each family writes calls: the one table from which forced calls get their grammar and past calls their text.

Invariant: what is written here is what the family's parser reads. In the texts NAME stands for the tool's name, QUOTED
for it as a JSON string, INDEX for the number of the call, KEY for a parameter's name, IS_STRING for true or false.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime.parsers.names import tool_parser


@dataclass(frozen=True, slots=True)
class JsonCall:
    """Arguments as one JSON object between two texts."""

    head: str
    tail: str = ""


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """A bare value after each `key`, ended by `value_end`: a string as it is, anything else as JSON."""

    head: str
    key: str
    value_end: str
    tail: str


@dataclass(frozen=True, slots=True)
class PythonCall:
    """`name(key=value, ...)`."""


@dataclass(frozen=True, slots=True)
class Writing:
    """`before` all calls, each as `call` has it, `between` two (None: there is one alone), `after` all."""

    call: JsonCall | TaggedCall | PythonCall
    before: str = ""
    between: str | None = "\n"
    after: str = ""


def writing_of(tool: str, special_tokens: Container[str]) -> Writing:
    """Of a tool parser's name. Mistral's has names where the vocabulary has their mark, else an array."""
    tool = tool_parser(tool)
    if tool == "mistral" and "[ARGS]" in special_tokens:
        return Writing(JsonCall("[TOOL_CALLS]NAME[ARGS]"), between="")
    return _WRITINGS[tool]


def calls_text(tool: str, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
    """The text of calls, (name, arguments) each; arguments that are no object are written as they are."""
    writing = writing_of(tool, ())
    texts = [_text(writing.call, name, arguments, index) for index, (name, arguments) in enumerate(calls)]
    return writing.before + (writing.between or "").join(texts) + writing.after


def tools_text(tool: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """What tells a model of its tools, in the shape of chat completions, and of how to call them."""
    signatures = "\n".join(json.dumps(item.get("function", item), ensure_ascii=False) for item in tools)
    example = calls_text(tool, [("function_name", {"parameter_name": "value"})])
    return (
        "# Tools\n\nYou may call these functions. Their signatures, one a line:\n"
        f"{signatures}\n\nTo call a function, write this and nothing behind it:\n{example}"
    )


def _text(call: JsonCall | TaggedCall | PythonCall, name: str, arguments: Mapping[str, Any] | str, index: int) -> str:
    whole = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if isinstance(call, JsonCall):
        return filled(call.head, name, index) + whole + call.tail
    given = {"arguments": arguments} if isinstance(arguments, str) else arguments
    if isinstance(call, PythonCall):
        return f"{name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in given.items())})"
    values = [
        keyed(call.key, key, is_string=isinstance(value, str))
        + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        + call.value_end
        for key, value in given.items()
    ]
    return filled(call.head, name, index) + "".join(values) + call.tail


def filled(head: str, name: str, index: int | str) -> str:
    """The text before a call's arguments."""
    words = {"INDEX": str(index), "NAME": name, "QUOTED": json.dumps(name, ensure_ascii=False)}
    return _WORD.sub(lambda word: words.get(word[0], word[0]), head)


def keyed(key: str, name: str, *, is_string: bool) -> str:
    """The text before a value."""
    words = {"KEY": name, "IS_STRING": "true" if is_string else "false"}
    return _WORD.sub(lambda word: words.get(word[0], word[0]), key)


_WORD = re.compile("[A-Z_]{3,}")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_GLM = Writing(TaggedCall("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"))
_WRITINGS: dict[str, Writing] = {
    "deepseek_v3": Writing(
        JsonCall("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),
        before=_DEEPSEEK[0],
        after=_DEEPSEEK[1],
    ),
    "deepseek_v31": Writing(
        JsonCall("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), _DEEPSEEK[0], "", _DEEPSEEK[1]
    ),
    "deepseek_v32": Writing(
        TaggedCall(
            '<｜DSML｜invoke name="NAME">\n',
            '<｜DSML｜parameter name="KEY" string="IS_STRING">',
            "</｜DSML｜parameter>\n",
            "</｜DSML｜invoke>\n",
        ),
        "<｜DSML｜function_calls>\n",
        "",
        "</｜DSML｜function_calls>",
    ),
    "glm45": Writing(
        TaggedCall("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>")
    ),
    "gpt-oss": Writing(JsonCall("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"), between=None),
    "hermes": Writing(JsonCall('<tool_call>\n{"name": QUOTED, "arguments": ', "}\n</tool_call>")),
    "kimi_k2": Writing(
        JsonCall("<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "llama3_json": Writing(JsonCall('{"name": QUOTED, "parameters": ', "}"), between="; "),
    "minimax_m2": Writing(
        TaggedCall('<invoke name="NAME">\n', '<parameter name="KEY">', "</parameter>\n", "</invoke>\n"),
        "<minimax:tool_call>\n",
        "",
        "</minimax:tool_call>",
    ),
    "mistral": Writing(JsonCall('{"name": QUOTED, "arguments": ', "}"), "[TOOL_CALLS][", ", ", "]"),
    "pythonic": Writing(PythonCall(), "[", ", ", "]"),
    "qwen3_coder": Writing(
        TaggedCall(
            "<tool_call>\n<function=NAME>\n", "<parameter=KEY>\n", "\n</parameter>\n", "</function>\n</tool_call>"
        )
    ),
}
