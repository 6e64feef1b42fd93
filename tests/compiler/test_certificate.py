"""What a certificate cuts away keeps the model one that can be: lists of divisors, partial rotary, many experts a token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.compiler.sim import tiny
from tests.e2e.models import CONFIGS, tiny_config
from tokenspeed.compiler.api import compile_model
from tokenspeed.models import find_family
from tokenspeed.models.nn import ConfigError

LONG = {
    "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 16,
}  # fmt: skip


def _family(kind: str, **over: Any) -> dict[str, Any]:
    return tiny_config(kind).to_dict() | {"architectures": [CONFIGS[kind].replace("Config", "ForCausalLM")]} | over


def _compile(config: dict[str, Any], mesh: str = "") -> int:
    """Program bodies that equal one rank."""
    done = compile_model(find_family(config["architectures"][0]), config, mesh=mesh, buckets=[4], certificate=True)
    return len(json.loads(done.files["certificate.json"])["bodies"])


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_divisors_of_a_long_rope(mesh: str) -> None:
    assert _compile(tiny(head_dim=32, rope_scaling=LONG), mesh)


def test_a_rotary_part_below_a_quarter() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125}
    assert _compile(_family("glm4_moe", head_dim=64, partial_rotary_factor=0.125, rope_parameters=rope))


def test_more_experts_a_token_than_the_cut_leaves() -> None:
    many = {"n_routed_experts": 64, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 20}
    assert _compile(_family("deepseek_v3", **many), "tp=2")


@pytest.mark.parametrize(
    ("family", "over", "field"),
    [
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ("deepseek_v3", {"first_k_dense_replace": "1"}, "first_k_dense_replace"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("qwen3_next", {"partial_rotary_factor": 2.0, "rope_parameters": None}, "partial_rotary_factor"),
        ("qwen3_next", {"layer_types": 3}, "layer_types"),
        ("qwen3_next", {"mlp_only_layers": 5}, "mlp_only_layers"),
        ("minimax_m2", {"rotary_dim": "8"}, "rotary_dim"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_name_their_field(family: str, over: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        _compile(_family(family, **over))
