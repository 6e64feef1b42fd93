"""select_rows and fill on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed import _cpu
from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.elementwise import register_elementwise
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability


def select_rows(x: Tensor, idx: Tensor, *, offset: int = 0, out: Tensor) -> None:
    """out[s] = x[idx[s] - offset]; x, out f32|bf16 [T, H], [S, H]; idx i32 [S]. A row x does not hold gives zeros."""
    rows, width = x.shape
    s = idx.shape[0]
    kind = CODE.get(x.dtype, -1)
    if out.shape != (s, width) or out.dtype != x.dtype or kind < 0 or idx.dtype != torch.int32:
        raise fail("select_rows", x=x, idx=idx, out=out)
    if not idx.is_contiguous() or (width != 1 and (x.stride(1) != 1 or out.stride(1) != 1)):
        raise fail("select_rows", x=x, idx=idx, out=out)
    _cpu.lookup(
        idx.data_ptr(), s, rows, width, offset, x.data_ptr(), x.stride(0), False, kind, out.data_ptr(), out.stride(0),
        kind,
    )  # fmt: skip


def fill(z: Tensor, *, start: int, value: float, out: Tensor) -> None:
    """out = z with columns from `start` on set to `value`; out may be z itself. z, out [S, V]."""
    if out.shape != z.shape or out.dtype != z.dtype or start < 0:
        raise fail("fill", z=z, start=start, out=out)
    if out.data_ptr() != z.data_ptr():
        out[:, :start] = z[:, :start]
    if start < z.shape[1]:
        out[:, start:] = value


def register(registry: Registry, capability: Capability) -> None:
    register_elementwise(registry, capability, (("select_rows", select_rows),))
    register_elementwise(registry, capability, (("fill", fill),), native=False)
