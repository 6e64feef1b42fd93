"""The program fuzzer on a few hundred programs, and that it has teeth: a wrong rule is found and shrunk to a few ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tokenspeed.compiler import fuzz_programs
from tokenspeed.compiler.fuzz import fault, fitted, fuzz, shrink
from tokenspeed.compiler.fuzz_programs import generate
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.ops.base import States
from tokenspeed.ir.types import Type

torch.set_num_threads(1)


def test_compiled_programs_mean_what_they_mean_on_one_rank() -> None:
    out = fuzz(240, seed=100_000)
    assert out.failures == [], out.failures[0]
    assert out.programs - out.skipped > 180
    assert out.rejected > 60
    assert out.equivalent > 20


def test_programs_vary() -> None:
    programs = [generate(s) for s in range(200)]
    assert {len(p.bodies) for p in programs} >= {2, 3, 4, 5}
    assert max(p.ops() for p in programs) > 25
    text = "".join(p.source() for p in programs)
    for part in (
        "+mlp",
        "+tp",
        "t@dp h",
        "t* h +?",
        "place(",
        "silu(",
        "RMSNorm(",
        "LayerNorm(",
        "bias=",
        "select_rows",
        "argmax:vp",
        "experts(",
        "groups=4",
        "self.bias)",
    ):
        assert part in text, part


@pytest.mark.parametrize("op", ["silu", "rms_norm"])
def test_a_wrong_rule_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    right = type(OPS[op])

    class Wrong(right):  # type: ignore[misc,valid-type]
        def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
            return ["P"] if states[0] == "P" else super().axis_rule(axis, states, ins, attrs)

    monkeypatch.setitem(OPS, op, Wrong())
    bad = next(p for s in range(400) for p, what in [fitted(generate(s))] if what == "another meaning")
    least = shrink(bad, lambda q: fault(q) == "another meaning")
    assert least.ops() <= 6
    assert least.ops() <= bad.ops()
    assert fault(least) == "another meaning"


def test_annotations_of_a_program_are_found() -> None:
    p = generate(3)
    found = [p.source()[a:b] for a, b in fuzz_programs.annotation_spans(p.source())]
    assert any("@" in text for text in found)
    assert all("import" not in text for text in found)
