"""What an op is: a shape rule, a placement rule, its effects, its cost and THE reference implementation.

Invariant: a placement rule is written for ONE mesh axis (states of the inputs -> states of the outputs) and the rule of
a mesh is the product over its axes; `Op.infer` is the only place that forms this product. States are "R" (replicated),
"P" (a pending sum), "P:max", "P:lse" ... (pending by another kind) or the name of the dim that the axis shards. A
combination that is not named by the rule is illegal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.mesh import Axes, Plan
from tokenspeed.ir.types import ROW_DIMS, Dim, Type

States = Sequence[str]
OutSpec = tuple[str, tuple[str, ...]]  # dtype, dim names


@dataclass(frozen=True)
class Local:
    """Where a rank stands: what an op that owns an offset may know."""

    plan: Plan
    rank: int
    sizes: Mapping[str, int]  # physical extents of every dim, rows included
    logical: Mapping[str, int]  # extents without padding

    def offset(self, dim: Dim) -> int:
        """First global index of this rank's block of `dim`."""
        return self.plan.mesh.index(self.rank, dim.axes) * (self.sizes[dim.name] // self.plan.mesh.size(dim.axes))


class Op:
    """One semantic op. Subclasses state the rules; instances are stateless and live in `OPS`."""

    name: str = ""
    writes_cache = False  # effect on the cache it names; kept in program order
    slotted = False  # follows a request's slot of its home block
    in_place_ok = False  # the output may share the first input's buffer when that dies here
    alias = False  # the output IS the input (no kernel, no buffer)
    discrete = False  # picks by value: its inputs must be equal bit for bit across ranks
    integers: tuple[int, ...] | None = None  # the operands that are i32, where no other may be; None: any may

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        raise TypeError(f"{self.name} has no shape rule")

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        raise TypeError(f"{self.name} has no placement rule")

    def check_extents(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int]
    ) -> None:
        """RuleError where types that the rule allows do not fit these global extents."""

    def check_integers(self, ins: Sequence[Type]) -> None:
        """RuleError where an operand is i32 that should not be, or the reverse. Of a finished program: before, an author's
        arguments have no dtypes."""
        integers = self.which_integers(len(ins))
        for i, t in enumerate(ins if integers is not None else ()):
            if (t.dtype == "i32") != (i in (integers or ())):
                wanted = "i32" if i in (integers or ()) else "numbers that are no i32"
                raise RuleError("P004", f"{self.name} takes {wanted} as operand {i + 1}, not {t}")

    def which_integers(self, count: int) -> tuple[int, ...] | None:
        """`integers` of so many operands."""
        return self.integers

    def reference(self, *ins: Tensor, **attrs: Any) -> Any:
        raise TypeError(f"{self.name} has no reference")

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        """Keyword arguments of the kernel on one rank: attributes plus the offsets it owns."""
        return dict(attrs)

    def exchange(self, ins: Sequence[Type]) -> Axes:
        """Axes over whose ranks the op exchanges rows itself, by the types of its operands."""
        return ()

    def spread(self, ins: Sequence[Type]) -> Axes:
        """Axes whose ranks share the work of a row, beyond what their local shapes say."""
        return ()

    def takes(self, kind: str, attrs: Mapping[str, Any]) -> bool:
        """Whether some row of the rule takes an operand pending by `kind` (not sum)."""
        return False

    def row_cost(
        self, ins: Sequence[Sequence[int]], outs: Sequence[Sequence[int]], weights: Sequence[Sequence[int]] = ()
    ) -> tuple[float, float]:
        """(elements moved, multiply-adds) a row, from local shapes with the row dims taken as 1; weights move none."""
        count = lambda shapes: sum(_prod(s) for s in shapes)  # noqa: E731
        return float(count(ins) + count(outs)), 0.0

    def infer(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Callable[[Axes], Axes], home: Axes = ()
    ) -> list[Type]:
        """Types of the outputs. RuleError where no rule allows these inputs."""
        specs = self.shape(ins, attrs)
        for t in ins:
            if t.pending and t.kind != "sum" and not self.takes(t.kind, attrs):
                raise RuleError(
                    "P013", f"{self.name} of a value pending by {t.kind}: only a redistribution may consume it"
                )
        axes: list[str] = []
        for t in ins:
            own = (*t.axes(), *(t.index.axes if t.index else ()))  # an index binds its home axes, sharded or not
            axes.extend(a for a in own if a not in axes)
        states: dict[str, list[str]] = {}
        for a in order(tuple(axes)):
            states[a] = self.axis_rule(a, [_state(t, a) for t in ins], ins, attrs)
        out: list[Type] = []
        for i, (dtype, names) in enumerate(specs):
            dims = []
            for name in names:
                on = [a for a, st in states.items() if st[i] == name]
                dims.append(Dim(name, order(tuple(on)) if name in ROW_DIMS else _merge_order(name, on, ins, self.name)))
            kinds = {a: st[i].partition(":")[2] or "sum" for a, st in states.items() if st[i].partition(":")[0] == "P"}
            if len(set(kinds.values())) > 1:
                raise RuleError("P013", f"{self.name} would be pending by {kinds}: a value is pending by one kind")
            kind = next(iter(kinds.values()), "sum")
            out.append(Type(dtype, tuple(dims), order(tuple(kinds)), kind, self.out_index(ins, attrs)))
        return out

    def out_index(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> Dim | None:
        return None


def wide(x: Tensor) -> Tensor:
    """The precision references compute in: float32, or float64 for float64 operands (the simulator's exact mode)."""
    return x if x.dtype == torch.float64 else x.float()


def _state(t: Type, axis: str) -> str:
    state = t.state(axis)
    return f"P:{t.kind}" if state == "P" and t.kind != "sum" else state


def _prod(shape: Sequence[int]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


def _merge_order(name: str, on: list[str], ins: Sequence[Type], op: str) -> Axes:
    """Order of the axes of one non-row dim of an output: that of the operands, which must agree."""
    orders = {tuple(a for a in d.axes if a in on) for t in ins for d in t.dims if d.name == name}
    full = [o for o in orders if len(o) == len(on)]
    if len(full) > 1:
        raise RuleError(
            "P014", f"{op}: {name} is sharded in the orders {sorted(full)} on its operands; the blocks do not match"
        )
    return full[0] if full else tuple(on)


def show(states: States, ins: Sequence[Type]) -> str:
    return ", ".join(f"{'/'.join(t.names)}:{s}" for s, t in zip(states, ins))


def refuse(
    op: str, axis: str, states: States, ins: Sequence[Type], why: str, code: str = "P010", **more: Any
) -> RuleError:
    return RuleError(code, f"{op} on axis {axis} ({show(states, ins)}): {why}", axis=axis, **more)


def pointwise_rule(
    op: str, axis: str, states: States, ins: Sequence[Type], out: Sequence[str], *, linear: Sequence[Sequence[int]] = (),
    joint: bool = False, closed: Sequence[str] = (),
) -> str:  # fmt: skip
    """The factor rule of ops whose operands meet by dim name (broadcast where an operand lacks the dim).

    `linear` lists groups of operand positions in which the op is linear: with `joint`, all of one group must be pending
    together (add); otherwise exactly one operand of a singleton group (mul). `closed` dims cannot be sharded.
    """
    pend = [i for i, s in enumerate(states) if s == "P"]
    if pend:
        for group in linear:
            if joint and sorted(group) == pend and all(states[i] == "P" for i in group):
                return "P"
            if not joint and pend == list(group) and all(s == "R" for i, s in enumerate(states) if i not in pend):
                return "P"
        if joint:
            raise refuse(
                op, axis, states, ins, f"a complete value added to a sum pending over {axis} is counted once a rank", "P012"
            )  # fmt: skip
        raise refuse(
            op, axis, states, ins, f"{op} is not linear in this operand: it must be reduced over {axis} first", "P011"
        )  # fmt: skip
    letters = {s for s in states if s != "R"}
    if not letters:
        return "R"
    if len(letters) > 1:
        raise refuse(op, axis, states, ins, f"one axis shards two different dims {sorted(letters)}")
    (letter,) = letters
    if letter in closed:
        raise refuse(op, axis, states, ins, f"{op} needs the whole of {letter} on every rank", "P015")
    for s, t in zip(states, ins):
        if letter in t.names and s != letter:
            raise refuse(
                op, axis, states, ins, f"{letter} is sharded on one operand and whole on another: blocks do not match"
            )
    return letter if letter in out else "R"


def index_axes(op: str, t: Type, what: str, dim: str) -> Axes:
    """Home axes of an index operand; RuleError where it is none or points into another dim."""
    if t.index is None or t.index.name != dim:
        raise RuleError("P004", f"{op} needs {what} as an index into {dim}, the operand is {t}")
    return t.index.axes


def check_outer(op: str, caches: Sequence[Type], home: Axes) -> None:
    """Slot numbers count from the start of a home block, so the home axes are the outermost of the slots."""
    for c in caches:
        axes = c.dims[0].axes
        if any(a in home for a in axes[len([a for a in axes if a in home]) :]):
            raise RuleError("V4", f"{op}: the home axes {list(home)} must be the outermost of {c.names[0]} in {c}")
