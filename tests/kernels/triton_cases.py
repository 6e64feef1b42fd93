"""The Triton kernels against the op references, in Triton's interpreter on CPU; run by test_triton_interpret.py in a
process of its own. Inputs lie in buffers of NaN, outputs start as NaN, and free cache slots hold NaN."""

from __future__ import annotations

import tests.kernels.interpreter  # isort: skip  # noqa: F401

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.support import DTYPES, gelu_excess, gumbel64, poisoned, strided
from tests.kernels.test_attention import Batch
from tokenspeed import kernels as K
from tokenspeed.ir.ops import REFERENCES
from tokenspeed.kernels.attention.triton import Tiling, attend
from tokenspeed.kernels.gemm.triton import Tiling as LinearTiling
from tokenspeed.kernels.gemm.triton import linear
from tokenspeed.kernels.launch import even_splits, recording, scratch
from tokenspeed.kernels.pages.triton import gather_pages, page_table, scatter_pages
from tokenspeed.kernels.sampling.triton import noise_of
from tokenspeed.kernels.tolerance import linear_allowed, tolerance

WIDTHS = (1, 127, 128, 129, 1025)
INF = float("inf")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(op: str, *args: Tensor, **attrs: float) -> Tensor:
    """The kernel's result in a fresh poisoned buffer, and again: the same bits."""
    want = REFERENCES[op](*args, **attrs)
    outs = [poisoned(*want.shape, dtype=want.dtype) for _ in range(2)]
    for out in outs:
        K.get(f"triton.{op}").fn(*args, **attrs, out=out)
    assert torch.equal(outs[0].nan_to_num(7), outs[1].nan_to_num(7))
    return outs[0]


def check(op: str, *args: Tensor, terms: int = 1, **attrs: float) -> Tensor:
    got = run(op, *args, **attrs)
    assert tolerance(op, got.dtype, terms=terms).excess(got, REFERENCES[op](*args, **attrs)) <= 1
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_pointwise(dtype: torch.dtype, rows: int) -> None:
    for width in WIDTHS:
        x, y = (strided(torch.randn(rows, width).to(dtype)) for _ in range(2))
        for op in ("add", "mul", "silu_mul"):
            check(op, x, y)
        assert gelu_excess("gelu_mul", run("gelu_mul", x, y), x, y) <= 1
        check("silu", x)
        assert gelu_excess("gelu", run("gelu", x), x) <= 1
        check("scale", x, factor=0.37)
        check("softcap", x, cap=1.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pointwise_in_place_and_beside_nan(dtype: torch.dtype) -> None:
    gate, up = (strided(torch.randn(3, 200).to(dtype)) for _ in range(2))
    gate[1] = float("nan")
    want = REFERENCES["silu_mul"](gate, up)
    K.get("triton.silu_mul").fn(gate, up, out=gate)
    assert tolerance("silu_mul", dtype).excess(gate, want) <= 1
    assert gate[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9])
def test_norms(dtype: torch.dtype, rows: int) -> None:
    for width in (1, 64, 127, 130, 1030):
        x, y = (strided(torch.randn(rows, width).to(dtype)) for _ in range(2))
        w = torch.randn(width).to(dtype)
        check("rms_norm", x, w, eps=1e-6, terms=width)
        check("rms_norm", x, torch.randn(width), eps=1e-6, terms=width)
        want = REFERENCES["add_rms_norm"](x, y, w, eps=1e-6)
        total, normed = (poisoned(rows, width, dtype=dtype) for _ in range(2))
        K.get("triton.add_rms_norm").fn(x, y, w, eps=1e-6, out=(total, normed))
        assert torch.equal(total, want[0])
        assert tolerance("add_rms_norm", dtype, terms=width).excess(normed, want[1]) <= 1
        K.get("triton.add_rms_norm").fn(x, y, w, eps=1e-6, out=(x, y))  # the sum over x, the norm over y
        assert torch.equal(x, total) and torch.equal(y, normed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads(dtype: torch.dtype) -> None:
    whole = strided(torch.randn(5, 6 * 64).to(dtype))
    heads = whole[:, 64:].unflatten(1, (5, 64))  # a segment of a wider product, as q and k are
    check("rms_norm", heads, torch.randn(64).to(dtype), eps=1e-5, terms=64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 2, 8, 8), (1, 1, 8, 4), (5, 3, 64, 64), (5, 9, 80, 32)])
def test_rope(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    t, n, d, r = shape
    x, table = strided(torch.randn(t, n, d).to(dtype)), torch.randn(50, r)
    pos = ints(0, 49, -1, 7, 8)[:t]
    if t > 2:
        x[2, 0, 1] = float("nan")  # in a hole: copied, and no neighbour touched
    want = check("rope", x, pos, table)
    K.get("triton.rope").fn(x, pos, table, out=x)
    assert torch.equal(x.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_rows(dtype: torch.dtype) -> None:
    for width in WIDTHS:
        source = strided(torch.randn(4, width).to(dtype))
        for idx in (ints(), ints(3), ints(9, 10, 11, 12, 13, 14, -1, -(2**31), 2**31 - 1)):
            check("lookup", idx, source, offset=10)
            check("select_rows", source, idx, offset=10)
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    out = poisoned(2, 9, dtype=other)
    source = torch.randn(4, 9).to(dtype)
    K.get("triton.lookup").fn(ints(3, 7), source, offset=0, out=out)
    assert torch.equal(out, torch.stack([source[3], torch.zeros(9)]).to(other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fill(dtype: torch.dtype) -> None:
    for width, start in ((1, 0), (5, 5), (1024, 1023), (1025, 1024), (2100, 7)):
        for rows in (0, 3):
            z = strided(torch.randn(rows, width).to(dtype))
            want = run("fill", z, start=start, value=-INF)
            assert torch.equal(want, REFERENCES["fill"](z, start=start, value=-INF))
            beside = z._base if z._base is not None else z
            before = beside.clone()
            K.get("triton.fill").fn(z, start=start, value=-INF, out=z)
            assert torch.equal(z, want)
            assert torch.equal(beside[..., width:].isnan(), before[..., width:].isnan())


@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append(dtype: torch.dtype, cache: torch.dtype) -> None:
    for kv, d in ((1, 8), (3, 80), (8, 64)):
        k, v = (strided(torch.randn(5, kv, d).to(dtype)) for _ in range(2))
        got = [torch.full((40, kv, d), float("nan"), dtype=cache) for _ in range(2)]
        want = [c.clone() for c in got]
        slot = ints(3, -1, 39, 0, -1)
        K.get("triton.append").fn(k, v, slot, *got)
        REFERENCES["append"](k, v, slot, *want)
        for a, b in zip(got, want):
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    K.get("triton.append").fn(k[:0], v[:0], slot[:0], *got)


def attended(
    batch: Batch, q: Tensor, pos: list[int], row: list[int], tiling: Tiling | None = None, rows: int | None = None,
    sinks: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """`rows`: how many rows the table has (more than tokens: the decode path); run twice, the same bits."""
    table = (
        batch.table
        if rows is None
        else torch.cat([batch.table, batch.table.new_full((rows, batch.table.shape[1]), -1)])
    )
    want = REFERENCES["attend"](
        q.float(), batch.kcache.float(), batch.vcache.float(), ints(*pos), ints(*row), table, sinks, page=batch.page,
        scale=0.3, **options,
    )  # fmt: skip
    outs = [poisoned(*q.shape, dtype=q.dtype) for _ in range(2)]
    for out in outs:
        attend(
            strided(q), batch.kcache, batch.vcache, ints(*pos), ints(*row), table, sinks, page=batch.page, scale=0.3,
            out=out, tiling=tiling, **options,
        )  # fmt: skip
    assert torch.equal(*outs)
    assert tolerance("attend", q.dtype, terms=max(pos, default=0) + 1).excess(outs[0], want) <= 1
    return outs[0]


@pytest.mark.parametrize(
    ("dtype", "cache", "heads", "parts"),
    [
        (torch.float32, torch.float32, (4, 2, 8, 7), 1),
        (torch.float32, torch.bfloat16, (6, 1, 20, 1), 3),
        (torch.bfloat16, torch.float32, (4, 2, 8, 4), 3),
        (torch.bfloat16, torch.bfloat16, (8, 2, 80, 16), 3),
        (torch.bfloat16, torch.bfloat16, (2, 2, 16, 16), 1),
    ],
)
def test_attend_mixed_batch(
    dtype: torch.dtype, cache: torch.dtype, heads: tuple[int, int, int, int], parts: int
) -> None:
    """A chunk of one request, decodes, holes and a whole prompt; tiles of 16 rows."""
    n, kv, d, page = heads
    batch = Batch.make([50, 1, 33, 40, 11], kv, d, page, cache)
    pos = [*range(39, 50), 0, 32, 39, 5, *range(11), 0]
    row = [*[0] * 11, 1, 2, 3, -1, *[4] * 11, -1]
    q = torch.randn(len(pos), n, d).to(dtype)
    got = attended(batch, q, pos, row, Tiling(16, 16, parts, 16, 4, 1))
    assert not got[[i for i, r in enumerate(row) if r < 0]].any()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [0, 5, 40])
def test_attend_options(window: int, parts: int) -> None:
    """Windows shorter and longer than steps and contexts, sinks and bent scores; in tiles and alone."""
    batch = Batch.make([50, 1, 33, 40, 11], 2, 16, 7, torch.float32)
    sinks = torch.tensor([-9.0, 0.0, 2.0, 9.0])
    pos, row = [*range(39, 50), 0, 32, 39, 5, *range(11), 0], [*[0] * 11, 1, 2, 3, -1, *[4] * 11, -1]
    q = 4 * torch.randn(len(pos), 4, 16)
    tiling = Tiling(16, 16, parts, 16, 4, 1)
    for options in ({"sinks": sinks}, {"softcap": 2.0, "sinks": sinks.to(torch.bfloat16)}):
        attended(batch, q, pos, row, tiling, window=window, **options)
        attended(batch, q[:4], [49, 32, 39, 0], [0, 2, 3, 1], tiling, rows=1, window=window, **options)


@pytest.mark.parametrize("parts", [1, 4])
def test_attend_decode_at_edges(parts: int) -> None:
    """Contexts of one step and a part, less and more by one; a grid of more parts than most contexts have."""
    lengths = [1, 15, 16, 17, 31, 32, 33, 47, 64, 65]
    batch = Batch.make(lengths, 2, 16, 4, torch.float32)
    q = torch.randn(len(lengths) + 1, 6, 16)
    pos, row = [*(x - 1 for x in lengths), 3], [*range(len(lengths)), -1]
    got = attended(batch, q, pos, row, Tiling(16, 16, parts, 16, 4, 1), rows=1)
    assert not got[-1].any()
    out = poisoned(1, 6, 16, dtype=q.dtype)
    attend(q[:1], batch.kcache, batch.vcache, ints(-1), ints(0), batch.table, page=4, scale=0.3, out=out)
    assert not out.any()  # a position of -1 is a hole as well


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 17])
def test_attend_tiles_at_edges(tokens: int) -> None:
    """One prompt of a tile (8 tokens of 2 heads) less and more by one, behind a cached prefix."""
    batch = Batch.make([40], 1, 16, 16, torch.bfloat16)
    q = torch.randn(tokens, 2, 16).to(torch.bfloat16)
    attended(batch, q, list(range(40 - tokens, 40)), [0] * tokens, Tiling(16, 16, 2, 16, 4, 1))


def test_attend_as_chosen_for_the_shape() -> None:
    batch = Batch.make([70, 3, 20], 2, 64, 16, torch.bfloat16)
    q = torch.randn(3, 8, 64).to(torch.bfloat16)
    attended(batch, q, [69, 2, 19], [0, 1, 2])
    q = torch.randn(9, 8, 64).to(torch.bfloat16)
    attended(batch, q, [*range(64, 70), 0, 1, 19], [*[0] * 6, 1, 1, 2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 64])
def test_linear(dtype: torch.dtype, tokens: int) -> None:
    for n, k, parts in ((1, 1, 1), (33, 31, 1), (32, 64, 2), (40, 100, 3)):
        x, w, bias = strided(torch.randn(tokens, k).to(dtype)), strided(torch.randn(n, k).to(dtype)), torch.randn(n)
        for b, out_dtype in ((None, dtype), (bias, torch.float32)):
            want = REFERENCES["linear"](x, w, b, dtype=out_dtype)
            outs = [poisoned(tokens, n, dtype=out_dtype) for _ in range(2)]
            for out in outs:
                linear(x, w, b, out=out, tiling=LinearTiling(32, 32, parts, 4, 1))
            assert torch.equal(*outs)
            assert ((outs[0].double() - want.double()).abs() <= linear_allowed(x, w, want, out_dtype)).all()


def test_linear_rows_are_apart() -> None:
    x, w = torch.randn(3, 64), torch.randn(40, 64)
    x[1] = float("nan")
    out = poisoned(3, 40, dtype=torch.float32)
    K.get("triton.linear").fn(x, w, None, out=out)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
    with pytest.raises(ValueError, match="do not fit"):
        linear(torch.randn(65, 64), w, out=torch.empty(65, 40))


def params(*rows: tuple[int, int, int, int, float]) -> Tensor:
    """flags, seed low, seed high, position, temperature a row."""
    out = torch.zeros(len(rows), 16, dtype=torch.int32)
    for i, (*words, temperature) in enumerate(rows):
        out[i, :4] = ints(*words)
        out[i, 4] = torch.tensor([temperature]).view(torch.int32)
    return out


ROWS = params((32, 5, -1, 0, 0.7), (33, 1, 2, 3, 0.0), (32, -7, 123456789, 70000, 1.9))


def test_temper_and_noise() -> None:
    for v, offset in ((1, 0), (16, 0), (17, 3), (1030, 1021)):
        z = strided(torch.randn(3, v) * 5)
        assert torch.equal(run("temper", z, ROWS), REFERENCES["temper"](z, ROWS))
        noise = gumbel64(ROWS[:, 1], ROWS[:, 2], ROWS[:, 3], torch.arange(offset, offset + v))
        noise[1] = 0  # greedy
        got = run("add_gumbel", z, ROWS, offset=offset)
        assert ((got - (z + noise)).abs() <= 8 * 2.0**-24 * (1 + z.abs() + noise.abs())).all()
        assert torch.equal(got[1], z[1])


def test_allow_masks() -> None:
    """Rows with a mask, without, not valid and of no slot; blocks of ids that begin anywhere; in place, others untouched."""
    for v, offset in ((1, 0), (31, 0), (4100, 0), (70, 2075), (2049, 33)):
        z = torch.randn(5, v) * 5
        z[0, 0] = float("nan")
        words = params(*((flags, 0, 0, 0, 1.0) for flags in (96, 32, 64, 97, 96)))
        words[:, 12] = ints(3, 1, 2, 0, 9)
        allow = torch.randint(-(2**31), 2**31, (4, (offset + v + 31) // 32), dtype=torch.int32)
        want = REFERENCES["mask_logits"](z, words, allow, offset=offset)
        apart = run("mask_logits", strided(z), words, allow, offset=offset)
        K.get("triton.mask_logits").fn(z, words, allow, offset=offset, out=z)
        for got in (apart, z):
            assert torch.equal(got.nan_to_num(7, posinf=8, neginf=9), want.nan_to_num(7, posinf=8, neginf=9))
    with pytest.raises(ValueError, match="mask_logits"):
        K.get("triton.mask_logits").fn(torch.randn(5, 40), words, allow[:, :1], offset=0, out=torch.empty(5, 40))


@triton.jit
def probe(source, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, noise_of(tl.load(source + at).to(tl.uint32)))


def test_noise_at_both_ends_of_the_uniform() -> None:
    """Words whose uniform rounds to 1 in float32 or is the least one: the noise stays finite and right."""
    words = torch.tensor([0, 255, 256, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 1])
    out = torch.empty(8)
    probe[(1,)](words, out, COUNT=8)
    u = ((words >> 8).double() + 0.5) * 2.0**-24
    want = -torch.log(-torch.log(u))
    assert ((out - want).abs() <= 4 * 2.0**-24 * (1 + want.abs())).all()


def picked(op: str, *args: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
    out = torch.full((args[0].shape[0],), float("nan")), ints(*[-9] * args[0].shape[0])
    K.get(f"triton.{op}").fn(*args, offset=offset, out=out)
    return out


@pytest.mark.parametrize("v", [1, 16, 17, 2047, 2048, 2049, 5000])
def test_argmax(v: int) -> None:
    z = strided(torch.randn(5, v))
    z[1] = float("nan")
    z[2] = -INF
    z[3, :: max(1, v // 3)] = 9.0  # ties
    z[4, 0] = float("nan")
    for _ in range(2):  # the counter is back at zero
        value, index = picked("argmax", z, offset=6)
        want = REFERENCES["argmax"](z, offset=6)
        assert torch.equal(value, want[0]) and torch.equal(index, want[1])
    assert picked("argmax", z[:0])[1].numel() == 0


def test_fused_pick_equals_its_steps_and_ignores_sharding() -> None:
    z = torch.randn(3, 4100)
    value, index = picked("gumbel_argmax", z, ROWS)
    mapped = run("add_gumbel", run("temper", z, ROWS), ROWS, offset=0)
    steps = picked("argmax", mapped)
    assert torch.equal(value, steps[0]) and torch.equal(index, steps[1])
    parts = [picked("gumbel_argmax", z[:, a:b], ROWS, offset=a) for a, b in ((0, 5), (5, 2051), (2051, 4100))]
    values = torch.stack([p[0] for p in parts])
    assert torch.equal(values.amax(0), value)
    assert torch.equal(torch.stack([p[1] for p in parts]).gather(0, values.argmax(0)[None])[0], index)


def test_arguments_that_do_not_fit_are_refused() -> None:
    x = torch.randn(2, 8)
    for op, args, attrs in (
        ("add", (x, x.half()), {}),
        ("silu", (x.half(),), {}),
        ("rms_norm", (x, torch.randn(9)), {"eps": 1e-6}),
        ("rope", (x[:, None], ints(1), torch.randn(4, 8)), {}),
        ("lookup", (ints(1, 2).long(), x), {"offset": 0}),
        ("fill", (x,), {"start": -1, "value": 0.0}),
        ("temper", (x, torch.zeros(2, 15, dtype=torch.int32)), {}),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            K.get(f"triton.{op}").fn(*args, **attrs, out=torch.empty_like(x))
    with pytest.raises(ValueError, match="in registers"):
        wide = torch.empty(1, 40000)
        K.get("triton.rms_norm").fn(wide, torch.empty(40000), eps=1e-6, out=wide)


def test_splits_fill_the_device() -> None:
    assert even_splits(8, 264, 64) == 33
    assert even_splits(264, 264, 64) == 1
    assert even_splits(100000, 264, 64) == 1
    assert even_splits(1, 264, 4) == 4
    for items in range(1, 600, 7):  # never worse than leaving the jobs whole
        s = even_splits(items, 264, 64)
        assert -(-items * s // 264) / s <= -(-items // 264)
        assert even_splits(items, 264, 64, overhead=1.0) <= s


def test_scratch_keeps_its_address_until_it_must_grow() -> None:
    device = torch.device("cpu")
    first = scratch(device, "a test", 2000, torch.int32)
    assert scratch(device, "a test", 10, torch.int32) is first and not first.any()
    assert scratch(device, "a test", 2001, torch.int32) is not first
    with recording() as launches:
        x = torch.empty(2, 8, device="meta")
        K.get("triton.add").fn(x, x, out=x)
    assert [launch.grid for launch in launches] == [(2,)]


@pytest.mark.parametrize(("widths", "word"), [((640, 64, 20000), 8), ((12, 20), 4), ((6, 3), 1)])
def test_pages_of_many_caches_as_rows(widths: tuple[int, ...], word: int) -> None:
    """What goes out comes back to other pages byte for byte, and no other page changes."""
    caches = [torch.randint(0, 256, (9, w), dtype=torch.uint8) for w in widths]
    table, unit = page_table(caches, 9)
    assert unit == word
    pages = torch.tensor([7, 0, 3])
    rows = torch.empty(3, sum(widths), dtype=torch.uint8)
    gather_pages(table, unit, pages, out=rows)
    assert torch.equal(rows, torch.cat([c[pages] for c in caches], dim=1))
    before = [c.clone() for c in caches]
    into = torch.tensor([1, 8, 3])
    scatter_pages(table, unit, into, rows)
    for now, old in zip(caches, before, strict=True):
        old[into] = old[pages]
        assert torch.equal(now, old)
    gather_pages(table, unit, pages[:0], out=rows[:0])
    with pytest.raises(ValueError, match="move_pages"):
        gather_pages(table, unit, pages, out=rows[:2])
