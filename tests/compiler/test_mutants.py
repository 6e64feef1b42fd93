"""The verifier alone rejects each mutant that is not equal to the original, with a rule's code, and no valid program."""

from __future__ import annotations

import pytest
import torch

from tests.compiler.sim import compile_tiny, tiny
from tokenspeed.compiler.mutants import mutants
from tokenspeed.compiler.mutate import EXPERTS, Report, judge, of_model, run
from tokenspeed.ir.agreement import agreement, meet, stuck, verify_ranks
from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.text import parse_program, print_program
from tokenspeed.ir.verifier import verify

torch.set_num_threads(1)


def test_every_mutant_is_rejected_or_equal() -> None:
    report = run(programs=150, families=["Qwen2ForCausalLM"], per_program=25, seed=3)
    assert report.survivors == [], report.survivors[0]
    assert report.false_rejects == [], report.false_rejects[0]
    assert report.valid > 100
    assert report.killed > 250
    assert set(report.codes) <= {f"V{n}" for n in range(1, 17)}


@pytest.mark.parametrize("family", EXPERTS)
def test_mutants_of_programs_with_experts_are_rejected_or_equal(family: str) -> None:
    plan = ("dp=2,tp=2", "ep=dp,etp=tp,se=tp,vp=dp*tp")
    report = run(programs=0, families=[family], per_program=30, seed=9, plans=[plan])
    assert report.survivors == [], report.survivors[0]
    assert report.false_rejects == [], report.false_rejects[0]
    assert report.valid == 16
    assert report.killed > 50


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("Qwen2ForCausalLM", ("dp=2,cp=2,tp=2", "")),
        ("Gemma3ForCausalLM", ("dp=2,tp=2", "vp=dp*tp")),
        ("DeepSeekMTPModel", ("dp=2,cp=2,tp=2", "ep=tp,etp=cp")),
    ],
    ids=["pages on several ranks", "windows", "latents and index keys on several ranks"],
)
def test_mutants_of_attention_with_options_are_rejected(family: str, plan: tuple[str, str]) -> None:
    report = run(programs=0, families=[family], per_program=30, seed=9, plans=[plan])
    assert (report.survivors, report.false_rejects, report.valid) == ([], [], 16)
    assert report.killed > 50


def test_a_rank_that_skips_or_repeats_a_collective_leaves_others_waiting() -> None:
    r = compile_tiny(tiny(), "dp=2,tp=2", "vp=dp*tp", [(4, 4)], variants=("gumbel",))
    p, q, s = (parse_program(r.texts["gumbel", 4]) for _ in range(3))
    assert not stuck([p, q, p, p])
    wires = [i for i, n in enumerate(q.nodes) if n.op == "all_reduce"]
    q.nodes.pop(wires[0])
    assert stuck([p, q, p, p])
    s.nodes.append(s.nodes[wires[0]])
    assert stuck([p, s, p, p])


def test_all_kinds_of_mutants_are_made_and_killed() -> None:
    r = compile_tiny(tiny(), "dp=2,tp=2", "vp=dp*tp", [(4, 4), (8, 4)], variants=("gumbel",))
    original = of_model(r, "gumbel", 4)
    found: dict[str, list] = {}
    for m in mutants(original.p, parse_program(r.texts["gumbel", 8])):
        found.setdefault(m.kind, []).append(m)
    assert set(found) >= {
        "dropped", "doubled", "wrong axis", "world group", "other collective", "other dim", "reduce op", "moved", "bypassed",
        "spare collective", "mask dropped", "cache write", "port placement", "result placement", "weight placement",
        "kv replica map", "signature", "missing on one rank", "bucket of one rank",
    }  # fmt: skip
    report = Report()
    for kind in found:
        for m in found[kind][:4]:
            judge(m, original, report)
    assert report.survivors == []
    assert all(killed for kind, (killed, _, _) in report.by_kind.items() if kind != "axis order"), report.by_kind


def test_a_program_without_types_reads_back_whole() -> None:
    text = compile_tiny(tiny(), "tp=2", variants=("gumbel",)).texts["gumbel", 8]
    bare = parse_program(print_program(parse_program(text), typed=False))
    assert bare.types == parse_program(text).types


def test_ranks_that_meet_run_one_bucket_and_one_order() -> None:  # sglang#37561
    apart = compile_tiny(tiny(), "dp=2,tp=2", "", [(4, 4), (8, 4)], variants=("gumbel",))
    joined = compile_tiny(tiny(), "dp=2,tp=2", "vp=dp*tp", [(4, 4), (8, 4)], variants=("gumbel",))
    small, large = (parse_program(apart.texts["gumbel", b]) for b in (4, 8))
    assert agreement(small) == ()
    verify_ranks([small, small, large, large])  # home groups that never meet
    with pytest.raises(VerifyError, match="V8"):
        verify_ranks([small, large, small, large])
    small, large = (parse_program(joined.texts["gumbel", b]) for b in (4, 8))
    assert agreement(small) == ("dp",)
    with pytest.raises(VerifyError, match="V8"):
        verify_ranks([small, small, large, large])


def test_a_mask_that_is_dropped_changes_tokens_and_is_refused() -> None:
    r = compile_tiny(tiny(), "tp=2", "", [(4, 4)], variants=("gumbel",))
    text = r.texts["gumbel", 4]
    assert " fill " in text
    p = parse_program(text.replace("value=-inf", "value=0.0"))
    with pytest.raises(VerifyError, match="V5"):
        verify(p)
    assert r.layout.sizes["v"] > r.layout.logical["v"]


def test_ranks_that_exchange_the_operands_of_two_equal_collectives_are_refused() -> None:
    r = compile_tiny(tiny(), "tp=2", "", [(4, 4)], variants=("gumbel",))
    text = r.texts["gumbel", 4]
    p, q = parse_program(text), parse_program(text)
    a, b = (
        i for i, n in enumerate(q.nodes) if n.inputs[0] in ("layers.0.attn", "layers.0.mlp") and n.op == "all_reduce"
    )
    q.nodes[a], q.nodes[b] = q.nodes[b], q.nodes[a]
    with pytest.raises(VerifyError, match="V7"):
        verify_ranks([p, q])


CIRCLE = """program @Two gumbel mesh(a=2, b=2) axes(cp=1, dp=1, ep=1, etp=a*b, mlp=a*b, se=a*b, tp=a*b, vp=a*b) bucket(t=4, s=4)
dims h=4
main(%x: f32[t, h] +a, %y: f32[t, h] +b) params()
  %x' = all_reduce %x {axes=('a',)} : f32[t, h]
  %y' = all_reduce %y {axes=('b',)} : f32[t, h]
  %z = add %x', %y' : f32[t, h]
  return %z : f32[t, h]
"""


def test_an_order_that_each_pair_shares_may_go_in_a_circle() -> None:
    """Each pair of ranks meets once, and yet none comes to its end."""
    p, q = parse_program(CIRCLE), parse_program(CIRCLE)
    q.nodes[0], q.nodes[1] = q.nodes[1], q.nodes[0]
    for program in (p, q):
        verify(program)
    verify_ranks([p, p, p, p])
    verify_ranks([p, p, q, q])  # ranks 0, 1 meet 2, 3 over a first on one side: they still come through
    assert all(len(meet(p, r, peer)) <= 1 for r in range(4) for peer in range(r))
    with pytest.raises(
        VerifyError, match="V7 ranks wait for each other in a circle: rank 0 in all_reduce over a of %x"
    ):
        verify_ranks([p, q, q, p])
