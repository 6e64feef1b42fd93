"""Fused ops: chains of ops of a program that one kernel may run. Invariant: a fused op means exactly the chain it stands
for, so its placement needs no rule of its own; the program is verified unfused, and its reference is the chain's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenspeed.ir.ops import REFERENCES


def rope_append(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, table: Tensor, slot: Tensor, kcache: Tensor, vcache: Tensor
) -> Tensor:
    """rope of q and k [T, n, D], and append of the turned k and of v; gives the turned q."""
    REFERENCES["append"](REFERENCES["rope"](k, pos, table), v, slot, kcache, vcache)
    return REFERENCES["rope"](q, pos, table)


def norm_rope_append(
    q: Tensor, k: Tensor, v: Tensor, wq: Tensor, wk: Tensor, pos: Tensor, table: Tensor, slot: Tensor, kcache: Tensor,
    vcache: Tensor, *, eps: float,
) -> Tensor:  # fmt: skip
    """As rope_append, of the heads of q and k after rms_norm with weights wq and wk [D]."""
    norm = REFERENCES["rms_norm"]
    return rope_append(norm(q, wq, eps=eps), norm(k, wk, eps=eps), v, pos, table, slot, kcache, vcache)


def linear_silu_mul(x: Tensor, w: Tensor) -> Tensor:
    """linear of x [T, K] with gate and up rows w [2 F, K], then silu(gate) * up [T, F], rounded to x's dtype in between."""
    gate, up = REFERENCES["linear"](x, w, None, dtype=x.dtype).chunk(2, 1)
    return REFERENCES["silu_mul"](gate, up)


def linear_chain(
    y: Tensor, wo: Tensor, x: Tensor, w1: Tensor, wgu: Tensor, wd: Tensor, w2: Tensor, wq: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Between two attentions: x + linear(y, wo), its norm through the gated MLP and added, and linear of the norm of that."""
    linear, norm = REFERENCES["linear"], REFERENCES["rms_norm"]
    first = x + linear(y.flatten(1), wo, None, dtype=x.dtype)
    total = first + linear(linear_silu_mul(norm(first, w1, eps=eps), wgu), wd, None, dtype=x.dtype)
    return total, linear(norm(total, w2, eps=eps), wq, None, dtype=x.dtype)


def gumbel_argmax(z: Tensor, params: Tensor, *, offset: int = 0) -> tuple[Tensor, Tensor]:
    """temper, add_gumbel and argmax of logits z f32 [S, V] whose columns are the global ids offset.."""
    noisy = REFERENCES["add_gumbel"](REFERENCES["temper"](z, params), params, offset=offset)
    return REFERENCES["argmax"](noisy, offset=offset)


_CHAINS = (rope_append, norm_rope_append, linear_silu_mul, linear_chain, gumbel_argmax)

#: references of the fused ops that the op table does not hold itself
FUSED: dict[str, Callable[..., Any]] = {fn.__name__: fn for fn in _CHAINS}
