"""The text form of a program: one line an op, diffable, and read back.

Invariant: `parse_program(print_program(p))` equals `p` up to source origins. Types print but are not stored: the reader
infers them again from the ports and parameters and refuses a line whose printed type differs (V1).

    program @CausalLM gumbel mesh(tp=3) axes(...) bucket(t=4, s=4)
    dims h=576 n=9 ...                      logical, or logical:padded
    leaf @MLP(%x: bf16[t, h]) weights(...)
      %0, %1 = linear %x, @up:0, @up:1 {..} : bf16[t, f@tp], bf16[t, f@tp]
      return %4
    main(%ids: i32[t], ...)
      %embed = call @Embed(%ids) in embed   : bf16[t, h] +tp
      %embed' = all_reduce %embed {axes=(tp)} : bf16[t, h]      ; embed tp: pending -> whole for rms_norm
      return %sampler' : i32[s]                the ports that the root's signature declares
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenspeed.ir.errors import RuleError, VerifyError
from tokenspeed.ir.graph import Leaf, Node, Param, Program, param_type
from tokenspeed.ir.mesh import Axes, Plan, parse_plan
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.types import Dim, Type

_TYPE = re.compile(r"(\w+)\[([^\]]*)\](?: \+([\w.,]+)| (max|min|lse|argmax|topk|varying):([\w.,]+))?$")


# ---- printing --------------------------------------------------------------------------------------------------------


def print_program(p: Program, typed: bool = True) -> str:
    """Text of one program; deterministic. Without `typed` the types of what its ops make are left out."""
    out = [
        print_header(p),
        "dims " + " ".join(_extent(p, d) for d in p.logical if d not in p.bucket),
    ]
    for name, leaf in p.leaves.items():
        args = ", ".join(f"%{i}: {leaf.types[i].text(p.plan)}" for i in leaf.inputs)
        out.append(f"leaf @{name}({args}) params({_params(leaf.params, p.plan)})")
        out += ["  " + _line(n, leaf.types if typed else None, p.plan) for n in leaf.nodes]
        out.append("  return " + ", ".join(f"%{o}" for o in leaf.outputs))
    out.append(
        f"main({', '.join(f'%{i}: {p.types[i].text(p.plan)}' for i in p.ports)}) params({_params(p.params, p.plan)})"
    )
    out += ["  " + _line(n, p.types if typed else None, p.plan) for n in p.nodes]
    declared = ", ".join(t.text(p.plan) for t in p.result_types)
    out.append("  return " + ", ".join(f"%{o}" for o in p.results) + f" : {declared}")
    return "\n".join(out) + "\n"


def print_header(p: Program) -> str:
    """The first line: all that tells programs apart whose buckets chose alike."""
    rows = ", ".join(f"{d}={n}" for d, n in p.bucket.items())
    return f"program @{p.name} {p.variant} {p.plan.describe()} bucket({rows})"


def _extent(p: Program, d: str) -> str:
    return f"{d}={p.logical[d]}" + (f":{p.sizes[d]}" if p.sizes[d] != p.logical[d] else "")


def _params(params: dict[str, Param], plan: Plan) -> str:
    return ", ".join(f"{q.kind} @{q.name}: {' | '.join(t.text(plan) for t in q.types)}" for q in params.values())


def print_node(n: Node, types: dict[str, Type], plan: Plan) -> str:
    """One line of a program."""
    return _line(n, types, plan)


def _line(n: Node, types: dict[str, Type] | None, plan: Plan) -> str:
    args = ", ".join(i if i.startswith("@") else f"%{i}" for i in n.inputs)
    outs = ", ".join(f"%{o}" for o in n.outputs)
    if n.op == "call":
        body = f"call @{n.attrs['leaf']}({args}) in {n.attrs['path']}"
    else:
        attrs = {k: plan.fold(v) if k == "axes" else v for k, v in n.attrs.items()}
        body = f"{n.op} {args}" + (f" {{{_attrs(attrs)}}}" if attrs else "")
    text = (f"{outs} = " if outs else "") + body
    if n.outputs and types is not None:
        text += " : " + ", ".join(types[o].text(plan) for o in n.outputs)
    return text + (f"   ; {n.note}" if n.note else "")


def _attrs(attrs: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in sorted(attrs.items()))


# ---- parsing ---------------------------------------------------------------------------------------------------------


def parse_type(text: str, plan: Plan) -> Type:
    key = ("type", text)
    if key not in plan.memo:
        plan.memo[key] = _parse_type(text, plan)
    return plan.memo[key]


def _parse_type(text: str, plan: Plan) -> Type:
    m = _TYPE.match(text.strip())
    if not m:
        raise VerifyError("V1", f"cannot read the type {text!r}")
    dtype, inner, sums, kind, others = m.groups()
    body, arrow, target = inner.partition(" -> ")
    dims = tuple(_parse_dim(d, plan) for d in _split(body) if d)
    pending = plan.unfold((sums or others).split(",")) if sums or others else ()
    return Type(dtype, dims, pending, kind or "sum", _parse_dim(target, plan) if arrow else None)


def _parse_dim(text: str, plan: Plan) -> Dim:
    name, _, axes = text.strip().partition("@")
    return Dim(name, plan.unfold(axes.strip("()").split(",")) if axes else ())


def _split(text: str) -> list[str]:
    """Splits on ", " outside any bracket (a pending list has commas without spaces)."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0 and text[i + 1 : i + 2] == " ":
            out.append(text[start:i].strip())
            start = i + 1
    out.append(text[start:].strip())
    return [o for o in out if o]


def _close(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += text[i] in "([{"
        depth -= text[i] in ")]}"
        if depth == 0:
            return i
    raise VerifyError("V1", f"unbalanced brackets in {text!r}")


def parse_program(text: str) -> Program:
    """Reads a program; VerifyError V1 names the line where the printed type is not the inferred one."""
    lines = [line for line in text.splitlines() if line.strip()]
    m = re.match(
        r"program @(\S+) (\w+) (mesh\(.*\) axes\(.*\)) bucket\((t=\d+, s=\d+(?:, drafted=\d+)?)\)$",
        lines[0] if lines else "",
    )
    if not m:
        raise VerifyError("V1", f"not a program: its first line is {lines[0] if lines else ''!r}")
    plan, bucket = parse_plan(m[3]), {d: int(n) for d, n in (item.split("=") for item in m[4].split(", "))}
    logical: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for item in lines[1].split()[1:]:
        d, _, extents = item.partition("=")
        first, _, padded = extents.partition(":")
        logical[d], sizes[d] = int(first), int(padded or first)
    rows = {d: n * plan.mesh.size(plan.home) for d, n in bucket.items()}
    p = Program(m[1], m[2], plan, bucket, sizes | rows, logical | rows, [], [], [], [], {}, {}, {})
    i = 2
    while i < len(lines):
        head = lines[i]
        j = next((k for k in range(i + 1, len(lines)) if lines[k].startswith("  return")), None)
        if j is None:
            raise VerifyError("V1", f"{head[:60]!r} has no return")
        names, _, declared = lines[j].strip()[6:].partition(" : ")
        returns = [r.strip()[1:] for r in names.split(",")]
        name, args, params = _parse_head(head, plan)
        if head.startswith("leaf "):
            leaf = Leaf(name.split("#")[0], list(args), returns, [], dict(args), params)
            _parse_body(lines[i + 1 : j], leaf.nodes, leaf.types, params, plan, p)
            if missing := [r for r in returns if r not in leaf.types]:
                raise VerifyError("V1", f"leaf @{name} returns %{missing[0]}, which is never made")
            p.leaves[name] = leaf
        else:
            p.ports, p.results, p.params = list(args), returns, params
            p.result_types = [parse_type(t, plan) for t in _split_types(declared)]
            p.types.update(args)
            _parse_body(lines[i + 1 : j], p.nodes, p.types, params, plan, p)
        i = j + 1
    return p


def _parse_head(head: str, plan: Plan) -> tuple[str, dict[str, Type], dict[str, Param]]:
    opened = head.index("(")
    closed = _close(head, opened)
    name = head[:opened].split("@")[-1] if head.startswith("leaf ") else "main"
    args: dict[str, Type] = {}
    for a in _split(head[opened + 1 : closed]):
        n, _, t = a.partition(": ")
        args[n[1:]] = parse_type(t, plan)
    start = head.index("params(", closed) + 6
    params: dict[str, Param] = {}
    for item in _split(head[start + 1 : _close(head, start)]):
        decl, _, types = item.partition(": ")
        kind, _, ref = decl.partition(" @")
        params[ref] = Param(ref, kind, tuple(parse_type(t, plan) for t in types.split(" | ")))
    return name, args, params


def _parse_body(
    lines: list[str], nodes: list[Node], types: dict[str, Type], params: dict[str, Param], plan: Plan, p: Program
) -> None:
    order: Callable[[Axes], Axes] = plan.mesh.ordered
    for raw in lines:
        op, inputs, outs, said, printed, note = _parse_line(raw)
        attrs = dict(said)
        if "axes" in attrs:
            attrs["axes"] = plan.unfold(attrs["axes"])
        node = Node(op, inputs, outs, attrs, note=note)
        inferred = infer_node(node, types, params, p, order)
        if printed:
            declared = [parse_type(t, plan) for t in printed]
            if declared != inferred:
                raise VerifyError(
                    "V1", f"{raw.strip()!r}: printed {list(map(str, declared))}, inferred {list(map(str, inferred))}"
                )
        types.update(zip(outs, inferred))
        nodes.append(node)


@lru_cache(maxsize=1 << 13)
def _parse_line(raw: str) -> tuple[str, tuple[str, ...], tuple[str, ...], Mapping[str, Any], Sequence[str], str]:
    """Op, inputs, outputs, attributes as printed, printed types and note of a line; programs of one model share many."""
    line, _, note = raw.strip().partition("   ; ")
    body, _, printed = line.partition(" : ")
    outs_text, eq, rhs = body.partition(" = ") if body.startswith("%") else ("", "", body)
    outs = tuple([o.strip()[1:] for o in outs_text.split(",")]) if eq else ()
    op, _, rest = rhs.partition(" ")
    attrs: Mapping[str, Any] = {}
    if op == "call":
        opened = rest.index("(")
        closed = _close(rest, opened)
        attrs = {"leaf": rest[1:opened], "path": rest[closed + 1 :].strip().removeprefix("in ")}
        args_text = rest[opened + 1 : closed]
    else:
        args_text, brace, attr_text = rest.partition(" {")
        if brace:
            attrs = _parse_attrs(attr_text.rstrip("}"))
    inputs = tuple([a if a.startswith("@") else a[1:] for a in _split(args_text)])
    return op, inputs, outs, attrs, _split_types(printed) if printed else (), note


@lru_cache(maxsize=1024)
def _parse_attrs(text: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for k, _, v in (a.partition("=") for a in _split(text)):
        out[k] = float(v) if v.lstrip("-") in ("inf", "nan") else ast.literal_eval(v)
    return out


def _split_types(text: str) -> list[str]:
    """Types are separated by ", " after a closing bracket or a pending list."""
    return re.split(r", (?=\w+\[)", text)


def infer_node(
    node: Node, types: dict[str, Type], params: dict[str, Param], p: Program, order: Callable[[Axes], Axes]
) -> list[Type]:
    """Types of a node's outputs from its inputs; VerifyError where no rule allows it."""
    missing = [i for i in node.inputs if (i[1:].split(":")[0] not in params if i.startswith("@") else i not in types)]
    if missing:
        raise VerifyError("V1", f"{node.op}: {missing[0]!r} is used before it is made, or is no parameter")
    args = [param_type(params, i) if i.startswith("@") else types[i] for i in node.inputs]
    if node.op == "call":
        leaf = p.leaves.get(node.attrs["leaf"])
        if leaf is None:
            raise VerifyError("V3", f"call of @{node.attrs['leaf']}, which is no leaf of this program")
        wanted = [leaf.types[i] for i in leaf.inputs]
        if wanted != args:
            bad = next(((w, a) for w, a in zip(wanted, args) if w != a), (len(wanted), len(args)))
            raise VerifyError(
                "V3",
                f"call of @{node.attrs['leaf']} in {node.attrs['path']}: the leaf wants {bad[0]}, the argument is {bad[1]}",
            )
        return [leaf.types[o] for o in leaf.outputs]
    if node.op not in OPS:
        raise VerifyError("V1", f"unknown op {node.op!r}")
    try:
        key = (node.op, *args, *sorted(node.attrs.items()))
        known = p.plan.memo
        if key not in known:
            known[key] = OPS[node.op].infer(args, node.attrs, order, p.plan.home)
        return known[key]
    except RuleError as e:
        code = e.code if e.code.startswith("V") else "V1"
        raise VerifyError(code, f"{node.op} {', '.join(node.inputs)}: {e.reason}") from None
    except KeyError as e:
        said = f"it says {', '.join(sorted(node.attrs)) or 'none'}"
        raise VerifyError("V1", f"{node.op} {', '.join(node.inputs)}: no attribute {e.args[0]!r}; {said}") from None
    except (StopIteration, ValueError, TypeError, IndexError, AttributeError) as e:
        raise VerifyError(
            "V1", f"{node.op} {', '.join(node.inputs)}: operands or attributes it does not take ({e})"
        ) from None
