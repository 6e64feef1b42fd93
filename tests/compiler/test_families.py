"""Families at their real sizes, without weights: every tensor of the checkpoint is counted, the cache is as large as published,
and what a family's configuration cannot mean is refused."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest

from tests.compiler.sim import compile_tiny, tiny
from tests.compiler.test_compile_time import config
from tokenspeed.compiler.api import Compiled, compile_model
from tokenspeed.models import find_family
from tokenspeed.models.nn.config import ConfigError
from tokenspeed.runtime.executor import cache_bytes

#: numbers of a model's weights as its card or its checkpoint has them, and KV bytes a token in bfloat16
SIZES = {
    "deepseek-v3": (671_026_419_200, 70_272),
    "deepseek-v3.2": (671_877_944_064, 70_272 + 15_616),
    "kimi-k2.5": (1_026_408_232_448, 70_272),
    "gemma-3-1b": (999_885_952, 4_096 + 22_528),
    "gpt-oss-120b": (116_829_156_672, 36_864 + 36_864),
    "glm-4.5-air": (106_852_251_264, 188_416),
    "minimax-m2": (228_689_764_864, 253_952),
}


@functools.cache
def compiled(model: str) -> Compiled:
    c = config(model)
    return compile_model(
        find_family(c["architectures"][0]),
        c,
        dtype="bfloat16",
        cache_dtype="bfloat16",
        buckets=[1],
        variants=["gumbel"],
    )


@pytest.mark.parametrize("model", SIZES)
def test_weights_and_cache_are_as_large_as_published(model: str) -> None:
    weights, cache = SIZES[model]
    m = compiled(model).result.weights
    assert sum(math.prod(m.extent(s)) for e in m.distinct() for s in e.segments) == weights
    program = compiled(model).result.programs["gumbel", 1]
    assert cache_bytes(program, "slots") + cache_bytes(program, "window_slots") == cache


def _of_layer(text: str, i: int) -> list[str]:
    """The lines that make values of layer i, layers counted from it."""
    mine = [line.partition("   ;")[0] for line in text.splitlines() if line.startswith(f"  %layers.{i}.")]
    return [re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) - i:+}", line) for line in mine]


@pytest.mark.parametrize("calibration", ["cpu", "h200"])
def test_equal_layers_choose_alike(calibration: str) -> None:
    """Of many plans of one price each layer takes the same: only the ends of the stack may differ."""
    c = config("deepseek-v3") | {"num_hidden_layers": 30}
    r = compile_model(
        find_family("DeepseekV3ForCausalLM"), c, mesh="dp=4,tp=2", axes="ep=dp*tp,se=1", dtype="bfloat16", cache_dtype="bfloat16",
        buckets=[1, 4, 16, 64, 256, 2048, 4096], variants=["gumbel"], calibration=calibration,
    ).result  # fmt: skip
    for (_, t), text in r.texts.items():
        layers = [_of_layer(text, i) for i in range(8, 24)]
        assert layers[0] and all(layer == layers[0] for layer in layers), t
    assert len(r.bodies) < len(r.texts)


@pytest.mark.parametrize(
    ("model", "windows"),
    [("gemma-3-1b", ([512] * 5 + [0]) * 4 + [512] * 2), ("gpt-oss-120b", [128, 0] * 18), ("glm-4.5-air", [0] * 46)],
)
def test_each_layer_sees_its_window(model: str, windows: list[int]) -> None:
    p = compiled(model).result.programs["gumbel", 1]
    leaves = [p.leaves[n.attrs["leaf"]] for n in p.nodes if n.op == "call" and n.attrs["path"].endswith(".attn")]
    seen = [next(n.attrs.get("window", 0) for n in leaf.nodes if n.op == "attend") for leaf in leaves]
    assert seen == windows


def test_what_ranks_say_to_norm_all_heads_is_two_numbers_a_row() -> None:
    over = {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 4}
    r = compile_tiny(tiny("MiniMaxM2ForCausalLM", **over), "tp=8", buckets=[(8, 8)], costs="h200", variants=("gumbel",))
    leaf = next(x for x in r.programs["gumbel", 8].leaves.values() if x.name.startswith("Attention"))
    sums = [n for n in leaf.nodes if n.op == "all_reduce"]
    assert [str(leaf.types[n.outputs[0]]) for n in sums] == ["f32[t, qk]"], "one reduction for queries and keys"


@pytest.mark.parametrize(
    ("arch", "over", "said"),
    [
        ("Gemma3ForCausalLM", {"hidden_activation": "silu", "sliding_window": 4}, "hidden_activation='silu'"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {"sliding_window": None}, "sliding_window"),
        ("Glm4MoeForCausalLM", {"partial_rotary_factor": 0.4, "num_experts_per_tok": 2}, "partial_rotary_factor=0.4"),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("MiniMaxM2ForCausalLM", {"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
    ],
)
def test_what_a_family_cannot_be_is_refused(arch: str, over: dict[str, Any], said: str) -> None:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    with pytest.raises(ConfigError, match=said):
        compile_tiny(tiny(arch, **experts | over), variants=("gumbel",))
