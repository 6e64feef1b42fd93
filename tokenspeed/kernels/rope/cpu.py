"""rope on CPU, the NeoX arrangement: the first R dimensions rotate in halves. Invariant: float32 arithmetic, rounded
once; a vector is read before it is written, so `out` may be `x`."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed import _cpu
from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.formats import DENSE
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority

_rope = _cpu.rope


def rope(x: Tensor, pos: Tensor, table: Tensor, *, out: Tensor) -> None:
    """x, out f32|bf16 [T, (n,) D]; pos i32 [T] (negative: the row is copied); table f32 [P, R]: cos R/2 | sin R/2."""
    if x.dim() == out.dim() == 2:
        x, out = x[:, None], out[:, None]
    t, n, d = x.shape
    xs, os, ts = x.stride(), out.stride(), table.stride()
    r = table.shape[1]
    kind = CODE.get(x.dtype, -1)
    if out.shape != x.shape or out.dtype != x.dtype or kind < 0 or xs[2] != 1 or os[2] != 1 or r > d or r % 2:
        raise fail("rope", x=x, pos=pos, table=table, out=out)
    if pos.shape[0] != t or pos.dtype != torch.int32 or table.dtype != torch.float32 or ts[1] != 1:
        raise fail("rope", x=x, pos=pos, table=table, out=out)
    if not pos.is_contiguous():
        raise fail("rope", pos=pos)
    _rope(
        x.data_ptr(), xs[0], xs[1], pos.data_ptr(), table.data_ptr(), ts[0], out.data_ptr(), os[0], os[1], t, n, d, r,
        kind,
    )  # fmt: skip


def register(registry: Registry, capability: Capability) -> None:
    registry.register(
        KernelSpec(
            name="cpu.rope",
            op="rope",
            solution="cpu",
            fn=rope,
            signatures=tuple({"x": frozenset({name}), "out": frozenset({name})} for name in DENSE),
            priority=Priority.PERFORMANT,
            capability=capability,
            native=True,
            tags=frozenset({"determinism"}),
        )
    )
