"""RMS norm on CPU, with and without a residual add: float32 statistics, rounded to the activations' dtype before a
weight of that dtype is applied, as Hugging Face does; once where the weight is float32."""

from __future__ import annotations

from torch import Tensor

from tokenspeed import _cpu
from tokenspeed.kernels.arguments import CODE, fail
from tokenspeed.kernels.elementwise import register_elementwise
from tokenspeed.kernels.formats import DENSE
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability

_norm = _cpu.norm


def rms_norm(x: Tensor, w: Tensor, *, eps: float, out: Tensor) -> None:
    """x, out f32|bf16 [T, D] or [T, n, D] of any leading strides; w f32|bf16 [D]."""
    shape, xs, os = x.shape, x.stride(), out.stride()
    kind = CODE.get(x.dtype, -1)
    if out.shape != shape or out.dtype != x.dtype or kind < 0 or xs[-1] != 1 or os[-1] != 1 or w.shape != shape[-1:]:
        raise fail("rms_norm", x=x, w=w, out=out)
    if len(shape) == 2:
        outer, inner, xi, oi = shape[0], 1, 0, 0
    elif len(shape) == 3:
        outer, inner, xi, oi = shape[0], shape[1], xs[1], os[1]
    else:
        raise fail("rms_norm", x=x, w=w, out=out)
    _norm(
        x.data_ptr(), xs[0], xi, 0, 0, w.data_ptr(), CODE[w.dtype], 0, 0, out.data_ptr(), os[0], oi, outer, inner,
        shape[-1], eps, kind,
    )  # fmt: skip


def add_rms_norm(x: Tensor, y: Tensor, w: Tensor, *, eps: float, out: tuple[Tensor, Tensor]) -> None:
    """x, y f32|bf16 [T, D]; out = (x + y, rms_norm(x + y)), of x's dtype. The sum may share x's or y's memory."""
    total, normed = out
    shape = x.shape
    kind = CODE.get(x.dtype, -1)
    if (
        not (
            len(shape) == 2 and y.shape == shape == total.shape == normed.shape and w.shape == shape[-1:] and kind >= 0
        )
        or not x.dtype == y.dtype == total.dtype == normed.dtype
    ):
        raise fail("add_rms_norm", x=x, y=y, w=w, sum=total, out=normed)
    xs, ys, ss, os = x.stride(), y.stride(), total.stride(), normed.stride()
    if not xs[1] == ys[1] == ss[1] == os[1] == 1:
        raise fail("add_rms_norm", x=x, y=y, w=w, sum=total, out=normed)
    _norm(
        x.data_ptr(), xs[0], 0, y.data_ptr(), ys[0], w.data_ptr(), CODE[w.dtype], total.data_ptr(), ss[0],
        normed.data_ptr(), os[0], 0, shape[0], 1, shape[1], eps, kind,
    )  # fmt: skip


def register(registry: Registry, capability: Capability) -> None:
    register_elementwise(registry, capability, (("rms_norm", rms_norm), ("add_rms_norm", add_rms_norm)), w=DENSE)
