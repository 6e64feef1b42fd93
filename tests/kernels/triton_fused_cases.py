"""The fused Triton kernels against the chains they stand for, and the two ends of a step, in Triton's interpreter on CPU;
run by test_triton_interpret.py in a process of its own."""

from __future__ import annotations

import tests.kernels.interpreter  # isort: skip  # noqa: F401

import pytest
import torch
from torch import Tensor

from tests.kernels.support import DTYPES, poisoned, strided
from tests.kernels.test_sampling import Flag, State, params, row
from tokenspeed import kernels as K
from tokenspeed.ir.ops import REFERENCES
from tokenspeed.kernels.fused import FUSED
from tokenspeed.kernels.gemm import hopper
from tokenspeed.kernels.gemm.triton import Tiling, linear_silu_mul
from tokenspeed.kernels.step.triton import HEADER, begin_step, end_step, slot_words
from tokenspeed.kernels.tolerance import tolerance


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 2, 1, 8, 8), (1, 4, 2, 8, 4), (5, 9, 3, 64, 64), (5, 6, 1, 80, 32)])
def test_rope_append(dtype: torch.dtype, cache: torch.dtype, shape: tuple[int, int, int, int, int]) -> None:
    """Segments of one product, holes of either kind, with and without the norms."""
    t, n, kv, d, r = shape
    whole = strided(torch.randn(t, (n + 2 * kv) * d).to(dtype))
    q, k, v = (s.unflatten(1, (-1, d)) for s in whole.split([n * d, kv * d, kv * d], 1))
    pos, slot, table = ints(0, 49, -1, 7, 8)[:t], ints(3, -1, 2, 19, 0)[:t], torch.randn(50, r)
    wq, wk = (torch.randn(d).to(dtype) for _ in range(2))
    for op, weights, attrs in (("rope_append", (), {}), ("norm_rope_append", (wq, wk), {"eps": 1e-6})):
        got, want = ([torch.full((20, kv, d), float("nan"), dtype=cache) for _ in range(2)] for _ in range(2))
        out = poisoned(t, n, d, dtype=dtype)
        K.get(f"triton.{op}").fn(q, k, v, *weights, pos, table, slot, *got, out=out, **attrs)
        expected = FUSED[op](q, k, v, *weights, pos, table, slot, *want, **attrs)
        assert (
            tolerance("rope" if op == "rope_append" else op, dtype, terms=d).excess(out, expected) <= 1
            if t
            else out.numel() == 0
        )
        for a, b in zip(got, want):
            written = ~b.isnan()
            assert torch.equal(written, ~a.isnan())
            limits = tolerance(
                "rope" if op == "rope_append" else op,
                torch.bfloat16 if torch.bfloat16 in (dtype, cache) else dtype,
                terms=d,
            )
            assert not t or limits.excess(a[written].float(), b[written].float()) <= 1
        if op == "rope_append":
            assert torch.equal(out, expected)


@pytest.mark.parametrize("tokens", [0, 1, 16, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_silu_mul(dtype: torch.dtype, tokens: int) -> None:
    for f, k, parts in ((1, 1, 1), (16, 64, 2), (23, 100, 3)):
        x, w = strided(torch.randn(tokens, k).to(dtype)), strided(torch.randn(2 * f, k).to(dtype))
        want = FUSED["linear_silu_mul"](x, w)
        outs = [poisoned(tokens, f, dtype=dtype) for _ in range(2)]
        for out in outs:
            linear_silu_mul(x, w, out=out, tiling=Tiling(32, 32, parts, 4, 1))
        assert torch.equal(*outs)
        gate, up = (x.double() @ w.double().t()).abs().chunk(2, 1)
        allowed = 4 * torch.finfo(dtype).eps * (gate + k**0.5) * (up + k**0.5)  # of either half, times the other
        assert ((outs[0].double() - want.double()).abs() <= allowed).all()
    with pytest.raises(ValueError, match="do not fit"):
        linear_silu_mul(torch.randn(1, 4), torch.randn(3, 4), out=torch.empty(1, 1))


def test_linear_silu_mul_of_many_rows_takes_few_at_a_time_without_a_device() -> None:
    x, w = torch.randn(130, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    out, want = (torch.full((130, 24), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    hopper.linear_silu_mul(x, w, out=out)
    for rows in (slice(0, 64), slice(64, 128), slice(128, 130)):
        linear_silu_mul(x[rows], w, out=want[rows])
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match="do not fit"):
        hopper.linear_silu_mul(torch.randn(1, 64), w, out=torch.empty(1, 24))


@pytest.mark.parametrize("windowed", [False, True])
def test_the_two_ends_of_a_step(windowed: bool) -> None:
    """Steps of two sizes through a ring of three slots: inputs arrive, waiting ids are resolved, tokens go out and stay."""
    most_t, most_s, width = 5, 3, 4
    ring = torch.full((3, slot_words(most_t, most_s, width, windowed)), -77, dtype=torch.int32)
    out = torch.full((3, most_s), -77, dtype=torch.int32)
    counter, sampled = ints(0), ints(10, 11, 12)
    sizes = {"ids": (5,), "pos": (5,), "slot": (5,), "row": (5,), "last": (3,), "request_slots": (3,)}
    ports = {name: torch.full(size, -9, dtype=torch.int32) for name, size in sizes.items()}
    ports |= {"params": torch.zeros(3, 16, dtype=torch.int32), "table": torch.full((3, width), -9, dtype=torch.int32)}
    by_token = ["pos", "slot", "row"]
    if windowed:
        by_token.append("window_slot")
        ports |= {"window_" + name: torch.full_like(ports[name], -9) for name in ("slot", "table")}
    for turn, (t, s, w) in enumerate(((5, 3, 2), (2, 2, 4), (1, 1, 1), (2, 2, 1))):
        words = torch.arange(
            1000 * (turn + 1), 1000 * (turn + 1) + slot_words(t, s, w, windowed) - HEADER, dtype=torch.int32
        )
        words[:t] = ints(7, -1, -3, -2, 9)[:t]  # -1 - r waits for request slot r
        last, slots = (ints(4, -1, 1)[:s], ints(2, 1, 0)[:s])
        at = (1 + len(by_token)) * t
        words[at : at + 2 * s] = torch.cat([last, slots])
        ring[turn % 3, 0] = w
        ring[turn % 3, HEADER : HEADER + len(words)] = words
        held = sampled.clone()
        begin_step(ring, counter, ports, sampled, t, s)
        want = [int(x) if x >= 0 else int(held[-1 - x]) for x in words[:t].tolist()]
        assert ports["ids"][:t].tolist() == want
        for i, name in enumerate(by_token, 1):
            assert torch.equal(ports[name][:t], words[i * t : (i + 1) * t])
        at += 2 * s
        assert torch.equal(ports["params"][:s].flatten(), words[at : at + 16 * s])
        tables = words[at + 16 * s :].view(-1, s, w)
        assert torch.equal(ports["table"][:s, :w], tables[0])
        assert not windowed or torch.equal(ports["window_table"][:s, :w], tables[1])
        tokens = ints(101, 102, 103)[:s] + 10 * turn
        end_step(tokens, ports, sampled, out, counter)
        assert torch.equal(out[turn % 3, :s], tokens)
        for i in range(s):
            held[slots[i]] = tokens[i] if last[i] >= 0 else held[slots[i]]
        assert torch.equal(sampled, held)
        assert int(counter) == (turn + 1) % 3


@pytest.mark.parametrize("scale", [0.5, 8.0])
@pytest.mark.parametrize("v", [37, 5000])
def test_full_sampler(v: int, scale: float) -> None:
    """Every parameter against the reference; NaN, -inf, holes, a vocabulary with padding behind it."""
    every = Flag.VALID | Flag.FILTERS
    penal = Flag.VALID | Flag.PENALTIES
    rows = [
        row(), row(temperature=0.2, seed=2**40 + 3), row(Flag.VALID | Flag.GREEDY), row(every, top_k=1),
        row(every, top_k=20, temperature=0.7), row(every, top_p=0.9), row(every, top_p=0.05), row(every, min_p=0.1),
        row(every, top_k=30, top_p=0.8, min_p=0.02, temperature=1.5), row(every, top_k=v, top_p=1.0),
        row(penal, repetition=1.3, presence=0.5, frequency=0.25, slot=1),
        row(penal | Flag.GREEDY | Flag.LOGPROBS, repetition=0.8, frequency=-0.5, slot=1, logprobs=5),
        row(Flag.VALID | Flag.BIAS | Flag.LOGPROBS, slot=2, logprobs=20), row(0),
        row(every | penal | Flag.BIAS | Flag.LOGPROBS, top_k=20, top_p=0.95, slot=0, presence=1.0, logprobs=0),
        row(Flag.VALID | Flag.LOGPROBS, logprobs=3),
    ]  # fmt: skip
    p = params(*rows)
    z = strided(torch.randn(len(rows), v + 5) * scale)
    z[0, 3], z[2, 1] = float("nan"), -float("inf")
    z[-1] = -float("inf")  # nothing to choose from: token -1
    ours, theirs = State(len(rows), v), State(len(rows), v)
    ours.counts.copy_(torch.randint(0, 3, (3, v)) * (torch.rand(3, v) < 0.1))
    ours.seen.copy_((torch.rand(3, v) < 0.1).to(torch.uint8))
    ours.bias.copy_(torch.where(torch.rand(3, v) < 0.2, -float("inf"), torch.randn(3, v)))
    for name in ("counts", "seen", "bias"):
        getattr(theirs, name).copy_(getattr(ours, name))
    K.get("triton.sample").fn(z, p, ours.counts, ours.seen, ours.bias, vocab=v, out=ours.out)
    token, logprob, ids, logprobs = ours.out
    want = REFERENCES["sample"](z, p, theirs.counts, theirs.seen, theirs.bias, vocab=v)
    assert token.tolist() == want[0].tolist()
    assert torch.equal(ours.counts, theirs.counts)
    torch.testing.assert_close(logprob, want[1], rtol=1e-5, atol=1e-5)
    for i, r in enumerate(rows[:-1]):
        count = min(r[11], v) if r[0] & Flag.LOGPROBS else 0
        assert ids[i, :count].tolist() == want[2][i, :count].tolist()
        torch.testing.assert_close(logprobs[i, :count], want[3][i, :count], rtol=1e-5, atol=1e-5)
        assert bool((ids[i, count:] == -1).all())
