"""RMS norm on GPU by CuTe DSL: what the registry calls. Rows of whole contiguous vectors in bfloat16; any other call is the
Triton kernel's."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.kernels import cute
from tokenspeed.kernels.launch import is_ahead
from tokenspeed.kernels.norm import triton as portable

VECTOR = 8  # values of 16 bytes


def threads_of(width: int) -> int:
    """Threads a row of `width` values is dealt to in whole vectors: the most up to 512; 0 where it cannot be."""
    return max((t for t in range(32, 513, 32) if width % (t * VECTOR) == 0), default=0)


def rms_norm(x: Tensor, w: Tensor, *, eps: float, out: Tensor) -> None:
    """As norm.triton.rms_norm."""
    if not _takes(x, w, out) or out.shape != x.shape:
        portable.rms_norm(x, w, eps=eps, out=out)
        return
    _run(x, x, w, x, out, eps, 0)


def add_rms_norm(x: Tensor, y: Tensor, w: Tensor, *, eps: float, out: tuple[Tensor, Tensor]) -> None:
    """As norm.triton.add_rms_norm."""
    total, normed = out
    if not _takes(x, w, y, total, normed) or not x.shape == y.shape == total.shape == normed.shape:
        portable.add_rms_norm(x, y, w, eps=eps, out=out)
        return
    _run(x, y, w, total, normed, eps, 1)


def _takes(x: Tensor, w: Tensor, *rows: Tensor) -> bool:
    every = (x, w, *rows)
    return (
        x.is_cuda and x.dim() == 2 and 0 < x.shape[1] <= 8192 and threads_of(x.shape[1]) > 0
        and w.shape == x.shape[1:]
        and all(a.dtype == torch.bfloat16 and a.is_contiguous() and a.data_ptr() % 16 == 0 for a in every)
    )  # fmt: skip


def _run(x: Tensor, y: Tensor, w: Tensor, total: Tensor, normed: Tensor, eps: float, add: int) -> None:
    width = x.shape[1]
    if is_ahead():
        cute.load("rms", (width, add), x.device)
    elif x.shape[0]:
        cute.launch("rms", (width, add), x.shape[0], threads_of(width), x, y, w, total, normed, eps)
