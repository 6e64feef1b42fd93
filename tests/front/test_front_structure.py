"""Structures: which a request may ask for, in which words, and what is refused by name before any grammar engine looks."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar import Structure
from tokenspeed.runtime.grammar.fields import from_response_format, from_structured_outputs
from tokenspeed.runtime.grammar.structure import MAX_DEPTH, MAX_SOURCE
from tokenspeed.runtime.messages import CoreParams
from tokenspeed.runtime.sampling_params import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "structure"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Structure("json_object")),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, Structure("json_schema", TEXT)),
        ({"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}, Structure("json_schema", TEXT)),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, Structure("json_schema", "{}")),  # vllm#52011
        ({"type": "regex", "pattern": "a+"}, Structure("regex", "a+")),
        ({"type": "structural_tag", "triggers": ["<f"]}, Structure("structural_tag", '{"triggers":["<f"]}')),
    ],
)
def test_response_format(given: Any, structure: Structure | None) -> None:
    assert from_response_format(given) == structure


@pytest.mark.parametrize(
    ("given", "structure"),
    [
        (None, None),
        ({}, None),
        ({"regex": None, "json_object": False}, None),
        ({"json": SCHEMA}, Structure("json_schema", TEXT)),
        ({"json": TEXT}, Structure("json_schema", TEXT)),
        ({"json_schema": SCHEMA, "disable_any_whitespace": True}, Structure("json_schema", TEXT, whitespace=0)),
        ({"json_object": True}, Structure("json_object")),
        ({"choice": ["a", 'b"']}, Structure("choice", '["a","b\\""]')),
        ({"ebnf": 'root ::= "a"'}, Structure("grammar", 'root ::= "a"')),
    ],
)
def test_structured_outputs(given: Any, structure: Structure | None) -> None:
    assert from_structured_outputs(given) == structure


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ([], "object"),
        ({"type": "yaml"}, "json_schema"),
        ({"type": "json_schema"}, "needs a schema"),
        ({"type": "json_schema", "json_schema": []}, "needs a schema"),
        ({"type": "json_schema", "schema": 7}, "must be an object"),
        ({"type": "json_schema", "schema": False}, "admits no value"),
        ({"type": "json_schema", "schema": nested(MAX_DEPTH + 1)}, "deeper"),
        ({"type": "json_schema", "schema": nested(100_000)}, "deeper"),
        ({"type": "json_schema", "schema": {"title": "x" * MAX_SOURCE}}, "bytes"),
        ({"type": "json_schema", "schema": {"const": float("nan")}}, "cannot be written"),
        ({"type": "json_schema", "schema": {"const": "\ud800"}}, "surrogate"),
        ({"type": "regex"}, "must be strings"),
    ],
)
def test_a_wrong_response_format_is_refused_by_name(given: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        from_response_format(given)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("given", "param", "word"),
    [
        ("x", "structured_outputs", "object"),
        ({"jsn": SCHEMA}, "structured_outputs", "no field"),
        ({"json": SCHEMA, "regex": "a"}, "structured_outputs", "json and regex"),
        ({"json": "{"}, "structured_outputs.json", "not valid JSON"),
        ({"json": "[" * 100_000}, "structured_outputs.json", "deeper"),
        ({"regex": ""}, "structured_outputs.regex", "empty"),
        ({"choice": []}, "structured_outputs.choice", "list of strings"),
        ({"choice": ["a", ""]}, "structured_outputs.choice", "none empty"),
        ({"choice": ["a"] * 5000}, "structured_outputs.choice", "at most"),
        ({"json_object": "yes"}, "structured_outputs.json_object", "true or false"),
        ({"structural_tag": "[]"}, "structured_outputs.structural_tag", "JSON object"),
    ],
)
def test_wrong_structured_outputs_are_refused_by_name(given: Any, param: str, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        from_structured_outputs(given)
    assert caught.value.param == param


def test_a_schema_at_the_limit_is_taken() -> None:
    assert json.loads(Structure.schema(nested(MAX_DEPTH)).source) == nested(MAX_DEPTH)


def test_a_structure_travels_to_the_core() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(structure="a")  # pyright: ignore
    assert caught.value.param == "structure"
    core = SamplingParams(structure=Structure("regex", "é+", after="</think>")).resolve(1, 8, [], 9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(core), type=CoreParams) == core
