"""Against a second grammar engine, where it is installed (extra `xgrammar`): what one draws the other takes.

The other one may also draw control characters within JSON strings, and bytes that are no UTF-8; ours is right to take neither.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from schemas import random_schema, rooted, walk

from tests.e2e.tiny import BOS, EOS, tiny_tokenizer
from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar import Structure
from tokenspeed.runtime.grammar.compiler import Grammars
from tokenspeed.runtime.tokenizer import Tokenizer

pytest.importorskip("llguidance")
xgrammar = pytest.importorskip("xgrammar")
END = 257


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(), special_tokens={"bos_token": BOS, "eos_token": EOS})


@pytest.fixture(scope="module")
def ours(tiny: Tokenizer) -> Grammars:
    return Grammars(tiny)


@pytest.fixture(scope="module")
def theirs(tiny: Tokenizer) -> Any:
    plain = [b"" if i in tiny.special_ids else raw for i, raw in enumerate(tiny.token_bytes)]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(plain, stop_token_ids=[END]))


REGEXES = ["[a-f]{2,4}", r"\d{3}-\d{2}", "(ab|cd)+x{0,2}", "a?b*(c|de)", r"[^\x00-\x1f]{1,5}"]
GRAMMARS = ['root ::= "x" ("y" | [0-9]+)', 'root ::= e\ne ::= "(" e ")" | [a-c] ("+" e)?']


def takes(theirs: Any, compiled: Any, tokens: list[int]) -> bool:
    m = xgrammar.GrammarMatcher(compiled)
    return all(m.accept_token(t) for t in tokens) and m.accept_token(END)


def drawn(theirs: Any, compiled: Any, r: random.Random) -> list[int] | None:
    """Tokens at random of the other engine; None where it goes on and on."""
    m, tokens = xgrammar.GrammarMatcher(compiled), []
    mask = xgrammar.allocate_token_bitmask(1, 301)
    while len(tokens) < 400:
        m.fill_next_token_bitmask(mask)
        bits = mask.numpy().view("uint32")[0]
        token = r.choice([i for i in range(301) if bits[i // 32] >> (i % 32) & 1])
        if token == END:
            return tokens
        tokens.append(token)
        assert m.accept_token(token)
    return None


def ours_takes(ours: Grammars, structure: Structure, tokens: list[int]) -> bool:
    m = ours.matcher(structure, [END])
    for n, token in enumerate(tokens):
        if m.done:
            return n == len(tokens)
        m.consume(token)
        if m.error:
            return False
        m.fill()
    return m.done or bool(m.words is not None and m.words[END // 32] >> END % 32 & 1)


def valid(tiny: Tokenizer, tokens: list[int]) -> bool:
    try:
        return bool(b"".join(tiny.token_bytes[t] for t in tokens).decode())
    except UnicodeDecodeError:
        return False


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def shared(schema: Any) -> Any:
    """A schema without bounds of numbers with a point, which the other engine reads with six digits at most."""
    if isinstance(schema, list):
        return [shared(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {"type": "number"} if schema.get("type") == "number" else {k: shared(v) for k, v in schema.items()}


def test_schemas(tiny: Tokenizer, ours: Grammars, theirs: Any) -> None:
    both = 0
    for seed in range(200):
        r = random.Random(seed)
        schema = shared(rooted(random_schema(r)))
        structure = Structure.schema(schema, whitespace=0)
        compiled = theirs.compile_json_schema(json.dumps(schema), any_whitespace=False, separators=(",", ":"))
        tokens = walk(ours.matcher(structure, [END]), {END}, r)
        if "\\u" not in tiny.decode(tokens):  # the other one spells a constant in one way alone
            assert takes(theirs, compiled, tokens), (seed, schema, tiny.decode(tokens))
        other = drawn(theirs, compiled, r)
        if other is not None and valid(tiny, other) and is_json(tiny.decode(other)):
            both += 1
            assert ours_takes(ours, structure, other), (seed, schema, tiny.decode(other))
    assert both > 100


@pytest.mark.parametrize("source", [*REGEXES, *GRAMMARS])
def test_regexes_and_grammars(source: str, tiny: Tokenizer, ours: Grammars, theirs: Any) -> None:
    lark = source in GRAMMARS
    structure = Structure("grammar" if lark else "regex", source)
    compiled = theirs.compile_grammar(source) if lark else theirs.compile_regex(source)
    for seed in range(20):
        r = random.Random(seed)
        tokens = walk(ours.matcher(structure, [END]), {END}, r)
        assert takes(theirs, compiled, tokens), tiny.decode(tokens)
        other = drawn(theirs, compiled, r)
        assert other is None or not valid(tiny, other) or ours_takes(ours, structure, other), tiny.decode(other)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "not": {"const": "a"}}, '"a"'),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}}, "[1, 1]"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"'),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "3"),
    ],
)
def test_why_it_holds_no_outputs(schema: Any, text: str, tiny: Tokenizer, ours: Grammars, theirs: Any) -> None:
    """It takes schemas that it follows in part; ours refuses them, or the text."""
    ids = {raw: i for i, raw in enumerate(tiny.token_bytes)}
    tokens = [ids[bytes([byte])] for byte in text.encode()]
    assert takes(theirs, theirs.compile_json_schema(json.dumps(schema), any_whitespace=False), tokens)
    try:
        assert not ours_takes(ours, Structure.schema(schema), tokens)
    except RequestError as fault:
        assert "json_schema" in fault.message
