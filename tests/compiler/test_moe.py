"""Experts on a plan: what is refused and how it is said, what each rank holds and reads, and a large model's arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from tests.compiler.sim import compile_tiny, tiny
from tokenspeed.compiler.api import compile_model
from tokenspeed.compiler.weightmap import from_json, to_json, verify_weights
from tokenspeed.ir.errors import PlacementError, PlanError, SpecError
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.models import find_family, qwen3_moe
from tokenspeed.models.nn import Experts, Routed, Routing, Rows
from tokenspeed.models.nn.config import ConfigError
from tokenspeed.models.qwen3_moe import CausalLM
from tokenspeed.runtime.loader import load_weights

FAMILY = "Qwen3MoeForCausalLM"


def config(**over: Any) -> dict[str, Any]:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
    return tiny(FAMILY, **sizes | over)


def test_experts_that_do_not_divide_are_refused_with_what_fits() -> None:
    with pytest.raises(
        PlanError, match=r"(?s)P032.*mlp.w13: e=8 does not divide over 3 ranks of ep.*num_experts=8.*one of \[1, 2\]"
    ):
        compile_tiny(config(), "tp=3", "ep=tp,etp=1")


def test_an_axis_splits_the_experts_or_their_width() -> None:
    with pytest.raises(PlanError, match=r"(?s)P031.*Routed: .*share mesh axis 'tp'.*fix 1"):
        compile_tiny(config(), "tp=2", "ep=tp,etp=tp")


def test_the_width_is_split_over_what_the_experts_leave_of_the_dense_axis() -> None:
    for axes, etp in (
        ("ep=tp", ()),
        ("ep=dp", ("tp",)),
        ("ep=dp*tp", ()),
        ("ep=1", ("tp",)),
        ("ep=tp,mlp=dp*tp", ("dp",)),
    ):
        assert make_plan(parse_mesh("dp=2,tp=2"), axes).axes("etp") == etp
    assert compile_tiny(config(), "dp=2,tp=2", "ep=dp*tp", variants=("gumbel",)).texts


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (Routing(9), "num_experts_per_tok is 9 .* 8 experts"),
        (Routing(2, groups=3), "3 groups of 8 experts"),
        (Routing(2, groups=4, group_best=3), "4 groups of 8 experts by their best 3"),
        (Routing(5, groups=4, top_groups=2), "k=5 experts from 2 of 4 groups"),
        (Routing(2, groups=2, top_groups=3), "from 3 of 2 groups"),
    ],
)
def test_a_choice_that_the_experts_do_not_allow_is_refused(
    monkeypatch: pytest.MonkeyPatch, how: Routing, words: str
) -> None:
    monkeypatch.setattr(qwen3_moe, "Routing", lambda *_, **__: how)
    with pytest.raises((PlacementError, ConfigError), match=words):
        compile_tiny(config(num_experts_per_tok=how.k), "tp=2")


@pytest.mark.parametrize("text", ["e@ep: h d -> f", "e@ep -> f", "e@ep: h -> f g", "e@ep h -> f", "e d: h -> f"])
def test_a_map_of_experts_has_one_dim_in_and_out(text: str) -> None:
    with pytest.raises(SpecError, match=r"Experts.*before a colon, e.g. `e@ep: h"):
        Experts(text)


def test_the_sum_over_the_experts_must_be_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Complete(Routed):
        def forward(self, x: Rows) -> Annotated[Tensor, "t* h +etp"]:
            return super().forward(x)

    Complete.forward.__annotations__ = {"x": Rows, "return": Annotated[Tensor, "t* h +etp"]}
    monkeypatch.setattr(qwen3_moe, "Routed", Complete)
    with pytest.raises(PlacementError, match=r"(?s)P020.*over ep the value is a pending sum, declared whole.*\+ep"):
        compile_tiny(config(), "tp=2")


class Recorded:
    """A checkpoint of tensors that say who they are, and what was read of it: (name, rows)."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.read: list[tuple[str, tuple[int, int]]] = []

    def names(self) -> list[str]:
        return []

    def stored(self, name: str) -> str | None:
        return "float32"

    def matrix(self, name: str, rows: tuple[int, int], shape: tuple[int, int]) -> Tensor:
        self.read.append((name, rows))
        g = torch.Generator().manual_seed(sum(map(ord, name)))
        return torch.randn(shape, generator=g)[rows[0] : rows[1]]

    def note(self) -> dict[str, Any]:
        return {}


def test_a_rank_reads_its_experts_and_its_part_of_their_width() -> None:
    m = compile_tiny(config(), "dp=2,tp=2", "ep=dp,etp=tp").weights
    verify_weights(m)
    assert from_json(to_json(m), m.plan, m.sizes, m.logical) == m
    whole: dict[str, Tensor] = {}
    for rank in range(4):
        files = Recorded()
        held = load_weights(m, files, rank)
        w13, w2 = held["layers.0.mlp.w13"], held["layers.0.mlp.w2"]
        assert w13.shape == (4, 20, 32) and w2.shape == (4, 32, 10)
        first, part = rank // 2 * 4, rank % 2 * 10
        mine = [(n, r) for n, r in files.read if ".experts." in n and ".layers.0." in n]
        assert {int(n.split(".experts.")[1].split(".")[0]) for n, _ in mine} == set(range(first, first + 4))
        assert {r for n, r in mine if "gate_proj" in n} == {(part, part + 10)}
        for e in range(4):
            name = f"model.layers.0.mlp.experts.{first + e}."
            if name not in whole:
                whole[name] = torch.cat(
                    [files.matrix(f"{name}{p}_proj.weight", (0, 20), (20, 32)) for p in ("gate", "up")]
                )
            both = whole[name].view(2, 20, 32)[:, part : part + 10].reshape(20, 32)
            assert torch.equal(w13[e], both)
            down = files.matrix(f"{name}down_proj.weight", (0, 32), (32, 20))
            assert torch.equal(w2[e], down[:, part : part + 10])
    assert len(whole) == 8


def test_dense_layers_are_those_that_the_configuration_names() -> None:
    dense = compile_tiny(config(mlp_only_layers=[1], num_hidden_layers=3), variants=("gumbel",)).texts["gumbel", 8]
    assert [f"call @{kind}(" in line for line in dense.splitlines() for kind in ("Routed",) if ".mlp = call" in line] == [
        True, False, True,
    ]  # fmt: skip
    every_second = compile_tiny(config(decoder_sparse_step=2, num_hidden_layers=4), variants=("gumbel",))
    lines = [line for line in every_second.texts["gumbel", 8].splitlines() if ".mlp = call" in line]
    assert ["@Routed" in line for line in lines] == [False, True, False, True]


def test_a_large_model_compiles_without_weights_and_holds_what_it_should() -> None:
    raw = json.loads((Path(__file__).parents[1] / "data" / "qwen3-30b-a3b" / "config.json").read_text())
    assert find_family(raw["architectures"][0]) is CausalLM
    r = compile_model(CausalLM, raw, mesh="dp=4,tp=2", axes="ep=dp*tp,etp=1", dtype="bfloat16", buckets=[1, 64]).result
    m = r.weights
    total = sum(math.prod(m.logical[d.name] for d in s.type.dims) for e in m.entries for s in e.segments)
    assert total == 30_532_122_624
    experts = [e for e in m.entries if ".mlp.w" in e.name]
    assert len(experts) == 2 * 48
    assert {m.local_bytes(e, 5) for e in experts} == {2 * 16 * 1536 * 2048, 2 * 16 * 2048 * 768}
    for program in r.explain.values():  # rows of all home groups meet before the experts and part behind them
        rows = [x for x in program["redistributions"] if "layers.7.mlp" in x["edge"]]
        assert {a for x in rows for a in x["axes"]} >= {"dp"}
        assert program["agreement"] == ["dp"]
