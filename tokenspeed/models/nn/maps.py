"""Weights and the maps made of them: Weight, Linear, and stacks of maps (Experts, HeadLinear). They are ops of the enclosing
body, not modules.

Invariant: a declaration names dims and axes only; extents come from the model's `dims` and ranks from the plan. A map is
written IN -> OUT | OUT ..., and a stack of maps with the dim that counts them before a colon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenspeed.ir.builder import apply, caller, current
from tokenspeed.ir.errors import SpecError
from tokenspeed.ir.spec import Spec, SpecDim, parse_sides, parse_spec
from tokenspeed.models.nn.module import Param

T = TypeVar("T")

#: marks "the dtype of the activation stream" until the compiler knows it
STREAM = "act"


@dataclass(frozen=True)
class Segment:
    """One matrix of a weight, as the checkpoint holds it: output dims, then input dims."""

    out: tuple[SpecDim, ...]
    inp: tuple[SpecDim, ...] = ()


def read(parse: Callable[[str], T], text: str) -> T:
    """What `parse` makes of an author's text; its SpecError says on which line the text stands."""
    try:
        return parse(text)
    except SpecError as e:
        raise SpecError(e.code, f"{caller()}: {e.message}") from None


def read_spec(text: str) -> Spec:
    """An annotation of an author's; its SpecError says on which line it stands."""
    return read(parse_spec, text)


class Weight(Param):
    """One tensor, e.g. Weight("v@vp h", pad=("v", 64)): extent of v is the next multiple of lcm(64, ranks of vp).

    dtype: default the stream's, or what the checkpoint stores in blocks; "f32" for numbers that must not be rounded."""

    def __init__(self, spec: str, pad: tuple[str, int] | None = None, dtype: str = STREAM) -> None:
        self.spec: Spec = read_spec(spec)
        self.pad, self.dtype = pad, dtype
        names = [d.name for d in self.spec.dims]
        if pad and pad[0] not in names:
            raise SpecError("P001", f"{caller()}: Weight({spec!r}): pad names {pad[0]!r}, which is not a dim of it")

    def ref(self) -> str:
        current().frame.params[self.path] = self
        return f"@{self.path}"


class Matrices(Param):
    """A map "IN -> OUT | OUT ..." stored as one matrix, a segment an output; what Linear and Stack share."""

    text: str
    inp: tuple[SpecDim, ...]
    segments: list[Segment]
    bias: list[Spec] | None = None
    stacked: bool = False  # the first output dim of each segment counts checkpoint tensors


def _biases(map_: str, segments: list[Segment], bias: bool | str | None) -> list[Spec] | None:
    """Where the biases of a map lie: like each output, or as a spec says of the one output."""
    if isinstance(bias, str) and len(segments) != 1:
        raise SpecError("P001", f"{caller()}: {map_!r}: a bias spec goes with one segment")
    return [read_spec(bias)] if isinstance(bias, str) else [Spec(seg.out) for seg in segments] if bias else None


class Linear(Matrices):
    """A linear map "h -> n@tp*d | kv@tp:kv*d | ...": one output a segment, stored as one matrix [sum of outputs, input].

    bias: None, or True for a bias placed like each output, or a spec for a pending one ("h +mlp", kept by the first rank).
    dtype: of the outputs, default the stream's ("f32" for logits).
    """

    def __init__(self, map_: str, bias: bool | str | None = None, dtype: str = STREAM) -> None:
        self.text, self.dtype = map_, dtype
        self.inp, outs = read(parse_sides, map_)
        self.segments = [Segment(out, self.inp) for out in outs]
        self.bias = _biases(map_, self.segments, bias)

    def __call__(self, x: Any) -> Any:
        current().frame.params[self.path] = self
        k = len(self.segments)
        refs = [f"@{self.path}:{i}" for i in range(k)]
        if self.bias:
            refs += [f"@{self.path}.bias:{i}" for i in range(k)]
        return apply(
            "linear",
            [x, *refs],
            k,
            in_dims=tuple(d.name for d in self.inp),
            segments=k,
            bias=bool(self.bias),
            dtype=self.dtype,
        )


class Stack(Matrices):
    """Linear maps that lie in a stack, one an index of its dim: "e@ep: h -> f@etp | f@etp" is a map an expert, "n@tp: a -> b" one a
    head. Each maps one dim; `segments` are [stack, out, in]."""

    def __init__(self, map_: str, bias: bool | str | None = None) -> None:
        self.text = map_
        of, colon, each = map_.partition(": ")
        stack = read_spec(of).dims if colon else ()
        inp, outs = read(parse_sides, each if colon else map_)
        if len(stack) != 1 or len(inp) != 1 or any(len(out) != 1 for out in outs):
            raise SpecError(
                "P001",
                f"{caller()}: {type(self).__name__}({map_!r}) maps one dim at each index of another; that one stands before a "
                "colon, e.g. `e@ep: h -> f@etp | f@etp`",
            )
        for out in outs:
            read_spec(" ".join(map(str, (*stack, *inp, *out))))  # an axis splits one dim of a map
        self.inp = tuple(inp)
        self.segments = [Segment((*stack, *out), self.inp) for out in outs]
        self.bias = _biases(map_, self.segments, bias)


class Experts(Stack):
    """A map an expert, of which a checkpoint holds a tensor each: the weights of `experts`. bias: as of Linear ("e@ep h +etp")."""

    stacked = True

    def refs(self) -> tuple[list[str], list[str]]:
        """References of the maps, and of their biases."""
        current().frame.params[self.path] = self
        count = range(len(self.segments))
        return [f"@{self.path}:{i}" for i in count], [f"@{self.path}.bias:{i}" for i in count if self.bias]


class HeadLinear(Stack):
    """A map a head: [T, n, a] -> [T, n, b]. A checkpoint holds the heads' matrices [b, a] as one, one under the other; with
    `transposed` matrices [a, b]."""

    def __init__(self, map_: str, transposed: bool = False) -> None:
        super().__init__(map_)
        if len(self.segments) != 1:
            raise SpecError("P001", f"{caller()}: HeadLinear({map_!r}) has one output")
        if transposed:
            (head, out), self.inp = self.segments[0].out, (self.segments[0].out[1],)
            self.segments = [Segment((head, *self.segments[0].inp), (out,))]

    def __call__(self, x: Any) -> Any:
        current().frame.params[self.path] = self
        return apply("head_linear", [x, f"@{self.path}"])
