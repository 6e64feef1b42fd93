"""Recurrent layers: a short causal convolution and the gated delta rule (Yang et al., 2412.06464), with what goes around
them: decay, l2 norm, gated RMS norm.

Invariant: a request's rows in a step are a segment in order, and what a step leaves behind of a request is one state slot.
`row` says whose a token is, `state` which slot that request owns; a segment that starts at position 0 starts from zeros,
any other from what the slot holds, and the slot holds what the segment leaves. Holes (-1) read and write nothing. A state
is split over heads or channels, never over tokens, so its request's rows are whole on every rank that holds a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.mesh import Plan
from tokenspeed.ir.ops.attention import check_group
from tokenspeed.ir.ops.base import Local, Op, OutSpec, States, check_outer, index_axes, pointwise_rule, refuse, wide
from tokenspeed.ir.types import Type


def segments(pos: Tensor, row: Tensor, state: Tensor) -> Iterator[tuple[Tensor, int, bool]]:
    """Of each request in a step: its token rows in order, its state slot, and whether it goes on from what that holds."""
    for r in row.unique().tolist():
        if r >= 0 and (slot := int(state[r])) >= 0:
            mine = (row == r).nonzero().flatten()
            yield mine, slot, int(pos[mine[0]]) > 0


class _Scan(Op):
    """Base of the ops that carry a state: the last three operands are pos i32[T], row i32[T -> s], state i32[S -> states],
    the one before them the cache [states, ...]. Subclasses list how the other operands and the cache may lie beside home."""

    writes_cache = True

    def beside(self, ins: Sequence[Type]) -> dict[tuple[str, ...], str]:
        """States of the operands up to the cache -> state of the output, where the axis is no home axis."""
        raise TypeError

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        *values, cache, pos, row, state = ins
        slots, s, t = cache.names[0], state.names[0], pos.names[0]
        homes = [axis in index_axes(self.name, i, "an operand", d) for i, d in ((row, s), (state, slots))]
        if any(homes):
            want = [t if t in v.names else "R" for v in values]
            if all(homes) and list(states) == [*want, slots, t, t, s]:
                return [t]
        elif tuple(states[-3:]) == ("R",) * 3:
            rows: dict[tuple[str, ...], str] = {("R",) * (len(ins) - 3): "R"} | self.beside(ins)
            if (got := rows.get(tuple(states[:-3]))) is not None:
                return [got]
        raise refuse(
            self.name, axis, states, ins,
            "rows go with their request's state: on the home axis all of them, elsewhere whole rows and the state's heads",
        )  # fmt: skip

    def infer(self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Any, home: Any = ()) -> list[Type]:
        cache, state = ins[-4], ins[-1]
        check_outer(self.name, (cache,), state.index.axes if state.index else ())
        if state.index and cache.dims[0].axes != state.index.axes:
            raise RuleError("V4", f"{self.name}: {cache} is not split over its slots as {state} counts them")
        return super().infer(ins, attrs, order, home)

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return dict(attrs)

    def row_cost(
        self, ins: Sequence[Sequence[int]], outs: Sequence[Sequence[int]], weights: Sequence[Sequence[int]] = ()
    ) -> tuple[float, float]:
        """The state is read and written, and every element of it meets each of a few products."""
        held = float(torch.Size(weights[-1][1:]).numel())
        moved, _ = super().row_cost(ins, outs)
        return moved + 2 * held, 3 * held


class CausalConv(_Scan):
    """x [T, *C], w [*C, K], past [states, K - 1, *C], pos, row, state -> silu(y) [T, *C].

    y of a token is the sum of its channel's last K inputs times w, the newest by the last tap; `past` keeps the last K - 1
    inputs of a request.
    """

    name = "causal_conv"
    integers = (3, 4, 5)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        x, w, past, pos, row, _ = ins
        if w.names[:-1] != x.names[1:] or past.names[2:] != x.names[1:] or not pos.names == row.names == x.names[:1]:
            raise RuleError("P004", f"causal_conv of {x} by {w} over {past} at {pos}, {row}: the dims do not meet")
        return [(x.dtype, x.names)]

    def beside(self, ins: Sequence[Type]) -> dict[tuple[str, ...], str]:
        return {(c, c, c): c for c in ins[0].names[1:]}

    def infer(self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Any, home: Any = ()) -> list[Type]:
        outs = super().infer(ins, attrs, order, home)
        x, w, past = ins[:3]
        if not x.dims[1:] == w.dims[:-1] == past.dims[2:]:
            raise RuleError("V4", f"causal_conv of {x} by {w} over {past}: the channels' blocks do not match")
        return outs

    def check_extents(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int]
    ) -> None:
        taps, kept = (sizes[ins[1].names[-1]], sizes[ins[2].names[1]])
        if kept != taps - 1:
            raise RuleError("P004", f"causal_conv with {taps} taps keeps {taps - 1} inputs of a request, not {kept}")

    def reference(self, x: Tensor, w: Tensor, past: Tensor, pos: Tensor, row: Tensor, state: Tensor) -> Tensor:
        out, taps = torch.zeros_like(x), past.shape[1] + 1
        weight = wide(w).reshape(*x.shape[1:], taps).movedim(-1, 0)
        for mine, slot, goes_on in segments(pos, row, state):
            before = wide(past[slot]) if goes_on else torch.zeros_like(wide(past[slot]))
            seen = torch.cat([before, wide(x[mine])])
            y = sum(seen[k : k + len(mine)] * weight[k] for k in range(taps))
            out[mine] = torch.nn.functional.silu(torch.as_tensor(y).to(x.dtype))
            past[slot] = seen[len(mine) :].to(past.dtype)
        return out


class DeltaRule(_Scan):
    """q, k [T, HK, DK], v [T, HV, DV], decay [T, HV], beta [T, HV], memory f32 [states, HV, DK, DV], pos, row, state ->
    [T, HV, DV] of v's dtype.

    A token's head forgets, S <- exp(decay) S, learns, S <- S + k (beta (v - S^T k))^T, and answers, S^T q * `scale`; value
    head i goes with key head i // (HV // HK).
    """

    name = "delta_rule"
    integers = (6, 7, 8)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        q, k, v, decay, beta, memory, pos, row, _ = ins
        meet = q.names == k.names and decay.names == beta.names == v.names[:2] and pos.names == row.names == v.names[:1]
        if not meet or q.names[:1] != v.names[:1] or memory.names[1:] != (v.names[1], q.names[2], v.names[2]):
            raise RuleError(
                "P004",
                f"delta_rule of {q}, {k}, {v}, {decay}, {beta} over {memory} at {pos}, {row}: the dims do not meet",
            )
        return [(v.dtype, v.names)]

    def beside(self, ins: Sequence[Type]) -> dict[tuple[str, ...], str]:
        (_, hk, _), (_, hv, dv), r = ins[0].names, ins[2].names, "R"
        return {
            (hk, hk, hv, hv, hv, hv): hv,
            (r, r, hv, hv, hv, hv): hv,  # several ranks share a key head
            (r, r, dv, r, r, dv): dv,
        }

    def infer(self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Any, home: Any = ()) -> list[Type]:
        q, k, v, decay, beta, memory = ins[:6]
        hk, hv = q.dims[1], v.dims[1]
        alike = k.dims[1] == hk and all(t.dim(hv.name) == hv for t in (decay, beta, memory))
        if not alike or hv.axes[: len(hk.axes)] != hk.axes:
            raise RuleError(
                "V6", f"the axes of {hk.name} {list(hk.axes)} must be the outer factors of those of {hv.name} "
                f"{list(hv.axes)}, alike in {decay}, {beta} and {memory}",
            )  # fmt: skip
        if memory.dims[3] != v.dims[2]:
            raise RuleError("V4", f"delta_rule of {v} over {memory}: the blocks of {v.names[2]} do not match")
        return super().infer(ins, attrs, order, home)

    def check_extents(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int]
    ) -> None:
        check_group(ins[2].dims[1], ins[0].dims[1], plan, sizes)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, pos: Tensor, row: Tensor,
        state: Tensor, *, scale: float,
    ) -> Tensor:  # fmt: skip
        out, group = torch.zeros_like(v), v.shape[1] // q.shape[1]
        keys, queries = (wide(x).repeat_interleave(group, 1) for x in (k, q))
        keep, rate, values = wide(decay).exp()[..., None, None], wide(beta)[..., None], wide(v)
        for mine, slot, goes_on in segments(pos, row, state):
            held = wide(memory[slot]) if goes_on else torch.zeros_like(wide(memory[slot]))
            for t in mine.tolist():
                held = held * keep[t]
                learned = (values[t] - torch.einsum("nkv,nk->nv", held, keys[t])) * rate[t]
                held = held + keys[t][..., None] * learned[:, None]
                out[t] = (torch.einsum("nkv,nk->nv", held, queries[t]) * scale).to(v.dtype)
            memory[slot] = held.to(memory.dtype)
        return out


class Decay(Op):
    """x [T, HV], a [HV], dt [HV] -> f32 [T, HV]: -exp(a) softplus(x + dt), the logarithm of what a head keeps."""

    name = "decay"
    integers = ()

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        x, a, dt = ins
        if not a.names == dt.names == x.names[-1:]:
            raise RuleError("P004", f"decay of {x} takes one value a head, not {a} and {dt}")
        return [("f32", x.names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [pointwise_rule(self.name, axis, states, ins, ins[0].names)]

    def reference(self, x: Tensor, a: Tensor, dt: Tensor) -> Tensor:
        return -wide(a).exp() * torch.nn.functional.softplus(wide(x) + wide(dt))


class L2Norm(Op):
    """x [T, *, D] -> f32, x * rsqrt(sum(x^2) + eps) over the last dim."""

    name = "l2_norm"
    integers = ()

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [("f32", ins[0].names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [pointwise_rule(self.name, axis, states, ins, ins[0].names, closed=ins[0].names[-1:])]

    def reference(self, x: Tensor, *, eps: float) -> Tensor:
        f = wide(x)
        return f * torch.rsqrt(f.pow(2).sum(-1, keepdim=True) + eps)


class GatedRmsNorm(Op):
    """x, z [T, *, D], w [D] -> rms_norm(x) * silu(z): the norm is rounded to x's dtype and weighed before the gate."""

    name = "gated_rms_norm"
    integers = ()
    in_place_ok = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        x, z, w = ins
        if x.names != z.names or x.names[-1:] != w.names:
            raise RuleError("P004", f"gated_rms_norm of {x} by {z}, weighed {w}: the dims do not meet")
        return [(x.dtype, x.names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        return [pointwise_rule(self.name, axis, states, ins, ins[0].names, closed=ins[2].names)]

    def reference(self, x: Tensor, z: Tensor, w: Tensor, *, eps: float) -> Tensor:
        f = wide(x)
        normed = w * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        return (normed * torch.nn.functional.silu(wide(z))).to(x.dtype)


STATE = [CausalConv(), DeltaRule(), Decay(), L2Norm(), GatedRmsNorm()]
