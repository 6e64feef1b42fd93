"""What output may be when a call must come: a grammar of the family's own notation, in llguidance's form of Lark.

Invariant: every output of the grammar is read by the family's parser as one call or more of the tools, with arguments
of their schemas, after a thought where the model thinks. Arguments are spaced as chat templates space them, so forced
calls look like those that the model was taught.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime.grammar.structure import Structure
from tokenspeed.runtime.parsers.pieces import Tool
from tokenspeed.runtime.parsers.reasoning import THINKING
from tokenspeed.runtime.parsers.values import STRING, types

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREEFORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Rules:
    """The rules of one grammar. Special tokens within a literal are written by their id, as the engine wants them."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = dict(special_tokens)
        names = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self.lines: list[str] = []

    def has(self, token: str) -> bool:
        return token in self._special

    def add(self, body: str, attribute: str = "") -> str:
        """A rule of this body; its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attribute}: {body}")
        return name

    def text(self, literal: str) -> str:
        """An expression of this text."""
        parts = self._split.split(literal) if self._split else [literal]
        words = [f"<[{self._special[part]}]>" if self.has(part) else _quoted(part) for part in parts if part]
        return " ".join(words)

    def until(self, end: str) -> str:
        """An expression of any text up to and with `end`."""
        special = self._split and self._split.match(end)
        if special:
            return f"{self.add('/(?s:.*)/')} {self.text(end)}"
        return self.add("/(?s:.*)/", f"[suffix={_quoted(end)}]")

    def json(self, schema: Mapping[str, Any]) -> str:
        """An expression of the JSON values of a schema."""
        return self.add("%json " + json.dumps({**schema, "x-guidance": _SPACING}, ensure_ascii=False))


Call = Callable[[Rules, Tool], str]  # an expression of one call of a tool


@dataclass(frozen=True, slots=True)
class _Calls:
    """How a family writes calls: `before` all, each as `call` has it, `between` two, `after` all."""

    call: Call
    before: str = ""
    between: str | None = "\n"  # None: one call an answer
    after: str = ""


def call_grammar(
    tool: str,
    tools: Sequence[Tool],
    choice: str,
    parallel: bool,
    *,
    reasoning: str | None = None,
    prompt: str = "",
    special_tokens: Mapping[str, int] | None = None,
) -> Structure:
    """The structure of an output that must call.

    `tool`: the tool parser's name. `choice`: "required", or the name of the tool to call, once. `parallel`: whether more
    than one call may come. `reasoning` and `prompt` as for `make_parser`: the model may think first. `special_tokens`:
    those of the vocabulary, text -> id.
    """
    rules = Rules(special_tokens or {})
    family = _mistral(rules) if tool == "mistral" else _FAMILIES[tool]
    named = [item for item in tools if item.name == choice] if choice != "required" else list(tools)
    call = rules.add(" | ".join(family.call(rules, item) for item in named))
    many = parallel and choice == "required" and family.between is not None
    parts = [rules.text(family.before), call, rules.text(family.after)]
    if many:
        between = rules.text(family.between or "")
        parts[1] = f"{call} ({between} {call})*"
    after, thought = _thought(rules, "gpt_oss" if family is _HARMONY else reasoning, prompt)
    start = " ".join(part for part in [*thought, *parts] if part)
    return Structure("lark", "\n".join([f"start: {start}", *rules.lines, r"SPACE: /[ \n]{1,8}/"]), after=after)


def _thought(rules: Rules, reasoning: str | None, prompt: str) -> tuple[str, list[str]]:
    """(text that ends a thought which is open already, expressions of what may come before the first call)."""
    if reasoning is None:
        return "", ["SPACE?"]
    if reasoning == "gpt_oss":
        thought = f"{rules.text('<|channel|>analysis<|message|>')} {rules.until('<|end|>')}"
        return "", [f"({thought} {rules.text('<|start|>assistant')})?"]
    thinking = THINKING[reasoning]
    if thinking.opened_by(prompt):
        return thinking.close, ["SPACE?"]
    if prompt.rstrip().endswith(thinking.close):
        return "", ["SPACE?"]
    return "", ["SPACE?", f"({rules.text(thinking.open)} {rules.until(thinking.close)} SPACE?)?"]


def _schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, an object. One that names its properties takes no others."""
    schema = tool.parameters or (_FREEFORM if tool.kind == "custom" else {})
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {"type": "object", **closed, **schema}


def _json_call(head: str, tail: str) -> Call:
    """A call whose arguments are a JSON object between two texts; NAME and QUOTED stand for the tool's name."""

    def call(rules: Rules, tool: Tool) -> str:
        begin = head.replace("QUOTED", json.dumps(tool.name, ensure_ascii=False)).replace("NAME", tool.name)
        return f"{rules.text(begin)} {rules.json(_schema(tool))} {rules.text(tail)}".rstrip()

    return call


def _kimi_call(rules: Rules, tool: Tool) -> str:
    begin = rules.text(f"<|tool_call_begin|>functions.{tool.name}:")
    arguments = f"{rules.text('<|tool_call_argument_begin|>')} {rules.json(_schema(tool))}"
    return f"{begin} {rules.add('/[0-9]{1,4}/')} {arguments} {rules.text('<|tool_call_end|>')}"


def _tagged_call(head: str, key: str, value_end: str, tail: str) -> Call:
    """A call whose values are bare text between tags, in the order of the schema; KEY stands for a parameter's name."""

    def call(rules: Rules, tool: Tool) -> str:
        schema = _schema(tool)
        root = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        parts = [rules.text(head.replace("NAME", tool.name))]
        for name, item in (schema.get("properties") or {}).items():
            item = item if isinstance(item, dict) else {}
            allowed = types(item, schema) or STRING
            begin = key.replace("KEY", name)
            begin = begin.replace("IS_STRING", "true" if allowed <= STRING else "false")
            if "string" in allowed and not isinstance(item.get("enum"), list):
                value = rules.until(value_end)
            elif "string" in allowed:
                value = f"({' | '.join(rules.text(_bare(choice)) for choice in item['enum'])}) {rules.text(value_end)}"
            else:
                value = f"{rules.json({**root, **item})} {rules.text(value_end)}"
            optional = "" if name in (schema.get("required") or ()) else "?"
            parts.append(f"({rules.text(begin)} {value}){optional}")
        return " ".join([*parts, rules.text(tail)])

    return call


def _python_call(rules: Rules, tool: Tool) -> str:
    """Keyword arguments, all that are required and then some of the others."""
    schema = _schema(tool)
    root = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    needed = schema.get("required") or ()
    properties = {
        name: item if isinstance(item, dict) else {} for name, item in (schema.get("properties") or {}).items()
    }
    words = {name: f"{rules.text(name + '=')} {rules.json({**root, **item})}" for name, item in properties.items()}
    first = ' ", " '.join(words[name] for name in words if name in needed)
    rest = " ".join(f'(", " {word})?' for name, word in words.items() if name not in needed)
    if not first and words:  # any one of them may be the first
        chains = [
            f"{word} " + " ".join(f'(", " {w})?' for w in list(words.values())[i + 1 :])
            for i, word in enumerate(words.values())
        ]
        first, rest = f"({' | '.join(chains)})?", ""
    return " ".join(part for part in (rules.text(f"{tool.name}("), first, rest, rules.text(")")) if part)


def _mistral(rules: Rules) -> _Calls:
    """The notation with names where the vocabulary has its mark, else the array."""
    if rules.has("[ARGS]"):
        return _Calls(_json_call("[TOOL_CALLS]NAME[ARGS]", ""), between="")
    return _Calls(_json_call('{"name": QUOTED, "arguments": ', "}"), "[TOOL_CALLS][", ", ", "]")


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_GLM = _tagged_call("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>")
_QWEN3_CODER = _Calls(
    _tagged_call("<tool_call>\n<function=NAME>\n", "<parameter=KEY>\n", "\n</parameter>\n", "</function>\n</tool_call>")
)
_HARMONY = _Calls(_json_call("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""), between=None)
_FAMILIES: dict[str, _Calls] = {
    "deepseek_v3": _Calls(
        _json_call("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),
        _SECTION[0],
        "\n",
        _SECTION[1],
    ),
    "deepseek_v31": _Calls(
        _json_call("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), _SECTION[0], "", _SECTION[1]
    ),
    "deepseek_v32": _Calls(
        _tagged_call(
            '<｜DSML｜invoke name="NAME">\n',
            '<｜DSML｜parameter name="KEY" string="IS_STRING">',
            "</｜DSML｜parameter>\n",
            "</｜DSML｜invoke>\n",
        ),
        "<｜DSML｜function_calls>\n",
        "",
        "</｜DSML｜function_calls>",
    ),
    "glm45": _Calls(_GLM),
    "glm47": _Calls(_GLM),
    "gpt-oss": _HARMONY,
    "hermes": _Calls(_json_call('<tool_call>\n{"name": QUOTED, "arguments": ', "}\n</tool_call>")),
    "kimi_k2": _Calls(_kimi_call, "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "llama3_json": _Calls(_json_call('{"name": QUOTED, "parameters": ', "}"), between="; "),
    "minimax_m2": _Calls(
        _tagged_call('<invoke name="NAME">\n', '<parameter name="KEY">', "</parameter>\n", "</invoke>\n"),
        "<minimax:tool_call>\n",
        "",
        "</minimax:tool_call>",
    ),
    "openai": _HARMONY,
    "pythonic": _Calls(_python_call, "[", ", ", "]"),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
}
