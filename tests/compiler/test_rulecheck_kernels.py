"""Kernels on every declared row of their op; a kernel that forgets its offset is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tokenspeed.compiler.rulecheck_kernels import Report, candidates, check, check_chain, check_form
from tokenspeed.ir.rulecheck_forms import FORMS

torch.set_num_threads(1)


def test_kernels_compute_what_the_rules_say() -> None:
    report = check()
    assert report.unsound == []
    assert {"cpu.linear", "cpu.add_rms_norm", "cpu.silu_mul", "cpu.lookup", "cpu.select_rows"} <= report.kernels
    assert "cpu.gumbel_argmax" in report.kernels
    assert report.rules > 300


def test_a_kernel_that_forgets_its_offset_is_caught() -> None:  # warp#1851
    form = next(f for f in FORMS if f.op == "select_rows")
    right = candidates(form.op)[0]

    def wrong(x: torch.Tensor, idx: torch.Tensor, *, offset: int = 0, out: Any) -> None:
        right.fn(x, idx, offset=0, out=out)

    broken = replace(right, name="cpu.select_rows_without_offset", fn=wrong, native=False)
    report = Report()
    check_form(form, broken, report)
    assert report.unsound


def test_a_chain_that_drops_its_noise_offset_is_caught() -> None:
    right = candidates("gumbel_argmax")[0]

    def wrong(z: torch.Tensor, params: torch.Tensor, *, offset: int = 0, out: Any) -> None:
        right.fn(z, params, offset=0, out=out)
        out[1].add_(offset)

    broken = replace(right, name="cpu.gumbel_argmax_with_local_noise", fn=wrong, native=False)
    report = Report()
    check_chain(right, report)
    assert not report.unsound
    check_chain(broken, report)
    assert report.unsound


def test_a_chain_without_operands_does_not_pass_unseen() -> None:
    kernel = replace(candidates("gumbel_argmax")[0], name="cpu.rope_append", op="rope_append", signatures=({},))
    with pytest.raises(LookupError, match="rope_append"):
        check_chain(kernel, Report())
