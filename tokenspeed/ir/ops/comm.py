"""Redistributions: the only ops that move data between ranks or change a placement. The compiler inserts them.

attrs: `axes`, one set of axes in the same state that move together, outermost first. Each declares the one state it
takes; `slice` and `keep_first` cost no traffic. `same_bits` lowerings give every rank the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.mesh import Axes
from tokenspeed.ir.ops.base import Local, Op, OutSpec
from tokenspeed.ir.types import ROW_DIMS, Type


class Redistribute(Op):
    """Base: the state of `axes` goes from one to another; other axes are untouched."""

    wire = True  # moves bytes between ranks
    takes_dim = False  # whether `dim` names the dim that is split or joined

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names)]

    def step(self, x: Type, axes: Axes, dim: str, order: Callable[[Axes], Axes]) -> Type:
        raise TypeError

    def infer(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Callable[[Axes], Axes], home: Axes = ()
    ) -> list[Type]:
        (x,), axes, dim = ins, tuple(attrs["axes"]), attrs.get("dim", "")
        if not axes or len(set(axes)) != len(axes):
            raise RuleError("V9", f"{self.name} over {list(axes)}: name each axis of the group once")
        if (dim in x.names) != self.takes_dim:
            raise RuleError(
                "V1", f"{self.name} of {x} " + (f"along {dim!r}" if self.takes_dim else f"has no dim {dim!r}")
            )
        if dim in ROW_DIMS and order(axes) != axes:
            raise RuleError("V4", f"{self.name}: the axes of the row dim {dim} move in mesh order, not {list(axes)}")
        if x.index and any(a in x.index.axes for a in axes):
            raise RuleError("V8", f"{self.name} over {list(axes)}: an index into one home block cannot cross it: {x}")
        kind = attrs.get("kind", "sum")
        if x.state(axes[0]) == "P" and x.kind != kind:
            raise RuleError("V1", f"{self.name} reduces by {kind}, the operand {x} is pending by {x.kind}")
        return [self.step(x, axes, dim, order)]

    def need(self, x: Type, axes: Axes, state: str) -> None:
        for a in axes:
            if x.state(a) != state:
                raise RuleError("V1", f"{self.name} over {a} needs state {state}, the operand {x} has {x.state(a)}")

    def need_inner(self, x: Type, axes: Axes, dim: str) -> None:
        """Only the innermost axes of an ordered dim move directly; the axes of a row dim are a set."""
        have = x.dim(dim).axes
        if dim not in ROW_DIMS and have[len(have) - len(axes) :] != axes:
            raise RuleError("V4", f"{self.name}: {list(axes)} are not the innermost axes of {dim} in {x}")


class AllReduce(Redistribute):
    """+A -> whole; attr `kind` where it is no sum. For argmax, topk and lse the operand is a pair: the result is the
    winning id, the k best ids, or the merged output."""

    name = "all_reduce"

    def step(self, x: Type, axes: Axes, dim: str, order: Callable[[Axes], Axes]) -> Type:
        self.need(x, axes, "P")
        if x.kind == "varying":
            raise RuleError("V2", f"all_reduce of {x}: a value that varies from rank to rank has no meaning")
        for a in axes:
            x = x.with_state(a, "R", order, x.kind)
        return x


class ReduceScatter(Redistribute):
    """+A -> dim@A."""

    name = "reduce_scatter"
    takes_dim = True

    def step(self, x: Type, axes: Axes, dim: str, order: Callable[[Axes], Axes]) -> Type:
        self.need(x, axes, "P")
        if x.kind != "sum":
            raise RuleError("V1", f"reduce_scatter of a value pending by {x.kind}")
        for a in axes:
            x = x.with_state(a, dim, order)
        return x


class AllGather(Redistribute):
    """dim@A -> whole."""

    name = "all_gather"
    takes_dim = True

    def step(self, x: Type, axes: Axes, dim: str, order: Callable[[Axes], Axes]) -> Type:
        self.need(x, axes, dim)
        self.need_inner(x, axes, dim)
        for a in axes:
            x = x.with_state(a, "R", order, x.kind)
        return x


class Slice(Redistribute):
    """whole -> dim@A, by keeping this rank's block."""

    name = "slice"
    takes_dim = True
    wire = False

    def step(self, x: Type, axes: Axes, dim: str, order: Callable[[Axes], Axes]) -> Type:
        self.need(x, axes, "R")
        for a in axes:
            x = x.with_state(a, dim, order, x.kind)
        return x


class KeepFirst(Redistribute):
    """whole -> +A: the first rank along A keeps the value, the others hold zeros (a select, so NaN holes do not spread)."""

    name = "keep_first"
    wire = False

    def step(self, x: Type, axes: Axes, dim: str, order: Callable[[Axes], Axes]) -> Type:
        self.need(x, axes, "R")
        if x.kind != "sum":
            raise RuleError("V1", f"keep_first of {x}: zeros are neutral in a sum, not in a pending {x.kind}")
        for a in axes:
            x = x.with_state(a, "P", order)
        return x

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"keep": at.plan.mesh.index(at.rank, tuple(attrs["axes"])) == 0}

    def reference(self, x: Tensor, *, keep: bool) -> Tensor:
        return x if keep else torch.zeros_like(x)


COMM = [AllReduce(), ReduceScatter(), AllGather(), Slice(), KeepFirst()]
