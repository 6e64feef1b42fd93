"""A reduction between ranks, the residual add behind it and the norm of the sum, as one kernel.

Invariant: the same bits as the three kernels one after the other. The sum is reduced into the place of the residual
stream's next value, so the reduced branch is never stored by itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenspeed.kernels.comm.distributed import all_reduce, reduce_scatter
from tokenspeed.kernels.formats import DENSE
from tokenspeed.kernels.norm.cpu import add_rms_norm
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority


def all_reduce_add_rms_norm(
    x: Tensor, b: Tensor, w: Tensor, *, eps: float, group: Any = None, out: tuple[Tensor, Tensor]
) -> None:
    """x, b f32|bf16 [T, D] -> (x + the sum of b over the ranks, its rms_norm weighed by w)."""
    all_reduce(b, group=group, out=out[0])
    add_rms_norm(x, out[0], w, eps=eps, out=out)


def reduce_scatter_add_rms_norm(
    x: Tensor, b: Tensor, w: Tensor, *, eps: float, group: Any = None, dim: int = 0, outer: int = 1,
    out: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """The same on this rank's rows: x [T / ranks, D], b [T, D]."""
    reduce_scatter(b, group=group, dim=dim, outer=outer, out=out[0])
    add_rms_norm(x, out[0], w, eps=eps, out=out)


def register(registry: Registry, capability: Capability) -> None:
    signatures = tuple({"x": frozenset({f}), "w": DENSE, "out": frozenset({f})} for f in sorted(DENSE))
    for op, fn in (
        ("all_reduce_add_rms_norm", all_reduce_add_rms_norm),
        ("reduce_scatter_add_rms_norm", reduce_scatter_add_rms_norm),
    ):
        registry.register(
            KernelSpec(
                name=f"gloo.{op}", op=op, solution="gloo", fn=fn, signatures=signatures,
                priority=Priority.PORTABLE, capability=capability, tags=frozenset({"portability", "determinism"}),
                summary="reduce into the sum's place, add and norm in one pass",
            )
        )  # fmt: skip
