"""Rows that may draw only what a packed mask allows, and rows from which nothing can be drawn, through the real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.tiny import tiny_model
from tokenspeed import Engine, SamplingParams
from tokenspeed.ir.ops.sampling import Flag, Word
from tokenspeed.runtime.errors import GenerationError
from tokenspeed.runtime.executor import StateOp
from tokenspeed.runtime.sampling_state import SamplingTable

PROMPTS = [[7, 3, 99, 250], [11, 12] * 9, [5]]
IDS = 320  # of a mask: of as many bits as the vocabulary of 301 fills words


def packed(allows: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The i32 words of a mask, as grammar engines give them: the lowest bit of a word is the lowest id."""
    return np.packbits(allows(np.arange(IDS)), bitorder="little").view(np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


def masked(monkeypatch: pytest.MonkeyPatch, mask: Callable[[int], np.ndarray | None]) -> None:
    """Gives every row of every step the mask of its request's next position, as a grammar would."""
    plain = SamplingTable.rows

    def rows(self: SamplingTable, plan: Any) -> tuple[np.ndarray, str, list[StateOp]]:
        params, variant, ops = plain(self, plan)
        for i in np.flatnonzero(params[:, Word.FLAGS] & int(Flag.VALID)).tolist():
            if (words := mask(int(params[i, Word.POSITION]))) is not None:
                params[i, Word.FLAGS] |= int(Flag.MASK)
                ops.append(StateOp(i // plan.rows, int(params[i, Word.SLOT]), mask=words))
                variant = "full"
        return params, variant, ops

    monkeypatch.setattr(SamplingTable, "rows", rows)


def tokens(model: Path, mesh: str, **options: Any) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, top_k=40, seed=5, max_tokens=12, ignore_eos=True)
    with Engine(
        str(model), core="inproc", mesh=mesh, num_pages=64, max_num_seqs=4, max_num_batched_tokens=32, buckets=[1, 4, 32],
        overlap_depth=0, **options,
    ) as engine:  # fmt: skip
        return [
            out.token_ids
            for params in (greedy, drawn)
            for out in engine.generate(input_ids=PROMPTS, sampling_params=[params] * len(PROMPTS))
        ]


def test_masks_hold_on_a_sharded_vocabulary_as_on_one_rank(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = tokens(model, "")
    masked(monkeypatch, lambda position: packed(lambda ids: ids % 5 == position % 5))
    one = tokens(model, "")
    for k, prompt in enumerate(PROMPTS * 2):
        assert [t % 5 for t in one[k]] == [(len(prompt) + n) % 5 for n in range(12)]
    assert one != free
    assert tokens(model, "tp=2") == one


def test_a_request_that_can_draw_nothing_ends_with_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masked(monkeypatch, lambda position: packed(lambda ids: ids < 0) if position == 9 else None)
    for depth in (0, 1):
        with Engine(str(model), core="inproc", num_pages=64, buckets=[1, 4, 32], overlap_depth=depth) as engine:
            short = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            with pytest.raises(GenerationError, match="no token could be drawn"):
                engine.generate(input_ids=PROMPTS[0], sampling_params=short)
            assert len(engine.generate(input_ids=PROMPTS[1], sampling_params=short).token_ids) == 12
