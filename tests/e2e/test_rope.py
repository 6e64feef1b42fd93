"""Every kind of rope: its table beside that of transformers, and that what a request gets depends on no other request and on
no length but the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.models import disagreements, write_tiny
from tokenspeed import Engine, SamplingParams
from tokenspeed.models.nn.config import Config, ConfigError
from tokenspeed.models.nn.params import Rope
from tokenspeed.runtime.rope import rope_table

SHORT, LONG = [1.0 + 0.05 * i for i in range(8)], [1.5 + 2.0 * i for i in range(8)]
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64},
}


def parameters(kind: str, theta: float = 1e4) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta} | KINDS[kind]


@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_that_of_transformers(kind: str, length: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
    ours = Config(fields | {"rope_parameters": parameters(kind)}).rope_parameters
    table = rope_table({"dim": 16, "positions": length, "parameters": ours}, length)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**fields, rope_parameters=parameters(kind)))
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    want = torch.cat([cos[0, :, :8], sin[0, :, :8]], 1)
    assert torch.allclose(table, want, rtol=1e-5, atol=1e-5)


def _tokens(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    return [r.token_ids for r in engine.generate(input_ids=prompts, sampling_params=greedy)]


def _engine(path: Path, length: int = 0) -> Engine:
    return Engine(
        model=str(path), core="inproc", max_model_len=length, max_num_seqs=2, max_num_batched_tokens=32, num_pages=100
    )


@pytest.mark.parametrize("kind", KINDS)
def test_b88_a_short_request_behind_a_long_one_is_as_if_alone(tmp_path: Path, kind: str) -> None:  # jquesnelle/yarn#27
    path = write_tiny(tmp_path, "llama", rope_parameters=parameters(kind))
    short, long = [7, 300, 4, 9], [(11 * i) % 1003 for i in range(200)]
    with _engine(path) as engine:
        alone = _tokens(engine, [short])
    with _engine(path) as engine:
        _tokens(engine, [long])
        assert _tokens(engine, [short]) == alone


@pytest.mark.parametrize(("length", "prompt"), [(64, 30), (64, 50), (512, 70), (512, 300)])
def test_b86_longrope_is_fixed_by_the_engine_s_length(tmp_path: Path, length: int, prompt: int) -> None:  # vllm#27431
    """The divisors are those that transformers picks for requests that stay within the original context, or start beyond it."""
    from transformers import AutoModelForCausalLM

    path = write_tiny(tmp_path, "llama", rope_parameters=parameters("longrope"))
    ids = [(13 * i + 5) % 1003 for i in range(prompt)]
    with _engine(path, length) as engine:
        out = _tokens(engine, [ids])
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert disagreements(reference, [ids], out) == (0, 0)


def test_b86_a_request_that_crosses_the_original_context_keeps_its_divisors(tmp_path: Path) -> None:  # vllm#27414
    path = write_tiny(tmp_path, "llama", rope_parameters=parameters("longrope"))
    ids = [(13 * i + 5) % 1003 for i in range(60)]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    with _engine(path) as engine:
        grown = engine.generate(input_ids=ids, sampling_params=greedy).token_ids
    with _engine(path) as engine:  # the same positions as a prompt
        again = _tokens(engine, [ids + grown[:10]])[0]
    assert again[:10] == grown[10:]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": "x"}, "long_factor is 'x'"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "needs 'long_factor'"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "short_factor lists 1 divisors"),
        ({"rope_type": "linear"}, "needs 'factor'"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
    ],
)
def test_ropes_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Rope(16, 512, Config({"max_position_embeddings": 512, "rope_parameters": given}).rope_parameters)
