"""Outputs of every family to pieces, the same for every chunking."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.front.fuzz_parsers import check, mutant
from tests.front.outputs import SAMPLES, TOOLS, Sample, all_splits, joined, parse
from tokenspeed.runtime.parsers import (
    REASONING_ALIASES,
    REASONING_PARSERS,
    TOOL_ALIASES,
    TOOL_PARSERS,
    CallArguments,
    CallBegin,
    Content,
    FreeformInput,
    Reasoning,
    Tool,
    families,
    make_parser,
)
from tokenspeed.runtime.parsers.writing import calls_text


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_every_split_of_an_output_gives_its_pieces(sample: Sample) -> None:
    assert parse(sample.parser(), [sample.text]) == sample.pieces
    for chunks in all_splits(sample.text):
        assert parse(sample.parser(), chunks) == sample.pieces, chunks


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_text_that_is_content_as_it_stands_need_not_be_fed(sample: Sample) -> None:
    for chunks in [[sample.text], list(sample.text), *all_splits(sample.text)]:
        parser, pieces = sample.parser(), []
        for chunk in chunks:
            pieces += [Content(chunk)] if parser.is_content(chunk) else parser.feed(chunk)
        assert joined([*pieces, *parser.finish()]) == sample.pieces, chunks


@pytest.mark.parametrize("tool", TOOL_PARSERS)
def test_words_of_an_answer_with_tools_are_content_as_they_stand(tool: str) -> None:
    parser = make_parser(tool, None, tools=TOOLS)
    parser.feed("Now then")
    assert parser.marks and parser.is_content(" we") and not parser.is_content(" we ")
    assert not parser.is_content(parser.marks[:1].decode("latin-1"))


def test_every_parser_has_samples() -> None:
    assert {sample.tool for sample in SAMPLES} >= set(TOOL_PARSERS)
    assert {sample.reasoning for sample in SAMPLES} >= set(REASONING_PARSERS)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(SAMPLES), st.randoms(use_true_random=False))
def test_random_chunks_give_the_same_pieces(sample: Sample, chance: random.Random) -> None:
    cuts = sorted(chance.sample(range(len(sample.text) + 1), min(len(sample.text), chance.randrange(1, 12))))
    ends = [0, *cuts, len(sample.text)]
    assert parse(sample.parser(), [sample.text[a:b] for a, b in itertools.pairwise(ends)]) == sample.pieces


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(SAMPLES), st.randoms(use_true_random=False))
def test_mutated_outputs_never_raise_and_never_depend_on_chunks(sample: Sample, chance: random.Random) -> None:
    check(sample, mutant(chance, sample.text), chance)


KEPT = [sample for sample in SAMPLES if sample.tool not in ("gpt-oss", "openai") and sample.name != "mistral array"]


@pytest.mark.parametrize("word", ["zyx", '"zyx', "{zyx, "])
@pytest.mark.parametrize("sample", KEPT, ids=lambda sample: sample.name)
def test_a_word_put_anywhere_is_never_lost(sample: Sample, word: str) -> None:
    for at in range(len(sample.text) + 1):
        text = sample.text[:at] + word + sample.text[at:]
        shown = "".join(
            f"{piece.name} {piece.id}" if isinstance(piece, CallBegin) else getattr(piece, "text", "")
            for piece in parse(sample.parser(), [text])
        )
        assert "zyx" in shown or '"type": "' in text[at - 20 : at], text


LONG = (
    ("hermes", "qwen3", "<think>", "word "),
    ("hermes", None, "", "word "),
    ("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": "', "word \\n"),
    ("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": [', "[1], "),
    ("hermes", None, '<tool_call>{"arguments": "', "word "),
    ("hermes", None, '<tool_call>{"id": "1"', ', "id": "1"'),
    ("llama3_json", None, "", "{}"),
    ("mistral", None, "[TOOL_CALLS]", " "),
    ("qwen3_coder", None, "<tool_call>", " "),
    ("qwen3_coder", None, "<function=now>\n<parameter=a>", "<par\n"),
    ("qwen3_coder", None, "<function=get_weather>\n<parameter=where>", "[1, "),
    ("glm45", None, "<tool_call>now<arg_key>", "k"),
    ("pythonic", None, "[get_weather(city='", "word "),
    ("deepseek_v3", None, "<｜tool▁call▁begin｜>", "word "),
    ("kimi_k2", None, "<|tool_call_begin|>", "word "),
    ("gpt-oss", None, "<|channel|>", "word "),
)


@pytest.mark.parametrize(("tool", "reasoning", "begin", "more"), LONG)
def test_what_is_held_of_a_long_output_is_bounded(tool: str, reasoning: str | None, begin: str, more: str) -> None:
    """Thus the time is linear in the output, token by token and at once."""
    parser = make_parser(tool, reasoning, tools=TOOLS)
    parser.feed(begin)
    held = 0
    for _ in range(5000):
        parser.feed(more)
        held = max(held, len(parser._reader.text))
    assert held < 20_000


def test_arguments_before_their_name_are_bounded_in_the_same_way_for_every_chunking() -> None:
    for length in (16_000, 16_300, 16_340, 16_370, 16_400, 17_000):
        text = '<tool_call>{"arguments": {"a": "' + "x" * length + '"}, "name": "now"}</tool_call>'
        whole = parse(make_parser("hermes", None, tools=TOOLS), [text])
        for size in (1, 1000, 9999):
            chunks = [text[at : at + size] for at in range(0, len(text), size)]
            assert parse(make_parser("hermes", None, tools=TOOLS), chunks) == whole
    assert whole == (Content(text),)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n\\"a\\" \\\\ \\/ \\u00e9\\ud83d\\ude00 é😀"}', '*** Begin\n"a" \\ / é😀 é😀'),
        (' { "input" : "" } ', ""),
        ('{"input": "\\ud83d x \\ude00\\ud83d"}', "\ufffd x \ufffd\ufffd"),
        ('{"input": "cut \\u00', "cut \\u00"),
        ('{"input": "cut \\ud83d', "cut \ufffd"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ('{"inp', '{"inp'),
        ("raw text", "raw text"),
        ("", ""),
    ],
)
def test_the_input_of_a_freeform_tool_in_every_chunking(arguments: str, text: str) -> None:
    for chunks in ([arguments], *all_splits(arguments)):
        unwrapped = FreeformInput()
        assert "".join([*map(unwrapped.feed, chunks), unwrapped.finish()]) == text, chunks


def test_the_page_of_parsers_names_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parsers.md").read_text("utf-8")
    for name in (*TOOL_PARSERS, *REASONING_PARSERS):
        assert f"`{name}`" in page


def test_other_names_of_parsers_stand_for_ours() -> None:
    assert set(TOOL_ALIASES.values()) <= set(TOOL_PARSERS) and not set(TOOL_ALIASES) & set(TOOL_PARSERS)
    assert set(REASONING_ALIASES.values()) <= set(REASONING_PARSERS)
    for name, ours in TOOL_ALIASES.items():
        text = calls_text(name, [("now", {})])
        assert text == calls_text(ours, [("now", {})])
        assert parse(make_parser(name, None, tools=TOOLS), [text])[0] == CallBegin(0, "now")
    for name in REASONING_ALIASES:
        begin = "<|channel|>analysis<|message|>" if "oss" in name else "<think>"
        assert parse(make_parser(None, name), [begin + "a"]) == (Reasoning("a"),)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, " 3\n", 3),
        ({"type": "integer"}, "3.0", 3.0),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "int"}, "3", 3),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "string"}, "3", "3"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, '"3"', '"3"'),
        ({"oneOf": [{"type": "object"}, {"type": "null"}]}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "{'a': True, 'b': (1, -2)}", {"a": True, "b": [1, -2]}),
        ({"type": "array"}, '["a", ', '["a", '),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": "x"}, "2", "2"),
        ({"$ref": "#/$defs/n"}, "7", 7),
        ({"$ref": "#/$defs/loop"}, "7", "7"),
        ({"items": {}}, "[1]", [1]),
        ({}, "7", "7"),
        ("nonsense", "7", "7"),
    ],
)
def test_a_bare_value_has_the_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    defs = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    tool = Tool("f", {"type": "object", "properties": {"a": schema}, "$defs": defs})
    written = f'<invoke name="f"><parameter name="a">{text}</parameter></invoke>'
    for chunks in ([written], list(written)):
        pieces = parse(make_parser("minimax_m2", None, tools=[tool]), chunks)
        (arguments,) = [piece.text for piece in pieces if isinstance(piece, CallArguments)]
        assert json.loads(arguments) == {"a": value} and type(json.loads(arguments)["a"]) is type(value)


@pytest.mark.parametrize(
    ("architecture", "template", "found"),
    [
        ("LlamaForCausalLM", "{{ x }}", (None, None)),
        ("Qwen3ForCausalLM", "<tool_call> <think>", ("hermes", "qwen3")),
        ("Qwen2ForCausalLM", "<tool_call>", ("hermes", None)),
        (
            "LlamaForCausalLM",
            '{"name": function name, "parameters": dictionary of argument name and its value}',
            ("llama3_json", None),
        ),
        ("GraniteForCausalLM", "{% if thinking %}<think>{% endif %}", (None, "qwen3")),
        ("DeepseekV3ForCausalLM", "<｜tool▁calls▁begin｜> <think>", ("deepseek_v31", "deepseek_r1")),
        ("DeepseekV3ForCausalLM", "<｜tool▁calls▁begin｜> ```json </think>", ("deepseek_v3", "qwen3")),
        ("DeepseekV3ForCausalLM", "", ("deepseek_v31", "deepseek_r1")),
        ("DeepseekV3ForCausalLM", "{{ of no sign }}", ("deepseek_v31", None)),
        ("GptOssForCausalLM", "", ("gpt-oss", "gpt_oss")),
        ("Glm4MoeForCausalLM", "<arg_key> <think>", ("glm45", "glm45")),
        ("MistralForCausalLM", "[TOOL_CALLS] [THINK]", ("mistral", "mistral")),
        ("MistralForCausalLM", "[TOOL_CALLS]", ("mistral", None)),
    ],
)
def test_parsers_are_picked_by_what_the_template_shows(
    architecture: str, template: str, found: tuple[Any, Any]
) -> None:
    assert families(architecture, template) == found
