"""linear through torch (oneDNN on CPU, cuBLAS on CUDA): the portable solution for dense weights."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import KernelSpec, Priority
from tokenspeed.kernels.weights import dense


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    """x [T, K] (or [T, ...] flattened), w [N, K] of x's dtype, bias [N] or None; out [T, N] of x's dtype or float32."""
    x = x.flatten(1)
    y = torch.nn.functional.linear(x, w, None if bias is None else bias.to(x.dtype))
    out.view(y.shape).copy_(y)


def register(registry: Registry) -> None:
    registry.register(
        KernelSpec(
            name="torch.linear",
            op="linear",
            solution="torch",
            fn=linear,
            pack=dense,
            signatures=tuple(
                {"x": frozenset({name}), "w": frozenset({name}), "out": frozenset({name, "float32"})}
                for name in ("float32", "bfloat16", "float16")
            ),
            priority=Priority.PORTABLE,
            tags=frozenset({"portability"}),
            summary="torch.nn.functional.linear",
        )
    )
