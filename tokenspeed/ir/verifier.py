"""The verifier: what a finished program must satisfy, checked from its text alone (types are inferred again).

Rules here: V1 every op is a row of its table; V2 nothing pending leaves the program; V3 calls and signatures agree; V4 an
axis appears once in a type, and axes of a row dim move in the order of its factors; V5 extents divide, row dims only over
the bucket's row factors, padding holds what its readers need; V6 query heads lie with their KV heads; V8 an index stays
in its home block; V9 a collective names axes of the mesh; V10 each pending value is reduced by exactly one path; V11 every
cache is written once, before it is read. V7 and the other half of V8 are of several ranks: `agreement`. V14 belongs to
the weight map.
"""

from __future__ import annotations

from tokenspeed.ir.collectives import outer_blocks
from tokenspeed.ir.errors import PlacementError, RuleError, VerifyError
from tokenspeed.ir.graph import Leaf, Node, Param, Program, absolute, param_type
from tokenspeed.ir.mesh import Axes
from tokenspeed.ir.ops import OPS, Redistribute
from tokenspeed.ir.ops.fused import expand
from tokenspeed.ir.pads import verify_pads
from tokenspeed.ir.text import infer_node
from tokenspeed.ir.types import ROW_DIMS, Type


def verify(p: Program) -> None:
    """VerifyError with the code of the first rule that does not hold, PlacementError where an author's extents do not. Fused ops are
    checked by their parts."""
    try:
        p = expand(p)
    except RuleError as e:
        raise VerifyError(e.code if e.code.startswith("V") else "V1", f"a fused op: {e.reason}") from None
    factors = {d: p.row_axes(d) for d in p.bucket}
    _verify_params(p, p.params, factors, "main")
    for name, leaf in p.leaves.items():
        _verify_params(p, leaf.params, factors, f"leaf @{name}")
        _verify_types(p, leaf.types, factors, f"leaf @{name}")
        _verify_body(p, leaf.nodes, leaf.types, leaf.params, f"leaf @{name}", list(leaf.inputs), factors)
        _verify_leaf_caches(name, leaf)
    _verify_types(p, p.types, factors, "main")
    _verify_body(p, p.nodes, p.types, p.params, "main", list(p.ports), factors)
    if len(p.results) != len(p.result_types):
        raise VerifyError("V3", f"the program returns {len(p.results)} values and declares {len(p.result_types)}")
    for r, declared in zip(p.results, p.result_types):
        if r not in p.types:
            raise VerifyError("V1", f"result %{r} is never made")
        if p.types[r].pending:
            raise VerifyError("V2", f"result %{r} : {p.types[r]} leaves the program pending")
        if p.types[r] != declared:
            raise VerifyError("V3", f"result %{r} : {p.types[r]}, the program declares {declared}")
    _verify_caches_once(p)
    _verify_reduced(p)
    verify_pads(p)


def _verify_params(p: Program, params: dict[str, Param], factors: dict[str, Axes], where: str) -> None:
    for q in params.values():
        _verify_types(p, {f"@{q.name}:{k}": t for k, t in enumerate(q.types)}, factors, where)
        for t in q.types if q.kind in ("cache", "state") else ():
            if t.pending:
                raise VerifyError("V2", f"{where}: {q.kind} @{q.name} : {t} is pending; what is stored is complete")


def _verify_types(p: Program, types: dict[str, Type], factors: dict[str, Axes], where: str) -> None:
    for name, t in types.items():
        axes = t.axes()
        if len(set(axes)) != len(axes):
            raise VerifyError("V4", f"{where}: %{name} : {t} uses an axis twice")
        unknown = [a for a in axes if a not in p.plan.mesh.names]
        if unknown:
            raise VerifyError("V9", f"{where}: %{name} : {t} names {unknown[0]!r}, which is no axis of the mesh")
        if t.index and t.index.axes != p.plan.home:
            raise VerifyError(
                "V8", f"{where}: %{name} : {t} counts from the start of a block that is not the home block"
            )
        if t.index and t.pending:
            raise VerifyError("V2", f"{where}: %{name} : {t} is an index and pending")
        for d in t.dims:
            if d.name in ROW_DIMS:
                outside = [a for a in d.axes if a not in factors.get(d.name, ())]
                if outside:
                    raise VerifyError(
                        "V5", f"{where}: %{name} : {t}: {d.name} cannot be split over {outside} in this bucket"
                    )
            elif d.axes and d.name in p.sizes and p.sizes[d.name] % p.plan.mesh.size(d.axes):
                raise VerifyError(
                    "V5", f"{where}: %{name} : {t}: {d.name}={p.sizes[d.name]} does not divide over {list(d.axes)}"
                )


def _verify_body(
    p: Program, nodes: list[Node], types: dict[str, Type], params: dict[str, Param], where: str, inputs: list[str],
    factors: dict[str, Axes],
) -> None:  # fmt: skip
    made = set(inputs)
    for n in nodes:
        late = [v for v in n.values if v not in made]
        if late:
            raise VerifyError("V1", f"{where}: {n.op} reads %{late[0]} before it is made")
        again = [o for o in n.outputs if o in made]
        if again:
            raise VerifyError("V1", f"{where}: %{again[0]} is made twice")
        if n.op in OPS and isinstance(OPS[n.op], Redistribute) and not n.attrs.get("axes"):
            raise VerifyError("V9", f"{where}: {n.op} of %{n.inputs[0]} names no axes")
        inferred = infer_node(n, types, params, p, p.plan.mesh.ordered)
        for o, t in zip(n.outputs, inferred):
            if types[o] != t:
                raise VerifyError("V1", f"{where}: %{o} is recorded as {types[o]}, its op gives {t}")
        if n.op in OPS:
            _verify_extents(p, n, types, params, factors, where)
        made.update(n.outputs)


def _verify_extents(
    p: Program, n: Node, types: dict[str, Type], params: dict[str, Param], factors: dict[str, Axes], where: str
) -> None:
    op = OPS[n.op]
    ins = [param_type(params, i) if i.startswith("@") else types[i] for i in n.inputs]
    try:
        op.check_integers(ins)
        op.check_extents(ins, n.attrs, p.plan, p.sizes)
        if isinstance(op, Redistribute) and (dim := n.attrs.get("dim", "")):
            axes = tuple(n.attrs["axes"])
            held = tuple(a for a in ins[0].dim(dim).axes if a not in axes)
            outer_blocks(p.plan, factors.get(dim, ()), held, axes, dim)
    except RuleError as e:
        if n.origin.file and not e.code.startswith(
            "V"
        ):  # of a program that an author's file made: the file is at fault
            raise PlacementError(e.code, f"{n.origin}  in {where}: {n.op}\n  {e.reason}") from None
        raise VerifyError(e.code if e.code.startswith("V") else "V1", f"{where}: {n.op}: {e.reason}") from None


def _made(n: Node) -> str:
    """Where an author wrote a node; nothing of a program that was read."""
    return f" ({n.origin})" if n.origin.file else ""


def _verify_leaf_caches(name: str, leaf: Leaf) -> None:
    written: set[str] = set()
    for n in leaf.nodes:
        caches = {
            i.split(":")[0] for i in n.inputs if i.startswith("@") and leaf.params[i[1:].split(":")[0]].kind == "cache"
        }
        if OPS[n.op].writes_cache:
            if caches & written:
                raise VerifyError("V11", f"leaf @{name}: cache {sorted(caches)} is written twice in one step{_made(n)}")
            written |= caches
        elif caches - written:
            raise VerifyError(
                "V11",
                f"leaf @{name}: {n.op} reads cache {sorted(caches)} before this step's tokens are written{_made(n)}",
            )


def _verify_caches_once(p: Program) -> None:
    seen: set[str] = set()
    for n in p.nodes:
        if n.op != "call":
            continue
        for q in p.leaves[n.attrs["leaf"]].params.values():
            if q.kind == "cache":
                name = absolute(n.attrs["path"], q.name)
                if name in seen:
                    raise VerifyError("V11", f"cache @{name} is used by two calls")
                seen.add(name)


def _verify_reduced(p: Program) -> None:
    """V10: every pending value and every collective leads to a result. Types see to it that each path from a pending value
    passes exactly one reduction an axis; here nothing is reduced, or left pending, for nobody."""
    live, idle = set(p.results), None
    for n in reversed(p.nodes):  # a value is read after it is made
        if live.intersection(n.outputs):
            live.update(n.values)
        elif isinstance(OPS.get(n.op), Redistribute):
            idle = n
    for name, t in p.types.items():
        if t.pending and name not in live:
            raise VerifyError("V10", f"%{name} : {t} is pending and no result depends on it")
    if idle is not None:
        raise VerifyError("V10", f"{idle.op} of %{idle.inputs[0]} serves no result")
