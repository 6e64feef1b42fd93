"""lookup on CPU: rows of an embedding table by token id, from a plain or a packed (tied, quantised) table."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed import _cpu
from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.formats import DENSE, QUANTISED
from tokenspeed.kernels.packing import PackedWeight, pack
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority


def lookup(ids: Tensor, w: Tensor | PackedWeight, *, offset: int = 0, out: Tensor) -> None:
    """ids i32 [T]; w holds the rows of ids offset.. ; out f32|bf16 [T, H]. An id that w does not hold gives zeros."""
    if isinstance(w, PackedWeight):
        rows, width, pointer, ldw, packed, layout = w.n, w.k, w.pointer, 0, True, w.layout
    else:
        rows, width = w.shape
        pointer, ldw, packed, layout = w.data_ptr(), w.stride(0), False, CODE.get(w.dtype, -1)
        if w.stride(1) != 1 and width != 1:
            raise fail("lookup", ids=ids, w=w, out=out)
    t = ids.shape[0]
    kind = CODE.get(out.dtype, -1)
    if ids.dtype != torch.int32 or not ids.is_contiguous() or out.shape != (t, width) or kind < 0 or layout < 0:
        raise fail("lookup", ids=ids, w=w, out=out)
    if out.stride(1) != 1 and width != 1:
        raise fail("lookup", out=out)
    _cpu.lookup(
        ids.data_ptr(), t, rows, width, offset, pointer, ldw, packed, layout, out.data_ptr(), out.stride(0), kind
    )


def register(registry: Registry, capability: Capability) -> None:
    registry.register(
        KernelSpec(
            name="cpu.lookup",
            op="lookup",
            solution="cpu",
            fn=lookup,
            pack=pack,
            signatures=({"w": DENSE | QUANTISED, "out": DENSE},),
            priority=Priority.PERFORMANT,
            capability=capability,
            native=True,
            tags=frozenset({"determinism"}),
            summary="gathers rows of a packed table, dequantising on the way; shares a tied head's packed weight",
        )
    )
