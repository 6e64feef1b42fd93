"""SamplingParams: what is refused, by name, and what reaches the core."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed.ir.ops.sampling import Word, philox_gumbel
from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.sampling_params import SamplingParams
from tokenspeed.runtime.sampling_state import pack_params

KEY = (Word.SEED_LO, Word.SEED_HI)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # sglang#28153
        *[("temperature", value) for value in (NAN, INF, -INF, -1, 1e9, "1", None, True)],
        *[("top_p", value) for value in (0, 1.5, NAN)],
        *[("min_p", value) for value in (-0.1, 1.1, NAN)],
        *[("top_k", value) for value in (-2, 1.0, True)],
        *[("repetition_penalty", value) for value in (0, -1, 1e-300, 0.009, 101, NAN, INF)],
        *[("presence_penalty", value) for value in (2.1, -2.1, NAN)],
        *[("frequency_penalty", value) for value in (2.1, -2.1, NAN)],
        *[("n", value) for value in (0, -1, 129, 1.0)],
        # vllm#16529, sglang#7670
        *[("logit_bias", value) for value in ({1: 1e9}, {1: NAN}, {-1: 1}, {"abc": 1}, {1: "x"}, [5], "x")],
        *[("stop", value) for value in ("", ["a", ""], [1], 7, ("a",), "\ud800", ["a", "b\udfff"])],
        *[("stop_token_ids", value) for value in ([-1], ["x"], "x", [True])],
        *[("allowed_token_ids", value) for value in ([], [-1], "x")],
        *[("seed", value) for value in (1 << 63, -(1 << 63) - 1, 1.5, "x")],
        *[("min_tokens", value) for value in (-1, 1.5)],
        *[("max_tokens", value) for value in (-1, 1.5, "x")],
        *[("logprobs", value) for value in (-1, 21, True)],
        *[("ignore_eos", value) for value in (1, "yes")],
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name and name in caught.value.message
    assert isinstance(caught.value, ValueError)


def test_values_at_the_edges_are_taken() -> None:
    for temperature in (0, 1e-6, 1e-4, 2.5):
        assert SamplingParams(temperature=temperature).resolve(1, 8, [], 9).temperature == temperature
    core = SamplingParams(top_k=-1, logit_bias={3: -100, 4: 100}, seed=-1, logprobs=0).resolve(1, 8, [], 9)
    assert (core.top_k, core.logit_bias, core.logprobs) == (0, {3: -100.0, 4: 100.0}, 0)
    assert core.seed == 2**64 - 1


def test_distinct_seeds_are_distinct_streams() -> None:
    seeds = [-(2**63), -(2**63) + 1, -(2**32), -2, -1, 0, 1, 2**31, 2**32, 2**62, 2**63 - 1]
    draws = set()
    for seed in seeds:
        words = pack_params(SamplingParams(seed=seed).resolve(1, 8, [], 9))[None]
        noise = philox_gumbel(*(torch.tensor(words[:, word]) for word in KEY), torch.zeros(1), torch.arange(8))
        draws.add(tuple(noise[0].tolist()))
    assert len(draws) == len(seeds)


def test_a_number_beyond_64_bits_is_refused_and_not_repeated() -> None:
    for name in ("n", "top_k", "seed", "min_tokens", "max_tokens", "logprobs", "temperature", "top_p"):
        with pytest.raises(RequestError, match=f"{name} must be .*, not one beyond 64 bits"):
            SamplingParams(**{name: 10**400})


def test_a_mapping_stands_for_its_fields() -> None:
    given = SamplingParams(n=2, stop="x")
    assert SamplingParams.of({"n": 2, "stop": "x"}) == SamplingParams.of(given) == given
    assert SamplingParams.of(None) == SamplingParams()
    with pytest.raises(RequestError, match="'heat' is no sampling parameter: fields are n, temperature"):
        SamplingParams.of({"heat": 1})


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(RequestError, match="min_tokens is 5, more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_b15_stop_strings_need_text() -> None:  # vllm#57058
    with pytest.raises(RequestError, match="use stop_token_ids") as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.param == "stop"


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_b22_b27_token_ids_must_be_in_the_vocabulary(name: str) -> None:  # vllm#16529
    value: Any = {100: 1.0} if name == "logit_bias" else [100]
    with pytest.raises(RequestError, match=r"ids are 0\.\.99") as caught:
        SamplingParams(**{name: value}).resolve(1, 8, [], 100)
    assert caught.value.param == name
    SamplingParams(**{name: value}).resolve(1, 8, [], 101)


def test_b16_ignore_eos_drops_every_end_of_sequence_id_and_no_other() -> None:  # vllm#4589
    params = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    assert params.resolve(1, 8, [2, 3, 4], 9).stop_token_ids == [7]
    assert SamplingParams(stop_token_ids=[7]).resolve(1, 8, [2, 3, 4], 9).stop_token_ids == [2, 3, 4, 7]


def test_b36_max_tokens_absent_is_the_rest_of_the_context() -> None:  # vllm#6707
    assert SamplingParams().resolve(30, 100, [], 9).max_tokens == 70


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "numbers"),
    [
        (300, None, ("100", "300")),  # vllm#36789
        (100, None, ("100", "100")),  # vllm#16445
        (100, 1, ("100", "1")),
        (300, 0, ("100", "300")),
        (8, 2045, ("100", "8", "2045")),  # vllm#33418
    ],
)
def test_what_does_not_fit_names_the_numbers(prompt: int, max_tokens: int | None, numbers: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=max_tokens).resolve(prompt, 100, [], 9)
    assert caught.value.code == "context_length_exceeded"
    assert "-" not in caught.value.message
    for number in numbers:
        assert f" {number}" in caught.value.message


def test_b33_scoring_a_prompt_of_the_whole_context_is_allowed() -> None:  # vllm#16445
    assert SamplingParams(max_tokens=0).resolve(100, 100, [], 9).max_tokens == 0
