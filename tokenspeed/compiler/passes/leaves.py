"""Pass 3: check leaf bodies. Once on logical axes, without a plan; then, per plan, each candidate placement is typed.

Invariant after: a leaf that passed is right on every plan whose axes inside it are disjoint and divide. Nothing is
inserted in a body, but where the author wrote `place`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.compiler.counterexample import of_op, of_reading
from tokenspeed.compiler.passes.layout import Layout
from tokenspeed.compiler.passes.trace import LeafDef
from tokenspeed.ir.errors import Origin, PlacementError, PlanError, RuleError
from tokenspeed.ir.graph import Leaf, Node, Param, absolute, param_type
from tokenspeed.ir.mesh import Axes
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.spec import Factor, Pend, Spec, SpecDim, parse_spec
from tokenspeed.ir.types import DTYPE_BYTES, ROW_DIMS, Dim, Type, bind_spec
from tokenspeed.models.nn.maps import STREAM, Matrices, Weight
from tokenspeed.models.nn.params import MASK_WORDS, LatentCache, PagedAttention, RMSNorm, Rope, SamplingState
from tokenspeed.models.nn.state import DeltaRule, StateCache

Stars = Mapping[str, Axes]  # axes of each starred row dim


@dataclass(frozen=True)
class Binding:
    """How axis names become axes: `axes` of a factor, `expand` of a bare name (pending, stars), `order` of a set."""

    axes: Callable[[Factor], Axes]
    expand: Callable[[str], Axes]
    order: Callable[[Axes], Axes]
    home: Axes
    dtype: str  # of the activation stream
    cache_dtype: str
    formats: Callable[[str], str]  # storage format of a weight, by name

    def spec(self, spec: Spec, dtype: str, stars: Stars | None = None) -> Type:
        return bind_spec(spec, dtype, self.axes, self.order, stars, self.expand)


def param_types(name: str, decl: Any, b: Binding, path: str | None = None) -> dict[str, Param]:
    """Types of the parameters one declaration stands for, by name; `path` is its absolute name where that differs."""
    stored = b.formats(path or name)

    def dims(ds: Iterable[SpecDim]) -> tuple[Dim, ...]:
        return tuple(Dim(f.name, b.axes(f)) for d in ds for f in d.factors)

    if isinstance(decl, Matrices):
        out = {name: Param(name, "weight", tuple(Type(stored, dims((*s.out, *s.inp))) for s in decl.segments))}
        if decl.bias:
            out[f"{name}.bias"] = Param(f"{name}.bias", "weight", tuple(b.spec(s, b.dtype) for s in decl.bias))
        return out
    if isinstance(decl, Weight):
        dtype = stored if decl.dtype == STREAM else decl.dtype
        return {name: Param(name, "weight", (b.spec(decl.spec, dtype),))}
    if isinstance(decl, RMSNorm):
        dtype = b.dtype if decl.dtype == STREAM else decl.dtype
        return {name: Param(name, "weight", (b.spec(decl.spec, dtype),))}
    if isinstance(decl, Rope):
        return {name: Param(name, "table", (Type("f32", (Dim("pos_table"), Dim("rope_dim"))),))}
    slots = Dim("slots", (*b.order(b.home), *b.order(b.expand("cp"))))
    if isinstance(decl, PagedAttention):
        held = Dim("window_slots", slots.axes) if decl.windowed else slots
        cache = Type(b.cache_dtype, (held, *dims((decl.kv, decl.d))))
        return {name: Param(name, "cache", (cache, cache))}
    if isinstance(decl, StateCache):
        dtype = b.dtype if decl.dtype == STREAM else decl.dtype
        return {name: Param(name, "cache", (Type(dtype, (Dim("states", b.order(b.home)), *dims(decl.spec.dims))),))}
    if isinstance(decl, LatentCache):
        return {name: Param(name, "cache", tuple(Type(b.cache_dtype, (slots, d)) for d in dims(decl.spec.dims)))}
    if isinstance(decl, SamplingState):
        rows = Dim("r", b.order(b.home))
        columns = tuple(Type(t, (rows, *dims(decl.vocabulary.dims))) for t in ("i32", "u8", "f32"))
        return {name: Param(name, "state", (*columns, Type("i32", (rows, Dim(MASK_WORDS)))))}
    raise PlanError("P034", f"{name}: {type(decl).__name__} is not a declaration the compiler knows")


def leaf_params(leaf: LeafDef, b: Binding) -> dict[str, Param]:
    out: dict[str, Param] = {}
    for name, decl in leaf.decls.items():
        out.update(param_types(name, decl, b, absolute(leaf.first_path, name)))
    return out


# ---- typing one body -------------------------------------------------------------------------------------------------


def resolve_dtypes(attrs: dict[str, Any], stream: str) -> dict[str, Any]:
    return attrs | {"dtype": stream} if attrs.get("dtype") == STREAM else attrs


def type_body(
    leaf: LeafDef, b: Binding, params: dict[str, Param], ins: list[Type], stars: Stars,
    repair: Callable[[str, Type, Type, Origin], tuple[list[Node], dict[str, Type], str]] | None = None,
) -> Leaf:  # fmt: skip
    """Types every value of the body. `repair` inserts what a `place` takes (None: logical check, the claim is believed)."""
    types = dict(zip(leaf.in_names, ins))
    rename: dict[str, str] = {}
    nodes: list[Node] = []
    for node in leaf.nodes:
        inputs = tuple(rename.get(i, i) for i in node.inputs)
        if node.op == "place":
            source = types[inputs[0]]
            target = b.spec(parse_spec(node.attrs["spec"]), source.dtype, stars)
            if target.names != source.names:
                raise _diagnose(
                    leaf,
                    node,
                    [source],
                    RuleError("P004", f"place names the dims {list(target.names)}, the value has {list(source.names)}"),
                )
            if repair is None:
                types[node.outputs[0]] = target
                continue
            if source == target:
                rename[node.outputs[0]] = inputs[0]
                continue
            extra, made, last = repair(inputs[0], source, target, node.origin)
            names: dict[str, str] = {}
            for n in made:  # the same value may be placed several ways
                names[n] = n
                while names[n] in types:
                    names[n] += "'"
                types[names[n]] = made[n]
            for e in extra:
                inputs, outs = ([names.get(x, x) for x in xs] for xs in (e.inputs, e.outputs))
                nodes.append(Node(e.op, tuple(inputs), tuple(outs), e.attrs, e.origin, e.note))
            rename[node.outputs[0]] = names.get(last, last)
            continue
        attrs = resolve_dtypes(node.attrs, b.dtype)
        args = [param_type(params, i) if i.startswith("@") else types[i] for i in inputs]
        try:
            outs = OPS[node.op].infer(args, attrs, b.order, b.home)
        except RuleError as e:
            raise _diagnose(leaf, node, args, e) from None
        types.update(zip(node.outputs, outs))
        nodes.append(Node(node.op, inputs, node.outputs, attrs, node.origin))
    outputs: list[str] = []
    for o in leaf.out_names:
        name = rename.get(o, o)
        if name in leaf.in_names or name in outputs:  # a call's results have names of their own
            alias = f"{name}'out{len(outputs)}"
            nodes.append(Node("cross", (name,), (alias,), {}, leaf.origin))
            types[alias], name = types[name], alias
        outputs.append(name)
    for name, spec in zip(outputs, leaf.out_specs):
        declared, derived = b.spec(spec, types[name].dtype, stars), types[name]
        if declared != derived:
            raise PlacementError(
                "P020",
                f"{leaf.origin}  {leaf.kind}.forward: declared output and derived output differ\n"
                f'  declared : {declared}      from "{spec}"\n  derived  : {derived}      {_source(leaf, name)}\n'
                f"  {_difference(declared, derived)}\n"
                + "".join(f"  {line}\n" for line in filter(None, [of_reading(derived, declared)]))
                + _result_fixes(leaf, derived, declared),
            )
    return Leaf(leaf.kind, list(leaf.in_names), outputs, nodes, types, params)


def _source(leaf: LeafDef, name: str) -> str:
    node = next((n for n in leaf.nodes if name in n.outputs), None)
    return f"from {node.op}, {node.origin}" if node else "an argument"


def _result_fixes(leaf: LeafDef, derived: Type, declared: Type) -> str:
    fixes = [f'declare "{_as_spec(derived, leaf)}" (0 bytes)']
    if derived.names == declared.names and (cost := _price(derived, declared)):
        fixes.append(f'return place(value, "{_as_spec(declared, leaf)}") ({cost})')
    return "\n".join(f"  fix {i}: {fix}" for i, fix in enumerate(fixes, 1))


def _price(t: Type, target: Type) -> str:
    """What it takes to place a value otherwise, in words: bytes a row and rank; "" where no redistribution does it."""
    row, words = " x ".join(d.name for d in t.dims if d.name not in ROW_DIMS) or "1", []
    for a in dict.fromkeys((*t.axes(), *target.axes())):
        before, after = t.state(a), target.state(a)
        if before == after:
            continue
        if "%" in a or "/" in a:
            return ""  # a part of an axis has no name of its own
        if before == "R":
            words.append(f"0 bytes: {'the first rank keeps it' if after == 'P' else 'a slice'} over {a}")
        elif before == "P":
            name, share = ("all-reduce", "2(n-1)/n") if after == "R" else ("reduce-scatter", "(n-1)/n")
            words.append(f"one {name} over {a}, {share} x {row} x {DTYPE_BYTES[t.dtype]} B a row and rank")
        elif after == "R":
            words.append(f"one all-gather over {a}, (n-1)/n x {row} x {DTYPE_BYTES[t.dtype]} B a row and rank")
        else:
            return ""
    return "; ".join(words)


def _difference(declared: Type, derived: Type) -> str:
    if declared.names != derived.names:
        return f"the dims differ: {list(declared.names)} and {list(derived.names)}"
    axes = dict.fromkeys((*declared.axes(), *derived.axes()))
    parts = [
        f"over {a} the value is {_word(derived, a)}, declared {_word(declared, a)}"
        for a in axes
        if declared.state(a) != derived.state(a)
    ]
    return "; ".join(parts) or "the kinds of the pending reduction or the index targets differ"


def _word(t: Type, axis: str) -> str:
    state = t.state(axis)
    return {"R": "whole", "P": f"a pending {t.kind}"}.get(state, f"sharded on {state}")


def _as_spec(t: Type, leaf: LeafDef) -> str:
    """The annotation of a type; a dim that the leaf's signature stars stays starred."""
    stars = starred(leaf)
    words = [f"{d.name}*" if d.name in stars else str(_factor(d)) for d in t.dims]
    words += [str(Pend(t.kind, _factor(Dim("", t.pending)).axes))] if t.pending else []
    return " ".join(words) + (f" -> {_factor(t.index)}" if t.index else "")


def _factor(d: Dim) -> Factor:
    """A dim as an author writes it: both parts of a split axis are the axis, the outer one alone is a sub-axis."""
    axes: list[str] = []
    sub = ""
    for a in d.axes:
        base, _, part = a.partition("/")
        if part and f"{base}%{part}" not in d.axes:
            sub = part
        axes.append(base.partition("%")[0])
    return Factor(d.name, tuple(dict.fromkeys(axes)), sub)


def _diagnose(leaf: LeafDef, node: Node, args: list[Type], e: RuleError) -> PlacementError:
    """Code, the user's line, each operand with what made it, the reason, a counter-example, fixes."""
    lines = [f"{node.origin}  in {leaf.kind}.forward: {node.op}"]
    for name, t in zip(node.inputs, args):
        is_param = name.startswith("@")
        label, source = (name, "a parameter") if is_param else (f"value {name}", _source(leaf, name))
        lines.append(f"  {label:<10}: {t}      {source}")
    lines.append(f"  {e.reason}")
    names = [n if n.startswith("@") else f"%{n}" for n in node.inputs]
    if e.axis and (example := of_op(node.op, names, args, node.attrs, e.axis)):
        lines.append(f"  {example}")
    fixes = e.fixes or (() if e.code == "P004" else _fixes(leaf, args))  # a wrong operand has no place to be put
    lines += [f"  fix {i}: {f}" for i, f in enumerate(fixes, 1)]
    return PlacementError(e.code, "\n".join(lines))


def _fixes(leaf: LeafDef, args: list[Type]) -> tuple[str, ...]:
    pending = next((t for t in args if t.pending), None)
    if pending is not None:
        whole = Type(pending.dtype, pending.dims)
        return (f"reduce the pending operand first: place(x, \"{_as_spec(whole, leaf)}\") ({_price(pending, whole)})",
                "return the pending value and do this in the calling composite, where the compiler repairs it (0 bytes here)")  # fmt: skip
    spread = [t for t in args if t.axes() and t.index is None]
    fixes = ["place the operands alike in the signature (0 bytes here: the compiler chooses at the boundary)"]
    for t in spread[:1]:
        whole = Type(t.dtype, tuple(Dim(d.name) for d in t.dims))
        fixes.append(f'place(x, "{_as_spec(whole, leaf)}") for the operand {t} ({_price(t, whole)})')
    return tuple(fixes)


# ---- the logical check -----------------------------------------------------------------------------------------------


def check_leaf(leaf: LeafDef, dtype: str = "bf16") -> None:
    """Checks a body once, on logical axes: each starred dim whole, on each axis it may use, on a fresh axis."""
    subs = _sub_axes(leaf)

    def expand(name: str) -> Axes:
        return (f"{name}/{subs[name]}", f"{name}%{subs[name]}") if name in subs else (name,)

    def axes(f: Factor) -> Axes:
        out = tuple(p for a in f.axes for p in expand(a))
        if not f.sub:
            return out
        return tuple(p for a in f.axes for p in (expand(a)[:1] if a in subs else (a,)))

    def order(a: Axes) -> Axes:
        return tuple(sorted(set(a)))

    b = Binding(axes, expand, order, ("dp",), dtype, dtype, lambda _: dtype)
    params = leaf_params(leaf, b)
    for stars in logical_stars(leaf, expand):
        type_body(leaf, b, params, [b.spec(s, dtype, stars) for s in leaf.in_specs], stars)


def _sub_axes(leaf: LeafDef) -> dict[str, str]:
    """Axes that some factor of this leaf uses only in part, with the name of the part's extent."""
    subs: dict[str, str] = {}
    dims = [*(d for s in (*leaf.in_specs, *leaf.out_specs) for d in s.dims), *_param_dims(leaf)]
    for f in (f for d in dims for f in d.factors):
        for a in f.axes if f.sub else ():
            if subs.setdefault(a, f.sub) != f.sub:
                raise PlacementError(
                    "P033", f"{leaf.origin}: axis {a!r} is split two ways in {leaf.kind}: by {subs[a]} and by {f.sub}"
                )
    return subs


def expert_axes(leaf: LeafDef, expand: Callable[[str], Axes]) -> set[str]:
    """Axes that count experts."""
    stacks = [d.segments[0].out[0] for d in leaf.decls.values() if isinstance(d, Matrices) and d.stacked]
    return {p for d in stacks for f in d.factors for a in f.axes for p in expand(a)}


def _param_dims(leaf: LeafDef, experts: bool = True) -> list[SpecDim]:
    """The dims of a leaf's weights and of its KV cache; without `experts` not those that count them."""
    dims: list[SpecDim] = []
    for decl in leaf.decls.values():
        if isinstance(decl, Matrices):
            first = 0 if experts or not decl.stacked else 1
            dims += [*decl.inp, *(d for seg in decl.segments for d in seg.out[first:])]
        elif isinstance(decl, PagedAttention | DeltaRule):
            dims += [decl.n, decl.kv]
        elif isinstance(decl, Weight | StateCache):
            dims += decl.spec.dims
    return dims


def starred(leaf: LeafDef) -> list[str]:
    dims = [d for s in (*leaf.in_specs, *leaf.out_specs) for d in s.dims if d.starred]
    return list(dict.fromkeys(d.name for d in dims))


def excluded(leaf: LeafDef, row: str, expand: Callable[[str], Axes]) -> set[str]:
    """Axes a starred row dim may not use: of another dim or an unconditional pending of the signature, or of a weight, but of
    those that count experts: there rows are exchanged."""
    out = {p for d in _param_dims(leaf, experts=False) for f in d.factors for a in f.axes for p in expand(a)}
    for s in (*leaf.in_specs, *leaf.out_specs):
        for d in s.dims:
            for f in d.factors:
                if f.name != row:
                    out.update(p for a in f.axes for p in expand(a))
        for p in s.pending:
            if not p.maybe:
                out.update(q for a in p.axes for q in expand(a))
    return out


def logical_stars(leaf: LeafDef, expand: Callable[[str], Axes]) -> list[Stars]:
    rows = starred(leaf)
    used = {p for s in (*leaf.in_specs, *leaf.out_specs) for a in s.logical_axes() for p in expand(a)}
    options: list[list[Axes]] = []
    for row in rows:
        usable = sorted(used - excluded(leaf, row, expand))
        options.append([(), *((a,) for a in usable), ("fresh",)])
    cases = [dict(zip(rows, pick)) for pick in itertools.product(*options)] if rows else [{}]
    return [c for c in cases if len({a for axes in c.values() for a in axes}) == sum(len(a) for a in c.values())]


# ---- candidates on a plan --------------------------------------------------------------------------------------------


def physical_stars(leaf: LeafDef, layout: Layout, rows: Mapping[str, Axes]) -> list[Stars]:
    """Every choice of the starred dims on this plan: subsets of the row factors minus what the signature uses otherwise."""
    names = starred(leaf)
    options: list[list[Axes]] = []
    for row in names:
        banned = excluded(leaf, row, layout.plan.axes)
        usable = [a for a in rows[row] if a not in banned]
        subsets = [tuple(c) for k in range(len(usable) + 1) for c in itertools.combinations(usable, k)]
        options.append([layout.plan.mesh.ordered(s) for s in subsets])
    return [dict(zip(names, pick)) for pick in itertools.product(*options)]


def check_disjoint(leaf: LeafDef, layout: Layout) -> None:
    """P031 where two logical axes of one signature or weight share a physical axis."""
    specs = [*leaf.in_specs, *leaf.out_specs]
    groups: list[tuple[str, list[tuple[str, Axes]]]] = []
    for s in specs:
        uses = [(f"{f}", layout.axes(f)) for d in s.dims for f in d.factors if f.axes]
        uses += [(str(p), tuple(q for a in p.axes for q in layout.plan.axes(a))) for p in s.pending if not p.maybe]
        groups.append((str(s), uses))
    for name, decl in leaf.decls.items():
        if isinstance(decl, Matrices):
            where = f'{name} "{decl.text}"'
            for seg in decl.segments:
                sharded = [f for d in (*seg.out, *seg.inp) for f in d.factors if f.axes]
                groups += [(where, [(str(f), layout.axes(f)) for f in sharded])]
        elif isinstance(decl, PagedAttention):
            slots = [(f"slots@{a}", layout.plan.axes(a)) for a in ("dp", "cp")]
            heads = [(str(f), layout.axes(f)) for d in (decl.n, decl.kv) for f in d.factors if f.axes]
            groups += [(f"the cache of {name}", [*slots, h]) for h in heads]
        elif isinstance(decl, LatentCache):
            groups.append((f"the caches of {name}", [(f"slots@{a}", layout.plan.axes(a)) for a in ("dp", "cp")]))
    for where, uses in groups:
        for (a, xs), (c, ys) in itertools.combinations(uses, 2):
            shared = sorted(set(xs) & set(ys))
            if shared:
                raise PlanError(
                    "P031",
                    f"{leaf.origin}  {leaf.kind}: {a} and {c} share mesh axis {shared[0]!r} in {where} under "
                    f"{layout.plan.describe()}\n  {a} is on {','.join(xs)}, {c} on {','.join(ys)}\n"
                    "  a rank has one coordinate on a mesh axis: it splits one dim, or one sum is pending over it\n"
                    "  fix 1: give the two axes different mesh axes (--axes)\n  fix 2: shard one of the two only",
                )
