"""Fused collectives: a factor of the solver where a kernel exists; the fused program means what its parts mean."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.compiler.sim import compile_tiny, tiny
from tests.compiler.test_solver import PLANS, odd_costs, price, problems
from tokenspeed.compiler.api import compile_model
from tokenspeed.compiler.exchange import CALLS as EXCHANGE
from tokenspeed.compiler.passes.bind import Binder
from tokenspeed.compiler.passes.fusions import fuse, saving
from tokenspeed.compiler.passes.insert import LeafCache
from tokenspeed.compiler.passes.pipeline import Problem, build
from tokenspeed.compiler.trial import batch, random_weights, runtime_sizes
from tokenspeed.ir.agreement import agreement
from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.ops.fused import FUSED, expand
from tokenspeed.ir.simulate import Simulator
from tokenspeed.ir.text import parse_program, print_program
from tokenspeed.ir.verifier import verify
from tokenspeed.models import find_family

ALL = frozenset(op.name for op in FUSED)


def test_the_target_decides_what_may_be_fused() -> None:
    assert Binder("cpu").collectives("float32") == Binder("cpu").collectives("bfloat16") == ALL | {*EXCHANGE}
    assert Binder("cuda:90").collectives("bfloat16") == frozenset()
    c = tiny()
    family = find_family(c["architectures"][0])
    for device, fused in (("cpu", True), ("cuda:90", False)):
        done = compile_model(
            family, c, mesh="tp=2", buckets=[8], dtype="bfloat16", cache_dtype="bfloat16", device=device
        )
        text = done.result.texts["gumbel", 8]
        assert ("_add_rms_norm" in text) == fused
        assert any(r["fused"] for r in done.result.explain["gumbel.t8"]["redistributions"]) == fused
        assert any(k.startswith("all_reduce_add_rms_norm|") for k in done.files["kernels.json"].split('"')) == fused


@pytest.mark.parametrize(("mesh", "axes"), [("tp=2", ""), ("dp=2,tp=2", "mlp=dp*tp"), ("tp=4", "")])
@pytest.mark.parametrize("seed", range(2))
def test_a_fused_program_expands_to_the_one_it_was_made_of(mesh: str, axes: str, seed: int) -> None:
    for costs in ("h200", odd_costs(seed)):
        for p in compile_tiny(tiny(), mesh, axes, [(8, 4)], costs).programs.values():
            q = fuse(p, ALL)
            back = expand(q)
            verify(q)
            verify(back)
            assert [(n.op, n.attrs) for n in back.nodes if "axes" in n.attrs] == [
                (n.op, n.attrs) for n in p.nodes if "axes" in n.attrs
            ]
            assert sorted(n.op for n in back.nodes) == sorted(n.op for n in p.nodes)
            text = print_program(q)
            assert print_program(parse_program(text)) == text


@pytest.mark.parametrize(("mesh", "axes"), [("tp=2", ""), ("tp=4", ""), ("dp=2,tp=2", "mlp=dp*tp")])
@pytest.mark.parametrize("rows", [8, 4096])
def test_it_computes_what_one_rank_does(mesh: str, axes: str, rows: int) -> None:
    """Rows beyond the requests' are holes; many of them make a scattered sum pay."""
    tokens = []
    for m, a in ((mesh, axes), ("", "")):
        r = compile_tiny(tiny(), m, a, [(rows, 4)], "h200", ("gumbel",), collectives=ALL)
        p = r.programs["gumbel", rows]
        assert any(n.op in ALL for n in p.nodes) == bool(m)
        groups = p.plan.mesh.size(p.plan.home)
        p.bucket |= {"t": 8}  # the same program for fewer rows that split alike
        p.sizes["t"] = p.logical["t"] = 8 * groups
        requests = [(k, [5 + k, 6, 7], 0) for k in range(2)]
        work = [[x] for x in requests] if groups == 2 else [requests]
        got = Simulator(p, runtime_sizes(p)).run(batch(p, work), random_weights(r.weights), {})[0][0]
        tokens.append([int(got[0]), int(got[4 if groups == 2 else 1])])
    assert tokens[0] == tokens[1]


def test_its_rule_is_that_of_its_parts() -> None:
    """A complete branch, a pending residual, a scatter of rows against whole ones: each is refused by a part."""
    p = compile_tiny(tiny(), "tp=2", "", [(8, 4)], "h200", ("gumbel",), collectives=ALL).programs["gumbel", 8]
    n = next(n for n in p.nodes if n.op == "all_reduce_add_rms_norm")
    t, w = p.types["layers.0.norm1"], p.params["layers.0.norm1"].types[0]
    pending = t.with_state("tp", "P", p.plan.mesh.ordered)
    spread = t.with_state("tp", "t", p.plan.mesh.ordered)
    order = p.plan.mesh.ordered
    assert OPS[n.op].infer([t, pending, w], n.attrs, order) == [t, t]
    scatter = OPS["reduce_scatter_add_rms_norm"]
    assert scatter.infer([spread, pending, w], n.attrs | {"dim": "t"}, order) == [spread, spread]
    for ins in ([t, t, w], [pending, pending, w], [spread, pending, w]):
        with pytest.raises(Exception, match=r"needs state P|counted once a rank|blocks do not match"):
            OPS[n.op].infer(ins, n.attrs, order)


def fused_price(p: Problem, picks: tuple[int, ...]) -> float:
    """The definition: what the plan costs, less what each fused kernel in its program saves."""
    rows = [options[k] for options, k in zip(p.rows, picks)]
    program, _ = build(p, rows, LeafCache(), ALL)
    return price(p, picks) - sum(saving(p.repairs, program.types[n.outputs[0]]) for n in program.nodes if n.op in ALL)


@pytest.mark.parametrize(("mesh", "axes"), PLANS)
@pytest.mark.parametrize("seed", range(2))
def test_what_the_solver_counted_on_is_what_is_built(mesh: str, axes: str, seed: int) -> None:
    p = problems(mesh, axes, odd_costs(seed), layers=2)
    s = p.solve(fused=ALL)
    assert s.cost == pytest.approx(fused_price(p, s.picks))
    plain = p.solve()
    assert s.cost <= fused_price(p, plain.picks) + 1e-9, "more freedom never costs more"


def test_the_minimum_with_fused_kernels_equals_brute_force() -> None:
    p = problems("tp=2", "", odd_costs(1))
    s = p.solve(fused=ALL)
    by_price = sorted(itertools.product(*(range(len(r)) for r in p.rows)), key=lambda c: price(p, c))
    bound = 3 * saving(p.repairs, p.results[0].__class__("f32", p.choices.base["embed"].dims))
    near = [c for c in by_price if price(p, c) <= s.cost + bound and np.isfinite(price(p, c))]
    assert near and min(fused_price(p, c) for c in near[:400]) == pytest.approx(s.cost)


def options() -> dict[str, Any]:
    c = tiny()
    return {"model": find_family(c["architectures"][0]), "config": c, "mesh": "tp=2", "buckets": [1, 64]}


def test_it_is_certified_and_explained() -> None:
    done = compile_model(**options(), certificate=True)
    assert "certificate.json" in done.files
    assert "(in all_reduce_add_rms_norm)" in done.files["explain.txt"]
    for e in done.result.explain.values():
        assert e["collectives"] == sum(OPS[r["op"]].wire for r in e["redistributions"])  # type: ignore[attr-defined]


def test_a_fused_op_is_verified_by_its_parts() -> None:
    """An edited program whose fused op takes a complete branch, or runs over no axis, is refused."""
    p = compile_tiny(tiny(), "tp=2", "", [(8, 4)], "h200", ("gumbel",), collectives=ALL).programs["gumbel", 8]
    verify(p)
    spread = compile_tiny(tiny(), "dp=2,tp=2", "mlp=dp*tp", [(8, 4)], "h200", ("gumbel",), collectives=ALL)
    assert agreement(spread.programs["gumbel", 8]) == ("dp",)
    text = print_program(p, typed=False)
    line = next(x for x in text.splitlines() if " = all_reduce_add_rms_norm " in x)
    branch = line.split("rms_norm ")[1].split(", ")[1]
    for old, new in ((branch, "%embed'"), ("('tp',)", "()")):
        with pytest.raises(VerifyError):
            verify(parse_program(text.replace(line, line.replace(old, new))))
