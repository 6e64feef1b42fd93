"""The solver: the minimum and every runner-up equal brute force; pinned choices; ties; tables stay narrow."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.compiler.sim import compile_tiny, tiny
from tokenspeed.compiler.costs import CostModel, load_costs
from tokenspeed.compiler.passes import eliminate as elimination
from tokenspeed.compiler.passes.eliminate import eliminate
from tokenspeed.compiler.passes.pipeline import Problem, Request, prepare
from tokenspeed.compiler.passes.repair import TIE
from tokenspeed.compiler.passes.solve import Solution
from tokenspeed.compiler.passes.tactics import parse_tactics
from tokenspeed.ir.errors import PlanError
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.models import find_family
from tokenspeed.models.nn import Config

PLANS = [("tp=2", ""), ("dp=2,tp=2", "vp=dp*tp"), ("dp=2,tp=2", "mlp=dp*tp"), ("a=2,b=2", "tp=a*b,mlp=b")]


def random_factors(rng: random.Random) -> tuple[list[int], list[Any]]:
    picks = [rng.randrange(1, 4) for _ in range(rng.randrange(2, 7))]
    free = [v for v, n in enumerate(picks) if n > 1]
    factors = []
    for _ in range(rng.randrange(1, 9) if free else 0):
        scope = tuple(sorted(rng.sample(free, k=min(rng.randrange(1, 4), len(free)))))
        shape = [picks[v] for v in scope]
        cells = [float("inf") if rng.random() < 0.05 else float(rng.randrange(20)) for _ in range(int(np.prod(shape)))]
        factors.append((scope, np.array(cells).reshape(shape)))
    return picks, factors


@pytest.mark.parametrize("seed", range(60))
def test_minimum_and_marginals_equal_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        elimination, "WIDE", 1 if seed % 3 == 0 else elimination.WIDE
    )  # a third in an order that is searched
    picks, factors = random_factors(random.Random(seed))
    all_choices = list(itertools.product(*(range(p) for p in picks)))
    totals = [sum(float(t[tuple(c[v] for v in s)]) for s, t in factors) for c in all_choices]
    found = eliminate(picks, factors)
    assert found.cost == min(totals)
    if found.cost == float("inf"):
        return
    assert totals[all_choices.index(tuple(found.chosen))] == found.cost
    for scope, table in factors:
        got = found.marginal(scope)
        for cell in np.ndindex(table.shape):
            forced = [t for c, t in zip(all_choices, totals) if tuple(c[v] for v in scope) == cell]
            assert found.cost + got[cell] == pytest.approx(min(forced))


def test_what_many_meet_at_once_goes_last() -> None:
    """The first variable meets ten others: eliminated first, it would take a table of 8^11 entries."""
    rng = np.random.default_rng(3)
    tables = [rng.integers(0, 50, (8, 8)).astype(float) for _ in range(10)]
    found = eliminate([8] * 11, [((0, k + 1), t) for k, t in enumerate(tables)])
    assert found.cost == min(sum(t[i].min() for t in tables) for i in range(8))
    assert max(c.total.size for c in found.cliques.values()) == 64
    assert found.marginal((0, 4)).min() == 0.0


def problems(mesh: str, axes: str, costs: CostModel, layers: int = 1, **request: Any) -> Problem:
    config = tiny(num_hidden_layers=layers)
    family = find_family(config["architectures"][0])
    r = Request(family, Config(config), make_plan(parse_mesh(mesh), axes), [(8, 8)], "f32", "f32", costs, **request)
    return prepare(r, "gumbel").bucket({"t": 8, "s": 8})


def price(p: Problem, picks: tuple[int, ...]) -> float:
    """An assignment's cost, from the definition: rows, and each value's distinct targets once."""
    rows = [options[k] for options, k in zip(p.rows, picks)]
    total = sum(r.cost for r in rows)
    values: dict[str, tuple[Any, list[Any]]] = {n: (t, []) for n, t in p.choices.ports.items()}
    for n, row in zip(p.flat.nodes, rows):
        for v, want in zip((i for i in n.inputs if not i.startswith("@")), row.ins):
            values[v][1].append(want)
        values.update((o, (t, [])) for o, t in zip(n.outputs, row.outs))
    for (v, _), want in zip(p.flat.results, p.results):
        values[v][1].append(want)
    for have, wanted in values.values():
        for want in dict.fromkeys(wanted):
            path = p.repairs.path(have, want)
            total += path.cost + TIE * path.wires
    return total


def odd_costs(seed: int) -> CostModel:
    rng = random.Random(seed)
    return replace(
        load_costs("cpu"), alpha_us={n: rng.uniform(0, 1) for n in (2, 4, 8)}, beta_gbs=10 ** rng.uniform(-4, 2),
        memory_gbs=10 ** rng.uniform(-4, 2), launch_us=rng.uniform(0, 1),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("mesh", "axes"), PLANS[:1])
def test_the_chosen_plan_is_the_cheapest_of_all(mesh: str, axes: str, seed: int) -> None:
    p = problems(mesh, axes, odd_costs(seed))
    sizes = [range(len(r)) for r in p.rows]
    count = int(np.prod([len(r) for r in sizes]))
    assert 200 < count < 40000
    s = p.solve()
    assert s.cost == pytest.approx(price(p, s.picks))
    assert min(price(p, c) for c in itertools.product(*sizes)) == pytest.approx(s.cost)


def forced_otherwise(p: Problem, s: Solution, value: str, consumer: int) -> float:
    """The cost of the best plan in which this edge has other types, solved anew with the chosen pair forbidden."""
    v = s.values[value]
    j = next(j for j, (i, _) in enumerate(v.consumers) if i == consumer)
    chosen = (
        v.sources[s.picks[v.maker] if v.maker >= 0 else 0],
        v.wanted[j][s.picks[consumer] if consumer >= 0 else 0],
    )
    scope = [i for i in (v.maker, consumer) if i >= 0]
    table = np.zeros([len(p.rows[i]) for i in scope])
    for cell in np.ndindex(table.shape):
        at = dict(zip(scope, cell))
        if (v.sources[at.get(v.maker, 0)], v.wanted[j][at.get(consumer, 0)]) == chosen:
            table[cell] = np.inf
    keep = [x for x, i in enumerate(scope) if len(p.rows[i]) > 1]
    if not keep:
        return float("inf")
    table = table[tuple(slice(None) if x in keep else 0 for x in range(len(scope)))]
    try:
        return p.solve(extra=[(tuple(scope[x] for x in keep), table)]).cost
    except PlanError:
        return float("inf")


@pytest.mark.parametrize(("mesh", "axes"), PLANS)
def test_runner_ups_equal_a_second_solve(mesh: str, axes: str) -> None:
    p = problems(mesh, axes, odd_costs(5), layers=2)
    s = p.solve()
    seen = 0
    for v in s.values.values():
        for i, _ in v.consumers:
            if v.maker < 0 and len(v.consumers) > 4:
                continue
            other = s.runner_up(v.name, i)
            want = forced_otherwise(p, s, v.name, i)
            assert (other is None) == (want == float("inf")), (v.name, i)
            if other is not None:
                assert other.gap == pytest.approx(want - s.cost, abs=1e-6)
                seen += 1
    assert seen > 10


def test_equal_prices_choose_fewer_collectives_and_the_same_plan_every_time() -> None:
    free = replace(
        load_costs("cpu"), alpha_us={2: 0.0, 4: 0.0}, beta_gbs=1e12, memory_gbs=1e12, tflops=1e12, launch_us=0
    )
    texts = {
        compile_tiny(tiny(), "dp=2,tp=2", "vp=dp*tp", [(8, 8)], free, ("gumbel",)).texts["gumbel", 8] for _ in range(2)
    }
    assert len(texts) == 1
    normal = compile_tiny(tiny(), "dp=2,tp=2", "vp=dp*tp", [(8, 8)], "cpu", ("gumbel",)).explain["gumbel.t8"]
    assert texts.pop().count(" = all_") <= normal["collectives"]


def test_three_axes_and_61_layers_keep_every_table_small() -> None:
    p = problems("a=2,b=2,c=2", "dp=a,tp=b*c,mlp=a*b*c,vp=a*b*c", load_costs("h200"), layers=61)
    s = p.solve()
    assert len(p.rows) > 61 * 5
    cliques = s.elimination.cliques.values()
    assert max(c.total.size for c in cliques) <= 50_000
    assert len({id(c.table) for c in cliques}) < len(cliques) / 6, "equal layers share their tables"
    s.elimination.marginal([next(iter(s.elimination.cliques))])  # and what runs back over them
    assert len({id(g) for g in s.elimination.gaps.values()}) < len(cliques) / 6


# ---- tactics ---------------------------------------------------------------------------------------------------------


def explained(*tactics: str, mesh: str = "tp=2", bucket: int = 8) -> list[dict[str, Any]]:
    r = compile_tiny(tiny(), mesh, "", [(bucket, 4)], "cpu", ("gumbel",), tactics=parse_tactics(tactics))
    return r.explain[f"gumbel.t{bucket}"]["redistributions"]


def repairs_of(rows: list[dict[str, Any]], value: str) -> list[str]:
    return [r["op"] for r in rows if r["edge"].split(" -> ")[0].rstrip("'") == value]


def test_a_tactic_changes_the_edges_it_names_and_says_so() -> None:
    assert repairs_of(explained(), "layers.0.attn") == []  # the sum stays open until after the residual
    rows = explained("layers.0.attn=reduce_scatter")
    assert repairs_of(rows, "layers.0.attn") == ["reduce_scatter"]
    pinned = next(r for r in rows if r["edge"].startswith("layers.0.attn ->"))
    assert pinned["runner_up"] == "pinned by a tactic"
    rows = explained("layers.*.attn=reduce_scatter", "layers.1.attn->layers.1.add=t h")
    assert repairs_of(rows, "layers.0.attn") == ["reduce_scatter"] and repairs_of(rows, "layers.1.attn") == [
        "all_reduce"
    ]
    rows = explained("layers.*.attn=all_reduce", "layers.*.mlp=none")
    assert all(repairs_of(rows, f"layers.{i}.attn") == ["all_reduce"] for i in (0, 1))
    assert all(repairs_of(rows, f"layers.{i}.mlp") == [] for i in (0, 1))


def test_a_file_of_tactics_and_placements(tmp_path: Any) -> None:
    file = tmp_path / "tactics.json"
    file.write_text('{"embed": "t@tp h"}')
    assert repairs_of(explained(str(file)), "embed") == ["reduce_scatter"]


@pytest.mark.parametrize(
    ("items", "code", "words"),
    [
        (["layers.0.atn=all_reduce"], "P037", ["layers.0.atn", "did you mean layers.*.attn", "its edges: "]),
        (["layers.0.attn=all_gather"], "P038", ["no bucket allows it", "all_reduce (t h)", "reduce_scatter (t@tp h)"]),
        (["layers.0.attn"], "P037", ["write NAME=VALUE"]),
        (["layers.0.attn=fast!"], "P037", ["neither a repair", "nor a placement"]),
        (["/nowhere.json"], "P037", ["/nowhere.json"]),
        (["layers.0.attn=t@tp h", "embed->layers.0.add=t h"], "P038", ["together leave no legal plan"]),
    ],
)  # fmt: skip
def test_tactics_that_cannot_be_are_errors(items: list[str], code: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as e:
        explained(*items)
    assert e.value.code == code and all(w in e.value.message for w in words), e.value.message


# ---- where gathers stand ---------------------------------------------------------------------------------------------


def test_a_norm_runs_on_the_rows_as_they_lie_and_one_gather_serves_all_its_readers() -> None:
    """A gather sunk below the norm, and hoisted above two consumers: what the solver chooses where rows are many."""
    config = tiny(
        "Qwen3MoeForCausalLM", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True
    )
    costs = replace(load_costs("h200"), memory_gbs=0.05)
    p = compile_tiny(config, "tp=4", "", [(64, 4)], costs, ("gumbel",)).programs["gumbel", 64]
    gathers = {n.inputs[0]: n for n in p.nodes if n.op == "all_gather" and n.attrs["dim"] == "t"}
    makers = {o: n for n in p.nodes for o in n.outputs}
    norms = [v for v in gathers if makers[v].op == "rms_norm"]
    assert len(norms) >= 3 and len(gathers) == sum(n.op == "all_gather" and n.attrs["dim"] == "t" for n in p.nodes)
    assert all(p.types[v].dim("t").axes for v in norms)

    config = tiny("DeepseekV3ForCausalLM") | {
        "kv_lora_rank": 6, "q_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "moe_intermediate_size": 8, "norm_topk_prob": True, "attention_bias": False,
    }  # fmt: skip
    p = compile_tiny(config, "tp=4", "ep=1,etp=tp,se=tp", [(64, 4)], costs, ("gumbel",)).programs["gumbel", 64]
    shared = [n.outputs[0] for n in p.nodes if n.op == "all_gather" and "norm2" in n.inputs[0]]
    readers = [[n.attrs["path"] for n in p.nodes if v in n.inputs] for v in shared]
    assert readers == [[f"layers.{i}.mlp.routed", f"layers.{i}.mlp.shared"] for i in range(2)]
