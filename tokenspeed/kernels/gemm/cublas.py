"""linear on GPU through torch and cuBLAS, for dense weights. Invariant: the product is written straight into `out`, so a
captured graph holds one GEMM and allocates nothing; sums are float32 throughout.

torch may sum the parts of a split product in bfloat16 and multiply float32 in tf32; both are off from the first call on.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tokenspeed.kernels.arguments import fail
from tokenspeed.kernels.launch import is_ahead


@functools.cache
def _float32_sums() -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    """x f32|bf16 [T, K] (or [T, ...] flattened), w [N, K] of x's dtype, bias [N] or None; out [T, N], x's dtype or f32."""
    _float32_sums()
    x = x.flatten(1) if x.dim() != 2 else x
    y = out if out.dim() == 2 else out.view(out.shape[0], -1)
    if x.dtype != w.dtype or y.shape != (x.shape[0], w.shape[0]) or x.shape[1] != w.shape[1]:
        raise fail("linear", x=x, w=w, out=out)
    if y.dtype != x.dtype and not (y.dtype == torch.float32 and x.device.type != "cpu"):
        raise fail("linear", x=x, w=w, out=out)
    if is_ahead():
        return
    if y.dtype == x.dtype:
        torch.mm(x, w.t(), out=y)
    else:
        torch.mm(x, w.t(), out_dtype=torch.float32, out=y)
    if bias is not None:
        y.add_(bias)
