"""Which token a layout may give in bfloat16: the rule of ties.

Among equal logits the lowest id wins, on every layout. In float64 (the simulator) and float32 (the engine) every layout gives
one rank's token. In bfloat16 a layout rounds other sums, so it may give another token, but only one whose exact logit lies
within twice the rounding of the best: MARGIN of the largest logit of the row. Where the best is ahead by more, tokens are equal.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests.compiler.sim import random_weights, tiny
from tokenspeed.compiler import trial
from tokenspeed.compiler.costs import load_costs
from tokenspeed.compiler.passes.pipeline import Request, Result, run_passes
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.ir.simulate import Simulator
from tokenspeed.ir.text import parse_program
from tokenspeed.models import find_family
from tokenspeed.models.nn import Config

torch.set_num_threads(1)
MARGIN = 2.0**-5  # of the row's largest logit: a few roundings to 8 bits, a layer deep
LAYOUTS = [("tp=2", ""), ("tp=4", ""), ("dp=2,tp=2", "vp=dp*tp"), ("dp=2,tp=2", "mlp=dp*tp,vp=tp")]
ROWS = 16


@functools.cache
def compiled(mesh: str, axes: str, dtype: str) -> Result:
    plan = make_plan(parse_mesh(mesh), axes)
    request = Request(
        find_family("LlamaForCausalLM"),
        Config(tiny()),
        plan,
        [(ROWS, ROWS)],
        dtype,
        dtype,
        load_costs("cpu"),
        variants=("gumbel",),
    )
    return run_passes(request)


def greedy(mesh: str, axes: str, dtype: str, seed: int, twins: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens of 16 requests of one id each, and their logits. `twins`: the upper half of the vocabulary repeats the lower."""
    r = compiled(mesh, axes, dtype)
    p = parse_program(r.texts["gumbel", ROWS])
    weights = random_weights(r, seed)
    if twins:
        half = weights["head.w"].shape[0] // 2
        weights["head.w"] = weights["head.w:0"] = torch.cat([weights["head.w"][:half]] * 2)
    groups = p.plan.mesh.size(p.plan.home)
    work = [[(i, [7 * i + 3], 0) for i in range(g * ROWS // groups, (g + 1) * ROWS // groups)] for g in range(groups)]
    sim = Simulator(p, trial.runtime_sizes(p), torch.float64 if dtype == "f32" else torch.float32)
    results, env = sim.run(trial.batch(p, work), weights, {})
    at = [g * ROWS + i for g, mine in enumerate(work) for i in range(len(mine))]
    return results[0][at], sim.meaning.assemble(env["head"], p.types["head"])[at][:, : p.logical["v"]].double()


@pytest.mark.parametrize(("mesh", "axes"), LAYOUTS)
def test_a_token_in_bfloat16_is_one_rank_s_or_within_the_margin(mesh: str, axes: str) -> None:
    clear = 0
    for seed in range(3):
        exact_tokens, exact = greedy("", "", "f32", seed)
        tokens, logits = greedy(mesh, axes, "bf16", seed)
        bound = MARGIN * exact.abs().amax(1)
        assert ((logits - exact).abs().amax(1) <= bound).all()
        best = exact.amax(1)
        behind = best - exact.gather(1, tokens.long()[:, None])[:, 0]
        assert (behind <= 2 * bound).all()
        ahead = best - exact.topk(2).values[:, 1] > 2 * bound
        assert torch.equal(tokens[ahead], exact_tokens[ahead])
        clear += int(ahead.sum())
    assert clear > 10, "some rows must be decided"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_of_equal_logits_the_lowest_id_wins_on_every_layout(dtype: str) -> None:
    for mesh, axes in [("", ""), *LAYOUTS]:
        tokens, logits = greedy(mesh, axes, dtype, 0, twins=True)
        half = 512  # 1003 ids are padded to 1024
        ties = (logits[:, : 1003 - half] == logits[:, half:]).all()
        assert ties, (mesh, axes)
        assert (tokens < half).all(), (mesh, axes)
