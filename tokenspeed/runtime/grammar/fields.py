"""The structure that a request's fields ask for: `response_format` of the OpenAI APIs, and `structured_outputs` as vLLM names
it (also an argument of `Engine.generate`). Invariant: what is not understood is a RequestError that names the field, and
never a structure that says less than was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar.structure import WHITESPACE, Structure, text_of

TYPES = ("text", "json_object", "json_schema", "structural_tag", "regex", "grammar")
#: fields of `structured_outputs`, of which one says what; SGLang's names stand beside vLLM's
SOURCES = ("json", "json_schema", "json_object", "regex", "choice", "grammar", "ebnf", "structural_tag")


def from_response_format(given: Any, param: str = "response_format") -> Structure | None:
    """Of `response_format`, or of `text.format` of the responses API, in which the schema stands beside the type."""
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.get("type") not in TYPES:
        raise RequestError(f"{param} must be an object with one of the types {', '.join(TYPES)}", param=param)
    kind = given["type"]
    if kind == "text":
        return None
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        value = inner.get("schema") if isinstance(inner, Mapping) else None
        if value is None:
            raise RequestError(f"{param} of type json_schema needs a schema", param=param)
    elif kind == "structural_tag":
        value = {name: value for name, value in given.items() if name != "type" and value is not None}
    else:
        value = True if kind == "json_object" else given.get(kind, given.get("pattern"))
    return _made(kind, value, WHITESPACE, param)


def from_structured_outputs(given: Any, param: str = "structured_outputs") -> Structure | None:
    """Of an object with one of SOURCES, and `disable_any_whitespace`. None and an object without any ask for nothing."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f"{param} must be an object with one of the fields {', '.join(SOURCES)}", param=param)
    known = (*SOURCES, "disable_any_whitespace")
    for name, value in given.items():
        if name not in known and value not in (None, False):
            raise RequestError(f"{param} has no field {str(name)[:40]!r}: fields are {', '.join(known)}", param=param)
    dense = given.get("disable_any_whitespace") or False
    if not isinstance(dense, bool):
        raise RequestError(f"{param}.disable_any_whitespace must be true or false", param=param)
    said = [name for name in SOURCES if given.get(name) not in (None, False)]
    if len(said) > 1:
        raise RequestError(f"{param} has {' and '.join(said)}: give one of them", param=param)
    return _made(said[0], given[said[0]], 0 if dense else WHITESPACE, f"{param}.{said[0]}") if said else None


def _made(kind: str, value: Any, whitespace: int, param: str) -> Structure:
    """The structure of one field's value; errors name `param`."""
    makers: dict[str, Callable[[], Structure]] = {
        "json": lambda: Structure.schema(value, whitespace=whitespace),
        "choice": lambda: Structure.choice(value),
        "structural_tag": lambda: Structure("structural_tag", text_of(kind, value), whitespace),
        "json_object": lambda: Structure("json_object", whitespace=whitespace),
        "regex": lambda: Structure("regex", value),
        "grammar": lambda: Structure("grammar", value, whitespace),
    }
    makers |= {"json_schema": makers["json"], "ebnf": makers["grammar"]}
    if kind == "json_object" and value is not True:
        raise RequestError(f"{param} must be true or false", param=param)
    try:
        return replace(makers[kind](), param=param)
    except RequestError as fault:
        raise RequestError(fault.message, param=param) from None
