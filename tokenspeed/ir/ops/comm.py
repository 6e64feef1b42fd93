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

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names)]

    def step(self, x: Type, axes: Axes, dim: str, order: Callable[[Axes], Axes]) -> Type:
        raise TypeError

    def infer(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Callable[[Axes], Axes], home: Axes = ()
    ) -> list[Type]:
        return [self.step(ins[0], tuple(attrs["axes"]), attrs.get("dim", ""), order)]

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
    """+A -> whole. For kind argmax the operand is a pair and the result the winning id."""

    name = "all_reduce"

    def step(self, x: Type, axes: Axes, dim: str, order: Callable[[Axes], Axes]) -> Type:
        self.need(x, axes, "P")
        if x.kind not in ("sum", "max", "argmax"):
            raise RuleError("V1", f"all_reduce has no lowering for a value pending by {x.kind}")
        for a in axes:
            x = x.with_state(a, "R", order, x.kind)
        return x


class ReduceScatter(Redistribute):
    """+A -> dim@A."""

    name = "reduce_scatter"

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

    def step(self, x: Type, axes: Axes, dim: str, order: Callable[[Axes], Axes]) -> Type:
        self.need(x, axes, dim)
        self.need_inner(x, axes, dim)
        for a in axes:
            x = x.with_state(a, "R", order, x.kind)
        return x


class Slice(Redistribute):
    """whole -> dim@A, by keeping this rank's block."""

    name = "slice"
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
