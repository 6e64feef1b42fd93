"""The memory plan: V13, exact bytes before anything is allocated, and the limit that a plan must keep."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiler.sim import EXCHANGING, compile_tiny, tiny
from tokenspeed.compiler.exchange import CALLS as EXCHANGE
from tokenspeed.compiler.memory import ALIGN, Buffer, live_bytes, plan_memory, verify_memory
from tokenspeed.compiler.passes.bind import Binder
from tokenspeed.compiler.passes.pipeline import Result
from tokenspeed.compiler.storage import FIXED, lay_out
from tokenspeed.ir.errors import PlanError, VerifyError

BUFFERS = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 10)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(BUFFERS)
def test_live_buffers_never_overlap(raw: list[tuple[int, int, int]]) -> None:
    buffers = [Buffer(n, birth, birth + length) for n, birth, length in raw]
    offsets, peak = plan_memory(buffers)
    for (a, x), (b, y) in itertools.combinations(zip(buffers, offsets), 2):
        if a.birth <= b.death and b.birth <= a.death:
            assert x + a.nbytes <= y or y + b.nbytes <= x
    assert all(x % ALIGN == 0 and x + b.nbytes <= peak for b, x in zip(buffers, offsets))
    verify_memory(buffers, offsets, peak)
    assert max(live_bytes(buffers), default=0) <= peak <= sum(b.held for b in buffers)


@settings(max_examples=60, deadline=None)
@given(BUFFERS, st.integers(0, 39), st.integers(0, 39))
def test_v13_refuses_two_live_buffers_in_one_place(raw: list[tuple[int, int, int]], i: int, j: int) -> None:
    buffers = [Buffer(n, birth, birth + length) for n, birth, length in raw]
    offsets, peak = plan_memory(buffers)
    if max(i, j) >= len(buffers) or i == j:
        return
    moved = [*offsets]
    moved[i] = offsets[j]
    a, b = buffers[i], buffers[j]
    if a.birth <= b.death and b.birth <= a.death:
        with pytest.raises(VerifyError, match="V13"):
            verify_memory(buffers, moved, peak + max(x.held for x in buffers))


@pytest.mark.parametrize(
    ("buffers", "offsets", "peak"),
    [
        ([Buffer(64, 0, 1), Buffer(64, 1, 2)], [0, 0], 128),  # live range shrunk: they meet at node 1
        ([Buffer(64, 0, 1)], [32], 128),  # misaligned
        ([Buffer(64, 0, 1)], [64], 64),  # beyond the arena
    ],
)
def test_v13_negative(buffers: list[Buffer], offsets: list[int], peak: int) -> None:
    with pytest.raises(VerifyError, match="V13"):
        verify_memory(buffers, offsets, peak)


def test_buffers_that_never_meet_may_share_a_place() -> None:
    verify_memory([Buffer(64, 0, 1), Buffer(64, 2, 3)], [0, 0], 64)


@pytest.mark.parametrize(
    ("family", "mesh", "axes"),
    [
        ("Llama", "", ""), ("Llama", "tp=2", ""), ("Llama", "dp=2,tp=2", "vp=dp*tp"), ("Llama", "dp=2,tp=2", "mlp=dp*tp"),
        ("Qwen3Moe", "dp=2,tp=2", "ep=dp*tp"),
    ],
)  # fmt: skip
def test_the_arena_is_known_before_it_is_asked_for(family: str, mesh: str, axes: str) -> None:  # vllm#37461
    """Emission, which knows rank, page size and context length, plans the bytes that the artifact states."""
    binder = Binder()
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
    r = compile_tiny(
        tiny(f"{family}ForCausalLM", **moe), mesh, axes, [(4, 4), (16, 8)], EXCHANGING if "ep" in axes else "h200", binder=binder,
        collectives=frozenset(EXCHANGE),
    )  # fmt: skip
    assert any(x["op"] == "exchange" for e in r.explain.values() for x in e["redistributions"]) == ("ep" in axes)
    runtime = FIXED | {"slots": 4096, "page": 16, "l": 77, "r": 64}
    for (variant, t), p in r.programs.items():
        for rank in range(p.plan.mesh.ranks):
            layout = lay_out(p, binder.kernels.__contains__, rank, runtime)
            assert layout.plan(dict(p.sizes) | runtime)[1] == r.arena_bytes[f"{variant}.t{t}"] > 0


def test_a_layout_that_needs_an_extent_of_the_runtime_cannot_be_sized() -> None:
    r = compile_tiny(tiny(), "", "", [(4, 4)], "cpu", ("gumbel",))
    layout = lay_out(r.programs["gumbel", 4], lambda key: False)
    with pytest.raises(KeyError):
        layout.buffers({"t": 4, "s": 4})


# ---- the limit -------------------------------------------------------------------------------------------------------


def limited(limit: int | None, bucket: int = 64) -> Result:
    return compile_tiny(tiny(num_hidden_layers=1), "tp=4", "", [(bucket, 4)], "cpu", ("gumbel",), memory_limit=limit)


def test_the_limit_chooses_the_cheapest_plan_that_fits() -> None:
    free = limited(None)
    held, best = free.weight_bytes + free.arena_bytes["gumbel.t64"], free.costs_us["gumbel.t64"]
    exact = limited(held)
    assert exact.texts == free.texts
    tight = limited(held - 1)
    assert tight.weight_bytes + tight.arena_bytes["gumbel.t64"] < held
    assert tight.costs_us["gumbel.t64"] > best
    assert tight.explain["gumbel.t64"]["collectives"] >= free.explain["gumbel.t64"]["collectives"]


def test_no_plan_fits_is_an_error_with_the_figures() -> None:
    free = limited(None)
    with pytest.raises(PlanError) as e:
        limited(free.weight_bytes + 100)
    assert e.value.code == "P039"
    figures = re.search(r"weights (\d+) B \+ arena (\d+) B = (\d+) B a rank, the limit is (\d+) B", e.value.message)
    assert figures
    weights, arena, total, limit = map(int, figures.groups())
    assert weights == free.weight_bytes and limit == weights + 100 and total == weights + arena > limit
    assert arena <= free.arena_bytes["gumbel.t64"] and "fix 1: smaller buckets" in e.value.message
