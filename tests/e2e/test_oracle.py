"""Greedy tokens equal those of transformers in float32, on the embedded model and on tiny random configurations."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.e2e.models import PROMPTS, disagreements, write_tiny
from tokenspeed import Engine, SamplingParams


@pytest.fixture(autouse=True)
def _threads():
    """The reference and the engine share this process: torch keeps its threads whatever the engine set."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_embedded_model_equals_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tokenspeed.runtime.gguf_metadata import find_embedded_model

    path = find_embedded_model()
    with Engine(
        model="smollm2",
        core="inproc",
        dtype="float32",
        max_num_seqs=32,
        max_num_batched_tokens=256,
        memory_fraction=0.05,
    ) as engine:
        results = engine.generate(
            prompt=PROMPTS, sampling_params=SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        )
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = [tokenizer(p).input_ids for p in PROMPTS]
    outputs = [r.token_ids for r in results]
    assert [len(o) for o in outputs] == [64] * 20
    ties, real = disagreements(reference, ids, outputs)
    with capsys.disabled():
        print(f"\n  near-ties: {ties} of {20 * 64} tokens")
    assert real == 0
    assert ties <= 1


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "over"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 8}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 20}),
        ("qwen2", {}),
        ("qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}),
        ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.7}}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"rope_parameters": YARN, "rope_interleave": False}),
        ("deepseek_v32", {}),
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [0], "num_hidden_layers": 3}),
        ("glm4_moe", {}),
        ("glm4_moe", {"use_qk_norm": True, "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.25}),
        ("minimax_m2", {}),
        ("gpt_oss", {}),
        (
            "gpt_oss",
            {"num_hidden_layers": 2, "swiglu_alpha": 1.3, "layer_types": ["full_attention", "sliding_attention"]},
        ),
        ("qwen3_next", {}),
        ("qwen3_next", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}, "mlp_only_layers": [1]}),
        ("qwen3_5", {}),
        ("qwen3_5_moe", {}),
        ("gemma3", {}),
        ("gemma3", {"final_logit_softcapping": 4.0, "tie_word_embeddings": False, "num_key_value_heads": 1}),
    ],
)
def test_tiny_models_equal_transformers(tmp_path: Path, kind: str, over: dict) -> None:
    from transformers import AutoModelForCausalLM

    path = write_tiny(tmp_path / "model", kind, **over)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 1003) for _ in range(rng.randrange(1, 90))] for _ in range(12)]
    with Engine(model=str(path), core="inproc", max_num_batched_tokens=32, max_num_seqs=8, num_pages=200) as engine:
        results = engine.generate(
            input_ids=prompts,
            sampling_params=SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False),
        )
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ties, real = disagreements(reference, prompts, [r.token_ids for r in results])
    assert (real, ties) == (0, 0)
    assert len({t for r in results for t in r.token_ids}) > 20, "a model that repeats itself proves little"
