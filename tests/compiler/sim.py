"""Helpers of the compiler's tests: tiny configurations, compiled without weights, stepped through the n-rank simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenspeed.compiler import trial
from tokenspeed.compiler.costs import CostModel, load_costs
from tokenspeed.compiler.passes.pipeline import Request, Result, run_passes
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.ir.text import parse_program
from tokenspeed.models import find_family
from tokenspeed.models.nn import Config

torch.set_num_threads(1)  # small tensors: threads cost ten times what they save


#: prices under which rows travel to experts, and are not gathered, wherever that is legal
EXCHANGING: CostModel = replace(
    load_costs("cpu"), alpha_us={8: 1.0}, beta_gbs=1e-3, measured={"all_to_all": {8: (0.1, 10.0)}}
)


def tiny(arch: str = "LlamaForCausalLM", **over: Any) -> dict[str, Any]:
    """A small configuration: 8 query heads on 2 KV heads, a vocabulary that divides by nothing."""
    return {
        "architectures": [arch], "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": 1003, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "hidden_act": "silu",
    } | over  # fmt: skip


def compile_tiny(
    config: dict[str, Any], mesh: str = "", axes: str = "", buckets: list[tuple[int, int]] | None = None,
    costs: str | CostModel = "cpu", variants: tuple[str, ...] = ("gumbel", "full"), **request: Any,
) -> Result:  # fmt: skip
    table = load_costs(costs) if isinstance(costs, str) else costs
    family = find_family(config["architectures"][0])
    plan = make_plan(parse_mesh(mesh), axes)
    return run_passes(
        Request(family, Config(config), plan, buckets or [(8, 8)], "f32", "f32", table, variants=variants, **request)
    )


def random_weights(r: Result, seed: int = 0) -> dict[str, Tensor]:
    """Global padded weights by `name:segment`; equal on every plan, the padding zero."""
    return trial.random_weights(r.weights, seed)


class Steps:
    """Prefills and decodes requests on the programs of one plan."""

    def __init__(self, r: Result, weights: dict[str, Tensor], variant: str = "gumbel") -> None:
        self.r, self.variant = r, variant
        self.groups = r.layout.plan.mesh.size(r.layout.plan.home)
        self.trial = trial.Steps(weights)

    def step(self, bucket: int, work: list[list[trial.Request]], seeds: list[int] | None = None) -> list[list[int]]:
        """`work[g]`: (request number, ids, first position) of home group g; returns the sampled token of each."""
        p = parse_program(self.r.texts[self.variant, bucket])
        return self.trial.run(p, work, dict(enumerate(seeds)) if seeds else None)[1]
