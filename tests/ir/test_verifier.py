"""Each rule of the verifier on a real program that was edited: the mutant is refused with the rule's code."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest

from tests.compiler.sim import compile_tiny, tiny
from tokenspeed.ir.errors import RuleError, VerifyError
from tokenspeed.ir.graph import Program
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.rulecheck_forms import FORMS, Form
from tokenspeed.ir.text import parse_program, print_program
from tokenspeed.ir.types import Dim, Type
from tokenspeed.ir.verifier import verify

#: ops that take either kind of number
EITHER = {"select_rows", "cross"}


@pytest.fixture(scope="module")
def text() -> str:
    return compile_tiny(tiny(), "tp=2", "", [(4, 4)], variants=("gumbel",)).texts["gumbel", 4]


@pytest.fixture(scope="module")
def dp_text() -> str:
    return compile_tiny(tiny(), "dp=2,tp=2", "vp=dp*tp", [(4, 4)], variants=("gumbel",)).texts["gumbel", 4]


def refuse(text: str, code: str, edit: str = "") -> None:
    with pytest.raises(VerifyError) as e:
        verify(parse_program(text))
    assert e.value.code == code, (edit, str(e.value))


def untyped(text: str) -> str:
    """The program without the types that print beside its ops: the verifier must find a fault from the ops alone."""
    return (
        "\n".join(
            re.sub(r" : (?:\w+\[.*?)(?=   ;|$)", "", line) if " = " in line else line for line in text.splitlines()
        )
        + "\n"
    )


def test_the_program_itself_passes_and_reads_back(text: str, dp_text: str) -> None:
    for t in (text, dp_text):
        p = parse_program(t)
        verify(p)
        assert print_program(p) == t
        assert print_program(parse_program(untyped(t))) == t


def test_a_leaf_that_returns_what_nobody_made_is_refused(text: str) -> None:
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  return"))
    refuse("\n".join([*lines[:at], lines[at] + "'", *lines[at + 1 :]]), "V1")


def test_each_dropped_collective_is_refused(text: str, dp_text: str) -> None:
    for source in (text, dp_text):
        lines = untyped(source).splitlines()
        collectives = [
            i for i, line in enumerate(lines) if re.search(r" = (all_reduce|all_gather|reduce_scatter|slice) ", line)
        ]
        assert len(collectives) >= 5
        for i in collectives:
            made, used = re.match(r"\s*%(\S+) = \w+ %(\S+) ", lines[i]).groups()  # type: ignore[union-attr]
            rest = [re.sub(rf"%{re.escape(made)}(?=[\s,)]|$)", f"%{used}", line) for line in lines[:i] + lines[i + 1 :]]
            with pytest.raises(VerifyError):
                verify(parse_program("\n".join(rest) + "\n"))


def test_each_doubled_collective_is_refused(text: str) -> None:
    lines = untyped(text).splitlines()
    for i in [i for i, line in enumerate(lines) if " = all_reduce " in line]:
        made = re.match(r"\s*%(\S+) = ", lines[i])[1]  # type: ignore[index]
        twice = f"  %{made}x = all_reduce %{made} {{axes=('tp',)}}"
        rest = [re.sub(rf"%{re.escape(made)}(?=[\s,)]|$)", f"%{made}x", line) for line in lines[i + 1 :]]
        refuse("\n".join([*lines[: i + 1], twice, *rest]) + "\n", "V1", lines[i])


def test_a_collective_over_another_axis_is_refused(dp_text: str) -> None:
    lines = untyped(dp_text).splitlines()
    for i in [i for i, line in enumerate(lines) if " = all_reduce " in line and "('tp',)" in line]:
        with pytest.raises(VerifyError):
            verify(
                parse_program("\n".join([*lines[:i], lines[i].replace("('tp',)", "('dp',)"), *lines[i + 1 :]]) + "\n")
            )


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("all_reduce %embed {axes=('tp',)}", "reduce_scatter %embed {axes=('tp',), dim='t'}", "V1"),
        ("all_reduce %embed {axes=('tp',)}", "all_reduce %embed {axes=()}", "V1"),
        ("%layers.0.norm1 = rms_norm %embed'", "%layers.0.norm1 = rms_norm %embed", "V1"),
        ("call @MLP(%layers.0.norm2) in", "call @Nothing(%layers.0.norm2) in", "V3"),
        ("return %sampler.gumbel'", "return %sampler.gumbel", "V2"),
        ("= call @Attention(%layers.1.norm1", "= call @Attention(%layers.9.norm1", "V1"),
    ],
)  # fmt: skip
def test_edits_of_the_main_list_are_refused(text: str, old: str, new: str, code: str) -> None:
    assert old in text
    with pytest.raises(VerifyError) as e:
        verify(parse_program(untyped(text).replace(old, new)))
    assert e.value.code == code or (code == "V1" and e.value.code in ("V9", "V3"))


def test_a_cache_written_twice_or_read_first_is_refused(text: str) -> None:
    lines = text.splitlines()
    i = next(i for i, line in enumerate(lines) if line.strip().startswith("append "))
    refuse("\n".join([*lines[: i + 1], lines[i], *lines[i + 1 :]]) + "\n", "V11")
    refuse("\n".join([*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]]) + "\n", "V11")


def test_two_calls_on_one_cache_are_refused(text: str) -> None:
    refuse(text.replace("in layers.1.attn :", "in layers.0.attn :"), "V11")


def test_a_printed_type_that_lies_is_refused(text: str) -> None:
    refuse(
        text.replace(
            "%embed' = all_reduce %embed {axes=('tp',)} : f32[t, h]",
            "%embed' = all_reduce %embed {axes=('tp',)} : f32[t, h] +tp",
        ),
        "V1",
    )


def test_extents_that_do_not_divide_and_rows_beyond_the_bucket_are_refused(text: str) -> None:
    refuse(text.replace("f=48", "f=47"), "V5")

    def spread(p: Program) -> Program:
        q = copy.deepcopy(p)
        q.bucket = {"t": 1, "s": 1}
        return q

    large = compile_tiny(tiny(), "tp=2", "", [(4096, 4)], "h200", ("gumbel",))
    p = parse_program(large.texts["gumbel", 4096])
    if any("tp" in d.axes for t in p.types.values() for d in t.dims if d.name == "t"):
        with pytest.raises(VerifyError, match="V5"):
            verify(spread(p))


def test_a_collective_for_nobody_is_refused(text: str) -> None:
    line = "  %embed' = all_reduce %embed {axes=('tp',)}"
    spare = "  %spare = all_reduce %embed {axes=('tp',)}"
    lines = untyped(text).splitlines()
    i = next(i for i, x in enumerate(lines) if x.startswith(line))
    refuse("\n".join([*lines[:i], spare, *lines[i:]]) + "\n", "V10")


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_an_operand_of_the_other_kind_of_number_is_refused(form: Form) -> None:
    """Ids in the place of numbers, or numbers in that of ids, of every op that does not take both."""
    op, types = OPS[form.op], [Type(o.dtype, tuple(map(Dim, o.dims))) for o in form.operands]
    op.check_integers(types)
    if op.which_integers(len(types)) is None:
        assert form.op in EITHER
        return
    for i, t in enumerate(types):
        other = replace(t, dtype="f32" if t.dtype == "i32" else "i32")
        with pytest.raises(RuleError, match=f"as operand {i + 1}"):
            op.check_integers([*types[:i], other, *types[i + 1 :]])


def test_a_collective_that_names_no_attribute_of_its_own_is_told_so(text: str) -> None:
    bare = re.sub(r"(= all_reduce %\S+) \{axes=[^}]*\}", r"\1 {kind='sum'}", untyped(text), count=1)
    with pytest.raises(VerifyError, match=r"all_reduce .*: no attribute 'axes'; it says kind"):
        parse_program(bare)
