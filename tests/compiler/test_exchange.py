"""Experts whose rows travel: forced on every plan and mixed with masked ones axis by axis; where it pays at real sizes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.compiler.layouts import EXPERTS, NAMED, Bench, Trial, compiled, config, layouts, one_rank, run, work
from tests.compiler.sim import EXCHANGING
from tests.compiler.test_compile_time import config as real_config
from tokenspeed.compiler.costs import load_costs
from tokenspeed.compiler.emit import _Emitter
from tokenspeed.compiler.exchange import CALLS, load_of
from tokenspeed.compiler.mutants import mutants
from tokenspeed.compiler.mutate import Report, judge, of_model
from tokenspeed.compiler.passes.insert import LeafCache
from tokenspeed.compiler.passes.pipeline import Request, Result, build, prepare, run_passes
from tokenspeed.ir.agreement import agreement, chain, verify_ranks
from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.graph import Node, Program
from tokenspeed.ir.meaning import Meaning
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.ir.text import parse_program, print_program
from tokenspeed.ir.types import Dim, Type
from tokenspeed.models import find_family
from tokenspeed.models.nn import Config

torch.set_num_threads(1)
PLANS = [
    (mesh, axes) for name, (mesh, axes) in NAMED.items() if "experts EP" in name or name.endswith("first layer TP4")
]


def exchanges(p: Program) -> list[tuple[str, ...]]:
    """The axes of every exchange of a program."""
    return [c.axes for c in chain(p) if c.op == "experts"]


@pytest.mark.parametrize("model", EXPERTS)
def test_rows_that_travel_give_the_tokens_of_one_rank(model: str) -> None:
    for mesh, axes in PLANS if model in ("DeepseekV3ForCausalLM", "Mixture") else PLANS[:1]:
        r = compiled(model, mesh, axes, [(4, 2)], EXCHANGING)
        assert all(exchanges(p) for p in r.programs.values()), (mesh, axes)
        assert run(Trial(model, mesh, axes, 1), EXCHANGING) >= 5


def test_rows_travel_on_random_layouts_of_six_and_eight_ranks() -> None:
    rng = random.Random(5)
    found = [at for n in (6, 8) for at in layouts(n, "Mixture") if "ep=1" not in at[1]]
    for mesh, axes in rng.sample(found, 4):
        assert run(Trial("Mixture", mesh, axes, 1), EXCHANGING) >= 5


def test_every_row_of_a_leaf_of_experts_means_what_one_rank_does() -> None:
    """Masked, exchanged and mixed, each forced once."""
    plan = make_plan(parse_mesh("dp=2,a=2,b=2"), "tp=a*b,ep=dp*a*b,etp=1,mlp=a,vp=1")
    r = Request(
        find_family("Qwen3MoeForCausalLM"), Config(config("Qwen3MoeForCausalLM")), plan, [(4, 2), (2, 2)], "f32", "f32",
        load_costs("cpu"), variants=("gumbel",), collectives=frozenset(CALLS),
    )  # fmt: skip
    ready = prepare(r, "gumbel")
    problems = {t: ready.bucket({"t": t, "s": 2}) for t in (4, 2)}
    leaf = next(i for i, n in enumerate(ready.flat.nodes) if n.path == "layers.1.mlp")
    want, exact = one_rank("Qwen3MoeForCausalLM", 2, 4, False)
    result = compiled(
        "Qwen3MoeForCausalLM", "dp=2,a=2,b=2", "tp=a*b,ep=dp*a*b,etp=1,mlp=a,vp=1", [(4, 2)], load_costs("cpu")
    )
    seen: set[tuple[str, ...]] = set()
    for k in range(len(problems[4].rows[leaf])):
        for t, problem in problems.items():
            picks = len(problem.rows[leaf])
            forced = np.where(np.arange(picks) == min(k, picks - 1), 0.0, np.inf)
            p, _ = build(problem, problem.solve(extra=[((leaf,), forced)]).rows, LeafCache())
            result.texts["gumbel", t] = print_program(p)
            if t == 4:
                seen.update(exchanges(p) or [()])
        got, logits = Bench(result).outcome(work(2, 4, False), 4)
        assert got == want, k
        assert torch.allclose(logits, exact, rtol=1e-9, atol=1e-9), k
    assert seen == {(), ("dp",), ("a",), ("b",), ("dp", "a"), ("dp", "b"), ("a", "b"), ("dp", "a", "b")}


def test_a_target_without_the_kernels_exchanges_nothing() -> None:
    c = Config(config("Qwen3MoeForCausalLM"))
    plan = make_plan(parse_mesh("dp=2,tp=2"), "ep=dp*tp,etp=1,mlp=tp,vp=1")
    family = find_family("Qwen3MoeForCausalLM")
    for collectives, rows in ((frozenset(CALLS), 4), (frozenset(), 1)):
        r = Request(family, c, plan, [(4, 2)], "f32", "f32", EXCHANGING, variants=("gumbel",), collectives=collectives)
        problem = prepare(r, "gumbel").bucket({"t": 4, "s": 2})
        leaf = next(i for i, n in enumerate(problem.flat.nodes) if n.path == "layers.1.mlp")
        assert len(problem.rows[leaf]) == rows


def exchanging() -> Result:
    return compiled("Qwen3MoeForCausalLM", "dp=2,tp=2", "ep=dp*tp,etp=1,mlp=tp,vp=1", [(4, 2), (8, 2)], EXCHANGING)


def test_ranks_whose_rows_travel_run_one_bucket() -> None:
    small, large = (parse_program(exchanging().texts["gumbel", t]) for t in (4, 8))
    assert agreement(small) == ("dp",)
    verify_ranks([small] * 4)
    with pytest.raises(VerifyError, match="V8"):
        verify_ranks([small, small, large, large])


def test_mutants_of_programs_whose_rows_travel_are_rejected_or_equal() -> None:
    original = of_model(exchanging(), "gumbel", 4)
    report = Report()
    for m in random.Random(2).sample(list(mutants(original.p)), 40):
        judge(m, original, report)
    assert (report.survivors, report.false_rejects) == ([], [])
    assert report.killed > 25


def dealt(k: int, groups: int, top: int, g: torch.Generator) -> torch.Tensor:
    """k of the 256 experts in `top` of `groups` equal groups, all alike likely."""
    allowed = torch.randperm(groups, generator=g)[:top]
    pool = (allowed[:, None] * (256 // groups) + torch.arange(256 // groups)).flatten()
    return pool[torch.randperm(len(pool), generator=g)[:k]]


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_a_row_visits_as_many_ranks_as_a_deal_of_experts_says(ranks: int) -> None:
    """The expected number of ranks, of those that 256 experts lie on, beside many deals."""
    plan = make_plan(parse_mesh(f"dp={ranks}"), "ep=dp")
    row = lambda dtype, d: Type(dtype, (Dim("t", ("dp",)), Dim(d)))  # noqa: E731
    w = Type("bf16", (Dim("e", ("dp",)), Dim("f"), Dim("h")))
    ins = [row("bf16", "h"), row("i32", "k"), row("f32", "k"), w, w, w]
    g = torch.Generator().manual_seed(0)
    for k, groups, top in ((1, 1, 1), (2, 1, 1), (8, 1, 1), (200, 1, 1), (8, 8, 4), (4, 16, 3)):
        body = [
            Node("route", ("z",), ("ids", "shares"), {"groups": groups, "top_groups": top}),
            Node("experts", ("x", "ids", "shares"), ("y",)),
        ]
        load = load_of(body[1], ins, body, plan, {"t": 64, "h": 7168, "k": k, "e": 256, "f": 2048})
        assert load is not None and (load.ranks, load.row, load.choice) == (ranks, 2 * 7168, 8 * k)
        deals = torch.stack([dealt(k, groups, top, g) // (256 // ranks) for _ in range(1500)])
        seen = torch.stack([(deals == r).any(1) for r in range(ranks)]).sum(0).float().mean()
        assert load.visits == pytest.approx(float(seen), rel=0.03)
        assert load.wire == pytest.approx((ranks - 1) * (8 * k + 2 * load.visits * 2 * 7168 / ranks))


def test_large_buckets_of_deepseek_v3_exchange_rows_and_small_ones_do_not() -> None:
    """Bytes on the wire fall by almost a half, and so does the price; decode keeps its two collectives a layer."""
    c = real_config("deepseek-v3")
    plan = make_plan(parse_mesh("dp=4,tp=2"), "ep=dp*tp,mlp=tp,vp=tp,se=1")
    family, buckets = find_family(c["architectures"][0]), [(8, 8), (2048, 64)]
    with_, without = (
        run_passes(
            Request(
                family,
                Config(c),
                plan,
                buckets,
                "bf16",
                "bf16",
                load_costs("h200"),
                variants=("gumbel",),
                collectives=frozenset(has),
            )
        )
        for has in (CALLS, ())
    )
    small, large = (with_.explain[f"gumbel.t{t}"] for t in (8, 2048))
    assert [sum(r["op"] == "exchange" for r in e["redistributions"]) for e in (small, large)] == [0, 58]
    assert large["bytes_per_token"] < 0.55 * without.explain["gumbel.t2048"]["bytes_per_token"]
    assert with_.costs_us["gumbel.t2048"] < without.costs_us["gumbel.t2048"]


@pytest.mark.parametrize("axes", [("dp", "a", "b"), ("dp", "b"), ("dp",)])
def test_holes_are_told_by_the_rows_that_a_rank_holds(axes: tuple[str, ...]) -> None:
    """Of every row that an exchange sends, the request that the port of its home group has; nothing where rows of other home
    groups are among them."""
    r = compiled("Qwen3MoeForCausalLM", "dp=2,a=2,b=2", "tp=a*b,ep=dp*a*b,etp=1,mlp=a,vp=1", [(8, 2)], EXCHANGING)
    p = r.programs["gumbel", 8]
    of_row = torch.arange(16, dtype=torch.int32)  # global row numbers, as requests
    m = Meaning(p.plan, p.sizes, {"t": p.row_axes("t")})
    for rank in range(8):
        emitter: Any = object.__new__(_Emitter)
        block = of_row[8 * (rank // 4) : 8 * (rank // 4) + 8]
        emitter.p, emitter.rt = p, SimpleNamespace(rank=rank, ports={"row": block})
        told = emitter._holes(Type("f32", (Dim("t", axes), Dim("h"))))
        assert torch.equal(told["request"][told["mine"]], m.distribute(of_row, Type("i32", (Dim("t", axes),)))[rank])
        assert emitter._holes(Type("f32", (Dim("t", ("a",)), Dim("h")))) == {}


def test_an_exchange_is_explained_with_what_it_would_cost_to_gather_the_rows() -> None:
    """The gap is that of the plan solved with the row forced otherwise."""
    r = compiled("Qwen3MoeForCausalLM", "dp=2,tp=2", "ep=dp*tp,etp=1,mlp=tp,vp=1", [(8, 2)], EXCHANGING)
    rows = [x for x in r.explain["gumbel.t8"]["redistributions"] if x["op"] == "exchange"]
    body = r.bodies[0]
    problem, leaf = body.problem, next(i for i, n in enumerate(body.problem.flat.nodes) if n.path == "layers.1.mlp")
    best = problem.solve()
    others = []
    for k in range(len(problem.rows[leaf])):
        forced = np.where(np.arange(len(problem.rows[leaf])) == k, 0.0, np.inf)
        if k != best.picks[leaf]:
            others.append(problem.solve(extra=[((leaf,), forced)]).cost - best.cost)
    assert [x["value"] for x in rows] == ["layers.1.mlp/3"] and rows[0]["axes"] == ["dp", "tp"]
    assert rows[0]["gap_us"] == pytest.approx(min(others), abs=1e-3) and rows[0]["runner_up"].startswith(
        "rows as f32[t"
    )
    load = rows[0]["bytes_per_token"]
    assert 0 < load < 2 * 3 * 4 * 16 + 3 * 3 * 8  # less than each row to each of the three other ranks and back
