"""Mixture of experts: `route` picks each token's experts, `experts` runs the ones this rank holds on all rows it sees.

Invariant: where the experts lie on an axis, there are two ways, axis by axis. Every rank of it sees the same rows and adds
only its own experts' share, so the result is a sum pending over that axis. Or the rows lie on the axis too: `experts`
exchanges them, a row goes to the ranks that hold an expert it picked and their shares come back, so the result is complete
and lies as the rows do. An axis inside the experts' width leaves a sum pending. Which it is follows from where the rows lie,
and that is the solver's choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.mesh import Axes, Plan
from tokenspeed.ir.ops.base import Local, Op, OutSpec, States, refuse, wide
from tokenspeed.ir.types import Type


class Route(Op):
    """z [T, E] logits (, bias f32[E]) -> ids i32[T, K], shares f32[T, K]: the K experts of highest score and their shares.

    A score is the softmax or the sigmoid of a logit (attr `score`), in float32. Experts are picked by score + bias, the
    lowest id first among equals; shares are scores without the bias, with `normalise` divided by their sum, then times
    `scale`. With `groups` > 1 only experts of the `top_groups` best of as many equal blocks of E are picked: a block counts
    what its best expert counts, or the sum of its best `group_best`. attr `dim`: the name of K's dim. A hole (NaN) gets ids
    of its own choosing and NaN shares. Ranks that see a row must pick the same experts for it, so logits are whole and
    complete.
    """

    name = "route"
    integers = ()
    discrete = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        if attrs["score"] not in ("softmax", "sigmoid") or not math.isfinite(attrs["scale"]):
            raise RuleError(
                "P004",
                f"route scores by softmax or sigmoid times a number, not {attrs['score']!r} times {attrs['scale']!r}",
            )
        for name in ("k", "groups", "top_groups", "group_best"):
            if type(attrs[name]) is not int or attrs[name] < 1:
                raise RuleError("P004", f"route takes a whole number from 1 on as {name}, not {attrs[name]!r}")
        if attrs["bias"] and ins[1].names != ins[0].names[-1:]:
            raise RuleError("P004", f"route of {ins[0]} with the bias {ins[1]}: one bias an expert is needed")
        names = (*ins[0].names[:-1], attrs["dim"])
        return [("i32", names), ("f32", names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        e = ins[0].names[-1]
        if states[0] == "P":
            raise refuse("route", axis, states, ins, "the largest of pending sums are not the largest sums", "P011")  # fmt: skip
        if states[0] == e:
            raise refuse("route", axis, states, ins, f"the choice needs the whole of {e} on every rank", "P015")
        if attrs["bias"] and states[1] != "R":
            raise refuse("route", axis, states, ins, "every rank adds the whole bias to the scores")
        return [states[0]] * 2

    def check_extents(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int]
    ) -> None:
        experts, k, groups = sizes[ins[0].names[-1]], attrs["k"], attrs["groups"]
        if sizes[attrs["dim"]] != k or k > experts:
            raise RuleError("P004", f"route takes k={k} of {experts} experts into {attrs['dim']}")
        if experts % groups or attrs["group_best"] > experts // groups:
            raise RuleError(
                "P004", f"route ranks {groups} groups of {experts} experts by their best {attrs['group_best']}"
            )
        if attrs["top_groups"] > groups or k > attrs["top_groups"] * (experts // groups):
            raise RuleError(
                "P004", f"route takes k={k} experts from {attrs['top_groups']} of {groups} groups of {experts} experts"
            )

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {a: v for a, v in attrs.items() if a not in ("dim", "bias")}

    def reference(
        self, z: Tensor, bias: Tensor | None = None, *, k: int, normalise: bool, score: str = "softmax", groups: int = 1,
        top_groups: int = 1, group_best: int = 1, scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        scores = wide(z).softmax(-1) if score == "softmax" else wide(z).sigmoid()
        choice = torch.where(scores.isnan(), float("-inf"), scores if bias is None else scores + bias.to(scores.dtype))
        if groups > 1:
            blocks = choice.unflatten(-1, (groups, -1))
            best = blocks.topk(group_best, -1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
            kept = torch.zeros(blocks.shape[:-1], dtype=torch.bool, device=z.device).scatter_(
                1, best[:, :top_groups], True
            )
            choice = torch.where(kept[..., None], blocks, float("-inf")).flatten(-2)
        order = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        picked = scores.gather(1, order)
        if normalise:
            picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be zero
        return order.int(), picked * scale


class Experts(Op):
    """x [T, H], ids i32[T, K], shares f32[T, K], gate, up [E, F, H], down [E, H, F] (, their biases [E, F], [E, F], [E, H])
    -> [T, H] of x's dtype.

    Row t is the sum over its K experts e of share * down_e(gated(gate_e x, up_e x)), experts in ascending order, summed in
    float32; gated(g, u) is silu(g) * u. With attrs `limit` and `alpha` it is g sigmoid(alpha g) (u + 1), g cut above limit and
    u to limit on both sides (gpt-oss). ids count all experts; those outside this rank's block (attr `offset` at a call) add
    nothing. gate and up, and their biases, may come as one tensor [E, 2F, H] ([E, 2F]).
    """

    name = "experts"
    integers = (1,)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        x, ids, shares, gate, up, down, *biases = ins
        e, f, h = gate.names
        if up.names != gate.names or down.names != (e, h, f) or x.names[1:] != (h,):
            raise RuleError(
                "P004",
                f"experts of {x} through {gate}, {up} and {down}: the dims do not meet as [e f h], [e f h], [e h f]",
            )
        if ids.names != shares.names or ids.names[:1] != x.names[:1]:
            raise RuleError("P004", f"experts of {x} by {ids}, {shares}: one row of ids and shares a row is needed")
        if biases and [b.names for b in biases] != [(e, f), (e, f), (e, h)]:
            raise RuleError(
                "P004", f"experts with the biases {', '.join(map(str, biases))}: [e f], [e f], [e h] are due"
            )
        return [(x.dtype, x.names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        t = ins[0].names[0]
        e, f, _ = ins[3].names
        r = "R"
        table: dict[tuple[str, ...], str] = {
            (r,) * 9: r,
            (t, t, t, *(r,) * 6): t,
            (r, r, r, *(e,) * 6): "P",  # each rank its own experts
            (t, t, t, *(e,) * 6): t,  # rows are exchanged
            (r, r, r, f, f, f, f, f, "P"): "P",  # each rank a part of every expert's width, contracted by `down`
        }
        got = {k[: len(states)]: v for k, v in table.items()}.get(tuple(states))
        if got is not None:
            return [got]
        if states[0] == "P":
            raise refuse("experts", axis, states, ins, f"silu is not linear: x must be reduced over {axis} first", "P011")  # fmt: skip
        if t in states[:3]:
            raise refuse("experts", axis, states, ins, f"rows, ids and shares go together, with whole experts or to other ranks' "
                         f"experts: on {axis} their width is split, or not all lie alike")  # fmt: skip
        if tuple(states[3:8]) == (f,) * 5:
            raise refuse(
                "experts", axis, states, ins, f"a complete bias inside a sum pending over {axis} is counted once a rank", "P012",
                fixes=(f"declare the bias of `down` pending over {axis} (0 bytes: the first rank keeps it)",),
            )  # fmt: skip
        raise refuse(
            "experts", axis, states, ins, f"the weights' blocks do not match: {e} or {f} is sharded on all three"
        )

    def infer(self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Any, home: Any = ()) -> list[Type]:
        outs = super().infer(ins, attrs, order, home)
        for k in range(2):
            axes = {t.dim(ins[3].names[k]).axes for t in ins[3:] if ins[3].names[k] in t.names}
            if len(axes) > 1:
                raise RuleError("P014", f"experts: {ins[3].names[k]} is sharded in the orders {sorted(axes)}")
        return outs

    def exchange(self, ins: Sequence[Type]) -> Axes:
        rows = [set(x.dims[0].axes) for x in ins[:3]]
        return tuple(a for a in ins[0].dims[0].axes if a in ins[3].dims[0].axes and all(a in r for r in rows))

    def spread(self, ins: Sequence[Type]) -> Axes:
        return tuple(a for a in ins[3].dims[0].axes if a not in ins[0].dims[0].axes)

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return dict(attrs) | {"offset": at.offset(ins[3].dims[0])}

    def reference(
        self, x: Tensor, ids: Tensor, shares: Tensor, *weights: Tensor, offset: int = 0, alpha: float = 0.0,
        limit: float = 0.0,
    ) -> Tensor:  # fmt: skip
        both, down, *biases = (torch.cat(weights[:2], 1), *weights[2:]) if len(weights) in (3, 6) else weights
        if len(biases) == 3:
            biases = [torch.cat(biases[:2], 1), biases[2]]
        out = torch.zeros_like(wide(x))
        for e in range(both.shape[0]):
            mine = ids == e + offset
            if not mine.any():
                continue
            share = torch.where(mine, shares.to(out.dtype), 0.0).sum(-1, keepdim=True)
            first = wide(x) @ wide(both[e]).t() + (wide(biases[0][e]) if biases else 0.0)
            gate, up = first.to(x.dtype).chunk(2, -1)
            y = wide(gated(gate, up, alpha, limit)) @ wide(down[e]).t() + (wide(biases[1][e]) if biases else 0.0)
            out += torch.where(mine.any(-1, keepdim=True), share * y, 0.0)
        return out.to(x.dtype)

    def row_cost(
        self, ins: Sequence[Sequence[int]], outs: Sequence[Sequence[int]], weights: Sequence[Sequence[int]] = ()
    ) -> tuple[float, float]:
        """Of all the experts that a row picks: `spread` ranks share them evenly."""
        (h,), (k,), f = ins[0][1:], ins[1][1:], weights[0][1]
        return float(2 * h + k * (h + 3 * f)), float(3 * k * h * f)


def wanted(ids: Tensor, first: int, held: int) -> Tensor:
    """bool[T]: rows of ids [T, K] some of which lie in first .. first + held."""
    return ((ids >= first) & (ids < first + held)).any(-1)


def gated(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """What an expert makes of gate and up; see Experts. `limit` 0: silu(gate) * up."""
    if not limit:
        return torch.nn.functional.silu(gate) * up
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(gate * alpha) * (up.clamp(-limit, limit) + 1)


MOE = [Route(), Experts()]
