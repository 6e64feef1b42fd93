"""What a value that is written as bare text is in JSON, by the tool's schema.

Invariant: the result is always valid JSON. A string stays the string it is; anything else counts only when it parses
and the schema allows it, else the text is a string.
"""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

STRING = frozenset({"string"})
ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_WORDS = {  # what schemas that are not JSON schema call their types
    "str": "string", "text": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean",
    "list": "array", "dict": "object",
}  # fmt: skip
_REF_DEPTH = 8
_PARTS = 200  # parts of a schema that are looked at for one parameter
_LITERAL_LIMIT = 1 << 20  # characters that are read as a Python literal
_NAMES = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def property_types(schema: Any) -> dict[str, frozenset[str]]:
    """Parameter -> JSON types that an object schema allows it; STRING where it says nothing."""
    properties = _resolve(schema, schema).get("properties")
    if not isinstance(properties, dict):
        return {}
    return {str(name): types(item, schema) or STRING for name, item in properties.items()}


def types(schema: Any, root: Any, seen: set[int] | None = None) -> frozenset[str]:
    """The JSON types that a schema allows; none where it does not say.

    `root` is what its references point into; `seen` are the parts that were looked at, which may point in a circle.
    """
    schema, seen = _resolve(schema, root), seen or set()
    if not schema or id(schema) in seen or len(seen) == _PARTS:
        return frozenset()
    seen.add(id(schema))
    found: set[str] = set()
    named = schema.get("type")
    found.update(
        _WORDS.get(name, name) for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)
    )
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if not found:
        found.update(_type(value) for value in [*values, *([schema["const"]] if "const" in schema else [])])
    if not found:
        for word in ("anyOf", "oneOf", "allOf"):
            for item in schema[word] if isinstance(schema.get(word), list) else []:
                found |= types(item, root, seen)
    if not found:
        found.update(kind for kind, word in (("object", "properties"), ("array", "items")) if word in schema)
    if found and schema.get("nullable") is True:
        found.add("null")
    return frozenset(found)


def _resolve(schema: Any, root: Any) -> dict[str, Any]:
    """`schema` behind its local references, {} for what is none."""
    for _ in range(_REF_DEPTH):
        if not isinstance(schema, dict) or not isinstance(path := schema.get("$ref"), str):
            return schema if isinstance(schema, dict) else {}
        if not path.startswith("#"):
            return {}
        schema = root
        for part in path[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, dict) else None
    return {}


def to_json(text: str, allowed: frozenset[str]) -> str:
    """JSON of the value that `text` writes, of one of the types `allowed`."""
    if not allowed <= STRING:
        bare = text.strip()
        try:
            value = _NAMES[bare] if bare in _NAMES else json.loads(bare, parse_constant=_refuse)
            if _fits(value, allowed):
                return json.dumps(value) if bare in _NAMES else bare
        except (ValueError, RecursionError):
            pass
        if not isinstance(value := python_value(bare), str | None) and _fits(value, allowed):
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def python_json(text: str) -> str:
    """JSON of the Python literal that `text` is; of any other text, as a string."""
    value = python_value(text)
    return json.dumps(text if value is None and text not in _NAMES else value, ensure_ascii=False)


def python_value(text: str) -> Any:
    """The JSON value that a Python literal stands for; None for what is none, or is not to be told from it."""
    if len(text) > _LITERAL_LIMIT:
        return None
    try:
        with warnings.catch_warnings():  # of escapes that Python will not take one day
            warnings.simplefilter("ignore")
            return _plain(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _plain(node: ast.expr) -> Any:
    """The value of a literal of JSON's types. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=str() as value):
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float):
            json.dumps(value, allow_nan=False)
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_plain(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _plain(value) for key, value in zip(keys, values)}
        case _:
            raise ValueError


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _plain(node)
    if not isinstance(key, str):
        raise ValueError
    return key


def _fits(value: Any, allowed: frozenset[str]) -> bool:
    kind = _type(value)
    return kind != "string" and (
        kind in allowed
        or (kind == "integer" and "number" in allowed)
        or (kind == "number" and "integer" in allowed and value.is_integer())
    )


def _type(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "string")


def _refuse(name: str) -> None:
    raise ValueError(name)
