"""Parts of the compiler alone: weight map, layout errors, buckets."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.compiler.sim import compile_tiny, random_weights, tiny
from tokenspeed.compiler.api import default_buckets
from tokenspeed.compiler.weightmap import verify_weights
from tokenspeed.ir.errors import PlanError, VerifyError
from tokenspeed.models.nn import ConfigError


@pytest.mark.parametrize(
    ("mesh", "over"),
    [
        ("tp=2", {"num_attention_heads": 9, "num_key_value_heads": 3}),
        ("tp=4", {}),
        ("tp=8", {"num_key_value_heads": 1}),
        ("dp=2,tp=2", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_each_checkpoint_entry_is_held_as_often_as_its_type_says(mesh: str, over: dict) -> None:  # vllm-gguf-plugin#103
    m = compile_tiny(tiny(**over), mesh).weights
    verify_weights(m)
    entry = next(e for e in m.entries if e.segments and e.name.endswith("qkv"))
    broken = type(m)(m.plan, m.sizes, m.runs | {"n": ((0, 0, 1),)}, m.logical, (entry,))
    with pytest.raises(VerifyError, match="V14"):
        verify_weights(broken)


def test_padded_weights_are_zero_outside_the_checkpoint() -> None:
    r = compile_tiny(tiny(num_attention_heads=9, num_key_value_heads=3), "tp=2")
    assert r.layout.sizes["kv"] == 4
    assert r.layout.sizes["n"] == 12
    assert r.layout.sizes["v"] == 1024
    weights = random_weights(r)
    q = weights["layers.0.attn.qkv:0"]
    assert torch.count_nonzero(q[9:]) == 0
    assert torch.count_nonzero(q[:9]) > 0


@pytest.mark.parametrize(
    ("mesh", "axes", "code"),
    [("a=2", "tp=a,dp=a", "P031"), ("ep=2", "", "P034"), ("tp=2", "nothing=tp,mlp=zz", "P034"), ("tp=2", "mlpp=tp", "P034")],
)  # fmt: skip
def test_plans_that_cannot_be_name_axis_and_module(mesh: str, axes: str, code: str) -> None:
    with pytest.raises(PlanError) as e:
        compile_tiny(tiny(), mesh, axes)
    assert e.value.code == code


@pytest.mark.parametrize(
    ("over", "field"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"), ({"sliding_window": -4}, "sliding_window"), ({"rope_scaling": {"type": "yarn"}}, "yarn"),
        ({"num_attention_heads": 9}, "num_attention_heads"), ({"hidden_size": None}, "hidden_size"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be_name_the_field(over: dict, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        compile_tiny(tiny(**over))


def test_default_buckets_are_dense_enough() -> None:
    for top in (1, 5, 64, 512, 8192):
        b = default_buckets(top)
        assert b[-1] == top
        assert b == sorted(set(b))
        assert all(y <= x * 1.26 + 1 for x, y in itertools.pairwise(b) if x >= 8)
