"""Row-wise kernels on every instruction set against the op references: norms, rope, activations, arithmetic, KV append,
lookups, row selection and fill, with poisoned neighbours and holes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.support import DTYPES, QUANT_FORMATS, gelu_excess, poisoned, quantised, strided
from tokenspeed import kernels as K
from tokenspeed.ir.ops import REFERENCES
from tokenspeed.kernels.tolerance import tolerance

ROWS = (0, 1, 7, 64)
WIDTHS = (1, 15, 16, 33, 576)
BIG = torch.tensor([[-1e4, -100.0, -88.0, -0.0, 0.0, 88.0, 1e4, float("nan")]])


def exact(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(isa: str, dtype: torch.dtype) -> None:
    for d in WIDTHS:
        bound = tolerance("rms_norm", dtype, terms=d)
        for rows in ROWS:
            w = torch.randn(d).to(dtype)
            x = strided(torch.randn(rows, d).to(dtype))
            out = poisoned(rows, d, dtype=dtype)
            K.get("cpu.rms_norm").fn(x, w, eps=1e-5, out=out)
            assert bound.excess(out, REFERENCES["rms_norm"](x, w, eps=1e-5)) <= 1
            heads = strided(torch.randn(rows, 3, d).to(dtype))
            out = poisoned(rows, 3, d, dtype=dtype)
            K.get("cpu.rms_norm").fn(heads, w, eps=1e-5, out=out)
            assert bound.excess(out, REFERENCES["rms_norm"](heads, w, eps=1e-5)) <= 1


def test_rms_norm_of_a_nan_row_and_of_zeros(isa: str) -> None:
    x = torch.randn(3, 40)
    x[1, 5] = float("nan")
    x[2] = 0
    out = torch.empty(3, 40)
    K.get("cpu.rms_norm").fn(x, torch.ones(40), eps=1e-5, out=out)
    assert out[0].isfinite().all() and out[1].isnan().all() and not out[2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(isa: str, dtype: torch.dtype) -> None:
    for d in WIDTHS:
        for rows in ROWS:
            w = torch.randn(d)  # wider than a bf16 row: rounded once
            x, y = (strided(torch.randn(rows, d).to(dtype)) for _ in range(2))
            total, normed = poisoned(rows, d, dtype=dtype), poisoned(rows, d, dtype=dtype)
            K.get("cpu.add_rms_norm").fn(x, y, w, eps=1e-6, out=(total, normed))
            want = REFERENCES["add_rms_norm"](x, y, w, eps=1e-6)
            exact(total, want[0])
            assert tolerance("add_rms_norm", dtype, terms=d).excess(normed, want[1]) <= 1
            # The residual stream may be updated in place.
            K.get("cpu.add_rms_norm").fn(x, y, w, eps=1e-6, out=(x, normed))
            exact(x, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(isa: str, dtype: torch.dtype) -> None:
    for d, r in ((8, 8), (64, 64), (64, 24), (80, 80), (20, 6)):
        table = torch.randn(50, r)
        for rows in ROWS:
            x = strided(torch.randn(rows, 3, d).to(dtype))
            pos = torch.randint(-1, 50, (rows,), dtype=torch.int32)
            want = REFERENCES["rope"](x, pos, table)
            out = poisoned(rows, 3, d, dtype=dtype)
            K.get("cpu.rope").fn(x, pos, table, out=out)
            assert tolerance("rope", dtype).excess(out, want) <= 1
            exact(out[pos < 0], x[pos < 0])
            inplace = strided(x)
            K.get("cpu.rope").fn(inplace, pos, table, out=inplace)
            exact(inplace, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["add", "mul", "silu", "silu_mul", "gelu", "gelu_mul", "sigmoid"])
def test_pointwise(isa: str, dtype: torch.dtype, op: str) -> None:
    arity = 1 if op in ("silu", "gelu", "sigmoid") else 2
    for width in WIDTHS:
        for rows in ROWS:
            inputs = [strided((8 * torch.randn(rows, width)).to(dtype)) for _ in range(arity)]
            out = poisoned(rows, width, dtype=dtype)
            K.get(f"cpu.{op}").fn(*inputs, out=out)
            want = REFERENCES[op](*inputs)
            if op in ("add", "mul"):
                exact(out, want)
            elif "gelu" in op:
                assert gelu_excess(op, out, *inputs) <= 1
            else:
                assert tolerance(op, dtype).excess(out, want) <= 1
    if arity == 1:
        out = torch.empty_like(BIG.to(dtype))
        K.get(f"cpu.{op}").fn(BIG.to(dtype), out=out)
        if op == "gelu":
            assert gelu_excess(op, out, BIG.to(dtype)) <= 1
        else:
            assert tolerance(op, dtype).excess(out, REFERENCES[op](BIG.to(dtype))) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "attrs"), [("scale", {"factor": 33.941125}), ("softcap", {"cap": 30.0})])
def test_pointwise_with_a_constant(isa: str, dtype: torch.dtype, op: str, attrs: dict[str, float]) -> None:
    """A factor is rounded to the stream's dtype first, as an embedding's scale is; a cap is not."""
    for x in (strided(8 * torch.randn(7, 33)).to(dtype), BIG.to(dtype)):
        out = poisoned(*x.shape, dtype=dtype)
        K.get(f"cpu.{op}").fn(x, **attrs, out=out)
        assert tolerance(op, dtype).excess(out, REFERENCES[op](x, **attrs)) <= 1
        if op == "scale":
            exact(out.nan_to_num(7), (x * torch.tensor(33.941125, dtype=dtype)).nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_a_row(isa: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        x, y = strided(torch.randn(7, width).to(dtype)), strided(torch.randn(7, 1).to(dtype))[:, 0]
        out = poisoned(7, width, dtype=dtype)
        K.get("cpu.mul_rows").fn(x, y, out=out)
        exact(out, REFERENCES["mul_rows"](x, y))


def test_pointwise_of_any_rank(isa: str) -> None:
    x, y = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    out = torch.empty(4, 3, 5)
    K.get("cpu.add").fn(x, y, out=out)
    exact(out, x + y)
    K.get("cpu.mul").fn(x[0, 0], y[0, 0], out=out[0, 0])
    exact(out[0, 0], x[0, 0] * y[0, 0])


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_writes_its_slots_and_no_other(isa: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for kv, d in ((1, 8), (3, 64), (2, 33)):
        for rows in ROWS:
            k, v = (strided(torch.randn(rows, kv, d).to(dtype)) for _ in range(2))
            slot = torch.randperm(100)[:rows].int()
            slot[::5] = -1
            got = [torch.randn(100, kv, d).to(cache_dtype) for _ in range(2)]
            want = [cache.clone() for cache in got]
            K.get("cpu.append").fn(k, v, slot, *got)
            REFERENCES["append"](k, v, slot, *want)
            exact(got[0], want[0])
            exact(got[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_lookup(isa: str, dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 19, 20, 39, 40, -1, 25, 2**31 - 1], dtype=torch.int32)
    for width in (1, 32, 64, 100):
        for table in (torch.randn(20, width), torch.randn(20, width).bfloat16()):
            for weight in (strided(table), K.get("cpu.lookup").pack(table)):
                out = poisoned(8, width, dtype=dtype)
                K.get("cpu.lookup").fn(ids, weight, offset=20, out=out)
                exact(out, REFERENCES["lookup"](ids, table, offset=20).to(dtype))
    for fmt in QUANT_FORMATS:
        weight, values = quantised(fmt, 20, 512)
        out = poisoned(8, 512, dtype=dtype)
        K.get("cpu.lookup").fn(ids, K.get("cpu.lookup").pack(weight), offset=20, out=out)
        want = REFERENCES["lookup"](ids, values, offset=20).to(dtype)
        torch.testing.assert_close(out, want, rtol=2.0**-23 if dtype == torch.float32 else 2.0**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_select_rows_and_fill(isa: str, dtype: torch.dtype) -> None:
    x = strided(torch.randn(9, 70).to(dtype))
    idx = torch.tensor([3, 11, 2, -1, 12, 3], dtype=torch.int32)
    out = poisoned(6, 70, dtype=dtype)
    K.get("cpu.select_rows").fn(x, idx, offset=3, out=out)
    exact(out, REFERENCES["select_rows"](x, idx, offset=3))
    for start in (0, 33, 70):
        out = poisoned(9, 70, dtype=dtype)
        K.get("cpu.fill").fn(x, start=start, value=float("-inf"), out=out)
        exact(out, REFERENCES["fill"](x, start=start, value=float("-inf")))
    K.get("cpu.fill").fn(x, start=60, value=1.0, out=x)
    assert bool((x[:, 60:] == 1).all())


def test_arguments_that_do_not_fit_are_named() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"rms_norm: .*w float32 \(7,\)"):
        K.get("cpu.rms_norm").fn(x, torch.ones(7), eps=1e-5, out=torch.empty(4, 8))
    with pytest.raises(ValueError, match="rope"):
        K.get("cpu.rope").fn(torch.randn(2, 1, 8), torch.zeros(2), torch.zeros(4, 8), out=torch.empty(2, 1, 8))
    with pytest.raises(ValueError, match="pointwise"):
        K.get("cpu.add").fn(x, x.double(), out=torch.empty(4, 8))
    with pytest.raises(ValueError, match="append"):
        K.get("cpu.append").fn(torch.randn(2, 1, 8), torch.randn(2, 1, 8), torch.zeros(2).long(), torch.zeros(4, 1, 8),
                               torch.zeros(4, 1, 8))  # fmt: skip
    with pytest.raises(ValueError, match="lookup"):
        K.get("cpu.lookup").fn(torch.zeros(2).long(), x, offset=0, out=torch.empty(2, 8))
