"""Simplification of collectives: each rule on a program that has what it looks for; types hold and the cost falls."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.compiler.sim import Steps, compile_tiny, random_weights, tiny
from tokenspeed.compiler.costs import load_costs
from tokenspeed.compiler.passes.pipeline import Request, run_passes
from tokenspeed.compiler.passes.repair import Repairs
from tokenspeed.compiler.passes.simplify import _Work, simplify, worthwhile
from tokenspeed.ir.graph import Program
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.ir.text import parse_program, print_program
from tokenspeed.ir.verifier import verify
from tokenspeed.models.llama import CausalLM, Layer
from tokenspeed.models.nn import Batch, Config, Tokens


def plain(mesh: str = "tp=2") -> str:
    """A program without the types that print beside its ops, so that lines can be edited."""
    text = compile_tiny(tiny(num_hidden_layers=1), mesh, "", [(8, 4)], "cpu", ("gumbel",)).texts["gumbel", 8]
    untyped = [re.sub(r" : (?:\w+\[.*?)(?=   ;|$)", "", x) if " = " in x else x for x in text.splitlines()]
    return "\n".join(x.split("   ;")[0] for x in untyped) + "\n"


def repairs(p: Program) -> Repairs:
    nominal = {"p": 16, "l": 16, "top": 20, "slots": 16, "r": 16}
    return Repairs(p.plan, p.sizes | nominal, {d: p.row_axes(d) for d in p.bucket}, load_costs("cpu"))


def cost(p: Program) -> float:
    return _Work(p.nodes, p.types, p.params, p.results, repairs(p)).cost()


def body(p: Program) -> list[str]:
    return [x.strip().split(" : ")[0] for x in print_program(p).split("main(")[1].splitlines()[1:]]


EMBED = "  %embed' = all_reduce %embed {axes=('tp',)}\n"

CASES = {
    "reduce-scatter and gather merge": (
        "  %a = reduce_scatter %embed {axes=('tp',), dim='t'}\n  %embed' = all_gather %a {axes=('tp',), dim='t'}\n",
        ["all_reduce %embed "], ["reduce_scatter", "all_gather"],
    ),
    "gather after scatter cancels": (
        EMBED.replace("%embed'", "%a") + "  %b = slice %a {axes=('tp',), dim='t'}\n  %embed' = all_gather %b {axes=('tp',), dim='t'}\n",
        ["all_reduce %embed "], ["slice", "all_gather"],
    ),
    "reduce after keep_first cancels": (
        EMBED.replace("%embed'", "%a") + "  %b = keep_first %a {axes=('tp',)}\n  %embed' = all_reduce %b {axes=('tp',)}\n",
        ["%layers.0.norm1 = rms_norm"], ["keep_first"],
    ),
    "a collective for nobody goes": (EMBED + "  %spare = reduce_scatter %embed {axes=('tp',), dim='t'}\n", ["all_reduce"], ["%spare"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_rule(case: str) -> None:
    new, has, lacks = CASES[case]
    text = plain()
    assert EMBED in text
    p = parse_program(text.replace(EMBED, new))
    assert worthwhile(p.nodes, p.results)
    q = simplify(p, repairs(p))
    lines = body(q)
    first = next(i for i, x in enumerate(lines) if x.startswith("%layers.0.norm1 ="))
    head = "\n".join(lines[: first + 1])
    assert all(x in head for x in has) and not any(x in head for x in lacks), head
    assert cost(q) < cost(p)
    verify(q)
    assert print_program(parse_program(print_program(q))) == print_program(q)


def test_equal_collectives_are_one() -> None:
    """The one that is left stands above both consumers."""
    norm = "%layers.0.norm1 = rms_norm %embed',"
    text = plain().replace(EMBED, EMBED + EMBED.replace("%embed'", "%again"))
    p = parse_program(text.replace(norm, "%x = add %embed', %again\n  " + norm.replace("%embed'", "%x")))
    q = simplify(p, repairs(p))
    assert "%x = add %embed', %embed'" in body(q) and cost(q) < cost(p)
    assert sum(x.count("all_reduce %embed {") for x in body(q)) == 1


def test_a_gather_sinks_below_an_op_on_rows_where_fewer_bytes_move() -> None:
    """select_rows does not work on rows as they lie; a norm moves the same bytes, so the gather moves with its work."""
    text = plain().replace(
        EMBED,
        "  %a = reduce_scatter %embed {axes=('tp',), dim='t'}\n  %embed' = all_gather %a {axes=('tp',), dim='t'}\n",
    )
    p = parse_program(text)
    work = _Work(p.nodes, p.types, p.params, p.results, repairs(p))
    before = work.cost()
    assert work.sink() and work.cost() < before
    gather = next(n for n in work.nodes if n.op == "all_gather")
    norm = next(n for n in work.nodes if n.outputs == (gather.inputs[0],))
    assert norm.op == "rms_norm" and gather.outputs == ("layers.0.norm1",) and norm.inputs[0] == "a"


def test_what_the_solver_made_is_left_alone() -> None:
    for mesh in ("tp=2", "dp=2,tp=2"):
        p = parse_program(plain(mesh))
        assert not worthwhile(p.nodes, p.results)
        assert print_program(simplify(p, repairs(p))) == print_program(p)


class WholeLayer(Layer):
    """A layer whose signature wants the stream whole on every tp rank."""

    def forward(self, x: Tokens, b: Batch) -> Tokens:
        x = x + self.attn(self.norm1(x), b)
        return x + self.mlp(self.norm2(x))


class WholeModel(CausalLM):
    layer = WholeLayer


def test_a_signature_that_a_value_crosses_twice_costs_nothing_but_what_it_says() -> None:
    """Between two such layers the value is made whole once, whatever the prices; tokens are those of one rank."""
    tokens = []
    for mesh in ("", "tp=4"):
        for table in ("cpu", "h200"):
            plan = make_plan(parse_mesh(mesh), "")
            costs = replace(load_costs(table), alpha_us={2: 0.01, 4: 0.01, 8: 0.01}, beta_gbs=0.001)
            r = run_passes(
                Request(WholeModel, Config(tiny()), plan, [(8, 4)], "f32", "f32", costs, variants=("gumbel",))
            )
            p = r.programs["gumbel", 8]
            moved = [
                (n.inputs[0], n.op, n.attrs["axes"]) for n in p.nodes if n.op in ("all_gather", "all_reduce", "slice")
            ]
            assert len(set(moved)) == len(moved)
            tokens.append(Steps(r, random_weights(r)).step(8, [[(0, [1, 2, 3], 0), (1, [4, 5], 0)]]))
    assert all(t == tokens[0] for t in tokens)
