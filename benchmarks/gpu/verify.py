"""Verification of the GPU kernels on a device, against the ops' references: a part of kernels.py.

Every kernel at full and edge sizes, with NaN around every input, in every free cache slot and in the output; twice, for the
same bits; beyond 2^31 elements; and replays of one captured graph over changing lengths.
"""

# ruff: noqa: B023 (a case runs in the turn of the loop that makes it)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.run import BF16, DEVICE, F32, I32, NAN, Run, checked, ints, poisoned, rand, reference, same, strided
from tokenspeed import kernels as K
from tokenspeed.kernels.attention import hopper
from tokenspeed.kernels.attention import triton as attention
from tokenspeed.kernels.norm import cute as cute_norm
from tokenspeed.kernels.pages import triton as moved
from tokenspeed.kernels.tolerance import linear_allowed, tolerance


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

    def check(
        self, pos: list[int], row: list[int], n: int, dtype: torch.dtype, repeat: int = 2,
        attend: Callable[..., None] = attention.attend, **more: Any,
    ) -> float:  # fmt: skip
        q = strided(rand(len(pos), n, self.k.shape[2], dtype=dtype))
        p, r = ints(pos), ints(row)
        first: Tensor | None = None
        for _ in range(repeat):
            out = poisoned(*q.shape, dtype=dtype)
            attend(q, self.k, self.v, p, r, self.table, page=self.page, scale=0.088, out=out, **more)
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
    for batch in (48, 160, 300):  # every tiling of many contexts
        pages = Pages((edges * batch)[:batch], 8, 128, 16, BF16)
        pos = [c - 1 for c in (edges * batch)[:batch]]
        run.verify(
            f"attend decode of {batch}",
            lambda pages=pages, pos=pos: pages.check(pos, list(range(len(pos))), 32, BF16),
        )
    deep = Pages([32768, 1], 8, 128, 16, BF16)
    run.verify("attend 32k decode, 300 runs alike", lambda: deep.check([32767, 0], [0, 1], 32, BF16, repeat=300))
    run.verify(
        "attend 32k chunk of 800, 20 runs alike",
        lambda: deep.check(list(range(31968, 32768)), [0] * 800, 32, BF16, repeat=20),
    )
    run.verify("attend: one graph, any length", lambda: _graph_lengths(8, 40))
    run.verify("attend: one mixed graph, any arrangement", lambda: _graph_mixed(20))


def verify_warp_specialised(run: Run) -> None:
    """gluon.attend, which takes steps of several tokens a request."""
    edges = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 513, 1023, 1024, 1025, 5000]
    pos = [*range(700, 1023), 4999, 0, 64, 5, *range(129), 0, 0]
    row = [*[12] * 323, 15, 0, 6, -1, *[9] * 129, -1, -1]
    for n, kv, d, page in ((32, 8, 128, 16), (16, 8, 128, 64), (32, 8, 128, 8), (9, 3, 64, 16), (8, 8, 128, 128),
                           (16, 2, 256, 16), (10, 1, 128, 32)):  # fmt: skip
        pages = Pages(edges, kv, d, page, BF16)
        name = f"gluon attend mixed {n}/{kv} d {d} page {page}"
        run.verify(name, lambda pages=pages, n=n: pages.check(pos, row, n, BF16, attend=hopper.attend))
    for context in (1024, 2944, 3000, 20000):
        pages = Pages([context], 8, 128, 64, BF16)
        for t in (1, 31, 32, 33, 127, 128, 129, 1024):
            run.verify(
                f"gluon attend chunk of {t} on {context}",
                lambda pages=pages, t=t, c=context: pages.check(
                    list(range(c - t, c)), [0] * t, 32, BF16, attend=hopper.attend
                ),
            )


def verify_pages(run: Run) -> None:
    """Pages of many caches to rows of bytes and back, also where a cache has more than 2^31 bytes."""
    for widths, pages in (((131072,) * 64, 90), ((640, 64, 20000), 33), ((6, 3), 5), ((1 << 20,), 3000)):
        caches = [torch.randint(0, 256, (pages, w), dtype=torch.uint8, device=DEVICE) for w in widths]
        for count in sorted({0, 1, min(3, pages // 2), pages // 2}):  # as many sources as targets
            run.verify(
                f"pages {count} of {pages}, {len(widths)} caches",
                lambda caches=caches, pages=pages, count=count: _pages(caches, pages, count),
            )


def _pages(caches: list[Tensor], pages: int, count: int) -> float:
    table, word = moved.page_table(caches, pages)
    some = torch.randperm(pages, device=DEVICE)
    source, target = some[:count], some[count : 2 * count]
    rows = torch.empty(count, sum(c.shape[1] for c in caches), dtype=torch.uint8, device=DEVICE)
    moved.gather_pages(table, word, source, out=rows)
    assert torch.equal(rows, torch.cat([c[source] for c in caches], dim=1)), "gathered"
    want = [c.index_copy(0, target, c[source]) for c in caches]
    moved.scatter_pages(table, word, target, rows)
    assert all(torch.equal(a, b) for a, b in zip(caches, want, strict=True)), "scattered"
    return 0.0


def verify_norms(run: Run) -> None:
    """The norms of CuTe DSL."""
    for rows in (0, 1, 7, 16, 1023):
        for width in (1024, 4096, 7168, 8192):
            x, y, w = rand(rows, width), rand(rows, width), rand(width)
            run.verify(f"cute_dsl norms [{rows}, {width}]", lambda x=x, y=y, w=w: _cute_norms(x, y, w))


def _cute_norms(x: Tensor, y: Tensor, w: Tensor) -> float:
    assert cute_norm._takes(x, w, y) or not len(x), "the kernel does not take it"
    want = reference("add_rms_norm", x, y, w, eps=1e-6)
    alone = reference("rms_norm", x, w, eps=1e-6)
    runs = []
    for _ in range(2):
        total, normed, only = (torch.full_like(x, NAN) for _ in range(3))
        K.get("cute_dsl.add_rms_norm").fn(x, y, w, eps=1e-6, out=(total, normed))
        K.get("cute_dsl.rms_norm").fn(x, w, eps=1e-6, out=only)
        runs.append((total, normed, only))
    for a, b in zip(*runs, strict=True):
        same(a, b)
    total, normed, only = runs[0]
    assert torch.equal(total, want[0]), "the sum differs"
    if not len(x):
        return 0.0
    allowed = tolerance("rms_norm", BF16, terms=x.shape[1])
    return max(allowed.excess(normed, want[1]), allowed.excess(only, alone))


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
        pos.copy_(ints(pos_))
        row.copy_(ints(row_))
        out.fill_(NAN)
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
    """The noise of the contract, both logarithms in float64, rounded to float32; greedy rows 0."""
    from tokenspeed.ir.ops.sampling import Word, is_greedy, philox_gumbel

    words = params.cpu()
    noise = philox_gumbel(words[:, Word.SEED_LO], words[:, Word.SEED_HI], words[:, Word.POSITION], ids.cpu()).double()
    return torch.where(is_greedy(words)[:, None], 0.0, noise).to(params.device)


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
        run.verify(f"mask_logits {where}", lambda z=z, params=params: _mask(z, params))
        if v > 9:
            run.verify(f"gumbel_argmax {where}", lambda a=(rows, v): _fused_pick(*a))


def _mask(z: Tensor, params: Tensor) -> float:
    """Rows with and without a mask, apart and in place."""
    rows, v = z.shape
    words = params.clone()
    words[:, 0] = torch.tensor([96, 32, 97])[torch.arange(rows) % 3]
    words[:, 12] = torch.randperm(rows)
    allow = ints(torch.randint(-(2**31), 2**31, (rows, -(-(v + 37) // 32))))
    want, apart, own = reference("mask_logits", z, words, allow, offset=37), poisoned(rows, v, dtype=F32), z.clone()
    for x, out in ((z, apart), (own, own)):
        K.get("triton.mask_logits").fn(x, words, allow, offset=37, out=out)
        assert torch.equal(out, want), "another id is allowed"
    return 0.0


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
