"""Recurrent layers on a plan: what each rank holds and reads, what is refused and how it is said, and large models' arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiler.sim import compile_tiny, tiny
from tokenspeed.compiler.api import compile_model
from tokenspeed.compiler.weightmap import verify_weights
from tokenspeed.ir.errors import TokenSpeedError, VerifyError
from tokenspeed.ir.graph import Node, Program
from tokenspeed.ir.text import parse_program
from tokenspeed.ir.verifier import verify
from tokenspeed.models import find_family
from tokenspeed.runtime.checkpoint import read_config
from tokenspeed.runtime.executor import cache_bytes
from tokenspeed.runtime.loader import load_weights

DATA = Path(__file__).parents[1] / "data"
HK, HV, DK, DV = 4, 12, 8, 6


def config(family: str = "Qwen3NextForCausalLM", **over: Any) -> dict[str, Any]:
    return tiny(family) | {
        "linear_num_key_heads": HK, "linear_num_value_heads": HV, "linear_key_head_dim": DK, "linear_value_head_dim": DV,
        "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 0.5,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 12,
    } | over  # fmt: skip


class Whole:
    """A checkpoint whose tensors are made of their names."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}

    def names(self) -> list[str]:
        return []

    def stored(self, name: str) -> str | None:
        return "float32"

    def matrix(self, name: str, rows: tuple[int, int], shape: tuple[int, int]) -> Tensor:
        g = torch.Generator().manual_seed(sum(map(ord, name)))
        return torch.randn(shape, generator=g)[rows[0] : rows[1]]

    def note(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(("tp", "keys", "values"), [(2, 2, 6), (4, 1, 3), (8, 1, 2)])
def test_a_rank_reads_the_heads_it_holds_out_of_projections_that_interleave_them(
    tp: int, keys: int, values: int
) -> None:
    """`keys`, `values`: heads a rank holds; where 8 ranks share 4 key heads, 3 value heads each, they take 2 and 1 of them."""
    m = compile_tiny(config(), f"tp={tp}", "ep=1,etp=tp").weights
    verify_weights(m)
    files, group = Whole(), HV // HK
    delta, h = "model.layers.0.linear_attn.", 32
    qkvz = files.matrix(f"{delta}in_proj_qkvz.weight", (0, 10000), (HK * (2 * DK + 2 * group * DV), h)).unflatten(
        0, (HK, -1)
    )
    ba = files.matrix(f"{delta}in_proj_ba.weight", (0, 10000), (2 * HV, h)).unflatten(0, (HK, -1))
    conv = files.matrix(f"{delta}conv1d.weight", (0, 10000), (2 * HK * DK + HV * DV, 4))
    rate = files.matrix(f"{delta}A_log", (0, 10000), (HV, 1))[:, 0]
    for rank in range(tp):
        held = load_weights(m, files, rank)
        first, inside = rank * HK // tp, rank % (tp // HK) if tp > HK else 0
        mine = slice(first, first + keys)
        rows = [qkvz[mine, :DK].flatten(0, 1), qkvz[mine, DK : 2 * DK].flatten(0, 1)]
        taken = [(k, j) for k in range(first, first + keys) for j in range(group) if tp <= HK or j // 2 == inside]

        def heads(x: Tensor, width: int, taken: list[tuple[int, int]] = taken) -> Tensor:
            """The value heads of this rank, zeros for those that pad it."""
            full = torch.zeros(values, width, x.shape[-1])
            for i, (k, j) in enumerate(taken):
                full[i] = x[k].unflatten(0, (group, width))[j]
            return full.flatten(0, 1)

        rows += [heads(qkvz[:, 2 * DK : 2 * DK + group * DV], DV), heads(qkvz[:, 2 * DK + group * DV :], DV)]
        rows += [heads(ba[:, :group], 1), heads(ba[:, group:], 1)]
        assert torch.equal(held["layers.0.mixer.proj"], torch.cat(rows))
        of_keys = conv[HK * DK : 2 * HK * DK].unflatten(0, (HK, DK))[mine].flatten(0, 1)
        assert torch.equal(held["layers.0.mixer.conv_k.w"], of_keys)
        of_values = conv[2 * HK * DK :].unflatten(0, (HK, -1))
        assert torch.equal(held["layers.0.mixer.conv_v.w"], heads(of_values, DV))
        assert torch.equal(held["layers.0.mixer.rate"], heads(rate.reshape(HK, group, 1), 1)[:, 0])


#: configuration, plan, weights, bytes a token of KV and a request of states on a rank
LARGE = [
    ("qwen3-next-80b-a3b", "dp=4,tp=2", "ep=dp*tp,mlp=tp,vp=tp,se=1", 79_674_391_296, 24_576 // 2, (75_497_472 + 1_769_472) // 2),
    ("qwen3.5-35b-a3b", "tp=4", "ep=tp", 34_660_610_688, 20_480 // 2, (62_914_560 + 1_474_560) // 4),
    ("qwen3.5-27b", "tp=8", "", 26_895_998_464, 65_536 // 4, (150_994_944 + 2_949_120) // 8),
]  # fmt: skip


@pytest.mark.parametrize(("model", "mesh", "axes", "weights", "kv", "states"), LARGE, ids=[m[0] for m in LARGE])
def test_large_models_compile_without_weights_and_hold_what_they_should(
    model: str, mesh: str, axes: str, weights: int, kv: int, states: int
) -> None:
    raw = read_config(DATA / model / "config.json")
    family = find_family(raw["architectures"][0])
    compiled = compile_model(
        family,
        raw,
        mesh=mesh,
        axes=axes,
        dtype="bfloat16",
        cache_dtype="bfloat16",
        buckets=[1, 64],
        variants=("gumbel",),
    )
    m = compiled.result.weights
    assert sum(math.prod(m.logical[d.name] for d in s.type.dims) for e in m.entries for s in e.segments) == weights
    p = compiled.result.programs["gumbel", 64]
    assert (cache_bytes(p, "slots"), cache_bytes(p, "states")) == (kv, states)
    full, state = json.loads(compiled.files["ports.json"])["cache_groups"]
    layers = raw["num_hidden_layers"]
    assert (len(full["caches"]), len(state["caches"])) == (layers // 4, 4 * (layers - layers // 4))
    assert state["kind"] == "recurrent_state"


def test_three_kinds_of_heads_split_an_axis_twice() -> None:
    text = compile_tiny(config(), "tp=8", "ep=1,etp=tp", variants=("gumbel",)).texts["gumbel", 8]
    p = parse_program(text)
    assert p.plan.mesh.axes == (("tp.0", 2), ("tp.1", 2), ("tp.2", 2))  # 2 KV heads, 4 key heads, 8 ranks
    assert "hk@(tp.0,tp.1)" in text and "kv@tp.0" in text and "hv@tp" in text


def programs() -> tuple[Program, list[Node]]:
    text = compile_tiny(config(), "dp=2,tp=2", "ep=1,etp=dp*tp", variants=("gumbel",)).texts["gumbel", 8]
    p = parse_program(text)
    return p, p.leaves["DeltaNet"].nodes


def test_a_state_is_used_once_in_a_step() -> None:
    p, nodes = programs()
    convs = [n for n in nodes if n.op == "causal_conv"]
    verify(p)
    taken = convs[0].inputs[2]  # keys go on from the queries' inputs
    convs[1].inputs = (*convs[1].inputs[:2], taken, *convs[1].inputs[3:])
    with pytest.raises(VerifyError, match=r"V11.*written twice in one step"):
        verify(p)


def test_a_state_lies_where_its_heads_lie() -> None:
    p, _ = programs()
    memory = p.leaves["DeltaNet"].params["delta"]
    (t,) = memory.types
    memory.types = (t.with_state("tp", "dk", p.plan.mesh.ordered),)
    with pytest.raises(VerifyError, match=r"V6.*must be the outer factors"):
        verify(p)
    memory.types = (t.with_state("dp", "R", p.plan.mesh.ordered),)
    with pytest.raises(VerifyError, match=r"V4.*is not split over its slots"):
        verify(p)


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"linear_num_value_heads": 10}, "linear_num_value_heads=10 is not a multiple of linear_num_key_heads=4"),
        (
            {"layer_types": ["linear_attention", "sliding_attention"]},
            "layer_types names .'sliding_attention'. for 2 layers",
        ),
        ({"layer_types": ["linear_attention"]}, "layer_types names 1 for 2 layers"),
        ({"partial_rotary_factor": 0.4}, "turns 3 of 8 values of a head: it must be even"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ({"output_gate_type": "gelu"}, "output_gate_type='gelu' is not supported"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0 .* whole number from 1 on"),
    ],
)
def test_configurations_that_cannot_be_are_refused(over: dict[str, Any], says: str) -> None:
    with pytest.raises(TokenSpeedError, match=says):
        compile_tiny(config(**over))
