"""Recurrent layers in an author's hands: the ports of a model that keeps states, and ops with a state slot a request.

Invariant: what a layer remembers of a request has one place, the slot that the request owns while it runs; whoever writes
a layer says which heads and channels its state has, and no more.
"""

from __future__ import annotations

from typing import Any

from tokenspeed.ir.builder import apply, caller, current
from tokenspeed.ir.errors import SpecError
from tokenspeed.models.nn.blocks import Batch
from tokenspeed.models.nn.maps import STREAM, Weight, read_spec
from tokenspeed.models.nn.module import Param, Port
from tokenspeed.models.nn.params import RMSNorm


class StateBatch(Batch):
    """The ports of a model with states: a batch, and where the state of each of its requests lies."""

    state = Port("s@dp -> states@dp")  # state slot of a request row; -1: a hole


class StateCache(Param):
    """What a layer keeps of a request, e.g. StateCache("hv@tp dk dv", dtype="f32"): one such tensor a state slot."""

    def __init__(self, spec: str, dtype: str = STREAM) -> None:
        self.spec, self.dtype = read_spec(spec), dtype

    def ref(self) -> str:
        current().frame.params[self.path] = self
        return f"@{self.path}:0"


class Conv(Param):
    """A short causal convolution of each channel with silu behind it, e.g. Conv("hk@tp:hk dk"). The model's dims name the
    number of `taps`, and `past`, which is one less: the inputs that it keeps of a request."""

    def __init__(self, channels: str) -> None:
        self.w, self.past = Weight(f"{channels} taps"), StateCache(f"past {channels}")

    def __call__(self, x: Any, b: StateBatch) -> Any:
        return apply("causal_conv", [x, self.w.ref(), self.past.ref(), b.pos, b.row, b.state])


class DeltaRule(StateCache):
    """The gated delta rule (Yang et al., 2412.06464): each value head keeps a float32 matrix of its request's keys and values.

    heads: "hv@tp hk@tp:hk dk dv", value heads, the key heads that groups of them share, widths of a key and of a value.
    scale: of the queries.
    """

    def __init__(self, heads: str, scale: float) -> None:
        dims = [read_spec(word).dims[0] for word in heads.split()]  # of several tensors, so an axis may recur
        if len(dims) != 4:
            raise SpecError(
                "P001",
                f"{caller()}: DeltaRule({heads!r}) takes four dims: value heads, key heads, key width, value width",
            )
        self.n, self.kv, self.scale = dims[0], dims[1], scale
        super().__init__(" ".join(str(d) for d in (dims[0], *dims[2:])), dtype="f32")

    def __call__(self, q: Any, k: Any, v: Any, decay: Any, beta: Any, b: StateBatch) -> Any:
        """q, k [T, hk, dk] of length 1, v [T, hv, dv], decay (a logarithm) and beta [T, hv] -> [T, hv, dv]."""
        return apply("delta_rule", [q, k, v, decay, beta, self.ref(), b.pos, b.row, b.state], scale=self.scale)


class GatedRMSNorm(RMSNorm):
    """The norm of x over the last dim, times silu(z)."""

    def __call__(self, x: Any, z: Any) -> Any:
        current().frame.params[self.path] = self
        return apply("gated_rms_norm", [x, z, f"@{self.path}"], eps=self.eps)


def decay(x: Any, a: Weight, dt: Weight) -> Any:
    """-exp(a) softplus(x + dt): the logarithm of what a head keeps of its state, [T, n] float32."""
    return apply("decay", [x, a.ref(), dt.ref()])


def l2_norm(x: Any, eps: float = 1e-6) -> Any:
    """x of length 1 over the last dim, float32."""
    return apply("l2_norm", [x], eps=eps)
