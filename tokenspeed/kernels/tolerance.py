"""How far a kernel's result may lie from the op's reference, by family. Invariant: a bound follows from the arithmetic
(the roundoff of the output's dtype, and growth with the number of terms), never from what a kernel happens to give.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.kernels.ops import op_of

ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|got - want| <= absolute * scale + relative * |want|, where scale is the largest |want| of the row."""

    relative: float
    absolute: float

    def excess(self, got: Tensor, want: Tensor) -> float:
        """The largest error as a multiple of what is allowed: at most 1 if the kernel is right. NaN must meet NaN."""
        got, want = got.double(), want.double()
        if not torch.equal(got.isnan(), want.isnan()):
            return float("inf")
        finite = ~want.isnan()
        if not bool(finite.any()):
            return 0.0
        clean = torch.where(finite, want, 0.0)
        scale = clean.abs().amax(-1, keepdim=True)
        allowed = self.absolute * scale + self.relative * clean.abs() + 1e-30
        return float(torch.where(finite, (got - want).abs() / allowed, 0.0).max())


def tolerance(op: str, dtype: torch.dtype, *, terms: int = 1) -> Tolerance:
    """The bound of `op`'s family for an output of `dtype`; `terms` is the length of the sum behind one output.

    Row moves and collectives of one term are exact up to a conversion. `linear` has its own bound: see linear_allowed.
    """
    unit = ROUNDOFF[dtype]
    family = op_of(op).family
    if family == "gemm":
        raise ValueError("the error of a product scales with its operands: use linear_allowed(x, w, ...)")
    if op == "norm_rope_append":  # where the norm rounds the other way, both terms of a rotation may
        return Tolerance(7 * unit, 4 * unit)
    if family in ("rows", "embedding", "comm"):
        return Tolerance(unit, 0.0)
    if family == "attention":
        return Tolerance(2 * unit, 2 * unit + 16 * 2.0**-24 * terms**0.5)
    if family == "sampling":
        return Tolerance(4 * 2.0**-24, 0.0)
    if family == "norm":  # two roundings in a row: where the first falls the other way, the second may too
        return Tolerance(4 * unit, 4 * 2.0**-24 * terms**0.5)
    return Tolerance(3 * unit, 4 * 2.0**-24 * terms**0.5)  # rope, activation, pointwise


def linear_allowed(x: Tensor, w: Tensor, want: Tensor, dtype: torch.dtype, *, int8: bool = False) -> Tensor:
    """Allowed |error| f64 [T, N] of x [T, K] @ w [N, K]^T (+ bias) in `dtype`, for float32 accumulation.

    The probabilistic bound of a sum (Higham and Mary, SIAM J. Sci. Comput. 2019): sqrt(K) u sum |x||w|. int8: each
    activation was rounded to a step of its block's largest / 127, an error uniform within half a step; six sigma of it.
    """
    x, w = x.double(), w.double()
    allowed = 2.0**-24 * x.shape[1] ** 0.5 * (x.abs() @ w.abs().t()) + 2 * ROUNDOFF[dtype] * want.double().abs()
    if int8 and x.numel():
        step = x.abs().amax(1, keepdim=True) / 127
        allowed = allowed + 6 / 12**0.5 * step * w.norm(dim=1)
    return allowed + 1e-30
