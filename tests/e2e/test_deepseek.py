"""DeepSeek and Kimi as they come: tensors that hold two matrices, layers that guess ahead, configurations inside others; and
what rotary embeddings must be whatever the lengths of requests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.models import tiny_config, write_tiny
from tokenspeed import Engine, SamplingParams
from tokenspeed.compiler.api import compile_model
from tokenspeed.models import find_family
from tokenspeed.models.nn.config import Config, ConfigError
from tokenspeed.runtime.checkpoint import SafetensorsCheckpoint, read_config
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.loader import load_weights, rope_table

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPTS = [[7, 3, 900, 21, 5], [11] * 40, [500, 4]]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("deepseek") / "model", "deepseek_v3")


def generated(path: Path, prompts: list[list[int]] = PROMPTS, **more: Any) -> list[list[int]]:
    with Engine(
        model=str(path), core="inproc", max_num_batched_tokens=32, max_num_seqs=4, num_pages=64, **more
    ) as engine:
        return [r.token_ids for r in engine.generate(input_ids=prompts, sampling_params=GREEDY)]


def changed(source: Path, target: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    """A copy of a checkpoint with more tensors and other fields."""
    shutil.copytree(source, target)
    save_file(load_file(target / "model.safetensors") | tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("mesh", ["", "tp=2", "tp=3"])
def test_each_rank_reads_its_heads_of_both_matrices(model: Path, mesh: str) -> None:
    """kv_b_proj holds the keys' 12 rows and the values' 10 of each of 8 heads in turn; 3 ranks hold a head of zeros."""
    c = read_config(model / "config.json")
    done = compile_model(find_family("DeepseekV3ForCausalLM"), c, mesh=mesh, buckets=[4], variants=["gumbel"])
    files = SafetensorsCheckpoint(model)
    whole = files.matrix("model.layers.1.self_attn.kv_b_proj.weight", (0, 176), (176, 24))
    assert isinstance(whole, Tensor)
    heads = torch.zeros(9, 22, 24)
    heads[:8] = whole.view(8, 22, 24)
    ranks = done.manifest["ranks"]
    each = -(-8 // ranks)
    for rank in range(ranks):
        held = load_weights(done.result.weights, files, rank)
        mine = heads[rank * each : (rank + 1) * each]
        assert torch.equal(held["layers.1.attn.k_b"], mine[:, :12].reshape(-1, 24))
        assert torch.equal(held["layers.1.attn.v_b"], mine[:, 12:].reshape(-1, 24))


def test_layers_that_guess_ahead_are_passed_over(model: Path, tmp_path: Path) -> None:
    more = {f"model.layers.3.{name}": torch.ones(4, 4) for name in ("eh_proj.weight", "enorm.weight")}
    beside = changed(model, tmp_path / "m", more, num_nextn_predict_layers=1)
    assert generated(beside) == generated(model)
    with pytest.raises(StartupError, match=r"2 tensors that this model has no place for, as model.layers.3.eh_proj"):
        generated(changed(model, tmp_path / "n", more, num_nextn_predict_layers=0))


def test_weights_of_a_strange_format_are_refused_by_its_name(model: Path, tmp_path: Path) -> None:
    packed = {"model.layers.1.mlp.experts.0.up_proj.qweight": torch.ones(1, 1)}
    path = changed(model, tmp_path / "m", packed, quantization_config={"quant_method": "awq"})
    with pytest.raises(StartupError, match=r"qweight: its weights are quantised \(awq\)"):
        generated(path)


def test_the_language_model_of_kimi_k2_5(model: Path, tmp_path: Path) -> None:
    """Its configuration nests the text model's, and its tensors lie under language_model."""
    target = tmp_path / "kimi"
    target.mkdir()
    tensors = {f"language_model.{name}": x for name, x in load_file(model / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.patch.weight": torch.ones(2, 2)}, target / "model.safetensors")
    text = json.loads((model / "config.json").read_text())
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (target / "config.json").write_text(json.dumps(whole))
    assert generated(target) == generated(model)


@pytest.mark.parametrize(
    ("architecture", "over", "said"),
    [
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("DeepseekV3ForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("DeepseekV32ForCausalLM", {"index_head_dim": 4}, "index_head_dim=4"),
        ("DeepseekV32ForCausalLM", {"index_topk": 0}, "index_topk is 0"),
        ("DeepseekV32ForCausalLM", {"q_lora_rank": None}, "q_lora_rank"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ],
)
def test_what_the_family_cannot_be_is_refused(architecture: str, over: dict[str, Any], said: str) -> None:
    kind = architecture.removesuffix("ForCausalLM").replace("V", "_v").lower()
    c = tiny_config(kind).to_dict() | over
    with pytest.raises(ConfigError, match=said):
        compile_model(find_family(architecture), c, buckets=[4], variants=["gumbel"])


def test_index_heads_turn_in_halves_where_attention_turns_pairs() -> None:
    """DeepSeek-V3.2-Exp, 17 November 2025: the demo turned pairs in the indexer, and long contexts suffered."""
    c = tiny_config("deepseek_v32").to_dict()
    done = compile_model(find_family("DeepseekV32ForCausalLM"), c, buckets=[4], variants=["gumbel"])
    leaf = next(x for n, x in done.result.programs["gumbel", 4].leaves.items() if n.startswith("Attention"))
    widths = {n.op: [] for n in leaf.nodes if n.op.startswith("rope")}
    for n in leaf.nodes:
        if n.op in widths:
            widths[n.op].append(leaf.types[n.inputs[0]].names[-1])
    assert widths == {"rope": ["di", "di"], "rope_pairs": ["dr", "dr"]}


# ---- rotary embeddings and lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"attention_factor": 1.5},
        {"beta_fast": 8, "beta_slow": 2}, {"truncate": False}, {"factor": 40.0, "original_max_position_embeddings": 4096},
    ],
)  # fmt: skip
def test_yarn_equals_transformers(more: dict[str, Any]) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    hf = tiny_config("deepseek_v3", rope_parameters=YARN | more)
    cos, sin = DeepseekV3RotaryEmbedding(hf)(torch.zeros(1), torch.arange(512)[None])
    parameters = Config(hf.to_dict()).rope_parameters
    table = rope_table({"dim": 8, "positions": 512, "parameters": parameters})
    assert torch.allclose(table, torch.cat([cos[0, :, :4], sin[0, :, :4]], 1), atol=1e-6)


KINDS = {
    "yarn": YARN,
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_request_behind_a_long_one_equals_a_fresh_one(tmp_path: Path, kind: str) -> None:
    """vllm#27431, vllm#3488: factors chosen by the length of a request, or kept from a longer one before it."""
    path = write_tiny(tmp_path / "model", "llama", rope_parameters=KINDS[kind], max_position_embeddings=256)
    long = [[(7 * i) % 1000 for i in range(200)]]  # three times the original context of 64
    fresh = generated(path, PROMPTS)
    with Engine(model=str(path), core="inproc", max_num_batched_tokens=64, max_num_seqs=4, num_pages=64) as engine:
        engine.generate(input_ids=long, sampling_params=GREEDY)
        after = [r.token_ids for r in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]
        beside = [r.token_ids for r in engine.generate(input_ids=long + PROMPTS, sampling_params=GREEDY)][1:]
    assert after == beside == fresh


def test_no_position_lies_past_the_table(model: Path) -> None:
    """vllm#44286: the table has a row for every position that a request may reach, and more are refused at start."""
    c = read_config(model / "config.json")
    done = compile_model(find_family("DeepseekV3ForCausalLM"), c, buckets=[4], variants=["gumbel"])
    held = load_weights(done.result.weights, SafetensorsCheckpoint(model), 0)
    assert held["rope"].shape[0] == c["max_position_embeddings"] == 512
    with pytest.raises(StartupError, match=r"max_model_len=513 is beyond the model's positions \(512\)"):
        generated(model, max_model_len=513)
