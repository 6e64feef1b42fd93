"""Sampling on every instruction set: noise against float64, the sampler against the op's reference, the promise that
a token depends neither on the sharding of the vocabulary nor on the batch nor on the threads."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import pytest
import torch

from tests.kernels.support import gumbel64, strided
from tokenspeed import _cpu
from tokenspeed import kernels as K
from tokenspeed.ir.ops import REFERENCES, sampling
from tokenspeed.ir.ops.sampling import Flag

V = 1003


def bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


def row(
    flags: int = Flag.VALID, seed: int = 7, position: int = 5, temperature: float = 1.0, top_k: int = 0,
    top_p: float = 1.0, min_p: float = 0.0, repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0,
    logprobs: int = 0, slot: int = 0,
) -> list[int]:  # fmt: skip
    signed = [struct.unpack("<i", struct.pack("<I", word & 0xFFFFFFFF))[0] for word in (seed, seed >> 32)]
    return [int(flags), *signed, position, bits(temperature), top_k, bits(top_p), bits(min_p), bits(repetition),
            bits(presence), bits(frequency), logprobs, slot, 0, 0, 0]  # fmt: skip


def params(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(list(rows), dtype=torch.int32)


def argmax(z: torch.Tensor, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(z.shape[0]), torch.empty(z.shape[0], dtype=torch.int32)
    K.get("cpu.argmax").fn(z, offset=offset, out=out)
    return out


def gumbel_argmax(z: torch.Tensor, p: torch.Tensor, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(z.shape[0]), torch.empty(z.shape[0], dtype=torch.int32)
    K.get("cpu.gumbel_argmax").fn(z, p, offset=offset, out=out)
    return out


class State:
    """Sampling state of three request slots and the four outputs."""

    def __init__(self, rows: int, vocab: int = V) -> None:
        self.counts = torch.zeros(3, vocab, dtype=torch.int32)
        self.seen = torch.zeros(3, vocab, dtype=torch.uint8)
        self.bias = torch.zeros(3, vocab)
        self.vocab = vocab
        self.out = (torch.full((rows,), -7, dtype=torch.int32), torch.full((rows,), math.nan),
                    torch.full((rows, 20), -7, dtype=torch.int32), torch.full((rows, 20), math.nan))  # fmt: skip

    def sample(self, z: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        K.get("cpu.sample").fn(z, p, self.counts, self.seen, self.bias, vocab=self.vocab, out=self.out)
        return self.out


def test_noise_is_the_counter_rng_s_in_float64(isa: str) -> None:
    rows = [row(seed=s, position=q) for s, q in ((0, 0), (1, 1), (0xDEADBEEF12345678, 77), (2**64 - 1, 2**31 - 1))]
    p = params(*rows)
    for offset, v in ((0, 1), (0, 5000), (3, 70), (49150, 64), (2, 4099)):
        z = torch.zeros(len(rows), v)
        out = torch.empty_like(z)
        K.get("cpu.add_gumbel").fn(z, p, offset=offset, out=out)
        want = gumbel64(p[:, 1], p[:, 2], p[:, 3], torch.arange(offset, offset + v))
        torch.testing.assert_close(out, want, rtol=2e-6, atol=2e-6)


def test_noise_has_gumbel_s_moments(isa: str) -> None:
    z = torch.zeros(1, 200_000)
    K.get("cpu.add_gumbel").fn(z, params(row(seed=3)), offset=0, out=z)
    assert z.isfinite().all()
    assert abs(float(z.mean()) - 0.57722) < 0.02
    assert abs(float(z.var()) - math.pi**2 / 6) < 0.05


def test_temper_and_greedy_rows(isa: str) -> None:
    z = strided(torch.randn(3, 77))
    p = params(row(temperature=0.7), row(Flag.VALID | Flag.GREEDY, temperature=0.3), row(temperature=2.0))
    for op in ("temper", "add_gumbel"):
        out = strided(torch.full((3, 77), math.nan))
        K.get(f"cpu.{op}").fn(z, p, out=out)
        assert torch.equal(out[1], z[1])
        assert not torch.equal(out[0], z[0])
        if op == "temper":
            assert torch.equal(out, REFERENCES["temper"](z, p))


def test_argmax_ties_nan_and_empty_rows(isa: str) -> None:
    inf, nan = math.inf, math.nan
    z = torch.zeros(7, 53)
    z[0, 20] = z[0, 40] = 3.0  # a tie
    z[1, :] = nan
    z[1, 17] = -5.0
    z[2, :] = nan
    z[3, :] = -inf
    z[4, 50] = inf
    z[5, 0] = nan
    z[5, 52] = 1.0
    value, index = argmax(z, offset=100)
    assert index.tolist() == [120, 117, -1, -1, 150, 152, 100]
    assert value.tolist() == [3.0, -5.0, -inf, -inf, inf, 1.0, 0.0]
    want = REFERENCES["argmax"](z, offset=100)
    assert torch.equal(value, want[0]) and torch.equal(index, want[1])
    for v in (1, 15, 16, 17, 8191, 8192, 8193, 40_000):
        z = torch.randn(3, v)
        want = REFERENCES["argmax"](z)
        got = argmax(z)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert argmax(torch.empty(0, 10))[1].shape == (0,)


def test_a_token_does_not_depend_on_the_sharding(isa: str) -> None:
    v = 20_011
    z = torch.randn(5, v) * 3
    z[4, 100] = z[4, 19_000] = 50.0  # a tie across shards
    p = params(
        *[row(seed=s, temperature=0.8) for s in (1, 2, 3)], row(Flag.VALID | Flag.GREEDY), row(Flag.VALID | Flag.GREEDY)
    )
    value, index = gumbel_argmax(z, p)
    assert int(index[4]) == 100
    for cuts in ([0, 1, v], [0, 5003, 10_006, 15_009, v], [0, 7, 8_190, v]):
        parts = [gumbel_argmax(z[:, a:b], p, offset=a) for a, b in pairwise(cuts)]
        merged = torch.empty(5), torch.empty(5, dtype=torch.int32)
        K.get("cpu.merge_argmax").fn(torch.stack([q[0] for q in parts]), torch.stack([q[1] for q in parts]), out=merged)
        assert torch.equal(merged[0], value) and torch.equal(merged[1], index), cuts
    # The fusion has the bits of its three parts, and the full sampler without filters draws the same token.
    t, g = torch.empty_like(z), torch.empty_like(z)
    K.get("cpu.temper").fn(z, p, out=t)
    K.get("cpu.add_gumbel").fn(t, p, out=g)
    separate = argmax(g)
    assert torch.equal(separate[0], value) and torch.equal(separate[1], index)
    assert torch.equal(State(5, v).sample(z, p)[0], index)


def test_filters_that_pass_everything_change_no_token(isa: str) -> None:
    z = torch.randn(8, V) * 4
    plain = params(*[row(seed=s) for s in range(8)])
    filtered = params(*[row(Flag.VALID | Flag.FILTERS, seed=s, top_k=V, top_p=1.0) for s in range(8)])
    assert torch.equal(State(8).sample(z, plain)[0], State(8).sample(z, filtered)[0])


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_sampler_against_the_reference(isa: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "philox_gumbel", gumbel64)
    every = Flag.VALID | Flag.FILTERS
    rows = [
        row(),
        row(temperature=0.2, seed=2**40 + 3),
        row(Flag.VALID | Flag.GREEDY),
        row(every, top_k=1),
        row(every, top_k=40, temperature=0.7),
        row(every, top_p=0.9),
        row(every, top_p=0.05),
        row(every, min_p=0.1),
        row(every, top_k=100, top_p=0.8, min_p=0.02, temperature=1.5),
        row(Flag.VALID | Flag.PENALTIES, repetition=1.3, presence=0.5, frequency=0.25, slot=1),
        row(
            Flag.VALID | Flag.PENALTIES | Flag.GREEDY | Flag.LOGPROBS,
            repetition=0.8,
            frequency=-0.5,
            slot=1,
            logprobs=5,
        ),
        row(Flag.VALID | Flag.BIAS | Flag.LOGPROBS, slot=2, logprobs=20),
        row(every | Flag.BIAS | Flag.PENALTIES | Flag.LOGPROBS, top_k=20, top_p=0.95, slot=0, presence=1.0, logprobs=0),
        row(0),
    ]
    p = params(*rows)
    for trial in range(4):
        p[:, 3] = trial
        z = strided(torch.randn(len(rows), V + 5) * scale)
        ours, theirs = State(len(rows)), State(len(rows))
        ours.counts.copy_(torch.randint(0, 3, (3, V)) * (torch.rand(3, V) < 0.1))
        ours.seen.copy_((torch.rand(3, V) < 0.1).to(torch.uint8))
        ours.bias.copy_(torch.where(torch.rand(3, V) < 0.2, -math.inf, torch.randn(3, V)))
        for name in ("counts", "seen", "bias"):
            getattr(theirs, name).copy_(getattr(ours, name))
        token, logprob, ids, logprobs = ours.sample(z, p)
        want = REFERENCES["sample"](z, p, theirs.counts, theirs.seen, theirs.bias, vocab=V)
        assert token.tolist() == want[0].tolist()
        assert torch.equal(ours.counts, theirs.counts)
        torch.testing.assert_close(logprob, want[1], rtol=1e-5, atol=1e-5)
        for i, r in enumerate(rows):
            count = r[11] if r[0] & Flag.LOGPROBS else 0
            assert ids[i, :count].tolist() == want[2][i, :count].tolist()
            torch.testing.assert_close(logprobs[i, :count], want[3][i, :count], rtol=1e-5, atol=1e-5)
            assert bool((ids[i, count:] == -1).all())
            assert logprobs[i].isfinite().all()


def test_ids_beyond_the_vocabulary_never_win(isa: str) -> None:
    z = torch.zeros(2, V + 61)
    z[:, V:] = 1e9
    state = State(2)
    token = state.sample(z, params(row(temperature=5.0), row(Flag.VALID | Flag.GREEDY)))[0]
    assert bool((token < V).all())


def test_rows_without_a_choice_are_safe(isa: str) -> None:
    z = torch.full((4, V), -math.inf)
    z[1] = math.nan
    z[2, 11] = math.inf
    z[3, 5] = 2.0
    flags = Flag.VALID | Flag.LOGPROBS | Flag.PENALTIES
    for extra in (Flag(0), Flag.GREEDY, Flag.FILTERS):
        state = State(4)
        token, logprob, ids, logprobs = state.sample(z, params(*[row(flags | extra, top_p=0.5, logprobs=3)] * 4))
        assert token.tolist() == [-1, -1, 11, 5]
        assert logprob.isfinite().all() and logprobs.isfinite().all()
        assert float(logprob[2]) == 0.0 and float(logprob[3]) == 0.0
        assert ids[0].tolist() == [-1] * 20 and ids[3, :2].tolist() == [5, -1]
        assert int(state.counts.sum()) == 2


def test_state_outside_the_slots_is_never_touched(isa: str) -> None:
    z = torch.randn(2, V)
    state = State(2)
    p = params(row(Flag.VALID | Flag.PENALTIES | Flag.BIAS, slot=3), row(Flag.VALID | Flag.PENALTIES, slot=-1))
    token = state.sample(z, p)[0]
    assert torch.equal(token, State(2).sample(z, params(row(), row()))[0])
    assert not state.counts.any()


def test_a_draw_follows_the_distribution(isa: str) -> None:
    """Chi-squared over 4,000 positions of one row: far tails would fail at p < 1e-6."""
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    z = probabilities.log().expand(4000, 4).contiguous()
    p = params(*[row(position=i) for i in range(4000)])
    index = gumbel_argmax(z, p)[1]
    observed = torch.bincount(index, minlength=4).double()
    chi = float(((observed - 4000 * probabilities) ** 2 / (4000 * probabilities)).sum())
    assert chi < 31.0


def test_batch_and_threads_change_no_token(isa: str) -> None:
    z = torch.randn(6, 30_000)
    p = params(*[row(Flag.VALID | (Flag.FILTERS if s % 2 else 0), seed=s, top_p=0.9) for s in range(6)])
    whole = State(6, 30_000).sample(z, p)[0].clone()
    for i in range(6):
        assert torch.equal(State(1, 30_000).sample(z[i : i + 1], p[i : i + 1])[0], whole[i : i + 1])
    before = _cpu.threads()
    try:
        _cpu.set_threads(3)
        assert torch.equal(State(6, 30_000).sample(z, p)[0], whole)
    finally:
        _cpu.set_threads(before)


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"temper: .*params"):
        K.get("cpu.temper").fn(torch.zeros(2, 4), params(row()), out=torch.empty(2, 4))
    with pytest.raises(ValueError, match="argmax"):
        K.get("cpu.argmax").fn(torch.zeros(2, 4).bfloat16(), out=(torch.empty(2), torch.empty(2, dtype=torch.int32)))
    state = State(1)
    state.bias = state.bias.double()
    with pytest.raises(ValueError, match=r"sample: .*bias float64"):
        state.sample(torch.zeros(1, V), params(row()))
    with pytest.raises(ValueError, match="merge_argmax"):
        K.get("cpu.merge_argmax").fn(torch.zeros(2), torch.zeros(2), out=(torch.empty(2), torch.empty(2)))
