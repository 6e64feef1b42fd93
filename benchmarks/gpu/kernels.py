"""Verifies and times the Triton kernels on one GPU: `python -m benchmarks.gpu.kernels --json FILE [--seconds 460]`.

Verification: each kernel against the op's reference at full and edge sizes, with NaN around every input, in every free
cache slot and in the output; twice, for the same bits; beyond 2^31 elements; and replays of one captured graph over
changing lengths. Timing: calls in a captured graph, medians of replays, each call on other data until 256 MB have gone
by, so that nothing large is met again in L2; the rate is set against a device copy of the same run. A call's time has
its share of the graph's launch gaps in it, as in a decode step.

Needs torch and triton; run it from the repository's root. A failure is printed and the rest goes on; exit code 1 then.
"""

# ruff: noqa: B023 (a case runs in the turn of the loop that makes it)

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.gpu.fused import verify_fused
from tokenspeed import kernels as K
from tokenspeed.ir.ops import REFERENCES
from tokenspeed.kernels.attention import triton as attention
from tokenspeed.kernels.gemm import triton as gemm
from tokenspeed.kernels.launch import processors, scratch_bytes
from tokenspeed.kernels.tolerance import linear_allowed, tolerance

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
NAN = float("nan")
DEVICE = torch.device("cuda")
COLD_BYTES = 256 << 20  # about four times the L2 of an H200
MODELS = {
    "0.6B": {"hidden": 1024, "heads": 16, "kv": 8, "d": 128, "ffn": 3072, "vocab": 151936},
    "8B": {"hidden": 4096, "heads": 32, "kv": 8, "d": 128, "ffn": 14336, "vocab": 128256},
}
BATCHES = (1, 16, 64, 256)


class Run:
    """What is known so far, written to the JSON file after every part."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.path, self.end, self.began = path, time.monotonic() + seconds, time.monotonic()
        self.data: dict[str, Any] = {"verify": [], "bench": [], "sweep": [], "skipped": []}
        self.later: list[tuple[str, Callable[[], tuple[float, float, float]], str]] = []  # run if time is left

    def left(self) -> float:
        return self.end - time.monotonic()

    def save(self) -> None:
        self.data["seconds"] = round(time.monotonic() - self.began, 1)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.data, indent=1))

    def verify(self, name: str, case: Callable[[], float]) -> None:
        """Runs a case, which gives its largest error as a multiple of what is allowed."""
        if self.left() < 0:
            self.data["skipped"].append(name)
            return
        try:
            excess = case()
            torch.cuda.synchronize()
            entry: dict[str, Any] = {"name": name, "ok": excess <= 1, "excess": round(excess, 4)}
        except Exception as error:
            text = traceback.format_exc()
            entry = {
                "name": name,
                "ok": False,
                "error": f"{type(error).__name__}: {error}"[:500],
                "trace": text[-2000:],
            }
            if "CUDA error" in str(error) or "illegal" in str(error):
                entry["fatal"] = True
        self.data["verify"].append(entry)
        if not entry["ok"]:
            print(f"FAILED {name}: {entry.get('error', entry.get('excess'))}", flush=True)
        if entry.get("fatal"):
            self.save()
            sys.exit(f"the device is lost after '{name}'")

    def bench(self, kind: str, name: str, case: Callable[[], tuple[float, float, float]], **facts: Any) -> None:
        """Times a case: (seconds a call, bytes, FLOPs)."""
        if self.left() < 15:
            self.data["skipped"].append(name)
            return
        try:
            seconds, moved, flops = case()
        except Exception as error:
            self.data[kind].append({"name": name, "error": f"{type(error).__name__}: {error}"[:500], **facts})
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            torch.cuda.empty_cache()
            return
        copy = self.data.get("copy_gbps")
        entry = {"name": name, "us": round(seconds * 1e6, 2), "gbps": round(moved / seconds / 1e9, 1), **facts}
        if copy:
            entry["of_copy"] = round(entry["gbps"] / copy, 3)
        if flops:
            entry["tflops"] = round(flops / seconds / 1e12, 1)
        self.data[kind].append(entry)
        rate = f"{entry['tflops']:7.1f} TF/s" if moved * 200 < flops else f"{entry['gbps']:7.0f} GB/s"
        share = f"{100 * entry.get('of_copy', 0):4.0f} %" if moved * 200 >= flops else ""
        extra = " ".join(f"{k}={v}" for k, v in facts.items() if k in ("tiling", "solution"))
        print(f"{name:52} {entry['us']:9.2f} us {rate} {share:6} {extra}", flush=True)


def ints(values: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=I32, device=DEVICE)


def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def strided(value: Tensor, spare: int = 8) -> Tensor:
    """`value` inside a wider buffer of NaN; rows stay aligned to 16 bytes."""
    wide = torch.full((*value.shape[:-1], value.shape[-1] + spare), NAN, dtype=value.dtype, device=value.device)
    out = wide[..., : value.shape[-1]]
    out.copy_(value)
    return out


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return strided(torch.full(shape, NAN, dtype=dtype, device=DEVICE))


def reference(op: str, *args: Any, **attrs: Any) -> Any:
    with DEVICE:  # references make index tensors on the default device
        return REFERENCES[op](*args, **attrs)


def same(a: Tensor, b: Tensor) -> None:
    if not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)):
        raise AssertionError(f"two runs differ in {int((a != b).sum())} of {a.numel()} values")


def checked(op: str, *args: Any, terms: int = 1, exact: bool = False, **attrs: Any) -> float:
    """Twice into poisoned buffers: the same bits, within tolerance, nothing written beside the output."""
    want = reference(op, *args, **attrs)
    outs = []
    for _ in range(2):
        out = poisoned(*want.shape, dtype=want.dtype)
        K.get(f"triton.{op}").fn(*args, **attrs, out=out)
        outs.append(out)
        beside = out._base
        assert beside is None or bool(beside[..., want.shape[-1] :].isnan().all()), "wrote beside the output"
    same(*outs)
    if exact:
        return 0.0 if torch.equal(outs[0].nan_to_num(7.0), want.nan_to_num(7.0)) else float("inf")
    return tolerance(op, want.dtype, terms=terms).excess(outs[0], want) if want.numel() else 0.0


# ---- verification -----------------------------------------------------------------------------------------------------


def verify_rows(run: Run, dtype: torch.dtype) -> None:
    """Row-wise kernels at edge row counts and the widths of real models."""
    tag = "bf16" if dtype == BF16 else "f32"
    for rows in (0, 1, 7, 8, 9, 1023, 1024, 1025):
        for width in (128, 1024, 4096, 127):
            x, y, w = (
                strided(rand(rows, width, dtype=dtype)),
                strided(rand(rows, width, dtype=dtype)),
                rand(width, dtype=dtype),
            )
            where = f"{tag} [{rows}, {width}]"
            for op, args in (("add", (x, y)), ("mul", (x, y)), ("silu_mul", (x, y)), ("silu", (x,))):
                run.verify(f"{op} {where}", lambda op=op, args=args: checked(op, *args))
            run.verify(f"rms_norm {where}", lambda x=x, w=w, n=width: checked("rms_norm", x, w, eps=1e-6, terms=n))
            run.verify(f"add_rms_norm {where}", lambda x=x, y=y, w=w: _add_rms(x, y, w))
            idx = ints(torch.randint(-3, rows + 3, (37,)))
            if rows:
                run.verify(f"select_rows {where}", lambda x=x, idx=idx: checked("select_rows", x, idx, exact=True))
                run.verify(f"lookup {where}", lambda x=x, idx=idx: checked("lookup", idx, x, offset=2, exact=True))
            run.verify(f"fill {where}", lambda x=x: checked("fill", x, start=100, value=-7.0, exact=True))
        for n, d, r in ((8, 128, 128), (3, 80, 32)):
            h, pos = strided(rand(rows, n, d, dtype=dtype)), ints(torch.randint(-1, 4096, (rows,)))
            table = rand(4096, r, dtype=F32)
            run.verify(
                f"rope {tag} [{rows}, {n}, {d}]", lambda h=h, pos=pos, table=table: checked("rope", h, pos, table)
            )
            run.verify(f"append {tag} [{rows}, {n}, {d}]", lambda h=h, rows=rows: _append(h, rows))


def _add_rms(x: Tensor, y: Tensor, w: Tensor) -> float:
    want = reference("add_rms_norm", x, y, w, eps=1e-6)
    total, normed = (poisoned(*x.shape, dtype=x.dtype) for _ in range(2))
    K.get("triton.add_rms_norm").fn(x, y, w, eps=1e-6, out=(total, normed))
    assert torch.equal(total, want[0]), "the sum differs"
    return tolerance("add_rms_norm", x.dtype, terms=x.shape[1]).excess(normed, want[1]) if x.numel() else 0.0


def _append(h: Tensor, rows: int) -> float:
    slots = max(16, 2 * rows)
    slot = ints(torch.randperm(slots)[:rows])
    slot[::3] = -1
    got = [torch.full((slots, *h.shape[1:]), NAN, dtype=BF16, device=DEVICE) for _ in range(2)]
    want = [g.clone() for g in got]
    K.get("triton.append").fn(h, h, slot, *got)
    reference("append", h, h, slot, *want)
    for a, b in zip(got, want):
        same(a, b)
    return 0.0


class Pages:
    """A KV pool of random values for contexts on shuffled pages; pages that no context owns hold NaN."""

    def __init__(self, contexts: list[int], kv: int, d: int, page: int, dtype: torch.dtype, slots: int = 0) -> None:
        pages = [-(-c // page) for c in contexts]
        total = max(sum(pages) + 3, slots // page)
        order = torch.randperm(total)[: sum(pages)]
        table = torch.full((len(contexts), max(pages, default=0) + 1), -1, dtype=I32)
        self.k, self.v = (torch.full((total * page, kv, d), NAN, dtype=dtype, device=DEVICE) for _ in range(2))
        used = 0
        for r, context in enumerate(contexts):
            table[r, : pages[r]] = order[used : used + pages[r]].int()
            used += pages[r]
            p = torch.arange(context)
            at = (table[r, p // page].long() * page + p % page).to(DEVICE)
            self.k[at], self.v[at] = rand(context, kv, d, dtype=dtype), rand(context, kv, d, dtype=dtype)
        self.table, self.page = table.to(DEVICE), page

    def check(self, pos: list[int], row: list[int], n: int, dtype: torch.dtype, repeat: int = 2, **more: Any) -> float:
        q = strided(rand(len(pos), n, self.k.shape[2], dtype=dtype))
        p, r = ints(pos), ints(row)
        first: Tensor | None = None
        for _ in range(repeat):
            out = poisoned(*q.shape, dtype=dtype)
            attention.attend(
                q, self.k, self.v, p, r, self.table, page=self.page, scale=0.088, out=out, **more
            )  # fmt: skip
            if first is not None:
                same(first, out)
            first = out
        want = reference("attend", q.float(), self.k, self.v, p, r, self.table, page=self.page, scale=0.088)
        assert first is not None
        return tolerance("attend", dtype, terms=max(pos, default=0) + 1).excess(first, want) if pos else 0.0


def verify_attention(run: Run) -> None:
    edges = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 513, 1023, 1024, 1025, 5000]
    for dtype, cache in ((BF16, BF16), (F32, F32), (F32, BF16), (BF16, F32)):
        tag = f"{'bf16' if dtype == BF16 else 'f32'}/{'bf16' if cache == BF16 else 'f32'}"
        for n, kv, d, page in ((32, 8, 128, 16), (16, 8, 128, 16), (9, 3, 64, 16), (8, 1, 80, 7), (8, 8, 128, 1)):
            shape = f"{tag} heads {n}/{kv} d {d} page {page}"
            pages = Pages(edges, kv, d, page, cache)
            rows = list(range(len(edges)))
            run.verify(
                f"attend decode at edges {shape}",
                lambda pages=pages, rows=rows, n=n, dtype=dtype: pages.check([c - 1 for c in edges], rows, n, dtype),
            )
            # A chunk on a cached prefix, decodes, holes, a whole prompt with a tile's edge inside.
            pos = [*range(700, 1023), 4999, 0, 64, 5, *range(129), 0, 0]
            row = [*[12] * 323, 15, 0, 6, -1, *[9] * 129, -1, -1]
            run.verify(
                f"attend mixed {shape}",
                lambda pages=pages, pos=pos, row=row, n=n, dtype=dtype: pages.check(pos, row, n, dtype),
            )
    for tokens in (0, 1, 31, 32, 33, 1024):
        pages = Pages([3000], 8, 128, 16, BF16)
        run.verify(
            f"attend chunk of {tokens} on 3000",
            lambda pages=pages, t=tokens: pages.check(list(range(3000 - t, 3000)), [0] * t, 32, BF16),
        )
    deep = Pages([32768, 1], 8, 128, 16, BF16)
    run.verify("attend 32k decode, 300 runs alike", lambda: deep.check([32767, 0], [0, 1], 32, BF16, repeat=300))
    run.verify(
        "attend 32k chunk of 800, 20 runs alike",
        lambda: deep.check(list(range(31968, 32768)), [0] * 800, 32, BF16, repeat=20),
    )
    run.verify("attend: one graph, any length", lambda: _graph_lengths(8, 40))
    run.verify("attend: one mixed graph, any arrangement", lambda: _graph_mixed(20))


def _captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _graph_lengths(batch: int, replays: int) -> float:
    """One captured decode over random lengths, holes included, against eager runs: the same bits."""
    pages = Pages([6000] * batch, 8, 128, 16, BF16)
    q, out = rand(batch, 32, 128), poisoned(batch, 32, 128, dtype=BF16)
    pos, row = ints([0] * batch), ints(list(range(batch)))

    def call(into: Tensor) -> None:
        attention.attend(q, pages.k, pages.v, pos, row, pages.table, page=16, scale=0.088, out=into)

    graph = _captured(lambda: call(out))
    worst = 0.0
    for i in range(replays):
        q.copy_(rand(batch, 32, 128))
        pos.copy_(ints(torch.randint(0, 6000 if i % 3 else 70, (batch,))))
        row.copy_(ints([-1 if (r + i) % 5 == 0 else r for r in range(batch)]))
        out.fill_(NAN)
        graph.replay()
        eager = poisoned(batch, 32, 128, dtype=BF16)
        call(eager)
        same(eager, out)
        if i % 8 == 0:
            want = reference("attend", q.float(), pages.k, pages.v, pos, row, pages.table, page=16, scale=0.088)
            worst = max(worst, tolerance("attend", BF16, terms=6000).excess(out, want))
    return worst


def _graph_mixed(replays: int) -> float:
    """One captured mixed bucket of 512 tokens over random chunkings of up to 6 requests."""
    pages = Pages([4000] * 6, 8, 128, 16, BF16)
    q, out = rand(512, 32, 128), poisoned(512, 32, 128, dtype=BF16)
    pos, row = ints([0] * 512), ints([-1] * 512)

    def call() -> None:
        attention.attend(q, pages.k, pages.v, pos, row, pages.table, page=16, scale=0.088, out=out)

    graph = _captured(call)
    worst = 0.0
    for _ in range(replays):
        cuts = sorted(torch.randint(0, 500, (5,)).tolist())
        pos_, row_ = [0] * 512, [-1] * 512
        for r, (a, b) in enumerate(zip([0, *cuts], [*cuts, 500])):
            start = int(torch.randint(0, 4000 - 500, (1,)))
            pos_[a:b], row_[a:b] = list(range(start, start + b - a)), [r] * (b - a)
        pos.copy_(ints(pos_)), row.copy_(ints(row_)), out.fill_(NAN)
        graph.replay()
        want = reference("attend", q.float(), pages.k, pages.v, pos, row, pages.table, page=16, scale=0.088)
        worst = max(worst, tolerance("attend", BF16, terms=4000).excess(out, want))
    return worst


def _linear(t: int, n: int, k: int, out_dtype: torch.dtype, name: str, bias: bool = False) -> float:
    x, w, b = strided(rand(t, k)), rand(n, k), rand(n) if bias else None
    want = reference("linear", x, w, b, dtype=out_dtype)
    outs = []
    for _ in range(2):
        out = poisoned(t, n, dtype=out_dtype)
        K.get(name).fn(x, w, b, out=out)
        outs.append(out)
    same(*outs)
    if not t:
        return 0.0
    allowed = linear_allowed(x, w, want, out_dtype)
    if bias and name.startswith("cublas"):
        allowed += 2.0**-8 * (want - b.float()).abs()  # type: ignore[union-attr]  # the product is rounded before the bias
    return float(((outs[0].double() - want.double()).abs() / allowed).max())


def verify_linear(run: Run) -> None:
    for t in (0, 1, 15, 16, 17, 32, 33, 64):
        for n, k in ((4096, 4096), (1024, 3072), (1000, 1000), (6144, 1024)):
            for out_dtype in (BF16, F32):
                where = f"[{t}, {k}] x [{n}, {k}] to {str(out_dtype)[6:]}"
                run.verify(f"triton.linear {where}", lambda a=(t, n, k, out_dtype): _linear(*a, "triton.linear"))
    for t, bias in ((1, False), (7, True), (256, False)):
        for out_dtype in (BF16, F32):
            run.verify(
                f"cublas.linear [{t}, 1024] to {str(out_dtype)[6:]} bias {bias}",
                lambda a=(t, 4096, 1024, out_dtype), bias=bias: _linear(*a, "cublas.linear", bias),
            )
    run.verify("triton.linear with bias", lambda: _linear(9, 4096, 1024, BF16, "triton.linear", True))


def params_of(rows: int) -> Tensor:
    words = torch.randint(-(2**31), 2**31 - 1, (rows, 16), dtype=torch.int64).int()
    words[:, 0] = 32 + (torch.arange(rows) % 4 == 3).int()  # every fourth row is greedy
    words[:, 3] = torch.randint(0, 100000, (rows,)).int()
    words[:, 4] = (0.2 + 1.5 * torch.rand(rows)).view(I32)
    return words.to(DEVICE)


def gumbel64(params: Tensor, ids: Tensor) -> Tensor:
    """The noise of the contract with both logarithms in float64; greedy rows 0."""
    from tokenspeed.ir.ops.sampling import _mulhilo

    mask, p = 0xFFFFFFFF, params.long()
    c = [(ids // 4)[None].expand(len(p), -1), (p[:, 3:4] & mask).expand(-1, len(ids))]
    c += [torch.zeros_like(c[0]), torch.zeros_like(c[0])]
    k0, k1 = p[:, 1:2] & mask, p[:, 2:3] & mask
    for _ in range(10):
        (h0, l0), (h1, l1) = _mulhilo(0xD2511F53, c[0]), _mulhilo(0xCD9E8D57, c[2])
        c = [h1 ^ c[1] ^ k0, l1, h0 ^ c[3] ^ k1, l0]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    words = torch.stack(c).gather(0, (ids % 4)[None, None].expand(1, *c[0].shape))[0]
    noise = -torch.log(-torch.log(((words >> 8).double() + 0.5) * 2.0**-24))
    return torch.where((params[:, :1] & 1) != 0, 0.0, noise)


def _noise(rows: int, v: int, offset: int) -> float:
    z, params = strided(rand(rows, v, dtype=F32) * 5), params_of(rows)
    out = poisoned(rows, v, dtype=F32)
    K.get("triton.add_gumbel").fn(z, params, offset=offset, out=out)
    noise = gumbel64(params, torch.arange(offset, offset + v, device=DEVICE))
    return float(((out - (z + noise)).abs() / (8 * 2.0**-24 * (1 + z.abs() + noise.abs()))).max())


def picked(op: str, *args: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
    rows = args[0].shape[0]
    out = torch.full((rows,), NAN, device=DEVICE), torch.full((rows,), -9, dtype=I32, device=DEVICE)
    K.get(f"triton.{op}").fn(*args, offset=offset, out=out)
    return out


def _argmax(rows: int, v: int) -> float:
    z = strided((rand(rows, v, dtype=F32) * 4).round())  # many ties
    z[::5, : v // 2], z[1::7], z[2::7] = NAN, NAN, -float("inf")
    want = reference("argmax", z, offset=3)
    for _ in range(3):
        value, index = picked("argmax", z, offset=3)
        assert torch.equal(value, want[0]), "values differ"
        assert torch.equal(index, want[1]), f"{int((index != want[1]).sum())} of {rows} indices differ"
    return 0.0


def _fused_pick(rows: int, v: int) -> float:
    z, params = rand(rows, v, dtype=F32), params_of(rows)
    mapped = torch.empty_like(z)
    K.get("triton.temper").fn(z, params, out=mapped)
    K.get("triton.add_gumbel").fn(mapped, params, offset=0, out=mapped)
    whole, steps = picked("gumbel_argmax", z, params), picked("argmax", mapped)
    assert torch.equal(whole[1], steps[1]) and torch.equal(whole[0], steps[0]), "fused and stepwise tokens differ"
    cut = v // 3 + 1
    a, b = picked("gumbel_argmax", z[:, :cut], params), picked("gumbel_argmax", z[:, cut:], params, offset=cut)
    joined = torch.where(b[0] > a[0], b[1], a[1])
    assert torch.equal(joined, whole[1]), "the token depends on the sharding"
    return 0.0


def verify_sampling(run: Run) -> None:
    for rows, v in ((1, 1), (1, 2047), (5, 2048), (3, 2049), (16, 151936), (256, 128256)):
        where = f"[{rows}, {v}]"
        z, params = strided(rand(rows, v, dtype=F32)), params_of(rows)
        run.verify(f"temper {where}", lambda z=z, params=params: checked("temper", z, params, exact=True))
        run.verify(f"add_gumbel {where}", lambda: _noise(min(rows, 16), v, 5))
        run.verify(f"argmax {where}", lambda a=(rows, v): _argmax(*a))
        if v > 9:
            run.verify(f"gumbel_argmax {where}", lambda a=(rows, v): _fused_pick(*a))


def verify_large(run: Run) -> None:
    """More than 2^31 elements in each operand that can grow; the ends and the middle are compared."""
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        run.data["skipped"].append("beyond 2^31 elements (less than 60 GB free)")
        return
    for part in (_large_rows, _large_logits, _large_cache):
        part(run)
        torch.cuda.empty_cache()


def _large_rows(run: Run) -> None:
    rows, width = 540_000, 4096
    ends = ints([0, 1, rows // 2, 524287, 524288, 524289, rows - 2, rows - 1]).long()
    big = torch.empty((rows, width), dtype=BF16, device=DEVICE).normal_()
    w = rand(width)
    run.verify("lookup beyond 2^31", lambda: checked("lookup", ends.int(), big, offset=0, exact=True))
    out = torch.full_like(big, NAN)

    def after(op: str, *args: Any, **attrs: Any) -> float:
        K.get(f"triton.{op}").fn(big, *args, **attrs, out=out)
        small = [a[ends] if isinstance(a, Tensor) and a.shape[0] == rows else a for a in args]
        want = reference(op, big[ends], *small, **attrs)
        return tolerance(op, BF16, terms=width).excess(out[ends].flatten(1), want.flatten(1))

    run.verify("rms_norm beyond 2^31", lambda: after("rms_norm", w, eps=1e-6))
    run.verify("silu_mul beyond 2^31", lambda: after("silu_mul", big))
    run.verify("fill beyond 2^31", lambda: after("fill", start=4000, value=3.0))
    pos, table = ints(torch.randint(0, 1000, (rows,))), rand(1000, 128, dtype=F32)

    def turned() -> float:
        heads, target = big.view(rows, 32, 128), out.view(rows, 32, 128)
        K.get("triton.rope").fn(heads, pos, table, out=target)
        return tolerance("rope", BF16).excess(target[ends], reference("rope", heads[ends], pos[ends], table))

    run.verify("rope beyond 2^31", turned)
    x = rand(3, width)

    def product() -> float:
        y = torch.full((3, rows), NAN, dtype=F32, device=DEVICE)
        K.get("triton.linear").fn(x, big, None, out=y)
        want = reference("linear", x, big[ends], None, dtype=F32)
        return float(((y[:, ends] - want).abs().double() / linear_allowed(x, big[ends], want, F32)).max())

    run.verify("linear beyond 2^31", product)


def _large_logits(run: Run) -> None:
    z = torch.empty((16_000, 151_936), dtype=F32, device=DEVICE).normal_()
    last = torch.tensor([0, 14133, 14134, 14135, 15999], device=DEVICE)
    params = params_of(16_000)

    def tokens() -> float:
        value, index = picked("gumbel_argmax", z, params)
        few = picked("gumbel_argmax", z[last].contiguous(), params[last].contiguous())
        assert torch.equal(index[last], few[1]) and torch.equal(value[last], few[0]), "rows beyond 2^31 differ"
        return 0.0

    run.verify("gumbel_argmax beyond 2^31", tokens)


def _large_cache(run: Run) -> None:
    pool = Pages([3000, 70], 8, 128, 16, BF16, slots=2_300_000)  # 2.4e9 elements; pages are spread over all of it
    pool.table[0, 187], pool.table[1, 4] = 2_300_000 // 16 - 1, 2_300_000 // 16 - 2
    tail = ints([2_300_000 - 16 + 2999 % 16, 2_300_000 - 32 + 69 % 16])

    def append_and_attend() -> float:
        end = (2_300_000 - 32) // 16 * 16
        pool.k[end:], pool.v[end:] = rand(32, 8, 128), rand(32, 8, 128)
        k = rand(2, 8, 128)
        K.get("triton.append").fn(k, k, tail, pool.k, pool.v)
        assert torch.equal(pool.k[tail.long()], k), "the last slots were not written"
        return pool.check([2999, 69], [0, 1], 32, BF16)

    run.verify("append and attend beyond 2^31", append_and_attend)


# ---- timing -----------------------------------------------------------------------------------------------------------


def timed(calls: Sequence[Callable[[], None]], replays: int = 9, least: float = 1.5e-3) -> float:
    """Seconds a call: the median over replays of a graph that runs `calls` in turn until it takes about `least`."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    calls[0]()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(200, int(least * 1e3 / max(2e-3, begin.elapsed_time(end)) / len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    graph.replay()
    times = []
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) / 1e3 / (rounds * len(calls))


def sets_for(moved: int, most: int = 64) -> int:
    """How many sets of operands of `moved` bytes a round must have to go past the L2."""
    return max(1, min(most, -(-COLD_BYTES // max(1, moved))))


def bench_attention(run: Run) -> None:
    page, kv, d = 16, 8, 128
    free = torch.cuda.mem_get_info()[0]
    slots = min(256 * 32768, int(free * 0.7) // (2 * kv * d * 2)) // page * page
    k = torch.empty((slots, kv, d), dtype=BF16, device=DEVICE).normal_()
    v = torch.empty_like(k).normal_()

    def tables(batch: int, context: int, count: int) -> list[Tensor]:
        need = -(-context // page)
        out = []
        for _ in range(count):
            order = torch.randperm(slots // page, device=DEVICE)[: batch * need].int()
            out.append(order.view(batch, need).contiguous())
        return out

    def decode(n: int, batch: int, context: int, tiling: attention.Tiling | None = None) -> tuple[float, float, float]:
        moved = batch * context * kv * d * 2 * 2
        q, out = rand(batch, n, d), rand(batch, n, d)
        pos, row = ints([context - 1] * batch), ints(list(range(batch)))
        calls = [
            lambda t=t: attention.attend(q, k, v, pos, row, t, page=page, scale=0.088, out=out, tiling=tiling)
            for t in tables(batch, context, sets_for(moved))
        ]
        return timed(calls), moved, 4.0 * batch * context * n * d

    def chunk(n: int, tokens: int, prefix: int, tiling: attention.Tiling | None = None) -> tuple[float, float, float]:
        q, out = rand(tokens, n, d), rand(tokens, n, d)
        (table,) = tables(1, prefix + tokens, 1)
        pos, row = ints(torch.arange(prefix, prefix + tokens)), ints([0] * tokens)
        seconds = timed(
            [lambda: attention.attend(q, k, v, pos, row, table, page=page, scale=0.088, out=out, tiling=tiling)]
        )
        pairs = tokens * prefix + tokens * (tokens + 1) / 2
        return seconds, 2 * 2 * ((prefix + tokens) * kv * d + tokens * n * d), 4.0 * pairs * n * d

    for model in MODELS:
        n = MODELS[model]["heads"]
        for context in (1024, 32768):
            for batch in (*BATCHES, 4):
                if batch * context <= slots:
                    run.bench(
                        "bench", f"attend {model} decode {batch} x {context}",
                        lambda a=(n, batch, context): decode(*a), op="attend", model=model, batch=batch, context=context,
                    )  # fmt: skip
        for tokens, prefix in ((1024, 0), (8192, 0), (32768, 0), (800, 50000)):
            run.bench(
                "bench", f"attend {model} chunk {tokens} on {prefix}", lambda a=(n, tokens, prefix): chunk(*a),
                op="attend", model=model, tokens=tokens, prefix=prefix,
            )  # fmt: skip
    run.save()

    def sweep() -> Iterator[tuple[str, Callable[[], tuple[float, float, float]], attention.Tiling]]:
        T = attention.Tiling
        for batch, context in ((1, 32768), (16, 32768), (64, 1024), (16, 1024)):
            chosen = attention.tiling_of(batch, True, 32, kv, d, False, processors(DEVICE))
            for keys, warps, stages in ((32, 4, 4), (64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 8, 3), (64, 2, 3)):
                t = T(16, keys, chosen.parts, max(keys, chosen.least), warps, stages)
                yield f"attend 8B decode {batch} x {context}", lambda a=(32, batch, context, t): decode(*a), t
            for parts in {max(1, chosen.parts // 2), chosen.parts * 2, chosen.parts * 4} - {chosen.parts}:
                t = T(16, chosen.keys, min(64, parts), chosen.least, chosen.warps, chosen.stages)
                yield f"attend 8B decode {batch} x {context}", lambda a=(32, batch, context, t): decode(*a), t
        for tokens, prefix in ((8192, 0), (800, 50000)):
            for rows, keys, warps, stages in ((128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 4, 3)):
                for parts in (1, 2, 4) if prefix else (1,):
                    t = T(rows, keys, parts, 1024, warps, stages)
                    yield f"attend 8B chunk {tokens} on {prefix}", lambda a=(32, tokens, prefix, t): chunk(*a), t

    run.later = [(name, case, repr(tiling)) for name, case, tiling in sweep()]


def bench_linear(run: Run) -> None:
    for model, m in MODELS.items():
        h, n, kv, d = m["hidden"], m["heads"], m["kv"], m["d"]
        shapes = {
            "qkv": ((n + 2 * kv) * d, h), "o": (h, n * d), "gate_up": (2 * m["ffn"], h), "down": (h, m["ffn"]),
            "head": (m["vocab"], h),
        }  # fmt: skip
        for what, (columns, depth) in shapes.items():
            count = sets_for(2 * columns * depth)
            weights = [rand(columns, depth) for _ in range(count)]

            def product(
                t: int, fn: Callable[..., None], weights: list[Tensor] = weights, what: str = what, **more: Any
            ) -> tuple[float, float, float]:
                columns, depth = weights[0].shape
                x, out = rand(t, depth), torch.empty((t, columns), dtype=F32 if what == "head" else BF16, device=DEVICE)
                seconds = timed([lambda w=w: fn(x, w, None, out=out, **more) for w in weights])
                return seconds, 2.0 * columns * depth + 2 * t * depth + out.nbytes, 2.0 * t * columns * depth

            for t in BATCHES:
                for solution in ("cublas", "triton") if t <= 64 else ("cublas",):
                    fn = K.get(f"{solution}.linear").fn
                    run.bench(
                        "bench", f"linear {model} {what} {t} rows {solution}",
                        lambda t=t, fn=fn, product=product: product(t, fn),
                        op="linear", model=model, what=what, batch=t, solution=solution,
                    )  # fmt: skip
                if model == "8B" and what != "head" and t in (1, 16, 64):
                    chosen = gemm.tiling_of(t, columns, depth, False, processors(DEVICE))
                    options = [(64, 128, 4, 5), (64, 256, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3), (32, 256, 4, 3)]
                    tilings = [gemm.Tiling(c, k, chosen.parts, w, s) for c, k, w, s in options if t < 64 or k < 256]
                    tilings += [
                        gemm.Tiling(chosen.columns, chosen.depth, p, chosen.warps, chosen.stages)
                        for p in (1, 2, 4, 8) if p != chosen.parts
                    ]  # fmt: skip
                    for tiling in tilings:
                        if run.left() > 60:
                            try:
                                seconds, moved, _ = product(t, gemm.linear, tiling=tiling)
                                run.data["sweep"].append(
                                    {"name": f"linear 8B {what} {t} rows", "us": round(seconds * 1e6, 2),
                                     "gbps": round(moved / seconds / 1e9, 1), "tiling": repr(tiling)}
                                )  # fmt: skip
                            except Exception as error:
                                run.data["sweep"].append({"name": f"linear 8B {what} {t} rows", "tiling": repr(tiling),
                                                          "error": f"{type(error).__name__}: {error}"[:200]})  # fmt: skip
            del weights
            torch.cuda.empty_cache()
    run.save()


def bench_rows(run: Run) -> None:
    for model, m in MODELS.items():
        h, n, kv, d, v = m["hidden"], m["heads"], m["kv"], m["d"], m["vocab"]
        table, w, wd, embedding = rand(4096, d, dtype=F32), rand(h), rand(d), rand(v, h)
        pool = [rand(1 << 14, kv, d) for _ in range(2)]
        for t in (*BATCHES, 8192):
            x, y, total, normed = (rand(t, h) for _ in range(4))
            gate_up, act = rand(t, 2 * m["ffn"]), rand(t, m["ffn"])
            qkv = rand(t, (n + 2 * kv) * d)
            q = qkv[:, : n * d].unflatten(1, (n, d))
            key = qkv[:, n * d : (n + kv) * d].unflatten(1, (kv, d))
            pos, idx = ints(torch.randint(0, 4096, (t,))), ints(torch.randint(0, v, (t,)))
            slot, q_out = ints(torch.randperm(1 << 14)[:t]), rand(t, n, d)
            gate, up = gate_up[:, : m["ffn"]], gate_up[:, m["ffn"] :]
            fn = {
                op: K.get(f"triton.{op}").fn
                for op in ("lookup", "rms_norm", "add_rms_norm", "rope", "silu_mul", "append")
            }
            cases: list[tuple[str, Callable[[], None], int]] = [
                ("lookup", lambda: fn["lookup"](idx, embedding, offset=0, out=x), 4 * t * h),
                ("rms_norm", lambda: fn["rms_norm"](x, w, eps=1e-6, out=y), 4 * t * h),
                ("add_rms_norm", lambda: fn["add_rms_norm"](x, y, w, eps=1e-6, out=(total, normed)), 8 * t * h),
                ("rms_norm of heads", lambda: fn["rms_norm"](q, wd, eps=1e-6, out=q_out), 4 * t * n * d),
                ("rope", lambda: fn["rope"](q, pos, table, out=q_out), 4 * t * n * d),
                ("silu_mul", lambda: fn["silu_mul"](gate, up, out=act), 6 * t * m["ffn"]),
                ("append", lambda: fn["append"](key, key, slot, *pool), 8 * t * kv * d),
            ]
            for name, call, moved in cases:
                run.bench(
                    "bench", f"{name} {model} {t} rows", lambda call=call, moved=moved: (timed([call] * 20), moved, 0),
                    op=name, model=model, batch=t,
                )  # fmt: skip
        for t in BATCHES:
            sets = [rand(t, v, dtype=F32) for _ in range(sets_for(4 * t * v, 16))]
            params = params_of(t)
            picks = (torch.empty(t, device=DEVICE), torch.empty(t, dtype=I32, device=DEVICE))
            for name, extra in (("argmax", ()), ("gumbel_argmax", (params,))):
                fn_ = K.get(f"triton.{name}").fn
                run.bench(
                    "bench", f"{name} {model} {t} rows",
                    lambda fn_=fn_, extra=extra, sets=sets, t=t, picks=picks: (
                        timed([lambda z=z: fn_(z, *extra, offset=0, out=picks) for z in sets]), 4 * t * v, 0,
                    ),
                    op=name, model=model, batch=t,
                )  # fmt: skip
        torch.cuda.empty_cache()
    run.save()


def copy_rate(run: Run) -> None:
    a = torch.randn(1 << 29, device=DEVICE)
    b = torch.empty_like(a)
    copy = lambda: torch.neg(a, out=b)  # noqa: E731 (a kernel's copy: in a graph the copy engine's reaches two thirds of it)
    for _ in range(400):  # half a second: the clocks of an idle card are low
        copy()
    seconds = min(timed([copy], least=2e-3) for _ in range(3))
    run.data["copy_gbps"] = round(2 * a.nbytes / seconds / 1e9, 1)
    print(f"copy of 2 GiB: {run.data['copy_gbps']} GB/s read and written", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--seconds", type=float, default=460.0, help="stop starting new cases after this long")
    parser.add_argument("--only", choices=("verify", "bench"), help="one half of the work")
    args = parser.parse_args()
    torch.manual_seed(0)
    run = Run(args.json, args.seconds)
    torch.backends.cuda.matmul.allow_tf32 = False
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    run.data["machine"] = {
        "gpu": torch.cuda.get_device_name(), "processors": processors(DEVICE), "torch": torch.__version__,
        "cuda": torch.version.cuda, "triton": triton.__version__, "python": platform.python_version(), "commit": commit,
    }  # fmt: skip
    print(run.data["machine"], flush=True)
    parts: list[tuple[str, Callable[[Run], None]]] = []
    if args.only != "bench":
        parts += [("fused bf16", lambda r: verify_fused(r, BF16)), ("fused f32", lambda r: verify_fused(r, F32)),
                  ("attention", verify_attention), ("linear", verify_linear), ("sampling", verify_sampling),
                  ("rows bf16", lambda r: verify_rows(r, BF16)), ("rows f32", lambda r: verify_rows(r, F32)),
                  ("large", verify_large)]  # fmt: skip
    if args.only != "verify":
        parts += [("copy", copy_rate), ("attention timing", bench_attention), ("rows timing", bench_rows),
                  ("linear timing", bench_linear)]  # fmt: skip
    for name, part in parts:
        began = time.monotonic()
        try:
            part(run)
            torch.cuda.empty_cache()
        except Exception as error:
            run.data["verify"].append({"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:500],
                                       "trace": traceback.format_exc()[-2000:]})  # fmt: skip
            print(f"FAILED part {name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        print(f"-- {name}: {time.monotonic() - began:.0f} s, {run.left():.0f} s left", flush=True)
        run.save()
    for name, case, tiling in run.later:
        if run.left() > 20:
            run.bench("sweep", name, case, tiling=tiling)
    run.data["scratch_bytes"] = scratch_bytes(torch.device("cuda", torch.cuda.current_device())) + scratch_bytes(DEVICE)
    run.save()
    failed = [v["name"] for v in run.data["verify"] if not v["ok"]]
    errors = [b["name"] for b in run.data["bench"] if "error" in b]
    print(f"verified {len(run.data['verify']) - len(failed)} of {len(run.data['verify'])}; failed: {failed[:40]}")
    print(f"timed {len(run.data['bench'])}, errors: {errors[:20]}; skipped: {len(run.data['skipped'])}; "
          f"{run.data['seconds']} s")  # fmt: skip
    return 1 if failed or errors else 0


if __name__ == "__main__":
    sys.exit(main())
