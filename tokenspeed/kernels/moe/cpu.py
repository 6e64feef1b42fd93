"""experts on CPU: rows grouped by expert, each group through the packed matrices of its expert.

Invariant: a row's result depends on that row alone. The matrix kernel gives each row the same bits in any group, and a row
adds up its experts in ascending order, in float32, however many rows share them. An expert that no row picked costs
nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tokenspeed.ir.ops.moe import gated
from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.formats import DENSE
from tokenspeed.kernels.gemm.cpu import linear
from tokenspeed.kernels.packing import PackedWeight, pack
from tokenspeed.kernels.pointwise.cpu import SILU_MUL, binary
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority
from tokenspeed.kernels.weights import QuantStack

Stack = tuple[PackedWeight, ...]  # an expert each

_stacks: WeakIdKeyDictionary = WeakIdKeyDictionary()


def pack_stack(weight: Tensor | QuantStack) -> Stack:
    """Packs [E, N, K], an expert at a time; the same weight object gives the same stack."""
    known = _stacks.get(weight)
    if known is None:
        known = _stacks[weight] = tuple(pack(w) for w in weight.unbind())
    return known


def experts(
    x: Tensor, ids: Tensor, shares: Tensor, w13: Stack, w2: Stack, b13: Tensor | None = None, b2: Tensor | None = None, *,
    offset: int = 0, alpha: float = 0.0, limit: float = 0.0, out: Tensor,
) -> None:  # fmt: skip
    """x f32|bf16 [T, H], ids i32 [T, K], shares f32 [T, K], w13 packed [2F, H] an expert (gate, then up), w2 packed
    [H, F], biases b13 [E, 2F] and b2 [E, H]; out [T, H] of x's dtype. ids outside offset .. offset + E are another rank's.
    alpha and limit as of the op; limit 0: silu(gate) * up."""
    rows, width = x.shape
    inner = w2[0].k
    fits = w13[0].k == w2[0].n == width and w13[0].n == 2 * inner and ids.shape == shares.shape and ids.shape[0] == rows
    if not fits or out.shape != x.shape or out.dtype != x.dtype or x.dtype not in CODE:
        raise fail("experts", x=x, ids=ids, shares=shares, w13=f"packed [{w13[0].n}, {w13[0].k}]",
                   w2=f"packed [{w2[0].n}, {w2[0].k}]", out=out)  # fmt: skip
    local = ids.flatten() - offset
    order = local.argsort(stable=True)
    token = order // ids.shape[1]
    share = shares.flatten()[order, None]
    ends = torch.searchsorted(local[order], torch.arange(len(w13) + 1, dtype=local.dtype)).tolist()
    total = torch.zeros(rows, width)
    for e, (up, down, start, end) in enumerate(zip(w13, w2, ends, ends[1:])):
        if start == end:
            continue
        mine = token[start:end]
        wide = x.new_empty(end - start, 2 * inner)
        linear(x[mine], up, None if b13 is None else b13[e], out=wide)
        gate = wide[:, :inner]
        if limit:
            gate.copy_(gated(gate, wide[:, inner:], alpha, limit))
        else:
            binary(SILU_MUL, gate, wide[:, inner:], gate)
        y = torch.empty(end - start, width)
        linear(gate, down, None if b2 is None else b2[e], out=y)
        total.index_add_(0, mine, y.mul_(share[start:end]))
    out.copy_(total)


def register(registry: Registry, capability: Capability) -> None:
    registry.register(
        KernelSpec(
            name="cpu.experts",
            op="experts",
            solution="cpu",
            fn=experts,
            pack=pack_stack,
            signatures=tuple(
                {"x": frozenset({name}), "w": frozenset({name, "mxfp4", "int4_32"}), "out": frozenset({name})}
                for name in DENSE
            ),
            priority=Priority.PERFORMANT,
            capability=capability,
            tags=frozenset({"determinism", "throughput"}),
            summary="rows grouped by expert, each group through its packed matrices",
        )
    )
