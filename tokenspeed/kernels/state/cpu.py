"""Recurrent layers on CPU: causal convolution and gated delta rule over state slots, decay, l2 norm, gated RMS norm.

Invariant: a request's rows lie side by side and in order, as every plan has them; what a row gives depends on its request's
rows before it alone, not on the batch, the chunking of its prompt or the number of threads. A hole touches no state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed import _cpu
from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.elementwise import register_cpu, register_elementwise
from tokenspeed.kernels.formats import DENSE
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability

MAX_TAPS = 8  # csrc/types.h kMaxTaps
F32 = frozenset({"float32"})


def _segments(
    op: str, t: int, cache: Tensor, pos: Tensor, row: Tensor, state: Tensor
) -> tuple[int, int, int, int, int]:
    """The first arguments of a kernel that carries a state."""
    good = pos.dtype == row.dtype == state.dtype == torch.int32 and pos.shape == row.shape == (t,)
    if not (good and cache.is_contiguous() and pos.is_contiguous() and row.is_contiguous() and state.is_contiguous()):
        raise fail(op, cache=cache, pos=pos, row=row, state=state)
    return pos.data_ptr(), row.data_ptr(), state.data_ptr(), t, cache.shape[0]


def causal_conv(x: Tensor, w: Tensor, past: Tensor, pos: Tensor, row: Tensor, state: Tensor, *, out: Tensor) -> None:
    """x, out f32|bf16 [T, n, D]; w f32|bf16 [n * D, K] (or [n, D, K]), 2 to 8 taps; past [states, K - 1, n, D] of x's dtype;
    pos, row i32 [T]; state i32 [S]."""
    t, n, d = x.shape
    taps, kind, weight = past.shape[1] + 1, CODE.get(x.dtype, -1), CODE.get(w.dtype, -1)
    fits = past.shape[2:] == (n, d) and w.numel() == n * d * taps and w.is_contiguous() and 2 <= taps <= MAX_TAPS
    if not fits or kind < 0 or weight < 0 or not x.dtype == past.dtype == out.dtype or out.shape != x.shape:
        raise fail("causal_conv", x=x, w=w, past=past, out=out)
    xs, os = x.stride(), out.stride()
    if xs[2] != 1 or os[2] != 1:
        raise fail("causal_conv", x=x, out=out)
    _cpu.conv(
        *_segments("causal_conv", t, past, pos, row, state), x.data_ptr(), xs[0], xs[1], w.data_ptr(), weight,
        past.data_ptr(), out.data_ptr(), os[0], os[1], n, d, taps, kind,
    )  # fmt: skip


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, pos: Tensor, row: Tensor, state: Tensor,
    *, scale: float, out: Tensor,
) -> None:  # fmt: skip
    """q, k f32 [T, hk, dk]; v, out f32|bf16 [T, hv, dv]; decay f32, beta of v's dtype [T, hv]; memory f32
    [states, hv, dk, dv]; pos, row i32 [T]; state i32 [S]."""
    (t, hk, dk), (_, hv, dv) = q.shape, v.shape
    kind = CODE.get(v.dtype, -1)
    fits = k.shape == q.shape and v.shape[0] == t and out.shape == v.shape and memory.shape[1:] == (hv, dk, dv)
    if not fits or hv % hk or decay.shape != (t, hv) or beta.shape != (t, hv) or kind < 0:
        raise fail("delta_rule", q=q, k=k, v=v, decay=decay, beta=beta, memory=memory, out=out)
    wide = q.dtype == k.dtype == decay.dtype == memory.dtype == torch.float32
    qs, ks, vs, gs, bs, os = (x.stride() for x in (q, k, v, decay, beta, out))
    inner = qs[2] == ks[2] == vs[2] == os[2] == 1 and (hv == 1 or gs[1] == bs[1] == 1)
    if not wide or not inner or not v.dtype == beta.dtype == out.dtype:
        raise fail("delta_rule", q=q, k=k, v=v, decay=decay, beta=beta, memory=memory, out=out)
    _cpu.delta(
        *_segments("delta_rule", t, memory, pos, row, state), q.data_ptr(), qs[0], qs[1], k.data_ptr(), ks[0], ks[1],
        v.data_ptr(), vs[0], vs[1], decay.data_ptr(), gs[0], beta.data_ptr(), bs[0], memory.data_ptr(), out.data_ptr(),
        os[0], os[1], hk, hv, dk, dv, scale, kind,
    )  # fmt: skip


def decay(x: Tensor, a: Tensor, dt: Tensor, *, out: Tensor) -> None:
    """x f32|bf16 [T, n]; a, dt f32 [n]; out f32 [T, n]."""
    kind, (t, n) = CODE.get(x.dtype, -1), x.shape
    vectors = a.shape == dt.shape == (n,) and a.is_contiguous() and dt.is_contiguous()
    wide = a.dtype == dt.dtype == out.dtype == torch.float32
    if kind < 0 or not vectors or not wide or out.shape != x.shape or (n > 1 and not x.stride(1) == out.stride(1) == 1):
        raise fail("decay", x=x, a=a, dt=dt, out=out)
    _cpu.decay(x.data_ptr(), x.stride(0), a.data_ptr(), dt.data_ptr(), out.data_ptr(), out.stride(0), t, n, kind)


def l2_norm(x: Tensor, *, eps: float, out: Tensor) -> None:
    """x f32|bf16 [T, n, D]; out f32 [T, n, D]."""
    kind, xs, os = CODE.get(x.dtype, -1), x.stride(), out.stride()
    if kind < 0 or out.dtype != torch.float32 or out.shape != x.shape or xs[2] != 1 or os[2] != 1:
        raise fail("l2_norm", x=x, out=out)
    t, n, d = x.shape
    _cpu.l2_norm(x.data_ptr(), xs[0], xs[1], out.data_ptr(), os[0], os[1], t, n, d, eps, kind)


def gated_rms_norm(x: Tensor, z: Tensor, w: Tensor, *, eps: float, out: Tensor) -> None:
    """x, z, out f32|bf16 [T, n, D]; w f32|bf16 [D]; out may be x."""
    kind, weight = CODE.get(x.dtype, -1), CODE.get(w.dtype, -1)
    fits = x.shape == z.shape == out.shape and w.shape == x.shape[-1:] and x.dtype == z.dtype == out.dtype
    xs, zs, os = x.stride(), z.stride(), out.stride()
    if kind < 0 or weight < 0 or not fits or not xs[2] == zs[2] == os[2] == 1 or not w.is_contiguous():
        raise fail("gated_rms_norm", x=x, z=z, w=w, out=out)
    t, n, d = x.shape
    _cpu.gated_norm(
        x.data_ptr(), xs[0], xs[1], z.data_ptr(), zs[0], zs[1], w.data_ptr(), weight, out.data_ptr(), os[0], os[1],
        t, n, d, eps, kind,
    )  # fmt: skip


def register(registry: Registry, capability: Capability) -> None:
    register_elementwise(registry, capability, (("gated_rms_norm", gated_rms_norm),), w=DENSE)
    narrow = tuple({"x": frozenset({name}), "cache": frozenset({name}), "out": frozenset({name})} for name in DENSE)
    for op, fn, signatures, summary in (
        ("causal_conv", causal_conv, tuple(s | {"w": DENSE} for s in narrow), "a channel's taps in registers"),
        ("delta_rule", delta_rule, ({"x": F32, "cache": F32, "out": DENSE},), "32 columns of a head's state a walk"),
        ("decay", decay, ({"x": DENSE, "w": F32, "out": F32},), ""),
        ("l2_norm", l2_norm, ({"x": DENSE, "out": F32},), ""),
    ):
        register_cpu(registry, capability, op, fn, signatures, summary=summary)
