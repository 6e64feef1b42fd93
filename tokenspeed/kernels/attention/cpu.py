"""Paged attention and KV append on CPU. Invariant: a token's result depends on its own request and position alone, not
on the batch, the chunking of its prompt, or the number of threads; a hole (row, position or slot -1) never touches the
cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed import _cpu
from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.formats import DENSE
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority

_append, _attend = _cpu.append, _cpu.attend


def append(k: Tensor, v: Tensor, slot: Tensor, kcache: Tensor, vcache: Tensor) -> None:
    """k, v f32|bf16 [T, KV, D] into slots slot i32 [T] of the caches f32|bf16 [slots, KV, D]; slot -1 is skipped."""
    t, kv, d = k.shape
    ks, vs, cs = k.stride(), v.stride(), kcache.stride()
    kind, cache = CODE.get(k.dtype, -1), CODE.get(kcache.dtype, -1)
    if v.shape != k.shape or v.dtype != k.dtype or kcache.shape[1:] != (kv, d) or vcache.shape != kcache.shape:
        raise fail("append", k=k, v=v, slot=slot, kcache=kcache, vcache=vcache)
    if kind < 0 or cache < 0 or vcache.dtype != kcache.dtype or vcache.stride() != cs or slot.dtype != torch.int32:
        raise fail("append", k=k, v=v, slot=slot, kcache=kcache, vcache=vcache)
    if not ks[2] == vs[2] == cs[2] == 1 or slot.shape != (t,) or not slot.is_contiguous():
        raise fail("append", k=k, v=v, slot=slot, kcache=kcache, vcache=vcache)
    _append(
        k.data_ptr(), ks[0], ks[1], v.data_ptr(), vs[0], vs[1], slot.data_ptr(), kcache.data_ptr(), vcache.data_ptr(),
        cs[0], cs[1], t, kv, d, kcache.shape[0], kind, cache,
    )  # fmt: skip


def attend(
    q: Tensor, kcache: Tensor, vcache: Tensor, pos: Tensor, row: Tensor, table: Tensor, sinks: Tensor | None = None,
    *, page: int, scale: float, window: int = 0, softcap: float = 0.0, out: Tensor,
) -> None:  # fmt: skip
    """q, out f32|bf16 [T, n, D]; caches f32|bf16 [slots, KV, D]; pos, row i32 [T]; table i32 [S, L]; sinks f32|bf16 [n].

    Token t attends positions 0..pos[t] of request row[t], of a `window` above 0 the last ones; position p lies in slot
    table[row, p // page] * page + p % page. A token with row -1 gets zeros. Softmax in float32, scores bent by a `softcap`
    above 0.
    """
    t, n, d = q.shape
    kv = kcache.shape[1]
    qs, os, cs, ts = q.stride(), out.stride(), kcache.stride(), table.stride()
    kind, cache = CODE.get(q.dtype, -1), CODE.get(kcache.dtype, -1)
    if out.shape != q.shape or out.dtype != q.dtype or kcache.shape[2] != d or vcache.shape != kcache.shape or n % kv:
        raise fail("attend", q=q, kcache=kcache, vcache=vcache, out=out)
    if kind < 0 or cache < 0 or vcache.dtype != kcache.dtype or vcache.stride() != cs or page < 1:
        raise fail("attend", q=q, kcache=kcache, vcache=vcache, page=page)
    if not (qs[2] == os[2] == cs[2] == 1 and (ts[1] == 1 or table.shape[1] == 1)):
        raise fail("attend", q=q, kcache=kcache, table=table, out=out)
    if not pos.dtype == row.dtype == table.dtype == torch.int32 or pos.shape != (t,) or row.shape != (t,):
        raise fail("attend", pos=pos, row=row, table=table)
    if not (pos.is_contiguous() and row.is_contiguous()):
        raise fail("attend", pos=pos, row=row)
    if sinks is not None and (sinks.shape != (n,) or sinks.dtype not in CODE or not sinks.is_contiguous()):
        raise fail("attend", q=q, sinks=sinks)
    _attend(
        q.data_ptr(), qs[0], qs[1], kcache.data_ptr(), vcache.data_ptr(), cs[0], cs[1], pos.data_ptr(), row.data_ptr(),
        table.data_ptr(), ts[0], out.data_ptr(), os[0], os[1], t, n, kv, d, page, scale, window, softcap,
        0 if sinks is None else sinks.data_ptr(), 0 if sinks is None else CODE[sinks.dtype], kind, cache,
    )  # fmt: skip


def register(registry: Registry, capability: Capability) -> None:
    registry.register(
        KernelSpec(
            name="cpu.append",
            op="append",
            solution="cpu",
            fn=append,
            signatures=({"x": DENSE, "cache": DENSE},),
            priority=Priority.PERFORMANT,
            capability=capability,
            native=True,
            tags=frozenset({"determinism"}),
        )
    )
    registry.register(
        KernelSpec(
            name="cpu.attend",
            op="attend",
            solution="cpu",
            fn=attend,
            signatures=tuple(
                {"x": frozenset({name}), "w": DENSE, "cache": DENSE, "out": frozenset({name})} for name in DENSE
            ),
            priority=Priority.PERFORMANT,
            capability=capability,
            native=True,
            tags=frozenset({"determinism", "latency", "throughput"}),
            summary="decode and prefill in one kernel: GQA packing, splits of 128 positions, float32 softmax",
        )
    )
