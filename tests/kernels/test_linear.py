"""linear on packed weights, on every instruction set: against the reference, and the promises of csrc/linear.h (a row's
bits depend on that row alone; poison outside the operands, and NaN in another row, never spread)."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.support import DTYPES, QUANT_FORMATS, poisoned, quantised, strided
from tokenspeed import _cpu
from tokenspeed import kernels as K
from tokenspeed.ir.ops import REFERENCES
from tokenspeed.kernels.tolerance import linear_allowed

EXACT, INT8, INT8_F32 = "cpu.linear", "cpu.linear_int8", "cpu.linear_int8_f32"
ROWS = (0, 1, 3, 7, 8, 9, 64, 131)


def run(
    kernel: str, x: torch.Tensor, packed: K.PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    out = poisoned(x.shape[0], packed.n, dtype=dtype)
    K.get(kernel).fn(x, packed, bias, out=out)
    return out


@pytest.mark.parametrize("fmt", QUANT_FORMATS)
@pytest.mark.parametrize("kernel", [EXACT, INT8_F32])
def test_quantised_weights_against_the_reference(isa: str, fmt: str, kernel: str) -> None:
    for n, k in ((1, 256), (16, 512), (70, 768)):
        weight, values = quantised(fmt, n, k)
        packed = K.get(kernel).pack(weight)
        bias = torch.randn(n)
        for rows in ROWS:
            x = strided(torch.randn(rows, k))
            want = REFERENCES["linear"](x.double(), values.double(), bias.double(), dtype=torch.float64)
            got = run(kernel, x, packed, bias, torch.float32)
            allowed = linear_allowed(x, values, want, torch.float32, int8=kernel != EXACT)
            assert bool(((got.double() - want).abs() <= allowed).all()), (n, k, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", DTYPES)
def test_dense_weights_against_the_reference(isa: str, dtype: torch.dtype, weights: torch.dtype) -> None:
    for n, k in ((1, 1), (17, 33), (48, 64), (130, 577)):
        weight = torch.randn(n, k).to(weights)
        packed = K.get(EXACT).pack(weight)
        bias = torch.randn(n).to(dtype)
        for rows in ROWS:
            x = strided(torch.randn(rows, k).to(dtype))
            for out in DTYPES:
                want = REFERENCES["linear"](x.double(), weight.double(), bias.double(), dtype=torch.float64)
                got = run(EXACT, x, packed, bias, out)
                allowed = linear_allowed(x, weight, want, out)
                assert bool(((got.double() - want).abs() <= allowed).all()), (n, k, rows, out)


CASES = [
    (EXACT, "q4_1"), (EXACT, "q8_0"), (EXACT, "f32"), (EXACT, "bf16"), (INT8_F32, "q4_1"), (INT8_F32, "q6_k"),
    (INT8, "q4_0"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_same_bits_in_every_batch_and_on_every_thread_count(isa: str, case: tuple[str, str]) -> None:
    kernel, fmt = case
    weight = torch.randn(83, 1312 if fmt in ("f32", "bf16") else 1280)
    weight = weight if fmt == "f32" else weight.bfloat16() if fmt == "bf16" else quantised(fmt, 83, 1280)[0]
    packed = K.get(kernel).pack(weight)
    x = torch.randn(137, packed.k).to(torch.bfloat16 if kernel == INT8 or fmt == "bf16" else torch.float32)
    whole = run(kernel, x, packed, None, torch.float32)
    assert torch.equal(run(kernel, x, packed, None, torch.float32), whole)
    for start, end in ((0, 1), (5, 7), (20, 23), (100, 105), (40, 48), (60, 69), (3, 136)):
        assert torch.equal(run(kernel, x[start:end], packed, None, torch.float32), whole[start:end]), (start, end)
    before = _cpu.threads()
    try:
        _cpu.set_threads(1)
        assert torch.equal(run(kernel, x, packed, None, torch.float32), whole)
        _cpu.set_threads(3)
        assert torch.equal(run(kernel, x, packed, None, torch.float32), whole)
    finally:
        _cpu.set_threads(before)


@pytest.mark.parametrize("kernel", [EXACT, INT8_F32])
def test_nan_and_inf_rows_stay_rows(isa: str, kernel: str) -> None:
    weight, _ = quantised("q4_1", 40, 256)
    packed = K.get(kernel).pack(weight)
    x = torch.randn(12, 256)
    clean = run(kernel, x, packed, None, torch.float32)
    x[3, 17] = float("nan")
    x[9, 200] = float("inf")
    got = run(kernel, x, packed, None, torch.float32)
    assert not got[3].isfinite().any() and not got[9].isfinite().any()
    others = [i for i in range(12) if i not in (3, 9)]
    assert torch.equal(got[others], clean[others])


def test_zero_rows_of_x_give_the_bias(isa: str) -> None:
    weight, _ = quantised("q8_0", 33, 64)
    bias = torch.randn(33)
    for kernel in (EXACT, INT8_F32):
        got = run(kernel, torch.zeros(2, 64), K.get(kernel).pack(weight), bias, torch.float32)
        assert torch.equal(got, bias.expand(2, 33))


def test_attention_output_is_flattened_and_segments_are_column_views() -> None:
    weight = torch.randn(32, 24)
    x = torch.randn(5, 3, 8)
    whole = torch.full((5, 96), 7.0)
    K.get(EXACT).fn(x, K.get(EXACT).pack(weight), None, out=whole[:, 32:64])
    torch.testing.assert_close(whole[:, 32:64], x.flatten(1) @ weight.t())
    assert bool((whole[:, :32] == 7).all() and (whole[:, 64:] == 7).all())


def test_arguments_that_do_not_fit_are_named() -> None:
    packed = K.get(EXACT).pack(torch.randn(32, 24))
    with pytest.raises(ValueError, match=r"linear: .*x float32 \(2, 23\).*\[32, 24\]"):
        K.get(EXACT).fn(torch.randn(2, 23), packed, None, out=torch.empty(2, 32))
    with pytest.raises(ValueError, match=r"out float32 \(3, 32\)"):
        K.get(EXACT).fn(torch.randn(2, 24), packed, None, out=torch.empty(3, 32))
    with pytest.raises(ValueError, match="float16"):
        K.get(EXACT).fn(torch.randn(2, 24).half(), packed, None, out=torch.empty(2, 32))
    with pytest.raises(ValueError, match="strides"):
        K.get(EXACT).fn(torch.randn(24, 2).t(), packed, None, out=torch.empty(2, 32))
    with pytest.raises(ValueError, match="bias"):
        K.get(EXACT).fn(torch.randn(2, 24), packed, torch.randn(31), out=torch.empty(2, 32))
    with pytest.raises(ValueError, match="needs a quantised weight"):
        K.get(INT8).fn(torch.randn(2, 24), packed, None, out=torch.empty(2, 32))


def test_torch_solution_agrees() -> None:
    x, weight, bias = torch.randn(9, 40), torch.randn(21, 40), torch.randn(21)
    out = torch.empty(9, 21)
    spec = K.get("torch.linear")
    spec.fn(x, spec.pack(weight), bias, out=out)
    want = REFERENCES["linear"](x.double(), weight.double(), bias.double(), dtype=torch.float64)
    assert bool(((out.double() - want).abs() <= linear_allowed(x, weight, want, torch.float32)).all())
