"""Random typed programs in the author's vocabulary, as source text; and their shrinking.

Invariant: every program that is generated is one the compiler must accept. Statements are typed as they are chosen (the
feature dims of a value and the axes it is pending over), so a leaf declares exactly what it derives. Shrinking only drops
statements whose result has the type of an operand, so a smaller program stays one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

AXES = ("tp", "mlp", "vp")
#: mesh, axes: one, two and three mesh axes, mixed orders, parts of an axis, home axes shared with others
PLANS = (
    ("tp=2", ""), ("tp=3", ""), ("tp=4", "mlp=1"), ("dp=2,tp=2", ""), ("dp=2,tp=2", "mlp=dp*tp"), ("dp=2,tp=2", "mlp=tp*dp,vp=dp"),
    ("a=2,b=2", "tp=a*b,mlp=b,vp=a"), ("a=2,b=2", "tp=b*a,mlp=a,vp=b"), ("dp=2,a=2,b=2", "tp=a*b,mlp=b,vp=dp*b"),
    ("dp=2,a=2,b=2", "tp=a,mlp=dp*a*b,vp=b"), ("dp=3,tp=2", "vp=tp*dp"), ("a=2,dp=2", "tp=a,mlp=dp*a,vp=a"),
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Type of a value inside a leaf: feature dims, the axis that shards the first of them, axes it is pending over."""

    dims: str = "h"  # h | f | n d
    axis: str = ""
    pending: tuple[str, ...] = ()

    def spec(self, rows: str) -> str:
        first, *rest = self.dims.split()
        words = [rows, first + (f"@{self.axis}" if self.axis else ""), *rest]
        return " ".join(words + (["+" + ",".join(self.pending)] if self.pending else []))


@dataclass(frozen=True)
class Statement:
    """`target = text`, with {0}, {1} for the operands; `weight` declares what it uses."""

    target: str
    text: str
    operands: tuple[str, ...]
    kind: Kind
    weight: tuple[str, str] | None = None  # attribute, declaration
    drop: bool = False  # the result has the kind of the first operand, which can stand for it


@dataclass(frozen=True)
class Body:
    """A module: leaf or composite. `rows`: t* or t@dp; `given`: kind of its argument; `result`: the value it returns."""

    name: str
    leaf: bool
    rows: str
    given: Kind
    statements: tuple[Statement, ...]
    result: str
    spec_in: str
    spec_out: str


@dataclass(frozen=True)
class Fuzzed:
    """A program: modules in order of definition, the root last. `rows`: t and s a home group."""

    bodies: tuple[Body, ...]
    plan: tuple[str, str]
    rows: tuple[int, int]
    sampled: bool
    seed: int
    extents: tuple[tuple[str, int], ...] = (("h", 6), ("f", 10), ("n", 4), ("d", 2), ("v", 11))

    def ops(self) -> int:
        return sum(len(b.statements) for b in self.bodies)

    def source(self) -> str:
        return "\n".join([_HEAD.format(dims=dict(self.extents)), *(_module(b) for b in self.bodies[:-1]), self._root()])

    def _root(self) -> str:
        body = self.bodies[-1]
        lines = [
            "class Root(Module):",
            "    dims = staticmethod(lambda c: dict(DIMS))",
            "",
            "    def __init__(self, c):",
        ]
        lines += _init(body) + (["        self.head = Top()"] if self.sampled else [])
        out = "s@dp" if self.sampled else "t@dp h"
        lines += [
            "",
            f'    def forward(self, b: Batch) -> Annotated[Tensor, "{out}"]:',
            "        x = b.x",
            "        y = b.y",
        ]
        lines += _lines(body)
        if self.sampled:
            lines += [
                f'        export("stream", {body.result}, "t@dp h")',
                f"        z = self.head(select_rows({body.result}, b.last))",
            ]
        lines.append("        return " + ("z" if self.sampled else body.result))
        return "\n".join(lines) + "\n"


_HEAD = """from typing import Annotated

from torch import Tensor

from tokenspeed.models.nn import *
from tokenspeed.models.nn.params import export

DIMS = {dims}


class Batch(Ports):
    x = Port("t@dp h", "f32")
    y = Port("t@dp h", "f32")
    last = Port("s@dp -> t@dp")


class Top(Module):
    def __init__(self):
        self.w = Weight("v@vp h", pad=("v", 4))

    def forward(self, x: Annotated[Tensor, "s* h"]) -> Annotated[Tensor, "s* argmax:vp"]:
        return argmax(head(x, self.w))

"""


def _init(b: Body) -> list[str]:
    weights = [s.weight for s in b.statements if s.weight]
    return [f"        self.{name} = {text}" for name, text in weights] or ["        pass"]


def _lines(b: Body) -> list[str]:
    return [f"        {s.target} = {s.text.format(*s.operands)}" for s in b.statements]


def _module(b: Body) -> str:
    head = [f"class {b.name}(Module):", "    def __init__(self):", *_init(b), ""]
    sig = f'    def forward(self, x: Annotated[Tensor, "{b.spec_in}"]) -> Annotated[Tensor, "{b.spec_out}"]:'
    return "\n".join([*head, sig, *_lines(b), f"        return {b.result}", "", ""])


# ---- generation ------------------------------------------------------------------------------------------------------


@dataclass
class _Leaf:
    rng: random.Random
    name: str
    rows: str
    values: dict[str, Kind] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)

    def add(
        self, text: str, operands: tuple[str, ...], kind: Kind, weight: str = "", more: tuple[Kind, ...] = ()
    ) -> str:
        n = len(self.statements)
        targets = [f"v{n}", *(f"w{n}_{k}" for k in range(len(more)))]
        attribute = (f"p{n}", weight) if weight else None
        drop = not more and self.values[operands[0]] == kind
        text = text.replace("self.p", f"self.p{n}")
        self.statements.append(Statement(", ".join(targets), text, operands, kind, attribute, drop))
        self.values.update(zip(targets, (kind, *more)))
        return targets[0]

    def grow(self) -> None:
        """One random statement that is legal here."""
        rng = self.rng
        v = rng.choice(list(self.values))
        k = self.values[v]
        others = [w for w, u in self.values.items() if u.dims == k.dims and u.axis == k.axis]
        free = [a for a in AXES if a not in k.pending]
        choice = rng.choice(("up", "up", "down", "down", "silu", "scale", "mul", "add", "norm", "place"))
        if choice == "up" and k.dims == "h" and free:
            axis = rng.choice([*free, ""])
            at = f"@{axis}" if axis else ""
            if rng.random() < 0.4:
                self.add("self.p({0})", (v,), Kind("n d", axis, k.pending), f'Linear("h -> n{at}*d")')
            elif rng.random() < 0.4:
                kind = Kind("f", axis, k.pending)
                self.add("self.p({0})", (v,), kind, f'Linear("h -> f{at} | f{at}")', (kind,))
            else:
                bias = ", bias=True" if not k.pending and rng.random() < 0.4 else ""
                self.add("self.p({0})", (v,), Kind("f", axis, k.pending), f'Linear("h -> f{at}"{bias})')
        elif choice == "down" and k.dims != "h":
            first, *rest = k.dims.split()
            at = f"@{k.axis}" if k.axis else ""
            pending = tuple(a for a in AXES if a in k.pending or a == k.axis)
            bias = f', bias="h{" +" + ",".join(pending) if pending else ""}"' if rng.random() < 0.3 else ""
            self.add(
                "self.p({0})", (v,), Kind("h", "", pending), f'Linear("{"*".join([first + at, *rest])} -> h"{bias})'
            )
        elif choice == "silu" and not k.pending:
            self.add("silu({0})", (v,), k)
        elif choice == "scale":
            self.add("{0} * " + rng.choice(("0.5", "-1.5")), (v,), k)
        elif choice == "mul":
            w = rng.choice([w for w in others if not (self.values[w].pending and k.pending)] or [""])
            if w:
                self.add("{0} * {1}", (v, w), replace(k, pending=k.pending or self.values[w].pending))
        elif choice == "add":
            w = rng.choice([w for w in others if self.values[w].pending == k.pending])
            self.add("{0} + {1}", (v, w), k)
        elif choice == "norm" and not k.pending and k.dims != "f":
            norm = "LayerNorm" if len(self.values) % 3 == 0 else "RMSNorm"
            self.add("self.p({0})", (v,), k, f'{norm}("{"h" if k.dims == "h" else "d"}", 1e-5)')
        elif choice == "place" and k.pending:
            kind = replace(k, pending=k.pending[1:])
            self.add(f'place({{0}}, "{kind.spec(self.rows)}")', (v,), kind)


def _leaf(rng: random.Random, name: str) -> Body:
    rows = rng.choice(("t*", "t*", "t@dp"))
    given = Kind("h", "", rng.choice(((), (), (), ("mlp",), ("tp",))))
    g = _Leaf(rng, name, rows, {"x": given})
    for _ in range(rng.randrange(2, 9)):
        g.grow()
    if not any(k.dims == "h" and v != "x" for v, k in g.values.items()):
        g.add("{0} * 0.5", ("x",), given)
    result = [v for v, k in g.values.items() if k.dims == "h"][-1]
    return Body(name, True, rows, given, tuple(g.statements), result, given.spec(rows), g.values[result].spec(rows))


def _experts(rng: random.Random, name: str) -> Body:
    """A leaf of routed experts on one axis, the width of each on another or whole; scores, groups and a bias at random."""
    over, inner = rng.sample(AXES, 2)
    width = f"g@{inner}" if rng.random() < 0.5 else "g"
    groups = rng.choice(("", ', score="sigmoid"', ", groups=4, top_groups=2, group_best=2, normalise=False, scale=1.5"))
    bias, given = (", self.bias" if rng.random() < 0.5 else ""), Kind()
    weights = (
        f'Linear("h -> e", dtype="f32"), Weight("e", dtype="f32"), Experts("e@{over}: h -> {width} | {width}"), '
        f'Experts("e@{over}: {width} -> h")'
    )
    routed = f"route(self.router({{0}}), Routing(2{groups}){bias})"
    text = f"experts({{0}}, *{routed}, self.up, self.down)"
    whole = Statement("y", text, ("x",), given, ("router, self.bias, self.up, self.down", weights))
    out = f"t* h +{over}?" + (f" +{inner}" if "@" in width else "")
    return Body(name, True, "t*", given, (whole,), "y", "t* h", out)


def _composite(rng: random.Random, name: str, callees: list[Body], root: bool) -> Body:
    """Residual joins, calls, norms and scales over streams [t, h]; every statement's result is a stream like its operands."""
    kind, values, statements = Kind(), ["x", "y"] if root else ["x"], []

    def add(text: str, operands: tuple[str, ...], weight: tuple[str, str] | None = None) -> None:
        statements.append(Statement(f"u{len(statements)}", text, operands, kind, weight, True))
        values.append(statements[-1].target)

    for body in [*callees, *(rng.choice(callees) for _ in range(rng.randrange(0, 2)))]:
        v, n = values[-1], len(statements)
        choice = rng.randrange(6)
        if choice == 0:
            add(f"self.m{n}({{0}})", (v,), (f"m{n}", f"{body.name}()"))
        elif choice == 1:
            add(f"{{0}} + self.m{n}({{1}})", (v, rng.choice(values)), (f"m{n}", f"{body.name}()"))
        elif choice == 2:
            add(f"self.q{n}({{0}})", (v,), (f"q{n}", 'RMSNorm("h", 1e-5)'))
            add(f"{{0}} + self.m{n}({{1}})", (v, values[-1]), (f"m{n}", f"{body.name}()"))
        elif choice == 3:
            add(f"self.m{n}({{0}}) + {{1}} * 0.5", (v, rng.choice(values)), (f"m{n}", f"{body.name}()"))
        elif choice == 4:
            add(f"self.m{n}({{0}})", (v,), (f"m{n}", f"{body.name}()"))
            add("{0} + {1} + {2}", (rng.choice(values), v, values[-1]))
        else:  # two sums that could wait for one reduction, were it not for what stands between
            other = rng.choice([body, body, *callees])
            add(f"self.m{n}({{0}})", (v,), (f"m{n}", f"{body.name}()"))
            if rng.random() < 0.5:
                add("silu({0})", (values[-1],))
            else:
                add(f"self.q{n}({{0}})", (values[-1],), (f"q{n}", 'RMSNorm("h", 1e-5)'))
            add(f"{{0}} + self.o{n}({{1}})", (values[-1], v), (f"o{n}", f"{other.name}()"))
        if rng.random() < 0.3:
            add(rng.choice(("silu({0})", "{0} * -0.5", "silu({0}) * {0}", "{0} + {0}")), (values[-1],))
    specs = ("t* h +?", "t* h", "t@dp h", "t* h +mlp?")
    return Body(name, False, "t*", kind, tuple(statements), values[-1], rng.choice(specs), rng.choice(specs))


def generate(seed: int) -> Fuzzed:
    """The program of one seed: one to three leaves, perhaps a composite around some of them, the root."""
    rng = random.Random(seed)
    bodies = [_leaf(rng, f"Leaf{i}") for i in range(rng.randrange(1, 4))]
    if (own := random.Random(f"experts {seed}")).random() < 0.15:
        bodies.append(_experts(own, "Sparse"))
    callees = list(bodies)
    if rng.random() < 0.5:
        bodies.append(_composite(rng, "Inner", rng.sample(callees, rng.randrange(1, len(callees) + 1)), False))
        callees = [*callees, bodies[-1]]
    bodies.append(_composite(rng, "Root", callees, True))
    rows = rng.choice((1, 2, 3, 4, 8, 12))
    extents = (("h", rng.choice((5, 6))), ("f", rng.choice((8, 10))), ("n", rng.choice((3, 4))), ("d", 2), ("v", 11),
               ("e", 24), ("k", 2), ("g", 4))  # fmt: skip
    return Fuzzed(tuple(bodies), rng.choice(PLANS), (rows, rng.choice((1, rows))), rng.random() < 0.4, seed, extents)


# ---- shrinking -------------------------------------------------------------------------------------------------------


def smaller(p: Fuzzed) -> Iterator[Fuzzed]:
    """Programs with one statement, or one plan axis, fewer."""
    for i, b in enumerate(p.bodies):
        for j, s in enumerate(b.statements):
            rest = b.statements[:j] + b.statements[j + 1 :]
            read = {o for t in b.statements for o in t.operands} | {b.result}
            if s.drop:
                rest = tuple(_replaced(t, s.target, s.operands[0]) for t in rest)
            elif read & set(s.target.split(", ")):
                continue
            less = replace(b, statements=rest, result=s.operands[0] if b.result == s.target else b.result)
            if _whole(less):
                yield replace(p, bodies=(*p.bodies[:i], less, *p.bodies[i + 1 :]))
    for i, b in enumerate(p.bodies[:-1]):
        if not any(f"{b.name}()" in (s.weight or ("", ""))[1] for c in p.bodies for s in c.statements):
            yield replace(p, bodies=p.bodies[:i] + p.bodies[i + 1 :])
    if p.sampled:
        yield replace(p, sampled=False)


def _whole(b: Body) -> bool:
    """Whether a body is still what it was: a leaf that computes something, a composite that calls something."""
    return b.result != "x" if b.leaf else any("self.m" in s.text or "self.o" in s.text for s in b.statements)


def _replaced(s: Statement, old: str, new: str) -> Statement:
    return replace(s, operands=tuple(new if o == old else o for o in s.operands))


_NOTE = re.compile(r'"(?=[^"]*\b(?:[tsh]\b|[tsh]\*|[tsnfv]@))([^"\n]+)"')


def annotation_spans(source: str) -> list[tuple[int, int]]:
    """Spans of the placement strings of a program, those of the ports aside."""
    start = source.index("class Top")
    return [m.span(1) for m in _NOTE.finditer(source) if m.start() > start]


def altered(text: str, rng: random.Random) -> str:
    """One annotation with one thing changed: an axis, a star, a pending sum."""
    ways: list[str] = []
    for a in (*AXES, "dp"):
        if re.search(rf"@{a}\b", text):
            ways += [re.sub(rf"@{a}\b", f"@{b}", text, count=1) for b in (*AXES, "dp") if b != a]
            ways.append(re.sub(rf"@{a}\b", "", text, count=1))
        if re.search(rf"\+{a}\b", text):
            ways += [re.sub(rf"\+{a}\b", f"+{b}", text, count=1) for b in AXES if b != a]
            ways.append(re.sub(rf" ?\+{a}\b[?]?", "", text, count=1))
    ways += [re.sub(r"\b([ts])\*(?!\w)", rf"\1{to}", text) for to in ("", "@dp", "@tp") if re.search(r"\b[ts]\*", text)]
    ways += [text.replace("t@dp", to) for to in ("t", "t*", "t@tp") if "t@dp" in text]
    if "->" not in text and "+" not in text:
        ways += [f"{text} +{a}" for a in AXES]
    ways += [text.replace("argmax:", to) for to in ("+", "max:") if "argmax:" in text]
    return rng.choice([w for w in ways if w != text] or [text + " +tp"])
