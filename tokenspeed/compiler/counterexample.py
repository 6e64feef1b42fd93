"""What would go wrong: an op that no rule allows, run on two ranks of the axis in question, beside one rank.

Invariant: every number is computed, from small whole numbers by the op's reference on each rank's locals, as the simulator
would; only an outcome that differs from one rank's is shown, and nothing where none is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError, VerifyError
from tokenspeed.ir.meaning import Meaning, Value, settled
from tokenspeed.ir.mesh import Mesh, Plan
from tokenspeed.ir.ops import OPS, REFERENCES, Local
from tokenspeed.ir.simulate import linear
from tokenspeed.ir.types import ROW_DIMS, Dim, Type

_TRIES = 12  # contents


def of_op(op: str, names: Sequence[str], args: Sequence[Type], attrs: Mapping[str, Any], axis: str) -> str:
    """One line that shows the op going wrong on two ranks of `axis`; "" where it cannot be shown in this way."""
    ins = [_on_axis(t, axis) for t in args]
    if op not in REFERENCES or any(t.index or t.kind != "sum" or t.dtype == "u8" for t in args):
        return ""
    for seed in range(_TRIES):  # whole dims hold one entry where that shows it, else two
        extents = {d.name: 2 if d.axes or seed >= _TRIES // 2 else 1 for t in ins for d in t.dims}
        extents |= {d.name: 2 for t in ins for d in t.dims if d.axes}
        try:
            line = _tried(op, names, ins, attrs, axis, extents, seed)
        except (RuntimeError, RuleError, VerifyError, IndexError, KeyError, TypeError, ValueError):
            continue  # these operands do not even fit
        if line:
            return line
    return ""


def of_reading(derived: Type, declared: Type) -> str:
    """One line that shows what a value is and how it would be read, on two ranks of the first axis on which they differ."""
    axis = next((a for a in (*derived.axes(), *declared.axes()) if derived.state(a) != declared.state(a)), "")
    if not axis or derived.names != declared.names or {derived.kind, declared.kind} != {"sum"}:
        return ""
    is_, read = _on_axis(derived, axis), _on_axis(declared, axis)
    extents = {d.name: 2 if d.axes or read.dim(d.name).axes else 1 for d in is_.dims}
    m = _meaning(axis, extents)
    x = torch.arange(3, 3 + _count(is_, extents)).double().reshape([extents[d.name] for d in is_.dims])
    xs = m.distribute(x, is_, _parts(0))
    held = f"e.g. 2 ranks of {_name(axis)} hold {_show(xs[0])} and {_show(xs[1])}: "
    try:
        other = f"read as {_how(read, axis)} it is {_show(m.assemble(xs, read))}"
    except VerifyError:
        other = f"read as {_how(read, axis)} it is {_show(xs[0])} on one rank and {_show(xs[1])} on the other"
        if xs[0].shape != m.distribute(x, read)[0].shape:
            other = f"{_how(read, axis)}, each would hold {list(m.distribute(x, read)[0].shape)} of its entries"
    return f"{held}the value is {_show(x)}, {other}"


def _on_axis(t: Type, axis: str) -> Type:
    dims = tuple(Dim(d.name, (axis,) if axis in d.axes else ()) for d in t.dims)
    return Type(t.dtype, dims, (axis,) if axis in t.pending else ())


def _meaning(axis: str, extents: Mapping[str, int]) -> Meaning:
    plan = Plan(Mesh(((axis, 2),)), {"dp": (), axis: (axis,)}, {})
    return Meaning(plan, extents, dict.fromkeys(ROW_DIMS, (axis,)))


def _count(t: Type, extents: Mapping[str, int]) -> int:
    n = 1
    for d in t.dims:
        n *= extents[d.name]
    return n


def _parts(seed: int) -> Any:
    def split(x: Tensor, n: int, kind: str) -> list[Tensor]:
        first = (x.round() - 1 - seed % 3) if x.dim() else x
        return [first, *(x - first if i == 0 else torch.zeros_like(x) for i in range(n - 1))]

    return split


def _tried(
    op: str, names: Sequence[str], ins: Sequence[Type], attrs: Mapping[str, Any], axis: str, extents: dict[str, int], seed: int
) -> str:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    m = _meaning(axis, extents)
    values = [torch.randint(1, 6, [extents[d.name] for d in t.dims], generator=g).double() for t in ins]
    ranks = [m.distribute(x, t, _parts(seed)) for x, t in zip(values, ins)]
    one = Plan(Mesh(), {"dp": ()}, {})
    whole = [Type(t.dtype, tuple(Dim(d.name) for d in t.dims)) for t in ins]
    want = _run(op, values, whole, attrs, Local(one, 0, extents, extents), extents, 1)
    got = [_run(op, [x[r] for x in ranks], ins, attrs, Local(m.plan, r, extents, extents), extents, 2) for r in (0, 1)]
    if got[0].shape == want.shape:
        how, total = "which sum to", got[0] + got[1]
    else:
        k = next(i for i, (a, b) in enumerate(zip(got[0].shape, want.shape)) if a != b)
        how, total = "together", torch.cat(got, k)
    if total.shape != want.shape or torch.allclose(total.double(), want.double()):
        return ""
    given = "; ".join(f"{n} = {_operand(t, x, axis)}" for n, t, x in zip(names, ins, ranks))
    return (
        f"e.g. 2 ranks of {_name(axis)}: {given}: {op} gives {_show(got[0])} and {_show(got[1])}, {how} {_show(total)}; "
        f"one rank has {_show(want)}"
    )


def _run(
    op: str, xs: Sequence[Tensor], ins: Sequence[Type], attrs: Mapping[str, Any], at: Local, extents: Mapping[str, int], ranks: int
) -> Tensor:  # fmt: skip
    if op == "linear":
        n_in, k = len(attrs["in_dims"]), attrs["segments"]
        shapes = [(xs[0].shape[0], *w.shape[: w.dim() - n_in]) for w in xs[1 : 1 + k]]
        out = linear([x.clone() for x in xs], attrs, shapes, torch.float64)
    else:
        out = OPS[op].reference(*(x.clone() for x in xs), **OPS[op].local_attrs(ins, [], attrs, at))
    value: Value = out[0] if isinstance(out, tuple) and not OPS[op].discrete else out
    return settled(value)


def _operand(t: Type, x: Sequence[Tensor], axis: str) -> str:
    if t.pending:
        return f"{_show(x[0])} and {_show(x[1])}, a pending sum"
    return f"{_show(x[0])} and {_show(x[1])}" if t.axes() else _show(x[0])


def _how(t: Type, axis: str) -> str:
    state = t.state(axis)
    return {"R": "whole", "P": "a pending sum"}.get(state, f"sharded on {state}")


def _name(axis: str) -> str:
    return axis.partition("/")[0].partition("%")[0]


def _show(x: Tensor) -> str:
    def word(v: Any) -> str:
        if isinstance(v, list):
            return f"[{', '.join(map(word, v))}]"
        return f"{v:.0f}" if float(v).is_integer() else f"{v:.2f}"

    return word(x.squeeze().tolist())
