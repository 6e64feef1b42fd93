"""Models with recurrent layers in the engine: their states through chunks, slots and retraction, the memory they take, and
the forms that their checkpoints have."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.models import write_tiny
from tokenspeed import Engine, SamplingParams
from tokenspeed.runtime import cache_sizes
from tokenspeed.runtime.errors import StartupError

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)


def prompts() -> list[list[int]]:
    rng = random.Random(8)
    shared = [rng.randrange(3, 1003) for _ in range(33)]
    return [shared + [rng.randrange(3, 1003) for _ in range(n)] for n in (0, 0, 1, 15)] + [
        shared[:n] for n in (1, 2, 16)
    ]


def generate(path: Path, work: list[list[int]], **options: Any) -> tuple[list[list[int]], dict[str, int]]:
    given = {"num_pages": 200, "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 128} | options
    with Engine(model=str(path), core="inproc", **given) as engine:
        first = engine.generate(input_ids=work, sampling_params=GREEDY)
        again = engine.generate(input_ids=work, sampling_params=GREEDY)  # in slots that others have left
        assert [r.token_ids for r in first] == [r.token_ids for r in again]
        return [r.token_ids for r in first], engine.control("stats")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "model", "qwen3_5_moe")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return generate(model, prompts(), overlap_depth=0, max_num_batched_tokens=128)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 1, "enable_prefix_caching": False},
        {"prefill_chunk": 7, "overlap_depth": 0},
        {"max_num_seqs": 2, "page_size": 1},
        {"page_size": 4, "num_pages": 18},
        {"page_size": 4, "num_pages": 18, "enable_prefix_caching": False},
    ],
)
def test_tokens_do_not_depend_on_chunks_slots_overlap_retraction_or_prefixes(
    model: Path, expected: list[list[int]], options: dict[str, Any]
) -> None:
    tokens, stats = generate(model, prompts(), **options)
    assert tokens == expected
    assert (stats["prefix_hit_tokens"] > 0) == options.get("enable_prefix_caching", True)
    assert (stats["retractions"] > 0) == (options.get("num_pages") == 18)


@pytest.mark.parametrize("pages", [0, 8])
def test_states_that_do_not_fit_are_refused_with_how_many_would(
    model: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    monkeypatch.setattr(cache_sizes, "free_memory", lambda: 1 << 20)
    options: dict[str, Any] = {"model": str(model), "core": "inproc", "max_model_len": 32, "num_pages": pages}
    with pytest.raises(StartupError, match=r"no room for the states of 256 requests at once: ") as refused:
        Engine(**options).__enter__()
    found = re.search(r"set max_num_seqs to (\d+) or less", str(refused.value))
    assert found is not None
    with Engine(**options, max_num_seqs=int(found[1])) as engine:
        assert engine.generate(input_ids=[[5, 6, 7]], sampling_params=GREEDY)


def test_the_next_turn_goes_on_from_a_snapshot(model: Path) -> None:
    """Two turns of a conversation: the second computes what is new, and says what it says from the beginning."""
    first = prompts()[3]
    with Engine(model=str(model), core="inproc", num_pages=200, max_num_seqs=4, max_model_len=256) as engine:
        (said,) = engine.generate(input_ids=[first], sampling_params=GREEDY)
        (again,) = engine.generate(input_ids=[[*first, *said.token_ids, 7, 8, 9]], sampling_params=GREEDY)
        found = engine.control("stats")["prefix_hit_tokens"]
    assert found == (len(first) + 15) // 16 * 16
    cold = generate(model, [[*first, *said.token_ids, 7, 8, 9]], enable_prefix_caching=False)[0]
    assert [again.token_ids] == cold


def published(source: Path, target: Path) -> Path:
    """The same model in the form that multi-modal models of this family are published in: all experts of a layer in one tensor,
    a vision tower and a layer that guesses ahead beside the language model."""
    config, weights = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    whole: dict[str, Tensor] = {
        "model.visual.blocks.0.attn.qkv.weight": torch.ones(3, 3),
        "mtp.fc.weight": torch.ones(2, 2),
    }
    experts: dict[str, dict[str, list[Tensor]]] = {}
    for name in sorted(weights, key=lambda n: [int(p) if p.isdigit() else p for p in n.split(".")]):
        head, found, rest = name.partition(".mlp.experts.")
        if found:
            experts.setdefault(head, {}).setdefault(rest.split(".")[1], []).append(weights[name])
        else:
            whole[name.replace("model.", "model.language_model.", 1)] = weights[name]
    for head, parts in experts.items():
        stack, prefix = (
            {k: torch.stack(v) for k, v in parts.items()},
            head.replace("model.", "model.language_model.", 1),
        )
        whole[f"{prefix}.mlp.experts.gate_up_proj"] = torch.cat([stack["gate_proj"], stack["up_proj"]], 1)
        whole[f"{prefix}.mlp.experts.down_proj"] = stack["down_proj"].contiguous()
    target.mkdir()
    save_file(whole, target / "model.safetensors")
    outer = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "vision_config": {"depth": 1},
    }
    (target / "config.json").write_text(json.dumps(outer | {"text_config": config}))
    return target


def test_a_published_checkpoint_gives_the_tokens_of_its_language_model(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    assert generate(published(model, tmp_path / "published"), prompts())[0] == expected
