"""What the padding of a value holds: 0, finite (anything but NaN and infinities), -inf, or undef. Rule V5 is decided here.

A dim is padded where its physical extent exceeds the logical one. Weights are padded with zeros; every op says what it
makes of that, and what it needs: a contraction needs finite values (zeros of the weight meet them), a sum zeros, a
maximum -inf. Row dims are not padded: their holes are rows, and ops are row-wise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.graph import Leaf, Node, Param, Program, param_type
from tokenspeed.ir.ops import OPS, Redistribute
from tokenspeed.ir.types import ROW_DIMS, Type

Taint = Mapping[str, str]  # padded dim -> 0 | finite | -inf | undef
ZERO, FINITE, LOW, UNDEF = "0", "finite", "-inf", "undef"

_SAME = frozenset({"rope", "rope_pairs", "cross", "select_rows", "temper", "attend", "mla"})


def verify_pads(p: Program) -> None:
    """VerifyError V5 where an op reads padding that it cannot bear."""
    padded = {d for d, n in p.sizes.items() if d not in ROW_DIMS and n != p.logical.get(d, n)}
    if not padded:
        return
    memo: dict[tuple[str, tuple[tuple[tuple[str, str], ...], ...]], list[Taint]] = {}
    taints: dict[str, Taint] = {i: {d: UNDEF for d in p.types[i].names if d in padded} for i in p.ports}
    for n in p.nodes:
        if n.op != "call":
            taints.update(zip(n.outputs, _node(n, taints, p.types, p.params, padded, "main")))
            continue
        name = n.attrs["leaf"]
        given = [taints[i] for i in n.inputs]
        key = (name, tuple(tuple(sorted(t.items())) for t in given))
        if key not in memo:
            memo[key] = _leaf(p.leaves[name], given, padded, f"leaf @{name}")
        taints.update(zip(n.outputs, memo[key]))


def leaf_taints(leaf: Leaf, padded: set[str], upto: str) -> Taint:
    """Taint of value `upto` of a leaf whose arguments have no padded dim."""
    taints: dict[str, Taint] = {i: {d: UNDEF for d in leaf.types[i].names if d in padded} for i in leaf.inputs}
    for n in leaf.nodes:
        if upto in taints:
            break
        taints.update(zip(n.outputs, _node(n, taints, leaf.types, leaf.params, padded, leaf.name)))
    return taints[upto]


def demand(op: str, attrs: Mapping[str, object]) -> float | None:
    """What an op needs the padding of its first operand's last dim to hold exactly; None where it needs nothing."""
    if op in ("argmax", "topk", "tally", "exp_sum"):
        return -math.inf
    if op == "route":  # a softmax gives -inf no share; a sigmoid, a bias or a group may prefer it to a real expert
        return -math.inf if (attrs["score"], attrs["bias"], attrs["groups"]) == ("softmax", False, 1) else math.inf
    if op == "reduce":
        return {"sum": 0.0, "max": -math.inf, "min": math.inf}[str(attrs["kind"])]
    return None


def taint_of(value: float) -> str:
    return ZERO if value == 0 else LOW if value == -math.inf else FINITE if math.isfinite(value) else UNDEF


def _leaf(leaf: Leaf, given: Sequence[Taint], padded: set[str], where: str) -> list[Taint]:
    taints: dict[str, Taint] = dict(zip(leaf.inputs, given))
    for n in leaf.nodes:
        taints.update(zip(n.outputs, _node(n, taints, leaf.types, leaf.params, padded, where)))
    return [taints[o] for o in leaf.outputs]


def _node(
    n: Node,
    taints: Mapping[str, Taint],
    types: Mapping[str, Type],
    params: dict[str, Param],
    padded: set[str],
    where: str,
) -> list[Taint]:
    ins: list[Taint] = [
        {d: ZERO for d in param_type(params, i).names if d in padded} if i.startswith("@") else taints[i]
        for i in n.inputs
    ]

    def need(i: int, dim: str, allowed: tuple[str, ...], why: str) -> None:
        have = ins[i].get(dim)
        if have is not None and have not in allowed:
            what = " or ".join(allowed)
            raise VerifyError(
                "V5", f"{where}: {n.op} of {n.inputs[i]}: {why}; the padding of {dim} must be {what}, it is {have}"
            )

    outs: list[Taint] = [{d: UNDEF for d in types[o].names if d in padded} for o in n.outputs]
    x: Taint = ins[0] if ins else {}
    op = n.op
    if isinstance(OPS[op], Redistribute) or op in _SAME:
        if op in ("attend", "mla"):  # a padded head inside a group averages real values
            return [dict.fromkeys(x, FINITE)]
        return [dict(x)]
    if (value := demand(op, n.attrs)) is not None:
        last = types[n.inputs[0]].names[-1]
        if last in x and value == math.inf:
            raise VerifyError("V5", f"{where}: {op} of {n.inputs[0]}: no padding of {last} is neutral in it")
        need(0, last, (taint_of(value),), f"it would choose or add what stands there, not {value}")
        return [{d: x.get(d, UNDEF) for d in o} for o in outs]
    if op == "mask_logits":  # a bit of the padding may be 0
        return [{d: t if t == LOW else UNDEF for d, t in x.items()}]
    if op == "shape_logits":
        return [dict.fromkeys(o, LOW) for o in outs]
    if op == "sift":
        return [dict(x)]
    if op == "linear":
        for d in n.attrs["in_dims"]:
            need(0, d, (ZERO, FINITE), "zero rows of the weight times infinity are NaN")
        return [{d: ins[1 + i].get(d, x.get(d, UNDEF)) for d in o} for i, o in enumerate(outs)]
    if op == "head_linear":
        need(0, types[n.inputs[0]].names[-1], (ZERO, FINITE), "zeros of the weight times infinity are NaN")
        return [{d: ZERO if x.get(d, ZERO) in (ZERO, FINITE) else UNDEF for d in outs[0]}]
    if op == "experts":  # zero rows of gate and up meet zero columns of down
        for d in x:
            need(0, d, (ZERO, FINITE), "zero columns of the weights times infinity are NaN")
        return [{d: ins[5].get(d, UNDEF) for d in outs[0]}]
    if op == "lookup":
        return [{d: ins[1].get(d, UNDEF) for d in outs[0]}]
    if op in ("rms_norm", "layer_norm"):
        for d in ins[1]:
            raise VerifyError("V5", f"{where}: {op} over {d}, which is padded: its mean would count the padding")
        return [dict(x)]
    if op in ("append", "append_latent"):
        for i in range(len(ins) // 2):
            for d in ins[i]:
                need(i, d, (ZERO, FINITE), "the cache keeps what is written")
        return []
    if op == "cat":
        for d in (d for mine in ins for d in mine):
            raise VerifyError("V5", f"{where}: cat of {d}, which is padded: the padding would lie amid the values")
    if op == "causal_conv":  # zero taps give zeros, of whatever finite inputs
        for d in x:
            need(0, d, (ZERO, FINITE), "zero taps times infinity are NaN, and the state keeps them")
        return [{d: ins[1].get(d, x.get(d, UNDEF)) for d in outs[0]}]
    if (
        op == "delta_rule"
    ):  # a padded head learns nothing of zero values, and answers with what a real one learned at most
        for i in range(5):
            for d in ins[i]:
                need(i, d, (ZERO, FINITE), "the state keeps what it is told")
        return [{d: ins[2].get(d, FINITE) for d in outs[0]}]
    if op in ("decay", "l2_norm", "sigmoid"):
        zero = ZERO if op == "l2_norm" else FINITE  # of zeros
        return [{d: {ZERO: zero, FINITE: FINITE}.get(t, UNDEF) for d, t in x.items()}]
    if op == "gated_rms_norm":
        for d in ins[2]:
            raise VerifyError(
                "V5", f"{where}: gated_rms_norm over {d}, which is padded: its mean would count the padding"
            )
        return [{d: _product(t, ins[1].get(d, UNDEF)) for d, t in x.items()}]
    if op == "square_sum":
        for i, mine in enumerate(ins):
            for d in mine:
                need(i, d, (ZERO,), "its squares would count")
        return outs
    if op == "rms_scale":
        return [{d: _product(t, ins[2].get(d, UNDEF)) for d, t in x.items()}]
    if op == "fill":
        last = types[n.inputs[0]].names[-1]
        return [{d: taint_of(n.attrs["value"]) if d == last else t for d, t in x.items()}]
    if op in ("silu", "gelu", "softcap"):
        return [{d: t if t in (ZERO, FINITE) else UNDEF for d, t in x.items()}]
    if op == "scale":
        positive = n.attrs["factor"] > 0
        return [{d: t if t != LOW or positive else UNDEF for d, t in x.items()}]
    if op == "mul_rows":
        return [{d: t if t in (ZERO, FINITE) else UNDEF for d, t in x.items()}]
    if op in ("mul", "silu_mul", "gelu_mul"):
        return [{d: _product(t, ins[1].get(d, UNDEF)) for d, t in x.items()}]
    if op == "add":
        return [{d: _sum(t, ins[1].get(d, UNDEF)) for d, t in x.items()}]
    if op == "add_gumbel":
        return [{d: FINITE if t == ZERO else t for d, t in x.items()}]
    return outs


def _product(a: str, b: str) -> str:
    if {a, b} <= {ZERO, FINITE}:
        return ZERO if ZERO in (a, b) else FINITE
    return UNDEF


def _sum(a: str, b: str) -> str:
    if {a, b} <= {ZERO, FINITE}:
        return ZERO if a == b == ZERO else FINITE
    return LOW if {a, b} <= {ZERO, FINITE, LOW} else UNDEF
