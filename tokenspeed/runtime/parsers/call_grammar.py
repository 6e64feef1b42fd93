"""What output may be when a call must come: a grammar of the family's own notation, in llguidance's form of Lark.

Invariant: every output of the grammar is read by the family's parser as one call or more of the tools, with arguments
of their schemas, after a thought where the model thinks. Arguments are spaced as chat templates space them, so forced
calls look like those that the model was taught.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar.structure import Structure, json_options
from tokenspeed.runtime.parsers.names import reasoning_parser, tool_parser
from tokenspeed.runtime.parsers.pieces import Tool
from tokenspeed.runtime.parsers.reasoning import THINKING
from tokenspeed.runtime.parsers.values import STRING, types
from tokenspeed.runtime.parsers.writing import JsonCall, PythonCall, TaggedCall, filled, keyed, writing_of

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LOOKS = re.compile(r"\(\?<?[=!]|\\[1-9]")
_DEPTH = 64
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

    def json(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        """An expression of the JSON values of a schema. Without `strict` what the engine cannot check is left out."""
        checked = schema if strict else _checkable(schema)
        options = {**_SPACING, "lenient": not strict}
        return self.add("%json " + json.dumps({**checked, "x-guidance": options}, ensure_ascii=False))


def call_grammar(
    tool: str,
    tools: Sequence[Tool],
    choice: str | None,
    parallel: bool,
    *,
    reasoning: str | None = None,
    prompt: str = "",
    special_tokens: Mapping[str, int] | None = None,
    answer: Structure | None = None,
) -> Structure:
    """The structure of an output that must call, or else must be the `answer` that is asked for.

    `tool`: the tool parser's name. `choice`: the name of the tool to call, once; None for any of them. `parallel`: whether more
    than one call may come. `reasoning` and `prompt` as for `make_parser`: the model may think first. `special_tokens`:
    those of the vocabulary, text -> id. Raises RequestError for an answer of a form that cannot stand beside calls.
    """
    rules = Rules(special_tokens or {})
    writing = writing_of(tool, special_tokens or {})
    named = [item for item in tools if choice is None or item.name == choice]
    call = rules.add(" | ".join(_call(rules, writing.call, item) for item in named))
    many = parallel and choice is None and writing.between is not None
    parts = [rules.text(writing.before), call, rules.text(writing.after)]
    if many:
        between = rules.text(writing.between or "")
        parts[1] = f"{call} ({between} {call})*"
    harmony = tool_parser(tool) == "gpt-oss"
    after, thought = _thought(rules, "gpt_oss" if harmony else reasoning, prompt)
    start = " ".join(part for part in [*thought, *parts] if part)
    if answer is not None:
        if isinstance(writing.call, JsonCall) and (writing.before + writing.call.head).startswith("{"):
            raise RequestError(
                "this model writes calls as bare JSON, which none can tell from an answer in JSON: leave out the tools or "
                "the structure",
                param="tools",
            )
        head = [rules.text("<|channel|>final<|message|>")] if harmony else []
        start += " | " + " ".join([*thought, *head, _answer(rules, answer)])
    lines = [f"start: {start}", *rules.lines, r"SPACE: /[ \n]{1,8}/"]
    return Structure("lark", "\n".join(lines), after=after, param="tools" if answer is None else answer.param)


def _thought(rules: Rules, reasoning: str | None, prompt: str) -> tuple[str, list[str]]:
    """(text that ends a thought which is open already, expressions of what may come before the first call)."""
    if reasoning is None:
        return "", ["SPACE?"]
    reasoning = reasoning_parser(reasoning)
    if reasoning == "gpt_oss":
        thought = f"{rules.text('<|channel|>analysis<|message|>')} {rules.until('<|end|>')}"
        return "", [f"({thought} {rules.text('<|start|>assistant')})?"]
    thinking = THINKING[reasoning]
    if thinking.opened_by(prompt):
        return thinking.close, ["SPACE?"]
    if prompt.rstrip().endswith(thinking.close):
        return "", ["SPACE?"]
    return "", ["SPACE?", f"({rules.text(thinking.open)} {rules.until(thinking.close)} SPACE?)?"]


def _answer(rules: Rules, answer: Structure) -> str:
    """An expression of an answer's structure."""
    if answer.kind == "choice":
        return rules.add(" | ".join(map(_quoted, json.loads(answer.source))))
    if answer.kind not in ("json_schema", "json_object"):
        raise RequestError(
            f"a {answer.kind} cannot stand beside tools that the model may call: leave one of them out, or send a JSON schema",
            param="tools",
        )
    schema: Any = json.loads(answer.source) if answer.kind == "json_schema" else {"type": "object"}
    options = json_options(answer.whitespace)
    return rules.add("%json " + json.dumps({**(schema if isinstance(schema, dict) else {}), "x-guidance": options}))


def _schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, an object. One that names its properties takes no others."""
    schema = tool.parameters or (_FREEFORM if tool.kind == "custom" else {})
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {**closed, **schema, "type": "object"}


def _properties(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameter -> its schema."""
    found = schema.get("properties")
    items = found.items() if isinstance(found, dict) else ()
    return {name: item if isinstance(item, dict) else {} for name, item in items}


def _required(schema: Mapping[str, Any]) -> frozenset[str]:
    found = schema.get("required")
    return frozenset(name for name in found if isinstance(name, str)) if isinstance(found, list) else frozenset()


def _call(rules: Rules, call: JsonCall | TaggedCall | PythonCall, tool: Tool) -> str:
    """An expression of one call of a tool."""
    if isinstance(call, PythonCall):
        return _python_call(rules, tool)
    if isinstance(call, TaggedCall):
        return _tagged_call(rules, call, tool)
    before, *index = [rules.text(filled(part, tool.name, "")) for part in call.head.split("INDEX")]
    numbered = [rules.add("/[0-9]{1,4}/"), *index] if index else []
    return " ".join(
        part
        for part in (before, *numbered, rules.json(_schema(tool), strict=tool.strict), rules.text(call.tail))
        if part
    )


def _tagged_call(rules: Rules, call: TaggedCall, tool: Tool) -> str:
    """Values in the order of the schema."""
    schema = _schema(tool)
    root = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parts = [rules.text(filled(call.head, tool.name, ""))]
    for name, item in _properties(schema).items():
        allowed = types(item, schema) or STRING
        choices = item.get("enum")
        if "string" not in allowed:
            value = f"{rules.json({**root, **item}, strict=tool.strict)} {rules.text(call.value_end)}"
        elif isinstance(choices, list):
            value = f"({' | '.join(rules.text(_bare(choice)) for choice in choices)}) {rules.text(call.value_end)}"
        else:
            value = rules.until(call.value_end)
        optional = "" if name in _required(schema) else "?"
        parts.append(f"({rules.text(keyed(call.key, name, is_string=allowed <= STRING))} {value}){optional}")
    return " ".join([*parts, rules.text(call.tail)])


def _python_call(rules: Rules, tool: Tool) -> str:
    """Keyword arguments, all that are required and then some of the others."""
    schema = _schema(tool)
    root = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    needed, properties = _required(schema), _properties(schema)
    words = {
        name: f"{rules.text(name + '=')} {rules.json({**root, **item}, strict=tool.strict)}"
        for name, item in properties.items()
    }
    first = ' ", " '.join(words[name] for name in words if name in needed)
    rest = " ".join(f'(", " {word})?' for name, word in words.items() if name not in needed)
    if not first and words:  # any one of them may be the first
        chains = [
            f"{word} " + " ".join(f'(", " {w})?' for w in list(words.values())[i + 1 :])
            for i, word in enumerate(words.values())
        ]
        first, rest = f"({' | '.join(chains)})?", ""
    return " ".join(part for part in (rules.text(f"{tool.name}("), first, rest, rules.text(")")) if part)


def _checkable(schema: Any, depth: int = _DEPTH) -> Any:
    """A schema without regular expressions that look around and references to elsewhere, and with less than DEPTH levels.

    A tool that is not strict asks for no promise, and its own check of arguments remains.
    """
    if isinstance(schema, list):
        return [_checkable(item, depth - 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if depth <= 0:
        return {}
    return {
        name: item if name in ("enum", "const") else _checkable(item, depth - 1)
        for name, item in schema.items()
        if not (name == "pattern" and isinstance(item, str) and _LOOKS.search(item))
        and not (name == "$ref" and isinstance(item, str) and not item.startswith("#"))
        and not (name in ("$schema", "$id") and isinstance(item, str))
    }


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
