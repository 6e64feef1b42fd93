"""Kernels on every declared row of their op; a kernel that forgets its offset is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tokenspeed.compiler.rulecheck_kernels import candidates, check
from tokenspeed.ir.rulecheck_forms import FORMS

torch.set_num_threads(1)


def test_kernels_compute_what_the_rules_say() -> None:
    forms = [f for f in FORMS if f.op not in ("append", "attend", "sample")]  # those: `make rulecheck`
    report = check(forms)
    assert report.unsound == []
    assert {"cpu.linear", "cpu.add_rms_norm", "cpu.silu_mul", "cpu.lookup", "cpu.select_rows"} <= report.kernels
    assert report.rules > 300


def test_a_kernel_that_forgets_its_offset_is_caught() -> None:
    form = next(f for f in FORMS if f.op == "select_rows")
    right = candidates(form)[0]

    def wrong(x: torch.Tensor, idx: torch.Tensor, *, offset: int = 0, out: Any) -> None:
        right.fn(x, idx, offset=0, out=out)

    broken = replace(right, name="cpu.select_rows_without_offset", fn=wrong, native=False)
    assert check([form], {"select_rows": [broken]}).unsound
