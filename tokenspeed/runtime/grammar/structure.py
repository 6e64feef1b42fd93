"""What a request's output must look like. Invariant: a `Structure` that exists is well formed as far as can be told without
a grammar engine: its source parses as what it is said to be, and lies within the limits of size and depth.

Standard library only: it travels from the front to the engine core as part of a request's parameters. Whether a grammar
engine takes it is found by the front too (compiler.py), before the core sees the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tokenspeed.runtime.errors import RequestError

Kind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "lark", "structural_tag"]

MAX_SOURCE = 1 << 18  # bytes of a source
MAX_DEPTH = 64  # of nested objects and arrays in a schema
MAX_CHOICES = 4096
MAX_WHITESPACE = 1024
WHITESPACE = 24  # blanks in a row between two parts of a JSON value, behind a line's end: an indent that people write
PARAM = "structured_outputs"  # what errors name


@dataclass(frozen=True, slots=True)
class Structure:
    """An output's form. `kind` says what `source` is:

    json_schema: a JSON schema; json_object: nothing (any JSON object); regex: a regular expression that the whole output
    matches; choice: a JSON list of strings, one of which the output is; grammar: a Lark or GBNF grammar; lark: a grammar in
    the engine's own form of Lark, as tool parsers write it; structural_tag: a JSON object of tags with schemas (SGLang).

    `whitespace`: between two parts of a JSON value stand a line's end at most and so many blanks (0: nothing at all). `after` is
    a text that ends what comes before the structure, such as the end of reasoning: the output is free until it has appeared.
    `param` is the field of the request that asked for it: what errors name.
    """

    kind: Kind
    source: str = ""
    whitespace: int = WHITESPACE
    after: str = ""
    param: str = field(default=PARAM, compare=False)

    def __post_init__(self) -> None:
        """Raises RequestError for what no grammar engine need look at."""
        if self.kind not in get_args(Kind):
            raise wrong(f"there is no structure of kind {self.kind!r}: kinds are {', '.join(get_args(Kind))}")
        if not isinstance(self.source, str) or not isinstance(self.after, str):
            raise wrong("a structure's source and the text it comes after must be strings")
        if type(self.whitespace) is not int or not 0 <= self.whitespace <= MAX_WHITESPACE:
            raise wrong(f"a structure's whitespace must be an integer in 0..{MAX_WHITESPACE}")
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError:
            raise wrong(f"the {self.kind} is not valid Unicode (it holds a lone surrogate)") from None
        if size > MAX_SOURCE:
            raise wrong(f"the {self.kind} has {size} bytes: at most {MAX_SOURCE} are taken")
        if self.kind in ("regex", "grammar", "lark") and not self.source:
            raise wrong(f"the {self.kind} is empty: leave it out to let the output be free")
        if self.kind == "json_schema":
            check_schema(_parsed(self.kind, self.source))
        elif self.kind == "structural_tag":
            tag = _parsed(self.kind, self.source)
            if not isinstance(tag, dict):
                raise wrong("the structural_tag must be a JSON object")
            _check_depth(tag)
        elif self.kind == "choice":
            _check_choices(_parsed(self.kind, self.source))
        elif self.kind == "json_object" and self.source:
            raise wrong("a json_object has no source: give a json_schema to say more")

    # ---- from what requests carry ----

    @classmethod
    def schema(cls, schema: Mapping[str, Any] | str | bool, **fields: Any) -> Structure:
        """Of a JSON schema: a mapping, true (anything), or its text."""
        return cls("json_schema", text_of("json_schema", schema), **fields)

    @classmethod
    def choice(cls, choices: Sequence[str], **fields: Any) -> Structure:
        """One of some strings."""
        _check_choices(choices)
        return cls("choice", text_of("choice", list(choices)), **fields)


def json_rule(schema: Mapping[str, Any] | bool, whitespace: int = WHITESPACE) -> str:
    """What stands in a `lark` structure for a value of a JSON schema, with bounded whitespace."""
    body = schema if isinstance(schema, Mapping) else {}
    return "%json " + text_of("json_schema", {**body, "x-guidance": json_options(whitespace)})


def json_options(whitespace: int) -> dict[str, Any]:
    """What llguidance is told of whitespace in JSON, beside a schema."""
    if not whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": rf"(\r?\n)?[ \t]{{0,{whitespace}}}"}


def check_schema(schema: Any) -> None:
    """RequestError for what is no JSON schema at the top or nested too deep; the rest is the grammar engine's to say."""
    if not isinstance(schema, dict | bool):
        raise wrong("a JSON schema must be an object, or true for any value")
    if schema is False:
        raise wrong("the JSON schema false admits no value: leave it out, or use true for any")
    _check_depth(schema)


def wrong(message: str) -> RequestError:
    return RequestError(message, param=PARAM)


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, list | tuple) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise wrong("choice must be a list of strings, at least one and none empty")
    if len(choices) > MAX_CHOICES:
        raise wrong(f"choice has {len(choices)} strings: at most {MAX_CHOICES} are taken")


def _check_depth(value: Any) -> None:
    """Without recursion: what is checked may be nested deeper than the interpreter goes."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise wrong(f"the schema is nested deeper than {MAX_DEPTH} levels: define parts under $defs and refer to them")


def _inside(value: Any) -> Iterator[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (part for part in parts if isinstance(part, dict | list))


def _parsed(kind: str, source: str) -> Any:
    try:
        return json.loads(source)
    except RecursionError:
        raise wrong(f"the {kind} is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as fault:
        raise wrong(f"the {kind} is not valid JSON: {fault}") from None


def text_of(kind: str, value: Any) -> str:
    """The canonical text of what a caller gave: a string as it is, all else as JSON. Raises RequestError."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise wrong(f"the {kind} is nested deeper than {MAX_DEPTH} levels") from None
    except (TypeError, ValueError) as fault:
        raise wrong(f"the {kind} cannot be written as JSON: {fault}") from None
