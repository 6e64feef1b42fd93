"""Pass 7: fewer and cheaper redistributions in a finished list of nodes, whoever put them there.

    share    two equal redistributions of one value are one (a gather hoisted above its consumers)
    shorten  a chain of redistributions is the cheapest path between its ends: gather after scatter cancels, reduce-scatter
             and gather merge into all-reduce, two gathers into one over the product group
    sink     an all-gather of rows moves below an op that works on the rows as they lie, where fewer bytes then move
    drop     what nobody reads goes

Invariant: the types that every other op takes and gives stay the same, or become rows of its rule; the cost never rises
(asserted). Whatever the solver inserts for one edge is a cheapest path already, so work is found where two edges meet:
at a signature that a value crosses, at an author's `place`, or in an edited program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from tokenspeed.compiler.passes.repair import TIE, Repairs
from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.graph import Node, Param, Program, param_type
from tokenspeed.ir.ops import OPS, Redistribute
from tokenspeed.ir.types import ROW_DIMS, Type


def simplify(p: Program, repairs: Repairs) -> Program:
    """The same program with less traffic; `p` itself where there is nothing to do."""
    if not worthwhile(p.nodes, p.results):
        return p
    work = _Work(p.nodes, p.types, p.params, p.results, repairs)
    work.run()
    return replace(p, nodes=work.nodes, types=work.types, results=work.results)


def worthwhile(nodes: Iterable[Node], results: Iterable[str]) -> bool:
    """Whether some rule may apply: two redistributions are equal, in a row for two edges (the steps of one edge are a
    cheapest path), or one is read by nobody, or by an op that works on rows as they lie."""
    made: dict[str, Node] = {}
    seen: set[object] = set()
    readers = Counter([*(i for n in nodes for i in n.inputs), *results])
    for n in nodes:
        if _moves(n):
            key = _key(n)
            inner = made.get(n.inputs[0])
            if key in seen or not readers[n.outputs[0]] or (inner is not None and _edge(n) != _edge(inner)):
                return True
            seen.add(key)
            made[n.outputs[0]] = n
        elif n.op != "call" and any(
            readers[i] == 1 and i in made and made[i].op == "all_gather" and made[i].attrs["dim"] in ROW_DIMS
            for i in n.inputs
        ):
            return True
    return False


def _moves(n: Node) -> bool:
    return n.op != "call" and isinstance(OPS[n.op], Redistribute)


def _edge(n: Node) -> str:
    """The value whose edge an inserted op serves, as its note says; another one for each op without a note."""
    return n.note.partition(" ")[0] or n.outputs[0]


def _key(n: Node) -> object:
    return n.op, n.inputs, tuple(sorted(n.attrs.items()))


class _Work:
    def __init__(
        self, nodes: list[Node], types: dict[str, Type], params: dict[str, Param], results: list[str], repairs: Repairs
    ) -> None:
        self.nodes, self.types, self.results = list(nodes), dict(types), list(results)
        self.params, self.repairs = params, repairs
        self.priced: dict[int, tuple[Node, float]] = {}  # by id; a node is kept with its price

    def run(self) -> None:
        before = self.cost()
        while any(rule() for rule in (self.share, self.drop, self.shorten, self.sink)):
            after = self.cost()
            if after > before * (1 + 1e-12):
                raise AssertionError(f"simplification made a program dearer: {before} -> {after} us")
            before = after

    # ---- cost ----

    def cost(self) -> float:
        return sum(map(self.price, self.nodes))

    def price(self, n: Node) -> float:
        """us of a redistribution, or of the bytes that an op of the main list moves; calls are not changed here."""
        if id(n) not in self.priced:
            self.priced[id(n)] = n, self._price(n)
        return self.priced[id(n)][1]

    def _price(self, n: Node) -> float:
        if n.op == "call":
            return 0.0
        if _moves(n):
            return self.step(n.op, n.attrs["axes"], self.types[n.inputs[0]], self.types[n.outputs[0]])
        if OPS[n.op].alias:
            return 0.0
        moved = sum(self.repairs.nbytes(self.types[v]) for v in (*n.values, *n.outputs) if v in self.types)
        return self.repairs.costs.compute(moved, 0.0, 1)

    def step(self, op: str, axes: tuple[str, ...], before: Type, after: Type) -> float:
        costs, mesh = self.repairs.costs, self.repairs.plan.mesh
        if op in ("slice", "keep_first"):
            return costs.compute(self.repairs.nbytes(after), 0.0, 1)
        whole = self.repairs.nbytes(after if op == "all_gather" else before)
        return costs.collective(op, mesh.size(axes), whole) + TIE

    # ---- rules: each applies once and says whether it did ----

    def readers(self, value: str) -> list[int]:
        return [i for i, n in enumerate(self.nodes) if value in n.inputs]

    def rename(self, old: str, new: str) -> None:
        for i, n in enumerate(self.nodes):
            if old in n.inputs:
                self.nodes[i] = replace(n, inputs=tuple(new if v == old else v for v in n.inputs))
        self.results = [new if r == old else r for r in self.results]
        del self.types[old]

    def share(self) -> bool:
        seen: dict[object, Node] = {}
        for i, n in enumerate(self.nodes):
            if not _moves(n):
                continue
            first = seen.setdefault(_key(n), n)
            if first is not n:
                del self.nodes[i]
                self.rename(n.outputs[0], first.outputs[0])
                return True
        return False

    def drop(self) -> bool:
        read = {v for n in self.nodes for v in n.inputs}.union(self.results)
        for i, n in enumerate(self.nodes):
            if _moves(n) and n.outputs[0] not in read:
                del self.nodes[i], self.types[n.outputs[0]]
                return True
        return False

    def shorten(self) -> bool:
        makers = {o: i for i, n in enumerate(self.nodes) if _moves(n) for o in n.outputs}
        readers = Counter(v for n in self.nodes for v in set(n.inputs))
        for i, n in enumerate(self.nodes):
            if not _moves(n):
                continue
            chain, at = [i], n.inputs[0]
            while at in makers:  # from each earlier value of the chain
                chain.append(makers[at])
                at = self.nodes[makers[at]].inputs[0]
                if self.shorter(chain, at, readers):
                    return True
        return False

    def shorter(self, chain: list[int], source: str, readers: Counter[str]) -> bool:
        """Replaces the last node of a chain by the cheapest path from `source`, if that saves; `chain`: last node first."""
        last = self.nodes[chain[0]]
        have, want = self.types[source], self.types[last.outputs[0]]
        path = self.repairs.path(have, want)
        spared = self.price(last)
        for i in chain[1:]:  # an inner one goes too where only this chain reads it
            value = self.nodes[i].outputs[0]
            if value in self.results or readers[value] > 1:
                break
            spared += self.price(self.nodes[i])
        if path.cost + TIE * path.wires >= spared * (1 - 1e-12):
            return False
        at, new = source, []
        for k, step in enumerate(path.steps):
            name = last.outputs[0] if k == len(path.steps) - 1 else self.fresh(source)
            new.append(Node(step.op, (at,), (name,), dict(step.attrs()), last.origin, last.note))
            self.types[name] = step.after
            at = name
        self.nodes[chain[0] : chain[0] + 1] = new
        if not new:
            self.rename(last.outputs[0], source)
        while self.drop():
            pass
        return True

    def fresh(self, base: str) -> str:
        name = base + "'"
        while name in self.types:
            name += "'"
        return name

    def sink(self) -> bool:
        for i, n in enumerate(self.nodes):
            if not _moves(n) or n.op != "all_gather" or n.attrs["dim"] not in ROW_DIMS:
                continue
            value, dim = n.outputs[0], n.attrs["dim"]
            readers = self.readers(value)
            if value in self.results or len(readers) != 1:
                continue
            j = readers[0]
            f = self.nodes[j]
            if f.op == "call" or _moves(f) or len(f.outputs) != 1 or OPS[f.op].alias:
                continue
            inputs = tuple(n.inputs[0] if v == value else v for v in f.inputs)
            args = [param_type(self.params, v) if v.startswith("@") else self.types[v] for v in inputs]
            plan = self.repairs.plan
            try:
                (scattered,) = OPS[f.op].infer(args, f.attrs, plan.mesh.ordered, plan.home)
                if dim not in scattered.names:
                    continue
                (after,) = OPS["all_gather"].infer([scattered], n.attrs, plan.mesh.ordered)
            except RuleError:
                continue
            if after != self.types[f.outputs[0]]:
                continue
            old = self.price(n) + self.price(f)
            inner = self.fresh(f.outputs[0])
            self.types[inner] = scattered
            below = replace(f, inputs=inputs, outputs=(inner,))
            gather = Node("all_gather", (inner,), f.outputs, dict(n.attrs), n.origin, f"{n.note}, sunk below {f.op}")
            if self.price(below) + self.price(gather) >= old * (1 - 1e-12):
                del self.types[inner]
                continue
            self.nodes[j : j + 1] = [below, gather]
            del self.nodes[i], self.types[value]
            return True
        return False
