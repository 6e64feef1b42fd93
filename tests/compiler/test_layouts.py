"""Every model on every legal layout and bucket edge: tokens equal to one rank's, logits within rounding of float64.

A seeded sample; `make test-layouts` runs all of them and prints the count.
"""

from __future__ import annotations

import pytest
import torch

from tests.compiler.layouts import EXPERTS, MODELS, NAMED, Trial, layouts, run, trials

torch.set_num_threads(1)
#: their experts are those of the others
ONCE = (
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepSeekMTPModel", "Glm4MoeMTPModel", "GptOssForCausalLM",
    "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "name"),
    [(m, n) for m in (*EXPERTS, "LlamaForCausalLM") for n in NAMED if m in EXPERTS or "experts EP" not in n],
)
def test_groups_of_unlike_sizes_in_one_model(model: str, name: str) -> None:
    mesh, axes = NAMED[name]
    if model not in EXPERTS:  # a dense model has no expert axes
        axes = ",".join(a for a in axes.split(",") if a.split("=")[0] not in ("ep", "etp", "se"))
    for seed in range(1 if model in ONCE else 2):
        assert run(Trial(model, mesh, axes, seed)) >= 5


@pytest.mark.parametrize(
    "model",
    ["LlamaForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM", "Qwen3_5ForCausalLM", "DeepseekV32ForCausalLM"],
)
@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ("cp=2", ""), ("cp=4", "mlp=1"), ("cp=2,tp=2", ""), ("tp=2,cp=2", "mlp=tp"), ("cp=2,dp=2", ""), ("dp=2,cp=2,tp=2", ""),
        ("a=2,b=2,tp=2", "cp=a*b"),
    ],
)  # fmt: skip
def test_a_request_s_pages_lie_on_several_ranks(model: str, mesh: str, axes: str) -> None:
    if model == "GptOssForCausalLM":
        axes = axes.replace("mlp", "etp")
    assert run(Trial(model, mesh, axes, 1)) >= 5


def test_tokens_do_not_depend_on_the_layout() -> None:
    cases = 0
    chosen = trials(len(MODELS) * 4, seed=11)
    for t in chosen:
        cases += run(t)
    assert cases >= 300


def test_the_layouts_are_many_and_mixed() -> None:
    for ranks in (2, 4, 6, 8):
        found = list(layouts(ranks, "LlamaForCausalLM"))
        assert len(found) == len(set(found)) >= 4 * ranks
    assert ("dp=2,a=2,b=2", "tp=a*b,mlp=b*dp,vp=a") in list(layouts(8, "LlamaForCausalLM"))
