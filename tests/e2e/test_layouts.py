"""Real processes: every layout of the embedded model gives the tokens of one rank, 20 prompts in one batch."""

from __future__ import annotations

import functools

import pytest

from tests.e2e.models import PROMPTS
from tokenspeed import Engine, SamplingParams


@functools.cache
def tokens(mesh: str) -> tuple[tuple[int, ...], ...]:
    """Greedy tokens of the 20 prompts, submitted together."""
    with Engine(
        model="smollm2", dtype="float32", mesh=mesh, max_num_seqs=32, max_num_batched_tokens=128, memory_fraction=0.05,
        buckets=[1, 8, 16, 32, 64, 128], core="process" if mesh else "inproc",
    ) as engine:  # fmt: skip
        results = engine.generate(
            prompt=PROMPTS, sampling_params=SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        )
    return tuple(tuple(r.token_ids) for r in results)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4", "dp=2,tp=2"])
def test_layout_gives_the_tokens_of_one_rank(mesh: str) -> None:
    assert tokens(mesh) == tokens("")
