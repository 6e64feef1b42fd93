"""Grammars and matchers, without an engine: masks are exact, outputs are valid, and what cannot be followed is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from typing import Any

import numpy as np
import pytest
from schemas import allowed, random_schema, rooted, walk

from tests.e2e.tiny import BOS, EOS, tiny_tokenizer
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar import Structure
from tokenspeed.runtime.grammar.fields import from_response_format
from tokenspeed.runtime.grammar.structure import WHITESPACE, json_rule
from tokenspeed.runtime.messages import CoreParams, Submit, packed
from tokenspeed.runtime.tokenizer import Tokenizer, load_tokenizer

pytest.importorskip("llguidance")
from tokenspeed.runtime.grammar import front
from tokenspeed.runtime.grammar.compiler import Grammars
from tokenspeed.runtime.grammar.core import CoreGrammars
from tokenspeed.runtime.grammar.matcher import Matcher, fill_all

END = 257  # the tiny tokenizer's EOS


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(), special_tokens={"bos_token": BOS, "eos_token": EOS})


@pytest.fixture(scope="module")
def grammars(tiny: Tokenizer) -> Grammars:
    return Grammars(tiny)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """A vocabulary of words: the embedded model's."""
    return load_tokenizer(EngineConfig("smollm2")) or pytest.fail("no tokenizer")


@pytest.fixture(scope="module")
def wordy(words: Tokenizer) -> Grammars:
    return Grammars(words)


def fed(g: Grammars, structure: Structure, text: bytes) -> Matcher:
    """A matcher that has seen a text, byte by byte (tiny vocabulary)."""
    m = g.matcher(structure, [END])
    for byte in text:
        assert m.words is None or byte_id(byte) in allowed(m), (text, chr(byte))
        m.consume(byte_id(byte))
        m.fill()
    return m


def byte_id(byte: int) -> int:
    return _BYTES[bytes([byte])]


_BYTES = {raw: i for i, raw in enumerate(Tokenizer(tiny_tokenizer()).token_bytes) if len(raw) == 1}


def takes(g: Grammars, structure: Structure, text: str) -> int:
    """How many bytes of a text the structure lets pass."""
    m = g.matcher(structure, [END])
    for n, byte in enumerate(text.encode()):
        if m.done or byte_id(byte) not in allowed(m):
            return n
        m.consume(byte_id(byte))
        m.fill()
    return len(text.encode())


def test_masks_are_exact(words: Tokenizer, wordy: Grammars) -> None:
    """Against every token of a real vocabulary: those that go on towards one of the choices, and the end where one is whole.
    Where all choices left go on with the same byte, the tokens that spell it in the tokenizer's own way may be all."""
    choices = ["The quick", "The quickest", " thé", "12", "1", "<|im_end|>x", "naïve 世界"]
    (end,) = words.eos_ids
    reached = {""}
    for choice in choices:
        m, rest, at = wordy.matcher(Structure.choice(choices), [end]), choice.encode(), b""
        while not m.done:
            wanted = {
                i
                for i, raw in enumerate(words.token_bytes)
                if raw and i not in words.special_ids and any(c.encode().startswith(at + raw) for c in choices)
            }
            got, forced = set(allowed(m)) - {end}, len({words.token_bytes[i][0] for i in wanted}) == 1
            assert got == wanted or (forced and got and got < wanted)
            assert (end in allowed(m)) == (at.decode(errors="replace") in choices)
            if at == choice.encode():
                break
            token = max(
                (i for i in wanted if rest.startswith(words.token_bytes[i])), key=lambda i: words.token_bytes[i]
            )
            at, rest = at + words.token_bytes[token], rest[len(words.token_bytes[token]) :]
            m.consume(token)
            m.fill()
        reached.add(at.decode())
    assert reached >= set(choices) - {"The quick", "1"}


def test_random_schemas_give_valid_outputs(tiny: Tokenizer, grammars: Grammars) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    seen: set[str] = set()
    for seed in range(200):
        r = random.Random(seed)
        schema = rooted(random_schema(r))
        m = grammars.matcher(Structure.schema(schema, whitespace=r.choice([0, 2])), [END])
        text = tiny.decode(walk(m, {END}, r))
        jsonschema.validate(json.loads(text), schema)
        seen.add(text)
    assert len(seen) > 100


def test_b54_whitespace_is_bounded(grammars: Grammars) -> None:
    # vllm#38696, xgrammar#412, omlx#2990
    schemas = (Structure.schema({"type": "object"}), Structure("json_object"), Structure.schema({}))
    for structure in schemas:
        for before in ("{", '{"a":', '{"a":1', '{"a":1,', '{"a":[', '{"a":[1,'):
            assert takes(grammars, structure, before + " " * 99) == len(before) + WHITESPACE
            assert takes(grammars, structure, before + "\r\n" + " " * 99) == len(before) + 2 + WHITESPACE
            assert takes(grammars, structure, before + "\n\n") == len(before) + 1
            assert takes(grammars, dataclasses.replace(structure, whitespace=0), before + "\n") == len(before)
        assert takes(grammars, structure, " {") == 0
        assert fed(grammars, structure, b'{ "a" : [1 , {}] , "b":"x"}').done


def test_b55_an_empty_schema_is_any_json_and_numbers_end(grammars: Grammars) -> None:
    # vllm#52011
    structure = from_response_format({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}})
    assert structure is not None
    for text in ("[]", '{"a": [1, -2.5e3, true, null]}', '"\\u00e9\\n"'):
        assert fed(grammars, structure, text.encode()).done
    for number in ("1" * 99, "0." + "1" * 99, "1e" + "9" * 99):
        assert takes(grammars, structure, number) < 40
    m = fed(grammars, structure, ("1" * 19).encode())
    assert END in allowed(m) and byte_id(ord("1")) not in allowed(m)


BAD = {
    "property": Structure.schema({"type": "object", "properties": {"foo": "bar"}}),
    "reference": Structure.schema({"$ref": "#/$defs/none"}),
    "remote": Structure.schema({"$ref": "http://localhost/x"}),
    "type": Structure.schema({"type": "strange"}),
    "pattern": Structure.schema({"type": "string", "pattern": "("}),
    "unsatisfiable": Structure.schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "not known": Structure.schema({"not": {"type": "string"}}),
    "too wide": Structure.schema({"type": "object", "properties": {f"property {i}": {} for i in range(3000)}}),
    "too deep": Structure.schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "regex": Structure("regex", "("),
    "look-ahead": Structure("regex", "(?=a)b"),
    "long": Structure("regex", "x{1000000}"),
    "lark": Structure("grammar", "start: unknown"),
    "gbnf": Structure("grammar", 'root ::= "x" ('),
    "tag": Structure("structural_tag", '{"structures": [], "triggers": []}'),
    "trigger": Structure("structural_tag", '{"structures": [{"begin": "<a", "end": ""}], "triggers": ["b"]}'),
}


@pytest.mark.parametrize("name", BAD)
def test_b56_a_structure_that_cannot_be_followed_is_refused(grammars: Grammars, name: str) -> None:
    # vllm#17248
    with pytest.raises(RequestError) as caught:
        grammars.compile(BAD[name])
    assert caught.value.param == "structured_outputs" and BAD[name].kind in caught.value.message
    assert len(caught.value.message) < 500 and "<state>" not in caught.value.message


def test_b57_a_nested_model_of_pydantic(tiny: Tokenizer, grammars: Grammars) -> None:
    # xgrammar#122
    pydantic = pytest.importorskip("pydantic")

    class Leaf(pydantic.BaseModel, extra="forbid"):
        value: int
        kind: str = pydantic.Field(max_length=3)

    class Tree(pydantic.BaseModel, extra="forbid"):
        left: Leaf
        right: Leaf | None
        more: list[Leaf] = pydantic.Field(max_length=2)

    structure = Structure.schema(Tree.model_json_schema(), whitespace=1)
    for seed in range(20):
        text = tiny.decode(walk(grammars.matcher(structure, [END]), {END}, random.Random(seed)))
        assert Tree.model_validate_json(text)


def test_ends(grammars: Grammars) -> None:
    """The model's end is allowed where the structure may end, if it ends this request; where it must, the output is done."""
    maybe = Structure("regex", "ab*")
    assert END not in allowed(fed(grammars, maybe, b""))
    assert END in allowed(fed(grammars, maybe, b"ab"))
    ignoring = grammars.matcher(maybe, [])
    ignoring.consume(byte_id(ord("a")))
    ignoring.fill()
    assert allowed(ignoring) == [byte_id(ord("b"))]
    must = fed(grammars, Structure("regex", "ab"), b"ab")
    assert must.done and must.words is None


def test_special_tokens_are_no_text(grammars: Grammars, tiny: Tokenizer) -> None:
    m = grammars.matcher(Structure("regex", "(.|\n)*"), [END])
    assert not tiny.special_ids & (set(allowed(m)) - {END})
    spelled = Structure("lark", 'start: <|start|> "a" <|end|>')
    m = grammars.matcher(spelled, [END])
    assert [tiny.token_bytes[i] for i in allowed(m)] == [b"<|start|>"]


def test_a_structure_after_reasoning(tiny: Tokenizer, grammars: Grammars) -> None:
    structure = Structure("regex", "[0-9]+", after="</think>")
    m = fed(grammars, structure, b"a < b </thin</think>")
    assert not m.free and byte_id(ord("a")) not in allowed(m)
    assert fed(grammars, structure, b"12</think").words is None
    marked = grammars.matcher(dataclasses.replace(structure, after="<|end|>"), [END])
    for token in (5, 7, tiny.encode("<|end|>")[0]):
        assert marked.free
        marked.consume(token)
        marked.fill()
    assert not marked.free and marked.tokens == 3


def test_text_in_the_token_that_ends_reasoning_counts(words: Tokenizer, wordy: Grammars) -> None:
    token = next(i for i, raw in enumerate(words.token_bytes) if raw == b"/>")
    for rest, wrong in (("x", True), (">y", False)):
        m = wordy.matcher(Structure("regex", rest, after="/"), [])
        m.consume(token)
        m.fill()
        assert bool(m.error) == wrong
    assert not m.free and {words.token_bytes[i] for i in allowed(m)} == {b"y"}


def test_masks_side_by_side_and_a_fault_of_one(grammars: Grammars) -> None:
    import llguidance

    structures = [Structure("regex", "a[bc]"), Structure("regex", "d[ef]"), Structure("json_object")]
    ms = [grammars.matcher(s, [END]) for s in structures]
    for m, char in zip(ms, "xd{"):  # the first is given what its mask forbids
        m.consume(byte_id(ord(char)))
    fill_all(llguidance.LLExecutor(2), ms)
    assert ms[0].error and not ms[1].error and not ms[2].error
    assert [chr(b) for b in range(97, 123) if byte_id(b) in allowed(ms[1])] == ["e", "f"]
    alone = fed(grammars, structures[2], b"{")
    assert allowed(alone) == allowed(ms[2])


def test_equal_structures_are_compiled_once(tiny: Tokenizer) -> None:
    g = Grammars(tiny)
    first = g.compile(Structure.schema({"type": "object"}))
    assert g.compile(Structure.schema({"type": "object"}, after="</think>")) is first
    assert g.compile(Structure.schema({"type": "object"}, whitespace=1)) is not first
    one, other = (g.matcher(Structure("regex", "ab"), []) for _ in range(2))
    one.consume(byte_id(ord("a")))
    one.fill()
    assert allowed(other) == [byte_id(ord("a"))]  # they share what was compiled, not their progress


def test_the_least_used_grammar_goes(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.runtime.grammar.compiler.KEPT", 2)
    g = Grammars(tiny)
    a, b, c = (Structure("regex", x) for x in "abc")
    for s in (a, b, a, c):
        g.compile(s)
    assert [g.knows(s) for s in (a, b, c)] == [True, False, True]


async def test_a_slow_grammar_is_refused_and_holds_up_nobody(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow, compile_ = Structure("regex", "a"), Structure("regex", "b"), Grammars.compile

    def sleepy(self: Grammars, s: Structure) -> Any:
        if s is slow:
            time.sleep(1)
        return compile_(self, s)

    monkeypatch.setattr(Grammars, "compile", sleepy)
    monkeypatch.setattr(front, "LIMIT", 0.3)
    checker = front.StructureCheck(tiny)
    order: list[str] = []

    async def check(s: Structure) -> None:
        try:
            await checker.check(s)
            order.append("taken")
        except RequestError as fault:
            order.append(fault.message)

    await asyncio.gather(check(slow), check(quick))
    assert order[0] == "taken" and "more than 0.3 s" in order[1]
    checker.close()


async def test_without_a_tokenizer_or_the_package_a_structure_is_refused(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        await front.StructureCheck(None).check(Structure("json_object"))
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"tokenspeed\[grammar\]") as caught:
        await front.StructureCheck(tiny).check(Structure("json_object", param="response_format"))
    assert caught.value.param == "response_format"


def submit(request_id: int, structure: Structure) -> Submit:
    return Submit(request_id, packed([1]), CoreParams(4, structure=structure))


def test_requests_wait_for_their_grammar(tiny: Tokenizer) -> None:
    core = CoreGrammars(lambda: tiny)
    core.begin(submit(1, Structure("regex", "a")))
    core.begin(submit(2, Structure("regex", "(")))
    core.begin(submit(3, Structure("regex", "b")))
    core.drop(3)
    got: dict[int, Any] = {}
    while core.waiting:
        got |= {m.request_id: matcher for m, matcher in core.ready()}
    assert set(got) == {1, 2} and allowed(got[1]) == [byte_id(ord("a"))]
    assert "regex" in got[2]
    core.close()


def test_json_in_a_grammar_of_ones_own(grammars: Grammars) -> None:
    rule = json_rule({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, whitespace=1)
    s = Structure("lark", f'start: "<f>" args "</f>"\nargs: {rule}')
    assert fed(grammars, s, b'<f>{"a": 1}</f>').done
    assert takes(grammars, s, '<f>{"a":  1}') == len('<f>{"a": ')
    anything = Structure("lark", f"start: args\nargs: {json_rule(True)}")
    assert takes(grammars, anything, "[null]") == 6


def test_structural_tags(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tag = {"structures": [{"begin": "<f=get>", "schema": schema, "end": "</f>"}], "triggers": ["<f="]}
    s = Structure("structural_tag", json.dumps(tag))
    m = fed(grammars, s, b'free <b> text <f=get>{"a": 3}</f> and more')
    assert END in allowed(m)
    assert takes(grammars, s, "free <f=set>") == len("free <f=")
    assert takes(grammars, s, '<f=get>{"b"') == len('<f=get>{"')


def test_masks_cover_the_vocabulary(grammars: Grammars, tiny: Tokenizer) -> None:
    m = grammars.matcher(Structure("regex", "(.|\n)*"), [END])
    assert m.words is not None and m.words.dtype == np.int32
    assert len(m.words) * 32 >= tiny.vocab_size and max(allowed(m)) < tiny.vocab_size
