"""Every legal plan computes what one rank computes: tokens of prefill and decode steps through the n-rank simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.compiler.sim import Steps, compile_tiny, random_weights, tiny
from tokenspeed.compiler.costs import CostModel, load_costs

PLANS = [
    ("tp=2", ""), ("tp=4", ""), ("tp=3", ""), ("tp=8", ""), ("dp=2,tp=2", ""), ("dp=2,tp=2", "vp=dp*tp"), ("dp=4", "mlp=dp,vp=dp"),
    ("dp=2,tp=2", "mlp=dp*tp,vp=tp"), ("a=2,b=2", "tp=a*b,mlp=b"), ("tp=4", "mlp=1"),
]  # fmt: skip
MODELS = {
    "gqa": tiny(), "nine-heads": tiny(num_attention_heads=9, num_key_value_heads=3), "mha": tiny(num_key_value_heads=8),
    "one-kv": tiny(num_key_value_heads=1, num_attention_heads=5), "qwen2": tiny("Qwen2ForCausalLM"), "qwen3": tiny("Qwen3ForCausalLM"),
    "bias": tiny(attention_bias=True, mlp_bias=True), "tied": tiny(tie_word_embeddings=True),
}  # fmt: skip


def tokens(
    config: dict, mesh: str, axes: str, costs: str | CostModel = "cpu", variant: str = "gumbel", seeds: bool = False
) -> list[int]:
    """Greedy (or seeded) tokens of four requests: prefill in a bucket of 8, then two decode steps in one of 4."""
    r = compile_tiny(config, mesh, axes, [(4, 4), (8, 4)], costs, (variant,))
    s = Steps(r, random_weights(r), variant)
    rng = random.Random(7)
    prompts = [[rng.randrange(1003) for _ in range(n)] for n in (3, 2, 4, 1)]
    draw = [11, 12, 13, 14] if seeds else None
    out: dict[int, list[int]] = {i: [] for i in range(4)}
    for pair in ([0, 1], [2, 3]):  # two requests a step, spread over the home groups; the others idle

        def spread(items: list) -> list:
            if s.groups == 1:
                return [items]
            return [[items[0]], [items[1]], *([] for _ in range(s.groups - 2))]

        got = s.step(8, spread([(i, prompts[i], 0) for i in pair]), draw)
        flat = [t for g in got for t in g]
        for i, t in zip(pair, flat):
            out[i].append(t)
        for k in range(2):
            got = s.step(4, spread([(i, [out[i][-1]], len(prompts[i]) + k) for i in pair]), draw)
            for i, t in zip(pair, [t for g in got for t in g]):
                out[i].append(t)
    return [t for i in range(4) for t in out[i]]


@pytest.mark.parametrize("model", MODELS)
def test_every_plan_gives_the_tokens_of_one_rank(model: str) -> None:
    one = tokens(MODELS[model], "", "")
    assert len(set(one)) > 3, "the tokens must depend on the input"
    first = list(MODELS).index(model)  # the head shapes matter here; test_layouts tries every layout
    for mesh, axes in [*PLANS[first % 3 :: 3], ("tp=3", "")]:
        if model == "one-kv" and mesh == "tp=3":
            continue
        assert tokens(MODELS[model], mesh, axes) == one, (mesh, axes)


@pytest.mark.parametrize("variant", ["gumbel", "full"])
def test_sampled_tokens_do_not_depend_on_the_plan(variant: str) -> None:
    one = tokens(tiny(), "", "", variant="gumbel", seeds=True)
    assert one != tokens(tiny(), "", "")
    for mesh, axes in PLANS[:6]:
        assert tokens(tiny(), mesh, axes, variant=variant, seeds=True) == one, (mesh, axes)


@pytest.mark.parametrize("seed", range(6))
def test_unusual_prices_force_unusual_programs_that_are_still_right(seed: int) -> None:
    rng = random.Random(seed)
    base = load_costs("cpu")
    odd = replace(
        base, alpha_us={n: rng.uniform(0, 1) for n in (2, 4, 8)}, beta_gbs=10 ** rng.uniform(-4, 2),
        memory_gbs=10 ** rng.uniform(-4, 2), launch_us=rng.uniform(0, 1),
    )  # fmt: skip
    mesh, axes = PLANS[rng.randrange(4, 9)]
    assert tokens(tiny(), mesh, axes, odd) == tokens(tiny(), "", "")
