"""Structured output through the real engine: valid, the same however it is scheduled, and nobody else's business."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import tiny_model
from tokenspeed import Engine, SamplingParams
from tokenspeed.runtime.errors import GenerationError, RequestError
from tokenspeed.runtime.grammar import Structure
from tokenspeed.runtime.outputs import RequestOutput

pytest.importorskip("llguidance")
from tests.front.schemas import random_schema, rooted
from tokenspeed.runtime.grammar.matcher import Matcher

PROMPT = [7, 3, 99, 250] * 5
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"enum": [1, 20, None]}, "ok": {"type": "boolean"}},
    "required": ["name", "n", "ok"],
    "additionalProperties": False,
}
OPTIONS: dict[str, Any] = {
    "core": "inproc", "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "buckets": [1, 4, 32],
}  # fmt: skip


def params(structure: Structure | None, seed: int = 0, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 64, "structure": structure} | more)


MIXED = [
    params(Structure.schema(SCHEMA, whitespace=1), 1),
    params(None, 2, ignore_eos=True, max_tokens=40),
    params(Structure("regex", "[a-f]{3}-[0-9]{2,4}x"), 3, temperature=0),
    params(Structure.choice(["yes", "no", "perhaps"]), 4, ignore_eos=True, min_tokens=9),
    params(None, 5, temperature=0, max_tokens=30, ignore_eos=True),
    params(Structure.schema(SCHEMA, whitespace=0), 6, top_k=30, repetition_penalty=1.2, logprobs=2),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(str(model), **OPTIONS) as engine:
        yield engine


def run(engine: Engine, wanted: list[SamplingParams]) -> list[RequestOutput]:
    return engine.generate(input_ids=[PROMPT] * len(wanted), sampling_params=wanted)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in out.choices] for out in outputs]


def check_mixed(outputs: list[RequestOutput]) -> None:
    for out, asked in zip(outputs, MIXED):
        assert out.finish_reason == ("stop" if asked.structure else "length")
    for k in (0, 5):
        value = json.loads(outputs[k].text)
        assert list(value) == ["name", "n", "ok"] and value["n"] in (1, 20, None)
    assert re.fullmatch("[a-f]{3}-[0-9]{2,4}x", outputs[2].text)
    assert outputs[3].text in ("yes", "no", "perhaps")


def test_structures_hold_at_every_depth_layout_and_chunk(model: Path, engine: Engine) -> None:
    """Greedy and drawn, beside free requests: with the tokens out and without, in chunks, on two ranks, on a full cache."""
    wanted = run(engine, MIXED)
    check_mixed(wanted)
    assert tokens([run(engine, [p])[0] for p in MIXED]) == tokens(wanted)  # alone, and from the prefix cache
    for options in ({"overlap_depth": 0}, {"prefill_chunk": 3}, {"mesh": "tp=2"}, {"mesh": "dp=2"}, {"num_pages": 8}):
        with Engine(str(model), **{**OPTIONS, **options}) as other:
            assert tokens(run(other, MIXED)) == tokens(wanted), options


def test_free_requests_do_not_notice(engine: Engine) -> None:
    free = [MIXED[k] for k in (1, 4)]
    beside = run(engine, MIXED)
    assert tokens(run(engine, free)) == tokens([beside[k] for k in (1, 4)])


def test_a_retracted_request_goes_on_where_it_was(engine: Engine) -> None:
    """A structure's progress is the request's and not the slot's."""
    items = {"type": "array", "items": {"enum": [0, 1]}, "minItems": 150, "maxItems": 150}
    asked = params(Structure.schema(items, whitespace=0), 8, max_tokens=400)
    wanted, before = run(engine, [asked]), engine.control("stats")["retractions"]
    stream = engine.generate(input_ids=PROMPT, sampling_params=asked, stream=True)
    got = list(next(stream).token_ids)
    for running in engine.control("scheduler")["requests"]:
        engine.control("retract", request_id=running["id"])
    for delta in stream:
        got += delta.token_ids
    assert engine.control("stats")["retractions"] > before and got == wanted[0].token_ids


def test_choices_follow_the_structure_each_for_itself(engine: Engine) -> None:
    (out,) = run(engine, [params(Structure.schema(SCHEMA, whitespace=0), 9, n=5)])
    assert len(out.choices) == 5 and len({c.text for c in out.choices}) > 1
    assert all(json.loads(c.text) for c in out.choices)


def test_ways_to_end(engine: Engine) -> None:
    digits = Structure("regex", "[0-9]{1,40}")
    cut, stopped, ended, least = run(
        engine,
        [
            params(digits, 1, max_tokens=3),
            params(digits, 1, stop=["1", "2", "3", "4", "5"]),
            params(digits, 1, logit_bias={257: 100}),  # the end, wherever it is allowed
            params(digits, 1, logit_bias={257: 100}, min_tokens=7),
        ],
    )
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)
    assert stopped.finish_reason == "stop" and stopped.choices[0].stop_reason in set("12345")
    assert re.fullmatch("[06789]*", stopped.text)
    assert (ended.finish_reason, len(ended.text), ended.choices[0].stop_reason) == ("stop", 1, None)
    assert (least.finish_reason, len(least.text)) == ("stop", 7)


def test_a_structure_after_free_text(engine: Engine) -> None:
    """The text before is free, the end of it is drawn sooner or later here, and what follows is held to the structure."""
    (bar,) = engine.tokenizer.encode("|")
    more = {"max_tokens": 200, "logit_bias": {bar: 6}, "ignore_eos": True}
    held, free = run(engine, [params(Structure("regex", "[xy]{4}", after="|"), 3, **more), params(None, 3, **more)])
    before, _, rest = held.text.partition("|")
    assert re.fullmatch("[xy]{4}", rest) and free.text.startswith(before + "|") and before


def test_an_error_of_one_matcher_ends_its_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run(engine, MIXED)
    consume, mark = Matcher.consume, 300  # a stop id that only the spoiled request has

    def broken(self: Matcher, token: int) -> None:
        consume(self, token)
        if self.tokens == 3 and self._ends[mark // 32] >> mark % 32 & 1:
            self._fail()

    monkeypatch.setattr(Matcher, "consume", broken)
    spoiled = params(Structure("regex", "[a-z]{20}"), 1, stop_token_ids=[mark])
    streams = [engine.generate(input_ids=PROMPT, sampling_params=p, stream=True) for p in (spoiled, *MIXED)]
    with pytest.raises(GenerationError, match="held to its structure"):
        list(streams[0])
    assert [[t for delta in stream for t in delta.token_ids] for stream in streams[1:]] == [
        out.token_ids for out in wanted
    ]


def test_a_wrong_structure_never_reaches_the_core(engine: Engine) -> None:
    steps = engine.control("stats")["steps"]
    for structure in (Structure("regex", "("), Structure.schema({"properties": {"foo": "bar"}})):
        with pytest.raises(RequestError):
            run(engine, [params(structure)])
    assert engine.control("stats")["steps"] == steps


async def test_the_argument_of_generate(engine: Engine) -> None:
    asked: dict[str, Any] = {"input_ids": PROMPT, "structured_outputs": {"regex": "[0-9]{3}"}}
    text = engine.generate(**asked).text
    assert re.fullmatch("[0-9]{3}", text)
    assert re.fullmatch("[0-9]{3}", "".join(delta.text for delta in engine.generate(**asked, stream=True)))
    assert re.fullmatch("[0-9]{3}", (await engine.async_generate(**asked)).text)
    assert re.fullmatch("[0-9]{3}", "".join([delta.text async for delta in engine.async_stream(**asked)]))


def test_random_schemas_on_a_random_model(engine: Engine) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemas = [rooted(random_schema(random.Random(seed))) for seed in range(40)]
    wanted = [params(Structure.schema(s, whitespace=0), seed, max_tokens=400) for seed, s in enumerate(schemas)]
    for out, schema in zip(run(engine, wanted), schemas):
        assert out.finish_reason == "stop"
        jsonschema.validate(json.loads(out.text), schema)


def test_a_grammar_that_compiles_holds_up_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed.runtime.grammar import core

    make, compiling = core.CoreGrammars._make, []

    def slow(self: Any, m: Any) -> Matcher:
        compiling.append(time.monotonic())
        while not released:
            time.sleep(0.002)
        return make(self, m)

    released: list[bool] = []
    monkeypatch.setattr(core.CoreGrammars, "_make", slow)
    stream = engine.generate(input_ids=PROMPT, sampling_params=params(Structure("regex", "[a-z]{3}")), stream=True)
    other = run(engine, [MIXED[1]])  # comes and goes meanwhile
    released.append(True)
    assert len(other[0].token_ids) == 40
    assert re.fullmatch("[a-z]{3}", "".join(delta.text for delta in stream))
