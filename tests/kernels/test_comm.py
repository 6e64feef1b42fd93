"""Collectives over two real gloo processes against plain torch on the whole tensors, in both dtypes and odd layouts."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from typing import Any

import torch
import torch.distributed as dist

from tokenspeed import kernels as K
from tokenspeed.ir.ops import REFERENCES

RANKS = 2


def run_rank(rank: int, store: str, results: Any) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        check(rank)
        results.put((rank, ""))
    except BaseException:
        results.put((rank, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parts = [torch.randn(6, 10, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(RANKS)]
        mine = parts[rank]
        total = (parts[0] + parts[1]).to(dtype)

        out = torch.empty_like(mine)
        K.get("gloo.all_reduce").fn(mine, out=out)
        assert torch.equal(out, total)
        wide = torch.zeros(6, 20, dtype=dtype)
        K.get("gloo.all_reduce").fn(mine, out=wide[:, 5:15])
        assert torch.equal(wide[:, 5:15], total) and not wide[:, 15:].any()
        inplace = mine.clone()
        K.get("gloo.all_reduce").fn(inplace, out=inplace)
        assert torch.equal(inplace, total)

        for dim in (0, 1, -1):
            want = torch.cat(parts, dim)
            out = torch.empty_like(want)
            K.get("gloo.all_gather").fn(mine, dim=dim, out=out)
            assert torch.equal(out, want)
            block = total.chunk(RANKS, dim)[rank]
            out = torch.full_like(block, 9)
            K.get("gloo.reduce_scatter").fn(mine, dim=dim, out=out)
            assert torch.equal(out, block)
            K.get("gloo.slice").fn(total, dim=dim, out=out)
            assert torch.equal(out, block)
        # Two whole outer factors: the ranks' blocks interleave.
        out = torch.empty(12, 10, dtype=dtype)
        K.get("gloo.all_gather").fn(mine, dim=0, outer=2, out=out)
        assert torch.equal(out, torch.cat([parts[0][:3], parts[1][:3], parts[0][3:], parts[1][3:]]))
        wide = torch.empty(6, 20, dtype=dtype)
        K.get("gloo.all_gather").fn(mine, dim=1, outer=2, out=wide)
        halves = [part.chunk(2, 1) for part in parts]
        assert torch.equal(wide, torch.cat([halves[0][0], halves[1][0], halves[0][1], halves[1][1]], 1))
        out = torch.empty(6, 5, dtype=dtype)
        K.get("gloo.reduce_scatter").fn(mine[:, :8], dim=1, outer=2, out=out[:, :4])
        blocks = total[:, :8].chunk(4, 1)
        assert torch.equal(out[:, :4], torch.cat([blocks[rank], blocks[2 + rank]], 1))
        K.get("gloo.keep_first").fn(mine, keep=rank == 0, out=inplace)
        assert torch.equal(inplace, mine) if rank == 0 else not inplace.any()

    check_fused(rank)
    check_large(rank)
    g = torch.Generator().manual_seed(7)
    held = [torch.randn(5, 3, generator=g) for _ in range(RANKS)]
    ids = [torch.stack([torch.randperm(6, generator=g)[:2] for _ in range(5)]).int() for _ in range(RANKS)]
    ids[1][4] = -1  # a hole
    picks = [torch.rand(5, 2, generator=g) for _ in range(RANKS)]
    for firsts in ((0, 3), (3, 0)):
        rows, all_ids, all_shares = torch.full((10, 3), 9.0), torch.empty(10, 2, dtype=torch.int32), torch.empty(10, 2)
        end = firsts[rank] + 3
        K.get("gloo.dispatch").fn(
            held[rank], ids[rank], picks[rank], group=None, firsts=firsts, held=3, out=(rows, all_ids, all_shares)
        )
        assert torch.equal(all_ids, torch.cat(ids)) and torch.equal(all_shares, torch.cat(picks))
        mine = ((all_ids >= firsts[rank]) & (all_ids < end)).any(1)
        assert torch.equal(rows, torch.where(mine[:, None], torch.cat(held), 9.0)), "other rows are left alone"
        made = torch.where(mine[:, None], rows * (1 + rank), float("nan"))
        out = torch.full((5, 3), 9.0)
        K.get("gloo.combine").fn(made, all_ids, group=None, firsts=firsts, held=3, out=out)
        visits = [((ids[rank] >= first) & (ids[rank] < first + 3)).any(1) * (1.0 + r) for r, first in enumerate(firsts)]
        assert torch.allclose(out, held[rank] * sum(visits)[:, None])  # type: ignore[index]
        # Row 1 of each rank is a hole: it picks nothing and goes nowhere. x holds every second row of its home group.
        request = torch.tensor([0, 0, -1, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int32)
        rows.fill_(9.0)
        K.get("gloo.dispatch").fn(
            held[rank], ids[rank], picks[rank], group=None, firsts=firsts, held=3, request=request, mine=torch.arange(0, 10, 2),
            out=(rows, all_ids, all_shares),
        )  # fmt: skip
        left = torch.arange(10) % 5 != 1
        assert torch.equal(all_ids, torch.where(left[:, None], torch.cat(ids), -1))
        assert torch.equal(rows, torch.where((mine & left)[:, None], torch.cat(held), 9.0))
    inf = float("inf")
    values = torch.tensor([[1.0, 5.0, -inf, 2.0], [3.0, 5.0, -inf, -inf]])[rank]
    indices = torch.tensor([[4, 9, 0, 1], [60, 50, 50, 50]], dtype=torch.int32)[rank]
    value, token = torch.empty(4), torch.empty(4, dtype=torch.int32)
    K.get("gloo.all_reduce_argmax").fn(values, indices, group=None, out=(value, token))
    assert token.tolist() == [60, 9, 0, 1] and value.tolist() == [3.0, 5.0, -inf, 2.0]
    rows = [torch.randn(5, 3, generator=torch.Generator().manual_seed(10 + r)) for r in range(RANKS)]
    for kind, want in (("max", torch.maximum(*rows)), ("min", torch.minimum(*rows))):
        out = torch.empty(5, 3)
        K.get(f"gloo.all_reduce_{kind}").fn(rows[rank], out=out)
        assert torch.equal(out, want)
    best = torch.tensor([[[4.0, 2.0, 1.0]], [[4.0, 3.0, -inf]]])[rank]
    ids = torch.tensor([[[7, 2, 3]], [[10, 12, 2**31 - 1]]], dtype=torch.int32)[rank]
    found = torch.empty(1, 3), torch.empty(1, 3, dtype=torch.int32)
    K.get("gloo.all_reduce_topk").fn(best, ids, group=None, out=found)
    assert (found[0].tolist(), found[1].tolist()) == ([[4.0, 4.0, 3.0]], [[7, 10, 12]])
    for op, width in (("all_reduce", 9), ("all_gather", 10), ("reduce_scatter", 10), ("slice", 10)):
        out = torch.empty(6, width)
        try:
            K.get(f"gloo.{op}").fn(torch.zeros(6, 10), out=out)
        except ValueError as error:
            assert op in str(error)
        else:
            raise AssertionError(f"{op} took an output that does not fit")


def check_fused(rank: int) -> None:
    """The weight of a norm is float32 and the stream bfloat16 (vllm#48324): the sum keeps the stream's dtype and values."""
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(12, generator=g)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(6, 12, generator=g).to(dtype)
        parts = [torch.randn(6, 12, generator=g).to(dtype) for _ in range(RANKS)]
        for w in (weight, weight.to(dtype)):
            total, normed = REFERENCES["add_rms_norm"](x, parts[0] + parts[1], w, eps=1e-5)
            assert (total.dtype, normed.dtype) == (dtype, dtype)
            rows = slice(3 * rank, 3 * rank + 3)
            for op, mine in (("all_reduce", slice(None)), ("reduce_scatter", rows)):
                out = torch.full_like(total[mine], 9), torch.full_like(normed[mine], 9)
                K.get(f"gloo.{op}_add_rms_norm").fn(x[mine], parts[rank], w, eps=1e-5, out=out)
                assert torch.equal(out[0], total[mine])
                torch.testing.assert_close(out[1], normed[mine])


def check_large(rank: int) -> None:
    """Chunks of several MiB (jax#40830), again and again: sums of small integers are exact."""
    for n in range(3):
        parts = [torch.arange(r + n, r + n + (1 << 22)).remainder(97).float().view(4, -1) for r in range(RANKS)]
        block = (parts[0] + parts[1]).chunk(RANKS)[rank]
        out = torch.full_like(block, -1)
        K.get("gloo.reduce_scatter").fn(parts[rank], dim=0, out=out)
        assert torch.equal(out, block)


def test_two_ranks() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run_rank, args=(r, f"{folder}/store", results)) for r in range(RANKS)]
        for process in ranks:
            process.start()
        errors = dict(results.get(timeout=60) for _ in ranks)
        for process in ranks:
            process.join(10)
    assert errors == {0: "", 1: ""}


def test_a_group_of_one_is_a_copy(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = torch.randn(4, 6)
        for op in ("all_reduce", "all_gather", "reduce_scatter", "slice"):
            out = torch.zeros(4, 6)
            K.get(f"gloo.{op}").fn(x, out=out)
            assert torch.equal(out, x)
    finally:
        dist.destroy_process_group()
