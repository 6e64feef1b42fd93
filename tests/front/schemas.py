"""Random JSON schemas of bounded values, and outputs drawn token by token from what a matcher allows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tokenspeed.runtime.grammar.matcher import Matcher

NAMES = ("name", "age", "tags", "a b", 'qu"ote', "é", "x1")


def random_schema(r: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose values are short."""
    simple = ("string", "integer", "number", "boolean", "null", "enum", "const", "pattern")
    kind = r.choice(simple if depth == 0 else (*simple, "object", "object", "array", "anyOf", "ref"))
    match kind:
        case "string":
            return {"type": "string", "minLength": r.randrange(3), "maxLength": 3 + r.randrange(5)}
        case "integer":
            low = r.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + r.randrange(200)}
        case "number":
            return {"type": "number", "minimum": -3, "maximum": 7.5, "multipleOf": 0.25}
        case "enum":
            return {"enum": r.sample(["a", "b c", 1, 2.5, None, True, [1], {"k": "v"}], 1 + r.randrange(4))}
        case "const":
            return {"const": r.choice(["x\n", -1, [None], {"a": [False]}])}
        case "pattern":
            return {"type": "string", "pattern": r.choice([r"^[a-f]{2,4}$", r"^\d{3}-\d{2}$", "^(ab|cd)+x{0,2}$"])}
        case "object":
            names = r.sample(NAMES, 1 + r.randrange(4))
            return {
                "type": "object",
                "properties": {name: random_schema(r, depth - 1) for name in names},
                "required": [name for name in names if r.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            low = r.randrange(2)
            return {
                "type": "array",
                "items": random_schema(r, depth - 1),
                "minItems": low,
                "maxItems": low + 1 + r.randrange(2),
            }
        case "anyOf":
            return {"anyOf": [random_schema(r, depth - 1) for _ in range(2)]}
        case "ref":
            inner = random_schema(r, depth - 1)
            return {"$defs": {"d": inner}, "$ref": "#/$defs/d"} if "$defs" not in str(inner) else inner
    return {"type": kind}


def rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """With all $defs at the root, where $ref looks for them."""
    defs: dict[str, Any] = {}

    def lift(node: Any) -> Any:
        if isinstance(node, list):
            return [lift(part) for part in node]
        if not isinstance(node, dict):
            return node
        if set(node) == {"$defs", "$ref"}:
            name = f"d{len(defs)}"
            defs[name] = None
            defs[name] = lift(node["$defs"]["d"])
            return {"$ref": f"#/$defs/{name}"}
        return {name: lift(part) for name, part in node.items()}

    top = lift(schema)
    return {**top, "$defs": defs} if defs else top


def allowed(m: Matcher) -> list[int]:
    """Ids that may come next."""
    assert m.words is not None
    return np.flatnonzero(np.unpackbits(m.words.view(np.uint8), bitorder="little")).tolist()


def walk(m: Matcher, ends: set[int], r: random.Random, limit: int = 2000) -> list[int]:
    """Tokens drawn at random from what is allowed, until the structure ends; AssertionError where it does not."""
    tokens: list[int] = []
    while not m.done:
        token = r.choice(allowed(m))
        if token in ends:
            return tokens
        tokens.append(token)
        assert len(tokens) < limit, "no end"
        m.consume(token)
        m.fill()
        assert not m.error, m.error
    return tokens
