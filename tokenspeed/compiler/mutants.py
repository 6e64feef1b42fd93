"""Mutants of a finished program: every small way to get a collective, a placement, a mask or an order wrong.

Invariant: a mutant is text that keeps no type but those of ports and parameters, no note and no key, so the verifier must
find the fault from op names, operands and the mesh. A mutant of several ranks is one text a rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tokenspeed.ir.graph import Leaf, Node, Param, Program
from tokenspeed.ir.ops import OPS, Redistribute
from tokenspeed.ir.ops.fused import expand
from tokenspeed.ir.text import print_program
from tokenspeed.ir.types import Dim, Type

_OPS = ("all_reduce", "reduce_scatter", "all_gather", "slice", "keep_first")


@dataclass(frozen=True)
class Mutant:
    kind: str
    what: str
    texts: Sequence[str]  # one, or one a rank


def mutants(p: Program, other: Program | None = None) -> Iterator[Mutant]:
    """Mutants of `p`; `other` is the same model's program of another bucket."""
    p, other = expand(p), None if other is None else expand(other)
    for edit, kind, what in itertools.chain(_collectives(p), _effects(p), _types(p)):
        q = _copy(p)
        try:
            edit(q)
        except (StopIteration, KeyError, ValueError):
            continue
        yield Mutant(kind, what, (_text(q),))
    yield from _ranks(p, other)


def _copy(p: Program) -> Program:
    """A program whose nodes, lists and tables are its own; what none of them changes (types, values of attributes) is shared."""

    def body(nodes: list[Node]) -> list[Node]:
        return [Node(n.op, n.inputs, n.outputs, dict(n.attrs), n.origin, n.note) for n in nodes]

    leaves = {
        k: Leaf(f.name, list(f.inputs), list(f.outputs), body(f.nodes), dict(f.types), dict(f.params))
        for k, f in p.leaves.items()
    }
    return replace(p, results=list(p.results), result_types=list(p.result_types), nodes=body(p.nodes), types=dict(p.types),
                   params=dict(p.params), leaves=leaves)  # fmt: skip


def _text(p: Program) -> str:
    bare = replace(p, nodes=[replace(n, note="") for n in p.nodes],
                   leaves={k: replace(f, nodes=[replace(n, note="") for n in f.nodes]) for k, f in p.leaves.items()})  # fmt: skip
    return print_program(bare, typed=False)


Edit = Callable[[Program], None]
Found = tuple[Edit, str, str]


class _Body:
    """The main list or a leaf of a program, under one view: nodes, types, and what leaves it."""

    def __init__(self, p: Program, leaf: str) -> None:
        self.nodes = p.leaves[leaf].nodes if leaf else p.nodes
        self.types = p.leaves[leaf].types if leaf else p.types
        self.results = p.leaves[leaf].outputs if leaf else p.results

    def rename(self, start: int, old: str, new: str) -> None:
        for n in self.nodes[start:]:
            n.inputs = tuple(new if i == old else i for i in n.inputs)
        self.results[:] = [new if r == old else r for r in self.results]

    def users(self, value: str) -> list[int]:
        return [k for k, n in enumerate(self.nodes) if value in n.inputs]


def _bodies(p: Program) -> list[str]:
    return ["", *p.leaves]


def _collectives(p: Program) -> Iterator[Found]:
    for leaf in _bodies(p):
        body = _Body(p, leaf)
        for i, n in enumerate(body.nodes):
            if isinstance(OPS.get(n.op), Redistribute):
                yield from _collective(p, leaf, i, n, body)
        yield from _joined(p, leaf, body)


def _collective(p: Program, leaf: str, i: int, n: Node, body: _Body) -> Iterator[Found]:
    source, made = n.inputs[0], n.outputs[0]
    t, axes = body.types[source], tuple(n.attrs["axes"])
    where = f"{n.op} of %{source}" + (f" in @{leaf}" if leaf else "")

    def change(**attrs: object) -> Edit:
        return lambda q: _Body(q, leaf).nodes[i].attrs.update(attrs)

    def drop(q: Program) -> None:
        b = _Body(q, leaf)
        del b.nodes[i]
        b.rename(i, made, source)

    def double(q: Program) -> None:
        b = _Body(q, leaf)
        b.rename(i + 1, made, made + "~")
        b.nodes.insert(i + 1, Node(n.op, (made,), (made + "~",), dict(n.attrs)))

    yield drop, "dropped", where
    yield double, "doubled", where
    mesh = p.plan.mesh
    groups = {p.plan.mesh.ordered(g) for k in (1, 2) for g in itertools.combinations(mesh.names, k)}
    for g in sorted(groups | {axes[:-1], axes[::-1]} - {axes, ()}):
        if g and g != axes:
            yield change(axes=g), "axis order" if set(g) == set(axes) else "wrong axis", f"{where} over {g}"
    if set(axes) != set(mesh.names):
        yield change(axes=mesh.names), "world group", where
    for op in _OPS:
        dims: list[str] = [d for d in t.names if d != n.attrs.get("dim")] if op == n.op else list(t.names)
        if op in ("all_reduce", "keep_first"):
            dims = [] if op == n.op else [""]
        for dim in dims:
            yield _swap(leaf, i, op, dim), "other collective" if op != n.op else "other dim", f"{where}: {op} {dim}"
    if n.op in ("all_reduce", "reduce_scatter"):
        for kind in ("sum", "max", "min", "argmax"):
            if kind != n.attrs.get("kind", "sum"):
                yield change(kind=kind), "reduce op", f"{where} by {kind}"
    users = body.users(made)
    for u in users:
        if len(users) > 1 or made in body.results:

            def bypass(q: Program, u: int = u) -> None:
                m = _Body(q, leaf).nodes[u]
                m.inputs = tuple(source if x == made else x for x in m.inputs)

            yield bypass, "bypassed", f"{where} by {body.nodes[u].op}"
    if len(users) == 1 and body.nodes[users[0]].outputs:

        def move(q: Program, u: int = users[0]) -> None:
            b = _Body(q, leaf)
            m = b.nodes[u]
            m.inputs = tuple(source if x == made else x for x in m.inputs)
            out = m.outputs[0]
            b.rename(u + 1, out, out + "~")
            b.nodes.insert(u + 1, Node(n.op, (out,), (out + "~",), dict(n.attrs)))
            del b.nodes[i]

        yield move, "moved", f"{where} behind {body.nodes[users[0]].op}"


def _swap(leaf: str, i: int, op: str, dim: str) -> Edit:
    def edit(q: Program) -> None:
        n = _Body(q, leaf).nodes[i]
        n.op = op
        n.attrs.pop("dim", None)
        if dim:
            n.attrs["dim"] = dim

    return edit


def _joined(p: Program, leaf: str, body: _Body) -> Iterator[Found]:
    """Collectives that nobody asked for, on values that are pending, whole or sharded."""
    for i, n in enumerate(body.nodes):
        for value in n.values[:2]:
            t = body.types[value]
            for a in p.plan.mesh.names:
                state = t.state(a)
                op = {"P": "all_reduce", "R": "keep_first"}.get(state, "all_gather")
                attrs = {"axes": (a,)} | ({"dim": state} if op == "all_gather" else {})
                if t.pending and t.kind != "sum" and op == "all_reduce":
                    attrs["kind"] = t.kind

                def insert(q: Program, i: int = i, value: str = value, op: str = op, attrs: dict = attrs) -> None:
                    b = _Body(q, leaf)
                    b.nodes[i].inputs = tuple(value + "~" if x == value else x for x in b.nodes[i].inputs)
                    b.nodes.insert(i, Node(op, (value,), (value + "~",), dict(attrs)))

                yield (
                    insert,
                    "spare collective",
                    f"{op} over {a} of %{value} for {n.op}" + (f" in @{leaf}" if leaf else ""),
                )


def _effects(p: Program) -> Iterator[Found]:
    for leaf in _bodies(p):
        body = _Body(p, leaf)
        for i, n in enumerate(body.nodes):
            if n.op == "fill":

                def unfill(q: Program, leaf: str = leaf, i: int = i, n: Node = n) -> None:
                    b = _Body(q, leaf)
                    del b.nodes[i]
                    b.rename(i, n.outputs[0], n.inputs[0])

                yield unfill, "mask dropped", f"fill of %{n.inputs[0]} in @{leaf}"
                for value in (0.0, 1e30):
                    yield _set(leaf, i, "value", value), "mask dropped", f"fill with {value} in @{leaf}"
            if n.op in OPS and OPS[n.op].writes_cache:

                def gone(q: Program, leaf: str = leaf, i: int = i) -> None:
                    del _Body(q, leaf).nodes[i]

                def late(q: Program, leaf: str = leaf, i: int = i) -> None:
                    nodes = _Body(q, leaf).nodes
                    written = {x for x in nodes[i].inputs if x.startswith("@")}
                    k = next(k for k, m in enumerate(nodes) if k > i and written & set(m.inputs))
                    nodes.insert(k, nodes.pop(i))

                def another(q: Program, leaf: str = leaf, i: int = i) -> None:
                    nodes = _Body(q, leaf).nodes
                    mine, count = nodes[i], len(nodes[i].inputs)
                    m = next(m for m in nodes if m.op == mine.op and m is not mine and len(m.inputs) == count)
                    k = next(k for k, x in enumerate(mine.inputs) if _kept(q, leaf, x))
                    mine.inputs = (*mine.inputs[:k], m.inputs[k], *mine.inputs[k + 1 :])

                def twice(q: Program, leaf: str = leaf, i: int = i) -> None:
                    nodes = _Body(q, leaf).nodes
                    nodes.insert(i, replace(nodes[i], attrs=dict(nodes[i].attrs)))

                for edit, what in (
                    (gone, "dropped"),
                    (late, "after it is read"),
                    (twice, "doubled"),
                    (another, "of another op"),
                ):
                    yield edit, "cache write", f"{n.op} {what} in @{leaf}"
            if n.op == "call" and n.attrs["path"]:

                def elsewhere(q: Program, i: int = i, n: Node = n) -> None:
                    twin = next(m for m in q.nodes if m.op == "call" and m.attrs["leaf"] == n.attrs["leaf"] and m is not q.nodes[i]
                                and any(c.kind == "cache" for c in q.leaves[n.attrs["leaf"]].params.values()))  # fmt: skip
                    q.nodes[i].attrs["path"] = twin.attrs["path"]

                yield elsewhere, "cache write", f"the cache of another layer in {n.attrs['path']}"


def _kept(p: Program, leaf: str, name: str) -> bool:
    """Whether an operand is a cache."""
    params = p.leaves[leaf].params if leaf else p.params
    return name.startswith("@") and params[name[1:].partition(":")[0]].kind == "cache"


def _set(leaf: str, i: int, key: str, value: object) -> Edit:
    return lambda q: _Body(q, leaf).nodes[i].attrs.__setitem__(key, value)


# ---- placements of ports, weights, caches, results -------------------------------------------------------------------


def placements(t: Type, p: Program) -> Iterator[Type]:
    """Types that differ from `t` in the placement of one axis, the order of two, or the index."""
    names = p.plan.mesh.names
    for k, d in enumerate(t.dims):
        others = {d.axes[:j] + d.axes[j + 1 :] for j in range(len(d.axes))} | {d.axes[::-1]}
        others |= {(*d.axes, a) for a in names if a not in t.axes()}
        others |= {tuple(b if x == a else x for x in d.axes) for a in d.axes for b in names if b not in t.axes()}
        for axes in sorted(others - {d.axes}):
            ordered = p.plan.mesh.ordered(axes) if d.name in p.bucket else axes
            if ordered != d.axes:
                yield replace(t, dims=(*t.dims[:k], Dim(d.name, ordered), *t.dims[k + 1 :]))
    for a in names:
        if a in t.pending:
            yield t.with_state(a, "R", p.plan.mesh.ordered, t.kind)
        elif a not in t.axes() and t.dtype in ("f32", "bf16"):
            yield t.with_state(a, "P", p.plan.mesh.ordered)
    if t.index:
        yield replace(t, index=None)
        yield replace(t, index=Dim(t.index.name, t.index.axes[:-1] if t.index.axes else names[:1]))


def _types(p: Program) -> Iterator[Found]:
    for name in p.ports:
        for t in placements(p.types[name], p):
            yield (lambda q, name=name, t=t: q.types.__setitem__(name, t)), "port placement", f"%{name} : {t}"
    for k, r in enumerate(p.result_types):
        for t in placements(r, p):
            yield (lambda q, k=k, t=t: q.result_types.__setitem__(k, t)), "result placement", f"result {k} : {t}"
    for leaf in _bodies(p):
        params = p.leaves[leaf].params if leaf else p.params
        for name, q in params.items():
            for k, s in enumerate(q.types):
                for t in placements(s, p):
                    both = q.kind == "cache"
                    kind = "kv replica map" if both or any(d.name == "kv" for d in s.dims) else "weight placement"
                    yield _retype(leaf, name, k, t, False), kind, f"@{name}:{k} : {t}"
                    if both and k == 0:
                        yield _retype(leaf, name, k, t, True), kind, f"@{name} : {t}"
    for name, f in p.leaves.items():
        for arg, t in ((a, t) for a in f.inputs for t in placements(f.types[a], p)):
            yield (
                (lambda q, n=name, a=arg, t=t: q.leaves[n].types.__setitem__(a, t)),
                "signature",
                f"@{name} {arg} : {t}",
            )


def _retype(leaf: str, name: str, k: int, t: Type, both: bool) -> Edit:
    def edit(q: Program) -> None:
        params = q.leaves[leaf].params if leaf else q.params
        old = params[name]
        alike = [
            t if j == k or s == old.types[k] else replace(s, dims=(t.dims[0], *s.dims[1:]))
            for j, s in enumerate(old.types)
        ]
        types = alike if both else [t if j == k else s for j, s in enumerate(old.types)]
        params[name] = Param(name, old.kind, tuple(types))

    return edit


# ---- several ranks ---------------------------------------------------------------------------------------------------


def _ranks(p: Program, other: Program | None) -> Iterator[Mutant]:
    """One rank that runs another order, one collective fewer, or another bucket."""
    whole, ranks = _text(p), p.plan.mesh.ranks

    def one(text: str, r: int) -> tuple[str, ...]:
        return tuple(text if k == r else whole for k in range(ranks))

    wires = [i for i, n in enumerate(p.nodes) if isinstance(op := OPS.get(n.op), Redistribute) and op.wire]
    for i, j in itertools.pairwise(wires):
        q = _copy(p)
        between = {o for n in q.nodes[i:j] for o in n.outputs}
        if not between & set(q.nodes[j].inputs):
            q.nodes.insert(i, q.nodes.pop(j))
            yield Mutant("order on one rank", f"collectives {i} and {j} on rank 1", one(_text(q), 1))
    for i in wires:
        q = _copy(p)
        del q.nodes[i]
        for n in q.nodes:
            n.inputs = tuple(p.nodes[i].inputs[0] if x == p.nodes[i].outputs[0] else x for x in n.inputs)
        q.results[:] = [p.nodes[i].inputs[0] if r == p.nodes[i].outputs[0] else r for r in q.results]
        yield Mutant("missing on one rank", f"collective {i} on rank 0", one(_text(q), 0))
    if other is not None:
        for r in range(ranks):
            yield Mutant("bucket of one rank", f"rank {r} runs t={other.bucket['t']}", one(_text(other), r))
