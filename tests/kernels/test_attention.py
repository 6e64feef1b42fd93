"""Paged attention on every instruction set: against the reference over page sizes, head layouts and mixed batches, and
the promise that a token's bits depend on its own request and position alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.kernels.support import DTYPES, poisoned, strided
from tokenspeed import _cpu
from tokenspeed import kernels as K
from tokenspeed.ir.ops import REFERENCES
from tokenspeed.kernels.tolerance import tolerance


@dataclass
class Batch:
    """Requests with contexts on shuffled pages; unused pages and the tail of every last page hold NaN."""

    kcache: torch.Tensor
    vcache: torch.Tensor
    table: torch.Tensor
    page: int

    @classmethod
    def make(cls, contexts: list[int], kv: int, d: int, page: int, dtype: torch.dtype) -> Batch:
        pages = [-(-c // page) for c in contexts]
        total = sum(pages) + 3
        caches = [torch.full((total * page, kv, d), float("nan")) for _ in range(2)]
        order = torch.randperm(total)
        table = torch.full((len(contexts), max(pages) + 1), -1, dtype=torch.int32)
        used = 0
        for r, context in enumerate(contexts):
            table[r, : pages[r]] = order[used : used + pages[r]].int()
            used += pages[r]
            p = torch.arange(context)
            slots = table[r, p // page].long() * page + p % page
            for cache in caches:
                cache[slots] = torch.randn(context, kv, d)
        return cls(caches[0].to(dtype), caches[1].to(dtype), table, page)

    def attend(
        self, q: torch.Tensor, pos: list[int], row: list[int], sinks: torch.Tensor | None = None, **options: float
    ) -> torch.Tensor:
        out = poisoned(*q.shape, dtype=q.dtype)
        K.get("cpu.attend").fn(
            strided(q), self.kcache, self.vcache, torch.tensor(pos, dtype=torch.int32),
            torch.tensor(row, dtype=torch.int32), self.table, sinks, page=self.page, scale=0.3, out=out, **options,
        )  # fmt: skip
        return out

    def check(
        self, q: torch.Tensor, pos: list[int], row: list[int], sinks: torch.Tensor | None = None, **options: float
    ) -> torch.Tensor:
        got = self.attend(q, pos, row, sinks, **options)
        want = REFERENCES["attend"](
            q.float(), self.kcache.float(), self.vcache.float(), torch.tensor(pos), torch.tensor(row), self.table,
            sinks, page=self.page, scale=0.3, **options,
        )  # fmt: skip
        assert tolerance("attend", q.dtype, terms=max(pos, default=0) + 1).excess(got, want) <= 1
        return got


@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 7, 16])
def test_mixed_batches_against_the_reference(isa: str, dtype: torch.dtype, cache: torch.dtype, page: int) -> None:
    for n, kv, d in ((4, 4, 8), (9, 3, 64), (6, 1, 20), (8, 2, 80)):
        batch = Batch.make([300, 1, 33, 140, 128], kv, d, page, cache)
        # A prefill chunk of request 0, decodes of 1..3, a whole prompt of request 4, and holes between them.
        pos = [*range(250, 283), 0, 32, 139, 5, *range(64), 0, 0]
        row = [*[0] * 33, 1, 2, 3, -1, *[4] * 64, -1, -1]
        got = batch.check(torch.randn(len(pos), n, d).to(dtype), pos, row)
        holes = torch.tensor(row) < 0
        assert not got[holes].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 31, 33, 128, 150, 1000])
def test_window_sinks_and_softcap_against_the_reference(isa: str, dtype: torch.dtype, window: int) -> None:
    """Windows around blocks and splits. What lies before a window is poisoned: it must not be read."""
    for n, kv, d in ((6, 2, 20), (8, 1, 64)):
        batch = Batch.make([300, 1, 33, 290, 64], kv, d, 7, dtype)
        pos, row = [*range(250, 283), 0, 32, 289, 5, *range(64), 0], [*[0] * 33, 1, 2, 3, -1, *[4] * 64, -1]
        for r, first in ((0, 250), (3, 289)) if window else ():
            p = torch.arange(max(first + 1 - window, 0))
            slots = batch.table[r, p // 7].long() * 7 + p % 7
            batch.kcache[slots], batch.vcache[slots] = float("nan"), float("nan")
        sinks = torch.linspace(-4, 6, n)
        q = 3 * torch.randn(len(pos), n, d).to(dtype)
        for options in ({}, {"softcap": 3.0}, {"sinks": sinks}, {"softcap": 3.0, "sinks": sinks.to(dtype)}):
            got = batch.check(q, pos, row, window=window, **options)
            assert got.isfinite().all() and not got[torch.tensor(row) < 0].any()


def test_a_sink_takes_its_share() -> None:
    """Beside one key of score 0.3 a sink of 1.5 leaves e^0.3 / (e^0.3 + e^1.5) of the value."""
    one = torch.ones(1, 1, 1)
    batch = Batch(one, one, torch.zeros(1, 1, dtype=torch.int32), 1)
    got = batch.attend(one, [0], [0], torch.tensor([1.5]))
    assert torch.allclose(got, torch.full_like(got, 1 / (1 + 2.718281828**1.2)))


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_few_tokens(isa: str, tokens: int) -> None:
    batch = Batch.make([600] * 7, 2, 32, 16, torch.float32)
    batch.check(torch.randn(tokens, 8, 32), [599 - 70 * t for t in range(tokens)], list(range(tokens)))


def test_every_position_around_block_and_split_edges(isa: str) -> None:
    batch = Batch.make([260], 1, 16, 4, torch.float32)
    for last in (0, 30, 31, 32, 63, 126, 127, 128, 129, 255, 256, 259):
        batch.check(torch.randn(1, 2, 16), [last], [0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 100])
def test_bits_do_not_depend_on_batch_chunking_or_threads(isa: str, dtype: torch.dtype, window: int) -> None:
    batch = Batch.make([400, 150], 3, 48, 16, dtype)
    q = torch.randn(400, 9, 48).to(dtype)
    options = {"window": window, "sinks": torch.randn(9)} if window else {}
    whole = batch.attend(q, list(range(400)), [0] * 400, **options)
    for chunk in (1, 7, 64):
        for start in (0, 121, 336):
            pos = list(range(start, start + chunk))
            got = batch.attend(q[start : start + chunk], pos, [0] * chunk, **options)
            assert torch.equal(got, whole[start : start + chunk])
    mixed = torch.cat([q[399:], q[:150], q[31:32]])
    mixed = batch.attend(mixed, [399, *range(150), 31], [0, *[1] * 150, 0], **options)
    assert torch.equal(mixed[:1], whole[399:]) and torch.equal(mixed[-1:], whole[31:32])
    before = _cpu.threads()
    try:
        for threads in (1, 3):
            _cpu.set_threads(threads)
            assert torch.equal(batch.attend(q, list(range(400)), [0] * 400, **options), whole)
            assert torch.equal(batch.attend(q[399:], [399], [0], **options), whole[399:])
    finally:
        _cpu.set_threads(before)


def test_a_poisoned_request_or_later_token_does_not_spread(isa: str) -> None:
    batch = Batch.make([64, 64], 2, 32, 8, torch.float32)
    q = torch.randn(66, 4, 32)
    pos, row = [*range(64), 20, 63], [*[0] * 64, 1, 1]
    clean = batch.attend(q, pos, row)
    slot = int(batch.table[0, 40 // 8]) * 8 + 40 % 8
    batch.kcache[slot] = float("nan")
    batch.vcache[slot] = float("nan")
    got = batch.attend(q, pos, row)
    assert torch.equal(got[:40], clean[:40]) and torch.equal(got[64:], clean[64:])
    assert got[40:64].isnan().all()


def test_large_scores_do_not_overflow(isa: str) -> None:
    batch = Batch.make([200], 1, 16, 16, torch.float32)
    batch.kcache *= 1e3
    got = batch.check(torch.randn(3, 2, 16) * 1e3, [199, 150, 3], [0, 0, 0])
    assert got.isfinite().all()


def test_slots_beyond_two_to_the_31_elements() -> None:
    """64-bit addressing: the last slots lie past 2^31 elements of memory that is otherwise never touched."""
    kv, d, slots = 1, 64, 2**25 + 64
    cache = torch.empty(slots, kv, d, dtype=torch.bfloat16)
    k, v = torch.randn(2, kv, d), torch.randn(2, kv, d)
    slot = torch.tensor([slots - 2, slots - 1], dtype=torch.int32)
    K.get("cpu.append").fn(k, v, slot, cache, cache)  # one buffer as both caches: the values are written last
    assert torch.equal(cache[-2:], v.bfloat16())
    out = torch.empty(1, 1, d)
    table = torch.tensor([[slots // 2 - 1]], dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    q = torch.randn(1, 1, d)
    K.get("cpu.attend").fn(q, cache, cache, one, one - 1, table, page=2, scale=0.1, out=out)
    want = torch.softmax((q[0] @ cache[-2:, 0].float().t()) * 0.1, -1) @ cache[-2:, 0].float()
    torch.testing.assert_close(out[0], want, rtol=1e-4, atol=1e-5)


def test_arguments_that_do_not_fit_are_named() -> None:
    batch = Batch.make([16], 3, 16, 16, torch.float32)
    with pytest.raises(ValueError, match="attend"):
        batch.attend(torch.randn(1, 4, 16), [0], [0])
    with pytest.raises(ValueError, match="attend"):
        batch.attend(torch.randn(1, 3, 8), [0], [0])
    with pytest.raises(ValueError, match=r"attend: .*pos"):
        batch.attend(torch.randn(2, 3, 16), [0], [0])
