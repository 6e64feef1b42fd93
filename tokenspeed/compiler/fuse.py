"""Local fusion: chains of nodes without a collective that one registered kernel runs. Invariant: the program that was
verified is untouched; `fuse` gives the list of kernel calls that binding asks the registry for and emission makes, and a
chain is fused only where the registry has a kernel for the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenspeed.compiler.exchange import CALLS as EXCHANGE
from tokenspeed.ir.graph import Node
from tokenspeed.ir.ops import OPS, Local, Op
from tokenspeed.ir.types import Type
from tokenspeed.kernels.fused import FUSED


class _Chain(Op):
    """What emission asks of an op, for a fused one: attributes pass through, an offset is that of the last dim of ins[0]."""

    def __init__(self, name: str) -> None:
        self.name = name

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        if self.name == "gumbel_argmax":
            return {"offset": at.offset(ins[0].dims[-1])}
        return dict(attrs)


class _Exchange(Op):
    """A half of an exchange (exchange.py): the first expert of every rank of the group, in its order, and how many each holds."""

    def __init__(self, name: str) -> None:
        self.name = name

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        group, experts = at.plan.mesh.group(at.rank, attrs["axes"]), attrs["experts"]
        held = at.sizes[experts.name] // at.plan.mesh.size(experts.axes)
        return {"firsts": tuple(replace(at, rank=r).offset(experts) for r in group), "held": held}


CALLS: dict[str, Op] = OPS | {name: _Chain(name) for name in FUSED} | {name: _Exchange(name) for name in EXCHANGE}


class _Uses:
    """Who makes and who takes the values of a list of nodes."""

    def __init__(self, nodes: Sequence[Node], kept: Collection[str]) -> None:
        self.nodes, self.kept = nodes, kept
        self.maker = {o: i for i, n in enumerate(nodes) for o in n.outputs}
        self.takers: dict[str, list[int]] = {}
        for i, n in enumerate(nodes):
            for v in n.inputs:
                self.takers.setdefault(v, []).append(i)

    def made_by(self, value: str, op: str) -> int | None:
        """The index of the node that makes `value`, if it is an `op`."""
        i = self.maker.get(value)
        return i if i is not None and self.nodes[i].op == op else None

    def only(self, value: str, taker: int) -> bool:
        """Whether nothing but node `taker` reads `value`."""
        return value not in self.kept and set(self.takers.get(value, ())) == {taker}


Found = tuple[Node, list[int]]  # a fused node, and the nodes it stands for: it takes the place of the last one


def fuse(nodes: Sequence[Node], kept: Collection[str], has_kernel: Callable[[Node], bool]) -> list[Node]:
    """`nodes` with chains replaced; `kept`: values read from outside the list."""
    uses = _Uses(nodes, kept)
    gone: set[int] = set()
    fused: dict[int, Node] = {}
    for i, n in enumerate(nodes):
        for node, members in _PATTERNS.get(n.op, _none)(uses, i):
            if gone.isdisjoint(members) and has_kernel(node):
                gone.update(members)
                fused[max(members)] = node
                break
    return [fused.get(i, n) for i, n in enumerate(nodes) if i in fused or i not in gone]


def _none(uses: _Uses, i: int) -> Iterator[Found]:
    yield from ()


def _append(uses: _Uses, i: int) -> Iterator[Found]:
    """rope of q, rope of k, append; with an RMS norm of each before, or without."""
    nodes, append = uses.nodes, uses.nodes[i]
    of_k = uses.made_by(append.inputs[0], "rope")
    caches = append.inputs[3:5]
    of_q = next(
        (
            q
            for n in nodes[i + 1 :]
            if n.op == "attend" and n.inputs[1:3] == caches and (q := uses.made_by(n.inputs[0], "rope")) is not None
        ),
        None,
    )
    if of_k is None or of_q is None or not uses.only(append.inputs[0], i):
        return
    k, q = nodes[of_k], nodes[of_q]
    if k.inputs[1:] != q.inputs[1:] or of_q > i or min(uses.takers[q.outputs[0]]) < i:
        return
    rest = (*q.inputs[1:], append.inputs[2], *caches)
    norm_q, norm_k = (uses.made_by(n.inputs[0], "rms_norm") for n in (q, k))
    if norm_q is not None and norm_k is not None:
        a, b = nodes[norm_q], nodes[norm_k]
        alone = uses.only(a.outputs[0], of_q) and uses.only(b.outputs[0], of_k)
        if alone and a.attrs == b.attrs:
            inputs = (a.inputs[0], b.inputs[0], append.inputs[1], a.inputs[1], b.inputs[1], *rest)
            yield Node("norm_rope_append", inputs, q.outputs, a.attrs, append.origin), [norm_q, norm_k, of_q, of_k, i]
    inputs = (q.inputs[0], k.inputs[0], append.inputs[1], *rest)
    yield Node("rope_append", inputs, q.outputs, {}, append.origin), [of_q, of_k, i]


def _norm(uses: _Uses, i: int) -> Iterator[Found]:
    """A residual add right before the norm of its sum; both values stay."""
    norm = uses.nodes[i]
    add = uses.made_by(norm.inputs[0], "add")
    if add is not None and add == i - 1:
        total = uses.nodes[add]
        inputs = (*total.inputs, norm.inputs[1])
        yield Node("add_rms_norm", inputs, (*total.outputs, *norm.outputs), norm.attrs, norm.origin), [add, i]


def _gated(uses: _Uses, i: int) -> Iterator[Found]:
    """The product with gate and up, and what becomes of them."""
    gate, up = uses.nodes[i].inputs
    product = uses.made_by(gate, "linear")
    if product is None or not (uses.only(gate, i) and uses.only(up, i)):
        return
    n = uses.nodes[product]
    if n.outputs == (gate, up) and not n.attrs["bias"]:
        yield Node("linear_silu_mul", n.inputs, uses.nodes[i].outputs, n.attrs, uses.nodes[i].origin), [product, i]


def _argmax(uses: _Uses, i: int) -> Iterator[Found]:
    noise = uses.made_by(uses.nodes[i].inputs[0], "add_gumbel")
    temper = None if noise is None else uses.made_by(uses.nodes[noise].inputs[0], "temper")
    if noise is None or temper is None:
        return
    z, params = uses.nodes[temper].inputs
    alone = uses.only(uses.nodes[temper].outputs[0], noise) and uses.only(uses.nodes[i].inputs[0], i)
    if alone and uses.nodes[noise].inputs[1] == params:
        node = Node("gumbel_argmax", (z, params), uses.nodes[i].outputs, {}, uses.nodes[i].origin)
        yield node, [temper, noise, i]


_PATTERNS = {"append": _append, "rms_norm": _norm, "silu_mul": _gated, "argmax": _argmax}
