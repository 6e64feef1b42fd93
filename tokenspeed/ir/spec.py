"""The annotation grammar: one string says how a tensor is placed. Parsed once, bound to axes later.

    spec   := dim* pend* [ "->" dim ]
    dim    := factor ("*" factor)* | row "*"
    factor := name [ "@" axes ] [ ":" (name | int) ]
    axes   := axis | "(" axis ("," axis)+ ")"
    pend   := "+" list [ "?" ] | "+?" | ("max"|"min"|"lse"|"argmax"|"topk"|"varying") ":" list

Invariant: `str(parse(text))` is canonical and parses to an equal Spec. A product of factors stands for several tensor
dims of one weight side; only its first factor may carry axes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from tokenspeed.ir.errors import SpecError

_FACTOR = re.compile(
    r"(?P<name>[A-Za-z_]\w*)(?:@(?P<axes>[A-Za-z_]\w*|\([A-Za-z_]\w*(?:,[A-Za-z_]\w*)+\)))?(?::(?P<sub>[A-Za-z_]\w*|\d+))?$"
)
_PEND = re.compile(
    r"(?P<kind>\+|max:|min:|lse:|argmax:|topk:|varying:)(?P<axes>[A-Za-z_]\w*(?:,[A-Za-z_]\w*)*)(?P<maybe>\?)?$"
)


@dataclass(frozen=True)
class Factor:
    name: str
    axes: tuple[str, ...] = ()
    sub: str = ""  # sharded over the outermost factors of `axes` with product min(sub, size)

    def __str__(self) -> str:
        at = "" if not self.axes else "@" + (self.axes[0] if len(self.axes) == 1 else f"({','.join(self.axes)})")
        return self.name + at + (f":{self.sub}" if self.sub else "")


@dataclass(frozen=True)
class SpecDim:
    factors: tuple[Factor, ...]
    starred: bool = False

    def __str__(self) -> str:
        return "*".join(map(str, self.factors)) + ("*" if self.starred else "")

    @property
    def name(self) -> str:
        return self.factors[0].name


@dataclass(frozen=True)
class Pend:
    kind: str  # sum, max, min, lse, argmax, topk, varying
    axes: tuple[str, ...]
    maybe: bool = False

    def __str__(self) -> str:
        head = "+" if self.kind == "sum" else self.kind + ":"
        return head + ",".join(self.axes) + ("?" if self.maybe else "")


@dataclass(frozen=True)
class Spec:
    dims: tuple[SpecDim, ...] = ()
    pending: tuple[Pend, ...] = ()
    any_pending: bool = False  # "+?": may be pending on any axis
    index: SpecDim | None = None

    def __str__(self) -> str:
        words = [str(d) for d in self.dims] + [str(p) for p in self.pending] + (["+?"] if self.any_pending else [])
        return " ".join(words) + (f" -> {self.index}" if self.index else "")

    def logical_axes(self) -> set[str]:
        dims = [*self.dims, *([self.index] if self.index else [])]
        return {a for d in dims for f in d.factors for a in f.axes} | {a for p in self.pending for a in p.axes}


def _parse_dim(word: str, text: str) -> SpecDim:
    starred = word.endswith("*")
    factors: list[Factor] = []
    for part in (word[:-1] if starred else word).split("*"):
        m = _FACTOR.match(part)
        if not m:
            raise SpecError(
                "P001", f"cannot read {part!r} in the annotation {text!r}; a dim is NAME[@AXES][:SUB], e.g. kv@tp:kv"
            )
        axes = tuple(m["axes"].strip("()").split(",")) if m["axes"] else ()
        if len(set(axes)) != len(axes):
            raise SpecError("P002", f"an axis is used twice in {part!r} of {text!r}")
        if m["sub"] and not axes:
            raise SpecError(
                "P001", f"{part!r} in {text!r} names a sub-axis but no axis; write {m['name']}@AXIS:{m['sub']}"
            )
        factors.append(Factor(m["name"], axes, m["sub"] or ""))
    if starred and (len(factors) > 1 or factors[0].axes):
        raise SpecError(
            "P001", f"{word!r} in {text!r}: a starred dim stands alone, without axes (the solver picks them)"
        )
    if any(f.axes for f in factors[1:]):
        raise SpecError("P003", f"{word!r} in {text!r}: only the outermost factor of a product may be sharded")
    return SpecDim(tuple(factors), starred)


@lru_cache(maxsize=4096)
def parse_spec(text: str) -> Spec:
    """Parses one annotation. SpecError P001 (grammar), P002 (an axis used twice), P003 (inner factor sharded)."""
    body, arrow, target = text.partition("->")
    index = None
    if arrow:
        words = target.split()
        if len(words) != 1:
            raise SpecError("P001", f"the index target of {text!r} must be one dim, e.g. `t@dp -> s@dp`")
        index = _parse_dim(words[0], text)
    dims: list[SpecDim] = []
    pending: list[Pend] = []
    any_pending = False
    for word in body.split():
        if word == "+?":
            any_pending = True
        elif m := _PEND.match(word):
            kind = "sum" if m["kind"] == "+" else m["kind"][:-1]
            pending.append(Pend(kind, tuple(m["axes"].split(",")), bool(m["maybe"])))
        elif pending or any_pending:
            raise SpecError("P001", f"{word!r} in {text!r}: dims come before pending axes")
        else:
            dims.append(_parse_dim(word, text))
    spec = Spec(tuple(dims), tuple(pending), any_pending, index)
    _check_axes(spec, text)
    return spec


def _check_axes(spec: Spec, text: str) -> None:
    seen: dict[str, Factor | Pend] = {}
    for f in (f for d in spec.dims for f in d.factors):
        for a in f.axes:
            if a in seen:
                raise _twice(text, a, seen[a], f)
            seen[a] = f
    for p in spec.pending:
        for a in p.axes:
            if a in seen and not p.maybe:
                raise _twice(text, a, seen[a], p)
            seen.setdefault(a, p)
    if len({p.kind for p in spec.pending}) > 1:
        raise SpecError("P002", f"{text!r} mixes kinds of pending reductions; a value has one kind")


def _twice(text: str, axis: str, first: Factor | Pend, second: Factor | Pend) -> SpecError:
    def without(use: Factor | Pend) -> str:
        rest = tuple(a for a in use.axes if a != axis)
        if isinstance(use, Factor):
            return f'write "{Factor(use.name, rest, use.sub if rest else "")}" for "{use}"'
        return f'write "{Pend(use.kind, rest)}" for "{use}"' if rest else f'leave "{use}" out'

    return SpecError(
        "P002",
        f'axis {axis!r} is used twice in "{text}"\n  first     : {first}\n  second    : {second}\n'
        "  a rank has one coordinate on an axis: the axis splits one dim, or one sum is pending over it\n"
        f"  fix 1: {without(second)}\n  fix 2: {without(first)}",
    )


def parse_sides(text: str) -> tuple[tuple[SpecDim, ...], tuple[tuple[SpecDim, ...], ...]]:
    """A weight's map, `"h -> n@tp*d | kv@tp:kv*d"`: input dims (factors flattened) and one dim list a segment."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise SpecError("P001", f"{text!r}: a linear map is written IN -> OUT | OUT ..., e.g. `h -> f@mlp | f@mlp`")
    flat = lambda side: tuple(  # noqa: E731
        SpecDim((f,)) for w in side.split() for f in _parse_dim(w, text).factors
    )
    inp, outs = flat(left), tuple(flat(seg) for seg in right.split("|"))
    for out, segment in zip(outs, right.split("|")):
        _check_axes(Spec((*inp, *out)), f"{left.strip()} -> {segment.strip()}")
    return inp, outs
