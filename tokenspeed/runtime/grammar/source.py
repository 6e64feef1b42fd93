"""A structure in the words of llguidance. Invariant: the text admits exactly what the structure says, whitespace between the
parts of JSON values is bounded, and where anything goes so are the digits of numbers, of which a model could print no end.
"""

from __future__ import annotations

import json
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from tokenspeed.runtime.grammar.structure import Structure, json_options, wrong

#: JSON of any shape (RFC 8259); {top} is object or value, {ws} an optional run of whitespace
_ANY_JSON = r"""
%llguidance {}
start: {top}
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" {ws} (pair ("," {ws} pair)*)? "}"
pair: STRING {ws} ":" {ws} value {ws}
array: "[" {ws} (value {ws} ("," {ws} value {ws})*)? "]"
STRING: /"([^"\\\x00-\x1f\x7f]|\\(["\\\/bfnrt]|u([0-9abcefABCEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})))*"/
NUMBER: /-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/
"""


def grammar_of(s: Structure) -> str:
    """The grammar of a structure. Raises RequestError for what llguidance has no words for."""
    match s.kind:
        case "json_object":
            return _lark(_any_json("object", s.whitespace))
        case "json_schema":
            schema = json.loads(s.source)
            if schema in ({}, True):
                return _lark(_any_json("value", s.whitespace))
            options: Any = json_options(s.whitespace)
            return llguidance.LLMatcher.grammar_from_json_schema(s.source, overrides=options)
        case "regex":
            return _lark(f"start: /{llguidance.regex_to_lark(s.source, 'd')}/")  # a digit is one of 0-9
        case "choice":
            return _lark("start: " + " | ".join(json.dumps(c) for c in json.loads(s.source)))
        case "lark":
            return _lark(s.source)
        case "grammar":
            try:
                return _lark(any_to_lark(s.source))
            except GbnfToLarkError as fault:
                raise wrong(f"the grammar cannot be read: {fault}") from None
        case "structural_tag":
            return _tags(json.loads(s.source), s.whitespace)


def _any_json(top: str, whitespace: int) -> str:
    text = _ANY_JSON.replace("{top}", top).replace("{ws}", "WS?" if whitespace else "")
    return text + (rf"WS: /\r?\n[ \t]{{0,{whitespace}}}|[ \t]{{1,{whitespace}}}/" if whitespace else "")


def _lark(text: str) -> str:
    return llguidance.LLMatcher.grammar_from_lark(text)


def _tags(tag: dict[str, Any], whitespace: int) -> str:
    """Free text in which each of some triggers begins a tag, whose content has a schema (SGLang's structural tags)."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise wrong("a structural_tag needs structures and triggers, both lists and not empty")
    tags: list[llguidance.StructTag] = []
    for s in structures:
        if not isinstance(s, dict) or not all(isinstance(s.get(name), str) for name in ("begin", "end")):
            raise wrong("each structure of a structural_tag is an object with begin and end (strings) and a schema")
        begin, schema = s["begin"], s.get("schema", {})
        if not isinstance(schema, dict | bool):
            raise wrong("the schema of a structural_tag's structure must be an object or true")
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            raise wrong(f"no trigger of the structural_tag begins {begin[:80]!r}")
        schema = {**(schema if isinstance(schema, dict) else {}), "x-guidance": json_options(whitespace)}
        tags.append(llguidance.StructTag(trigger=trigger, begin=begin, grammar=schema, end=s["end"]))
    return _lark(llguidance.StructTag.to_grammar(tags, assume_special=False))
