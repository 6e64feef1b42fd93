"""Forced calls: whatever the grammar of a family lets through is calls of the tools, as the family's parser reads it."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from tests.front.outputs import called, parse
from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar import Structure
from tokenspeed.runtime.parsers import (
    TOOL_PARSERS,
    CallArguments,
    CallBegin,
    Content,
    Piece,
    Tool,
    call_grammar,
    make_parser,
)

llguidance = pytest.importorskip("llguidance")
BYTES = llguidance.LLTokenizer("byte")

ORDER = Tool(
    "order",
    {
        "type": "object",
        "properties": {
            "dish": {"type": "string"},
            "count": {"type": "integer", "minimum": 1, "maximum": 99},
            "to": {"$ref": "#/$defs/place"},
            "size": {"enum": ["s", "m"]},
            "hot": {"type": "boolean"},
        },
        "required": ["dish", "to"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}},
    },
)
NOW = Tool("now", {"type": "object", "properties": {}})
PATCH = Tool("patch", kind="custom")
OPTIONS = Tool("set", {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}})
TOOLS = (ORDER, NOW, PATCH, OPTIONS)


def grammar(source: str) -> str:
    text = llguidance.LLMatcher.grammar_from_lark(source)
    assert not (fault := llguidance.LLMatcher(BYTES, text)).is_error(), fault.get_error()
    return text


def accepts(source: str, text: str) -> bool:
    """Whether the whole of `text` is an output of the grammar."""
    matcher = llguidance.LLMatcher(BYTES, grammar(source))
    ids = BYTES.tokenize_str(text)
    return matcher.consume_tokens(ids) and matcher.is_accepting()


def walk(source: str, chance: random.Random) -> str | None:
    """A random output of the grammar, closing what is open where it may; None when it got too long."""
    matcher, out = llguidance.LLMatcher(BYTES, grammar(source)), bytearray()
    mask = np.zeros((BYTES.vocab_size + 31) // 32, dtype=np.int32)
    while not (matcher.is_accepting() and chance.random() < 0.6):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:256]).tolist()
        plain = [i for i in ids if 31 < i < 127] or ids
        if not plain:
            break
        closing = [i for i in plain if chr(i) in '"}]</>']
        char = chance.choice(closing if closing and chance.random() < 0.4 else plain)
        assert matcher.consume_token(char)
        out.append(char)
        if len(out) > 400 or matcher.is_stopped():
            break
    return out.decode() if matcher.is_accepting() else None


def reasoning_of(tool: str) -> str:
    return "gpt_oss" if tool in ("gpt-oss", "openai") else "qwen3"


@pytest.mark.parametrize("tool", TOOL_PARSERS)
def test_every_output_of_the_grammar_is_calls(tool: str) -> None:
    chance = random.Random(tool)
    source = call_grammar(tool, TOOLS, None, True).source
    texts = [text for _ in range(8) if (text := walk(source, chance)) is not None]
    assert len(texts) > 1
    for text in texts:
        pieces = parse(make_parser(tool, None, tools=TOOLS, forced=True), [text])
        begins = [piece for piece in pieces if isinstance(piece, CallBegin)]
        arguments = [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
        assert begins and len(begins) == len(arguments) and not any(isinstance(piece, Content) for piece in pieces)
        for begin, given in zip(begins, arguments):
            declared = {item.name: item for item in TOOLS}[begin.name].parameters
            assert set(given) <= set(declared.get("properties", {"input": ...}))
            assert set(given) >= set(declared.get("required", [] if declared else ["input"]))
            assert isinstance(given.get("count", 0), int) and isinstance(given.get("to", {}), dict)


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm45": "<tool_call>now\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "pythonic": "[now()]",
    "llama3_json": '{"name": "now", "parameters": {}}',
    "gpt-oss": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
}


@pytest.mark.parametrize("tool", WRITTEN)
def test_a_call_that_the_model_was_taught_is_allowed(tool: str) -> None:
    text = WRITTEN[tool]
    assert accepts(call_grammar(tool, TOOLS, None, True).source, text)
    assert accepts(call_grammar(tool, TOOLS, "now", True).source, text)
    assert not accepts(call_grammar(tool, TOOLS, "order", True).source, text)
    assert not accepts(call_grammar(tool, TOOLS, None, True).source, "Hello")


def test_parallel_calls_and_a_named_one() -> None:
    one = WRITTEN["hermes"]
    two = f"{one}\n{one}"
    assert accepts(call_grammar("hermes", TOOLS, None, True).source, two)
    assert not accepts(call_grammar("hermes", TOOLS, None, False).source, two)
    assert not accepts(call_grammar("hermes", TOOLS, "now", True).source, two)


def test_a_tool_may_be_called_as_a_word_of_the_api() -> None:
    tools = [Tool("required"), Tool("auto")]
    written = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
    source = call_grammar("hermes", tools, "required", True).source
    assert accepts(source, written % "required") and not accepts(source, written % "auto")


def test_a_model_may_think_before_a_forced_call() -> None:
    call, tools = WRITTEN["hermes"], (NOW,)
    free = call_grammar("hermes", tools, None, True, reasoning="qwen3", prompt="<|im_start|>assistant\n")
    assert free.after == "" and accepts(free.source, call)
    text = f"<think>\na <tool_call>\n</think>\n\n{call}"
    assert accepts(free.source, text)
    opened = call_grammar("hermes", tools, None, True, reasoning="qwen3", prompt="<think>\n")
    assert opened.after == "</think>" and accepts(opened.source, f"\n\n{call}")
    closed = call_grammar("hermes", tools, None, True, reasoning="qwen3", prompt="<think>\n\n</think>\n\n")
    assert closed.after == "" and accepts(closed.source, call) and not accepts(closed.source, text)
    harmony = call_grammar("gpt-oss", tools, "now", False, reasoning="gpt_oss")
    thought = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
    assert accepts(harmony.source, thought + WRITTEN["gpt-oss"])
    pieces: tuple[Piece, ...] = parse(make_parser("gpt-oss", "gpt_oss", tools=tools), [thought + WRITTEN["gpt-oss"]])
    assert pieces[1:] == tuple(called(0, "now", "{}"))


def test_a_tool_may_have_any_name_and_a_schema_any_fault() -> None:
    odd = Tool("NAME_INDEX_KEY", {"type": "object", "properties": {"KEY": {"type": "string"}}, "required": ["KEY"]})
    source = call_grammar("hermes", [odd], None, True).source
    assert accepts(source, '<tool_call>\n{"name": "NAME_INDEX_KEY", "arguments": {"KEY": "x"}}\n</tool_call>')
    source = call_grammar("glm45", [odd], None, True).source
    call = "<tool_call>NAME_INDEX_KEY\n<arg_key>KEY</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
    assert accepts(source, call)
    circle = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 40}}}
    for schema in (
        circle,
        {"properties": []},
        {"properties": {"a": 3}, "required": True},
        {"$ref": "#"},
        {"type": "string"},
    ):
        for tool in ("hermes", "glm45", "pythonic"):
            assert call_grammar(tool, [Tool("f", schema)], None, True).source
            parse(make_parser(tool, None, tools=[Tool("f", schema)]), ["<tool_call>f\n<arg_key>a</arg_key>"])


def test_what_the_engine_cannot_check_is_left_out_of_a_tool_that_is_not_strict() -> None:
    wild = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "mail": {"type": "string", "pattern": r"^(?!\.)\S+$", "format": "strange"},
            "pattern": {"type": "array", "items": {"$ref": "https://example.com/x.json"}, "uniqueItems": True},
        },
        "required": ["mail"],
    }
    call = '<tool_call>\n{"name": "f", "arguments": {"mail": "a", "pattern": [1, 1]}}\n</tool_call>'
    assert accepts(call_grammar("hermes", [Tool("f", wild)], None, True).source, call)
    strict = call_grammar("hermes", [Tool("f", wild, strict=True)], None, True).source
    text = llguidance.LLMatcher.grammar_from_lark(strict)
    assert llguidance.LLMatcher(BYTES, text).is_error()
    nested: Any = {"type": "object"}
    for _ in range(2000):
        nested = {"type": "object", "properties": {"a": nested}}
    call = '<tool_call>\n{"name": "f", "arguments": {"a": {}}}\n</tool_call>'
    assert accepts(call_grammar("hermes", [Tool("f", nested)], None, True).source, call)


def test_special_tokens_are_named_by_their_ids() -> None:
    source = call_grammar("mistral", (NOW,), None, True, special_tokens={"[TOOL_CALLS]": 9, "[ARGS]": 32}).source
    assert '<[9]> "now" <[32]>' in source and "[TOOL_CALLS]" not in source


@pytest.mark.parametrize("tool", sorted(TOOL_PARSERS))
def test_an_answer_of_a_schema_may_stand_beside_calls(tool: str) -> None:
    answer = Structure.schema({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
    if tool.startswith("llama3"):  # its calls are JSON too
        with pytest.raises(RequestError, match="bare JSON"):
            call_grammar(tool, TOOLS, None, True, answer=answer)
        return
    source = call_grammar(tool, TOOLS, None, True, answer=answer).source
    head = "<|channel|>final<|message|>" if tool in ("gpt-oss", "openai") else ""
    assert accepts(source, head + '{"x": 3}')
    assert not accepts(source, head + '{"x": "3"}') and not accepts(source, "x") and not accepts(source, "")
    assert accepts(call_grammar(tool, TOOLS, None, True, answer=Structure.choice(["yes", 'n"o'])).source, head + 'n"o')
    with pytest.raises(RequestError, match="a regex cannot stand beside tools"):
        call_grammar(tool, TOOLS, None, True, answer=Structure("regex", "a+"))
