"""Sampling through the real engine: a request's tokens depend on its prompt, parameters and seed, and on nothing beside it."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import tiny_model
from tokenspeed import Engine, SamplingParams

PROMPTS = [[7, 3, 99, 250], [11, 12] * 9, list(range(40, 75)), [5], list(range(100, 132))]
OUT = 24
GREEDY = SamplingParams(temperature=0, max_tokens=OUT, ignore_eos=True)
PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


def start(model: Path, **options: Any) -> Engine:
    given = {
        "num_pages": 200,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "buckets": [1, 4, 16, 64],
        "page_size": PAGE,
    }
    return Engine(str(model), core="inproc", **given | options)


@pytest.fixture(scope="module", params=[1, 0], ids=["overlap", "synchronous"])
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with start(model, overlap_depth=request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Engine]:
    """One request at a time, no overlap, no prefix cache: what everything else must equal."""
    with start(model, overlap_depth=0, enable_prefix_caching=False, max_num_seqs=1, buckets=[64]) as engine:
        yield engine


def ids(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return engine.generate(input_ids=prompt, sampling_params=params).token_ids


def sampled(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": OUT, "ignore_eos": True} | more)


# A request of every kind; each is told from the others by what the program does for it.
KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "sampled": sampled(1),
    "hot": sampled(2, temperature=3.0),
    "top-k": sampled(3, top_k=5),
    "top-p": sampled(4, top_p=0.7),
    "min-p": sampled(5, min_p=0.2),
    "repetition": replace(GREEDY, repetition_penalty=2.0),
    "presence": sampled(6, presence_penalty=2.0, temperature=0.5),
    "frequency": sampled(7, frequency_penalty=1.0, temperature=0.7),
    "bias": sampled(8, logit_bias={65: 5.0, 66: -100.0}),
    "allowed": replace(GREEDY, allowed_token_ids=list(range(97, 123))),
    "min-tokens": sampled(9, ignore_eos=False, stop_token_ids=list(range(0, 256, 3)), min_tokens=12),
    "logprobs": replace(GREEDY, logprobs=3),
}


@pytest.fixture(scope="module")
def alone(plain: Engine) -> dict[str, list[int]]:
    return {name: ids(plain, PROMPTS[at % len(PROMPTS)], params) for at, (name, params) in enumerate(KINDS.items())}


def test_b20_b25_b26_every_kind_in_one_batch_gives_what_it_gives_alone(
    engine: Engine, alone: dict[str, list[int]]
) -> None:
    """In either order, beside all others (vllm#5639, #22180, #27878)."""
    work = [(name, PROMPTS[at % len(PROMPTS)], params) for at, (name, params) in enumerate(KINDS.items())]
    for order in (work, work[::-1]):
        outputs = engine.generate(input_ids=[p for _, p, _ in order], sampling_params=[s for _, _, s in order])
        for (name, _, _), output in zip(order, outputs):
            assert output.token_ids == alone[name], name


def test_the_kinds_differ(alone: dict[str, list[int]], plain: Engine) -> None:
    """Each parameter has an effect: without it the same prompt and seed give other tokens."""
    for at, (name, params) in enumerate(KINDS.items()):
        if name in ("greedy", "sampled", "logprobs"):
            continue
        bare = replace(
            params, temperature=min(params.temperature, 1.0), top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
            presence_penalty=0.0, frequency_penalty=0.0, logit_bias=None, allowed_token_ids=None, min_tokens=0,
        )  # fmt: skip
        assert ids(plain, PROMPTS[at % len(PROMPTS)], bare) != alone[name], name


@pytest.mark.parametrize("temperature", [1e-4, 1e-6])
def test_b21_a_tiny_temperature_is_greedy(engine: Engine, temperature: float) -> None:  # vllm#2937
    for prompt in PROMPTS:
        assert ids(engine, prompt, sampled(3, temperature=temperature)) == ids(engine, prompt)
        assert ids(engine, prompt, sampled(3, temperature=temperature, top_p=0.9)) == ids(engine, prompt)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_the_narrowest_filter_is_greedy(engine: Engine, narrow: dict[str, Any]) -> None:
    for seed, prompt in enumerate(PROMPTS):
        assert ids(engine, prompt, sampled(seed, **narrow)) == ids(engine, prompt)


def test_b20_a_greedy_row_beside_masked_and_random_rows(engine: Engine, plain: Engine) -> None:  # vllm#22180
    masked = sampled(1, allowed_token_ids=[65, 66])
    hot = sampled(2, temperature=50.0)
    outputs = engine.generate(
        input_ids=[PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0]], sampling_params=[masked, GREEDY, hot, GREEDY]
    )
    assert set(outputs[0].token_ids) <= {65, 66}
    assert outputs[1].token_ids == ids(plain, PROMPTS[1]) and outputs[3].token_ids == ids(plain, PROMPTS[0])
    assert all(0 <= token < 301 for token in outputs[2].token_ids)


def test_b28_the_padding_of_the_vocabulary_is_never_sampled(engine: Engine) -> None:  # mlx-vlm#1917
    """301 rows of the head are padded to 320; at this temperature each of them would come up."""
    out = engine.generate(input_ids=[5], sampling_params=sampled(1, temperature=100.0, n=16, max_tokens=60))
    flat = [token for choice in out.choices for token in choice.token_ids]
    assert max(flat) <= 300 and len(set(flat)) > 250
    wide = engine.generate(input_ids=[5], sampling_params=sampled(1, temperature=100.0, n=16, max_tokens=60, top_k=300))
    assert max(token for choice in wide.choices for token in choice.token_ids) <= 300


# ---- penalties -------------------------------------------------------------------------------------------------------


def test_b24_a_repetition_penalty_looks_at_prompt_and_output(engine: Engine) -> None:  # vllm-metal#69
    found = ids(engine, PROMPTS[2], replace(GREEDY, repetition_penalty=100.0))
    assert len(set(found)) == OUT and not set(found) & set(PROMPTS[2])


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_b24_presence_and_frequency_look_at_the_output_alone(engine: Engine, penalty: str) -> None:  # vllm-metal#69
    first = ids(engine, PROMPTS[0])[0]
    prompt = [first] * 3 + PROMPTS[0]
    bare = ids(engine, prompt)
    punished = ids(engine, prompt, SamplingParams(temperature=0, max_tokens=OUT, ignore_eos=True, **{penalty: 2.0}))
    assert punished[0] == bare[0]
    inside = prompt + bare[:1]  # as a part of the prompt the token costs nothing
    assert ids(engine, inside, SamplingParams(temperature=0, max_tokens=1, **{penalty: 2.0})) == bare[1:2]


def test_penalties_are_of_the_raw_logits(engine: Engine) -> None:
    """The token after a penalised one is the best of the logits less the penalty, by the reported log-probabilities."""
    params = replace(GREEDY, frequency_penalty=1.5, logprobs=20, max_tokens=12)
    out = engine.generate(input_ids=PROMPTS[3], sampling_params=params)
    counts: Counter[int] = Counter()
    for entry in out.logprobs:
        best = max(zip(entry.top_ids, entry.top_logprobs), key=lambda item: item[1] - 1.5 * counts[item[0]])
        assert entry.token_id == best[0]
        counts[entry.token_id] += 1


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": -2.0}, {"frequency_penalty": -2.0}, {"repetition_penalty": 0.01}]
)
def test_chunks_of_a_prompt_sample_nothing_that_counts(model: Path, penalty: dict[str, float]) -> None:
    """The row of a chunk that does not end its prompt is a hole: token 0 is not among the output for it."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={0: 4.0}, **penalty)
    prompt = [token % 251 + 1 for token in range(7, 107)]
    with start(model, buckets=[128], max_num_batched_tokens=128) as whole, start(model, buckets=[1, 16]) as chunks:
        assert ids(chunks, prompt, params) == ids(whole, prompt, params)


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_b16_ignore_eos_outlasts_a_list_of_ends(model: Path, plain: Engine, tmp_path: Path) -> None:  # vllm#4589
    free = ids(plain, PROMPTS[0])
    ends = sorted({free[4], free[9], 257})
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with start(tmp_path) as engine:
        stopped = engine.generate(input_ids=PROMPTS[0], sampling_params=replace(GREEDY, ignore_eos=False))
        assert stopped.token_ids == free[: min(map(free.index, ends[:2] if 257 not in free else ends)) + 1]
        assert stopped.finish_reason == "stop"
        assert ids(engine, PROMPTS[0]) == free
        later = engine.generate(input_ids=PROMPTS[0], sampling_params=replace(GREEDY, ignore_eos=False, min_tokens=8))
        assert len(later.token_ids) >= 8 and not set(later.token_ids[:8]) & set(ends)


def test_a_stop_token_id_ends_and_is_named(engine: Engine) -> None:
    free = ids(engine, PROMPTS[1])
    out = engine.generate(input_ids=PROMPTS[1], sampling_params=replace(GREEDY, stop_token_ids=[free[5]]))
    assert out.token_ids == free[: free.index(free[5]) + 1]
    assert out.finish_reason == "stop" and out.choices[0].stop_reason == free[5]


# ---- the prefix cache ------------------------------------------------------------------------------------------------


def test_b93_a_prefix_hit_changes_no_token(engine: Engine, plain: Engine) -> None:  # vllm#7845
    prompt = [token % 251 for token in range(7, 107)]
    expected = ids(plain, prompt)
    outputs = [engine.generate(input_ids=prompt, sampling_params=GREEDY) for _ in range(3)]
    assert [o.token_ids for o in outputs] == [expected] * 3
    assert [o.usage.cached_tokens for o in outputs] == [0, 96, 96]


@pytest.mark.parametrize("pages", [1, 2, 4])
def test_b71_a_prompt_of_whole_pages_sent_twice(engine: Engine, plain: Engine, pages: int) -> None:  # nano-vllm#144
    prompt = [(37 * pages + 11 * token) % 251 for token in range(pages * PAGE)]
    first, second = (engine.generate(input_ids=prompt, sampling_params=GREEDY) for _ in range(2))
    assert first.token_ids == second.token_ids == ids(plain, prompt)
    assert pages * PAGE - PAGE <= second.usage.cached_tokens < pages * PAGE


def test_b79_one_prompt_several_times_in_a_batch(engine: Engine, plain: Engine) -> None:  # MinivLLM#98
    prompt = [(91 + 13 * token) % 251 for token in range(70)]
    outputs = engine.generate(input_ids=[prompt] * 4, sampling_params=GREEDY)
    assert [o.token_ids for o in outputs] == [ids(plain, prompt)] * 4


def test_a_longer_turn_finds_the_shorter_one(engine: Engine, plain: Engine) -> None:
    """A conversation goes on: prompt, answer and the next question; the answer's pages are found too."""
    prompt = [(17 + 29 * token) % 251 for token in range(40)]
    answer = ids(engine, prompt, replace(GREEDY, max_tokens=40))
    turn = [*prompt, *answer, 1, 2, 3]
    again = engine.generate(input_ids=turn, sampling_params=GREEDY)
    assert again.token_ids == ids(plain, turn)
    assert again.usage.cached_tokens == 64  # 79 positions were computed: four whole pages


# ---- many choices, few pages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sampled", "presence", "bias"])
def test_b29_five_choices_on_a_pool_for_two(model: Path, plain: Engine, kind: str) -> None:  # vllm#8844
    params = replace(KINDS[kind], n=5, max_tokens=60, seed=40)
    expected = [ids(plain, PROMPTS[2], replace(params, n=1, seed=40 + i)) for i in range(5)]
    with start(model, num_pages=9, max_num_seqs=8) as engine:
        out = engine.generate(input_ids=PROMPTS[2], sampling_params=params)
        stats = engine.control("stats")
        engine.control("check")
    assert [c.index for c in out.choices] == list(range(5))
    assert [c.token_ids for c in out.choices] == expected
    assert all(c.finish_reason == "length" for c in out.choices)
    assert stats["retractions"] > 0, "the pool was meant to be too small"
    assert stats["kv_pages_free"] + stats["kv_pages_cached"] == stats["kv_pages_total"] == 9


def test_choices_are_different_and_made_again_by_their_seed(engine: Engine) -> None:
    out = engine.generate(input_ids=PROMPTS[0], sampling_params=sampled(5, n=4))
    assert len({tuple(c.token_ids) for c in out.choices}) == 4
    again = engine.generate(input_ids=PROMPTS[0], sampling_params=sampled(5, n=4))
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in out.choices]


# ---- the distribution ------------------------------------------------------------------------------------------------


def first_tokens(engine: Engine, count: int, **more: Any) -> Counter[int]:
    """Of `count` choices the first token, seeds 0, 1, ..."""
    found: Counter[int] = Counter()
    for base in range(0, count, 128):
        params = SamplingParams(
            **{"temperature": 1.0, "n": 128, "seed": base, "max_tokens": 1, "ignore_eos": True} | more
        )
        found.update(c.token_ids[0] for c in engine.generate(input_ids=PROMPTS[0], sampling_params=params).choices)
    return found


def best(engine: Engine) -> dict[int, float]:
    """Probabilities of the 20 best first tokens."""
    (entry, *_) = engine.generate(input_ids=PROMPTS[0], sampling_params=replace(GREEDY, logprobs=20)).logprobs
    return {token: math.exp(lp) for token, lp in zip(entry.top_ids, entry.top_logprobs)}


@pytest.mark.parametrize("full", [False, True], ids=["gumbel", "full"])
def test_tokens_come_as_often_as_the_model_says(engine: Engine, full: bool) -> None:
    """1,024 draws, by the vocabulary-sharded sampler and by the full one (a filter that lets all pass)."""
    count, expected = 1024, best(engine)
    found = first_tokens(engine, count, **({"top_k": 301} if full else {}))
    for token, p in expected.items():
        spread = math.sqrt(p * (1 - p) / count)
        assert abs(found[token] / count - p) < 5 * spread, token
    assert len(found) > 10


def test_a_nucleus_holds_what_it_should(engine: Engine) -> None:
    expected = best(engine)
    sums = list(itertools.accumulate(expected.values()))
    inside = {token for token, before in zip(expected, [0.0, *sums]) if before < 0.5}
    assert 1 < len(inside) < 20
    assert set(first_tokens(engine, 256, top_p=0.5)) == inside
    assert set(first_tokens(engine, 512, top_k=4)) == set(list(expected)[:4])
