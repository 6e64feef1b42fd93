"""Shared by the kernel tests: weights of every format with their dequantised values from the gguf package (an
independent oracle), poisoned strided tensors, and float64 Gumbel noise."""

from __future__ import annotations

import gguf
import gguf.quants
import numpy as np
import torch
from torch import Tensor

from tokenspeed.ir.ops import REFERENCES
from tokenspeed.kernels import QuantWeight, register_references
from tokenspeed.kernels.ops import OPS
from tokenspeed.kernels.tolerance import ROUNDOFF

register_references({op: fn for op, fn in REFERENCES.items() if op in OPS})

QUANT_FORMATS = ("q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k")
DTYPES = (torch.float32, torch.bfloat16)


def quantised(fmt: str, n: int, k: int, seed: int = 0) -> tuple[QuantWeight, Tensor]:
    """A random [n, k] weight of `fmt` and its float32 values according to gguf."""
    rng = np.random.default_rng(seed)
    kind = getattr(gguf.GGMLQuantizationType, fmt.upper())
    if fmt in ("q4_k", "q6_k"):  # gguf cannot quantise these: random codes and scales, small float16 super-scales
        block, halves = {"q4_k": (144, (0, 2)), "q6_k": (210, (208,))}[fmt]
        raw = rng.integers(0, 256, (n, k // 256, block), dtype=np.uint8)
        for at in halves:
            raw[:, :, at : at + 2] = rng.uniform(0.001, 0.01, (n, k // 256, 1)).astype(np.float16).view(np.uint8)
        raw = raw.reshape(n, -1)
    else:
        raw = gguf.quants.quantize(rng.standard_normal((n, k), dtype=np.float32), kind)
    values = gguf.quants.dequantize(raw, kind)
    return QuantWeight(torch.from_numpy(raw.copy()), fmt, (n, k)), torch.from_numpy(values.copy())


def strided(value: Tensor, spare: int = 5) -> Tensor:
    """`value` inside a wider buffer of NaN: the last dimension is contiguous, rows are not, neighbours are poison."""
    wide = torch.full((*value.shape[:-1], value.shape[-1] + spare), float("nan"), dtype=value.dtype)
    out = wide[..., : value.shape[-1]]
    out.copy_(value)
    return out


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """An output buffer full of NaN, as a column view of a wider one."""
    return strided(torch.full(shape, float("nan"), dtype=dtype))


def gelu_excess(op: str, got: Tensor, *ins: Tensor) -> float:
    """The largest error of gelu or gelu_mul as a multiple of what is allowed. Where a gate is far below zero its weight is
    small and known to an absolute error only: the bound is that of the operands' product."""
    want = REFERENCES[op](*(x.double() for x in ins))
    allowed = 4 * ROUNDOFF[got.dtype] * ins[0].double().abs() * (ins[1].double().abs() if len(ins) > 1 else 1.0) + 1e-30
    assert torch.equal(got.isnan(), want.isnan())
    return float(((got.double() - want).abs() / allowed).nan_to_num(0.0).max()) if got.numel() else 0.0


def _mulhilo(m: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of m * x, x in [0, 2^32) held in int64 (16-bit limbs: no overflow)."""
    m_hi, m_lo = m >> 16, m & 0xFFFF
    x_hi, x_lo = x >> 16, x & 0xFFFF
    low = m_lo * x_lo
    mid = m_hi * x_lo + (low >> 16)
    mid2 = m_lo * x_hi + (mid & 0xFFFF)
    return m_hi * x_hi + (mid >> 16) + (mid2 >> 16), ((mid2 & 0xFFFF) << 16) | (low & 0xFFFF)


def gumbel64(seed_lo: Tensor, seed_hi: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """f32 [S, V]: the noise of the contract, with both logarithms in float64 (in float32, u itself rounds to 1)."""
    mask = 0xFFFFFFFF
    c0 = (ids // 4)[None, :].expand(seed_lo.shape[0], -1) & mask
    c1 = (position.long() & mask)[:, None].expand_as(c0)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = (seed_lo.long() & mask)[:, None], (seed_hi.long() & mask)[:, None]
    for _ in range(10):
        h0, l0 = _mulhilo(0xD2511F53, c0)
        h1, l1 = _mulhilo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    words = torch.stack([c0, c1, c2, c3]).gather(0, (ids % 4)[None, None, :].expand(1, *c0.shape))[0]
    u = ((words >> 8).double() + 0.5) * 2.0**-24
    return (-torch.log(-torch.log(u))).float()
