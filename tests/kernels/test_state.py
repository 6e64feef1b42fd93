"""Recurrent layers on every instruction set: against the references, the references against transformers' own functions,
and the promise that a row's bits depend on its request's rows before it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.support import DTYPES, poisoned, strided
from tokenspeed import kernels as K
from tokenspeed.ir.ops import REFERENCES

STATES, N, HK, DK, DV, TAPS = 7, 6, 2, 24, 40, 4

#: (request row, tokens, first position), side by side; -1 is a run of holes
STEP = [(2, 5, 0), (0, 1, 9), (3, 3, 4), (-1, 2, -1), (1, 1, 0), (4, 2, 0)]
SLOTS = torch.tensor([3, 0, 5, 1, -1], dtype=torch.int32)  # of request rows; 4 has none


def step(parts: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    """pos, row of a step."""
    pos = [p + i if r >= 0 else -1 for r, n, p in parts for i in range(n)]
    return torch.tensor(pos, dtype=torch.int32), torch.tensor(
        [r for r, n, _ in parts for _ in range(n)], dtype=torch.int32
    )


def conv_inputs(t: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(t, N, DV).to(dtype), torch.randn(N, DV, TAPS), torch.randn(STATES, TAPS - 1, N, DV).to(dtype)]


def delta_inputs(t: int, dtype: torch.dtype) -> list[Tensor]:
    q, k = (torch.nn.functional.normalize(torch.randn(t, HK, DK), dim=-1) for _ in range(2))
    gates = [-torch.rand(t, N), torch.rand(t, N).to(dtype)]
    return [q, k, torch.randn(t, N, DV).to(dtype), *gates, torch.randn(STATES, N, DK, DV) / 4]


MADE = {"causal_conv": (conv_inputs, {}), "delta_rule": (delta_inputs, {"scale": DK**-0.5})}


def run(op: str, values: list[Tensor], cache: Tensor, pos: Tensor, row: Tensor, slots: Tensor = SLOTS) -> Tensor:
    v = values[0 if op == "causal_conv" else 2]
    out = poisoned(*v.shape, dtype=v.dtype)
    K.get(f"cpu.{op}").fn(*values, cache, pos, row, slots, out=out, **MADE[op][1])
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", list(MADE))
def test_a_step_goes_on_from_its_states_and_leaves_them(isa: str, dtype: torch.dtype, op: str) -> None:
    pos, row = step(STEP)
    *values, cache = MADE[op][0](len(pos), dtype)
    mine, exact = cache.clone(), cache.double()
    got = run(op, [strided(v) if v.dim() == 3 and len(v) == len(pos) else v for v in values], mine, pos, row)
    want = REFERENCES[op](*(v.double() for v in values), exact, pos, row, SLOTS, **MADE[op][1])
    bound = 3e-6 if dtype == torch.float32 else 0.02
    assert torch.allclose(got.double(), want, rtol=bound, atol=bound * float(want.abs().max()))
    assert torch.allclose(mine.double(), exact, rtol=bound, atol=bound * float(exact.abs().max()))
    holes = (row < 0) | (row == 4)
    assert torch.equal(got[holes], torch.zeros_like(got[holes])) and bool(got[~holes].any())
    untouched = [s for s in range(STATES) if s not in SLOTS.tolist()]
    assert torch.equal(mine[untouched], cache[untouched])


@pytest.mark.parametrize("op", list(MADE))
def test_chunks_batches_and_threads_give_the_same_bits(isa: str, op: str) -> None:
    from tokenspeed import _cpu

    pos, row = step([(0, 23, 0)])
    *values, cache = MADE[op][0](23, torch.float32)
    each = [len(v) == 23 for v in values]
    whole, states = cache.clone(), []
    want = run(op, values, whole, pos, row)
    for cuts in ([7, 1, 15], [1] * 23):
        mine, got, at = torch.full_like(cache, float("nan")), [], 0
        for n in cuts:  # beside another request's rows, whose state must not matter
            here, beside = (
                [v[at : at + n] if e else v for v, e in zip(values, each)],
                MADE[op][0](2, torch.float32)[:-1],
            )
            both = [torch.cat([b, h]) if e else h for h, b, e in zip(here, beside, each)]
            p, r = step([(1, 2, 0), (0, n, at)])
            got.append(run(op, both, mine, p, r)[2:])
            at += n
        assert torch.equal(torch.cat(got), want)
        states.append(mine[3])
    assert all(torch.equal(s, whole[3]) for s in states)
    threads = _cpu.threads()
    try:
        _cpu.set_threads(3)
        alone = cache.clone()
        assert torch.equal(run(op, values, alone, pos, row), want) and torch.equal(alone, whole)
    finally:
        _cpu.set_threads(threads)


def test_references_are_those_of_transformers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    t, one = 9, torch.zeros(9, dtype=torch.int32)
    pos, slot = torch.arange(t, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    q, k, v = torch.randn(t, HK, DK), torch.randn(t, HK, DK), torch.randn(t, N, DV)
    x, a, dt, b = torch.randn(t, N), torch.randn(N), torch.randn(N), torch.randn(t, N).sigmoid()
    decay = REFERENCES["decay"](x, a, dt)
    normed = [REFERENCES["l2_norm"](y, eps=1e-6) for y in (q, k)]
    memory = torch.full((1, N, DK, DV), float("nan"))
    got = REFERENCES["delta_rule"](*normed, v, decay, b, memory, pos, one, slot, scale=DK**-0.5)
    g = -a.exp() * torch.nn.functional.softplus(x + dt)
    want, last = hf.torch_chunk_gated_delta_rule(
        q[None], k[None], v[None], g=g[None], beta=b[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert torch.allclose(got, want[0], atol=1e-5) and torch.allclose(memory, last, atol=1e-5)

    w, past = torch.randn(N, DV, TAPS), torch.full((1, TAPS - 1, N, DV), float("nan"))
    got = REFERENCES["causal_conv"](v, w, past, pos, one, slot)
    want = hf.causal_conv1d_fn(v.flatten(1).T[None], w.flatten(0, 1), activation="silu")[0].T
    assert torch.allclose(got.flatten(1), want, atol=1e-6) and torch.equal(past[0], v[-3:])

    norm = hf.Qwen3NextRMSNormGated(DV, eps=1e-5)
    norm.weight.data.normal_()
    z = torch.randn_like(v)
    assert torch.allclose(REFERENCES["gated_rms_norm"](v, z, norm.weight, eps=1e-5), norm(v, z), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["decay", "l2_norm", "gated_rms_norm"])
def test_rowwise_kernels_equal_their_references(isa: str, dtype: torch.dtype, op: str) -> None:
    x = strided((3 * torch.randn(5, N, DV)).to(dtype))
    more: dict[str, Any] = {"eps": 1e-5}
    ins = [x]
    if op == "gated_rms_norm":
        ins += [torch.randn(5, N, DV).to(dtype), torch.randn(DV).to(dtype)]
    if op == "decay":
        ins, more = [8 * torch.randn(5, N).to(dtype), torch.randn(N), torch.randn(N)], {}
    out = poisoned(*ins[0].shape, dtype=dtype if op == "gated_rms_norm" else torch.float32)
    K.get(f"cpu.{op}").fn(*ins, out=out, **more)
    want = REFERENCES[op](*ins, **more)
    bound = 0.02 if dtype == torch.bfloat16 and op == "gated_rms_norm" else 3e-6
    assert out.dtype == want.dtype and torch.allclose(out.double(), want.double(), rtol=bound, atol=bound)


def test_arguments_that_do_not_fit_are_refused() -> None:
    pos, row = step(STEP)
    *values, cache = conv_inputs(len(pos), torch.float32)
    with pytest.raises(ValueError, match="causal_conv: these arguments do not fit"):
        run("causal_conv", values, cache[:, :2], pos, row)
    with pytest.raises(ValueError, match="causal_conv: these arguments do not fit"):
        run("causal_conv", values, cache, pos[:-1], row)
    *values, cache = delta_inputs(len(pos), torch.float32)
    with pytest.raises(ValueError, match="delta_rule: these arguments do not fit"):
        run("delta_rule", values, cache.bfloat16(), pos, row)
