"""Rule discovery finds nothing against the declared rules, and finds every rule that is made wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tokenspeed.ir.ops import OPS, Local, Op
from tokenspeed.ir.ops.base import States
from tokenspeed.ir.rulecheck import check, check_form, homes
from tokenspeed.ir.rulecheck_forms import FORMS
from tokenspeed.ir.types import Type

torch.set_num_threads(1)


def test_every_declared_rule_holds_and_every_other_is_reviewed() -> None:
    report = check()
    assert (report.unsound, report.missing, report.stale) == ([], [], [])
    assert report.rules > 3000


#: op, form, states of the operands on one axis, and the wrong states of the results
WRONG = [
    ("silu", "silu", ("P",), ["P"]), ("rms_norm", "rms_norm", ("h", "h"), ["h"]), ("add", "add", ("R", "P"), ["P"]),
    ("mul", "mul", ("P", "P"), ["P"]), ("silu_mul", "silu_mul", ("P", "R"), ["P"]), ("scale", "scale", ("P",), ["R"]),
    ("linear", "linear", ("h", "h"), ["R"]), ("linear", "linear", ("P", "f"), ["P"]),
    ("linear", "linear, bias", ("h", "h", "R"), ["P"]), ("lookup", "lookup", ("R", "v"), ["R"]),
    ("lookup", "lookup", ("t", "v"), ["t"]), ("argmax", "argmax", ("v",), ["R"]), ("argmax", "argmax", ("P",), ["R"]),
    ("topk", "topk", ("v",), ["R"]), ("reduce", "reduce max", ("h",), ["P"]), ("reduce", "reduce sum", ("h",), ["P:max"]),
    ("select_rows", "select_rows", ("t", "R"), ["R"]), ("select_rows", "select_rows", ("t", "s"), ["s"]),
    ("select_rows", "select_rows, drafted", ("t", "R"), ["R"]), ("select_rows", "select_rows, drafted", ("t", "drafted"), ["drafted"]),
    ("cat", "cat", ("R", "P"), ["P"]), ("cat", "cat", ("P", "P"), ["R"]), ("cat", "cat", ("t", "t"), ["R"]),
    ("fill", "fill", ("v",), ["R"]), ("temper", "temper", ("s", "R"), ["s"]),
    ("attend", "attend, one KV head a block", ("R", "slots", "slots", "R", "R", "R"), ["R"]),
    ("attend", "attend, one KV head a block", ("n", "R", "R", "R", "R", "R"), ["R"]), ("rope", "rope", ("d", "R", "R"), ["d"]),
    ("append", "append", ("R", "R", "R", "slots", "R"), []),
    ("causal_conv", "causal_conv", ("t", "R", "R", "t", "t", "s"), ["t"]), ("decay", "decay", ("P", "R", "R"), ["P"]),
    ("causal_conv", "causal_conv", ("P", "R", "R", "R", "R", "R"), ["P"]), ("l2_norm", "l2_norm", ("d",), ["d"]),
    ("delta_rule", "delta_rule", ("t", "t", "t", "t", "t", "R", "t", "t", "s"), ["t"]),
    ("delta_rule", "delta_rule", ("d", "d", "R", "R", "R", "d", "R", "R", "R"), ["P"]),
    ("route", "route, sigmoid and groups", ("e", "e"), ["R", "R"]),
    ("mla", "mla", ("R", "R", "slots", "slots", "R", "R", "R"), ["R"]), ("mla", "mla", ("c", "R", "c", "R", "R", "R", "R"), ["P"]),
    ("head_linear", "head_linear", ("d", "d"), ["R"]),
    ("head_linear", "head_linear, transposed", ("d", "d"), ["R"]), ("rope_pairs", "rope_pairs", ("d", "R", "R"), ["d"]),
    ("append_latent", "append_latent", ("R", "R", "R", "slots", "R"), []), ("layer_norm", "layer_norm", ("h", "h", "h"), ["h"]),
    ("append_latent", "append_latent, one value", ("R", "R", "c"), []),
    ("mla", "mla, at positions", ("R", "R", "slots", "slots", "R", "R", "R", "R"), ["R"]),
    ("mla", "mla, at positions", ("t", "t", "slots", "slots", "t", "t", "s", "R"), ["t"]),
    ("index_topk", "index_topk", ("R", "R", "slots", "R", "R", "R"), ["R"]),
    ("index_topk", "index_topk", ("n", "n", "R", "R", "R", "R"), ["P:topk"]),
    ("index_topk", "index_topk", ("t", "t", "slots", "t", "t", "R"), ["t"]),
    ("experts", "experts", ("t", "t", "t", "e", "e", "e"), ["P"]), ("experts", "experts", ("t", "R", "t", "e", "e", "e"), ["t"]),
    ("tally", "tally by count", ("v", "R"), ["R"]), ("exp_sum", "exp_sum", ("v", "R"), ["R"]), ("pick", "pick", ("v", "R"), ["P"]),
    ("sift", "sift", ("v", "R", "R", "R", "R"), ["R"]), ("count_token", "count_token", ("s", "s", "s", "R"), []),
]  # fmt: skip


@pytest.mark.parametrize(("op", "form", "states", "says"), WRONG, ids=lambda x: str(x))
def test_a_wrong_row_is_caught(
    monkeypatch: pytest.MonkeyPatch, op: str, form: str, states: tuple[str, ...], says: list[str]
) -> None:
    right = type(OPS[op])

    class Mutant(right):  # type: ignore[misc,valid-type]
        def axis_rule(self, axis: str, given: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
            return says if tuple(given) == states else super().axis_rule(axis, given, ins, attrs)

    caught(monkeypatch, Mutant(), form)


@pytest.mark.parametrize(
    "form",
    [
        "lookup",
        "select_rows",
        "select_rows, drafted",
        "add_gumbel",
        "argmax",
        "topk",
        "append",
        "attend, one KV head a block",
        "experts",
        "append_latent",
        "append_latent, one value",
        "mla",
        "mla, at positions",
        "index_topk",
        "pick",
        "count_token",
    ],
)
def test_an_offset_that_is_dropped_is_caught(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    right = type(OPS[form.split(",")[0]])

    class Mutant(right):  # type: ignore[misc,valid-type]
        def local_attrs(
            self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
        ) -> dict[str, Any]:
            own = super().local_attrs(ins, outs, attrs, at)
            return own | {"offset": 0} if "offset" in own else own

    caught(monkeypatch, Mutant(), form)


def test_rows_that_are_not_exchanged_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mutant(type(OPS["experts"])):  # type: ignore[misc]
        def exchange(self, ins: Sequence[Type]) -> tuple[str, ...]:
            return ()

    caught(monkeypatch, Mutant(), "experts")


@pytest.mark.parametrize("op", ["attend", "delta_rule"])
def test_heads_that_read_another_block_s_head_are_caught(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    class Mutant(type(OPS[op])):  # type: ignore[misc]
        def check_extents(self, *_: Any) -> None:
            return

    caught(monkeypatch, Mutant(), op)


def caught(monkeypatch: pytest.MonkeyPatch, mutant: Op, form: str) -> None:
    chosen = [f for f in FORMS if f.name == form]
    assert chosen, form
    monkeypatch.setitem(OPS, mutant.name, mutant)
    reports = [check_form(form, home, discovering=False) for form in chosen for home in homes(form)]
    assert any(r.unsound for r in reports), "rule discovery let a wrong rule pass"
