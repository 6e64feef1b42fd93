"""`explain DIR why %VALUE`: the chain of rules that gave a value its placement, from the value up to ports and weights.

Invariant: every step is read from the program: the op, the types of its operands, and its rule as states per axis (R
whole, P pending, a dim's name: sharded on it). A redistribution also says which rule asks for it and what the runner-up is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenspeed.compiler.artifact import ArtifactError
from tokenspeed.compiler.explain import fold
from tokenspeed.ir.graph import Node, Param, Program, param_type
from tokenspeed.ir.mesh import Plan
from tokenspeed.ir.text import print_node
from tokenspeed.ir.types import Type


def why(p: Program, value: str, info: dict[str, Any]) -> str:
    """`value`: a name of the main list (`%` optional), or `path/name` inside a leaf. ArtifactError where there is none."""
    name = value.removeprefix("%")
    rows = {r["value"]: r for r in info["redistributions"]}
    path, _, inner = name.rpartition("/")
    call = next((n for n in p.nodes if n.op == "call" and n.attrs["path"] == path), None) if path else None
    if path and call is not None:
        leaf = p.leaves[call.attrs["leaf"]]
        if inner in leaf.types:
            return "\n".join(_chain(p, leaf.nodes, leaf.types, leaf.params, inner, rows, path + "/"))
    elif name in p.types:
        return "\n".join(_chain(p, p.nodes, p.types, p.params, name, rows, ""))
    near = sorted(v for v in p.types if name.split("/")[0] in v)[:12] or sorted(p.types)[:12]
    raise ArtifactError(
        f"the program of bucket {p.bucket['t']} has no value %{name}; e.g. {', '.join('%' + v for v in near)}"
    )


def _chain(
    p: Program, nodes: list[Node], types: dict[str, Type], params: dict[str, Param], name: str,
    rows: dict[str, dict[str, Any]], where: str,
) -> list[str]:  # fmt: skip
    makers = {o: n for n in nodes for o in n.outputs}
    out: list[str] = []
    at: str | None = name
    while at is not None:
        n = makers.get(at)
        out.append(f"%{where}{at} : {types[at].text(p.plan)}")
        if n is None:
            out.append("  a port of the program" if not where else "  an argument of the leaf")
            break
        out.append(f"  {print_node(n, types, p.plan)}")
        out += ["  " + line for line in _rule(p, n, types, params, at)]
        row = rows.get(where + at) or rows.get(f"{where}{n.outputs[0]}'sum")  # of a fused reduction
        if row:
            out.append(f"  {row['rule']}: {row['reason']}; {row['time_us']:.1f} us")
            gap = "" if row["gap_us"] is None else f", +{row['gap_us']:.2f} us a step"
            out.append(f"  runner-up: {row['runner_up']}{gap}")
        if n.op == "call":
            leaf = p.leaves[n.attrs["leaf"]]
            result = leaf.outputs[n.outputs.index(at)]
            inner = _chain(p, leaf.nodes, leaf.types, leaf.params, result, rows, n.attrs["path"] + "/")
            out += ["    " + line for line in inner]
        at = _decisive(n, types, at)
    return out


def _decisive(n: Node, types: dict[str, Type], value: str) -> str | None:
    """The operand that the placement came from: the first that has the axes of the value, else the first."""
    mine = set(types[value].axes())
    return next((v for v in n.values if mine & set(types[v].axes())), n.values[0] if n.values else None)


def _rule(p: Program, n: Node, types: dict[str, Type], params: dict[str, Param], value: str) -> list[str]:
    if n.op == "call":
        return [f"as @{n.attrs['leaf']} declares it"]
    ins = [param_type(params, i) if i.startswith("@") else types[i] for i in n.inputs]
    lines: list[str] = []
    for a in p.plan.mesh.names:
        states = [t.state(a) for t in ins]
        got = types[value].state(a)
        if got != "R" or any(s != "R" for s in states):
            lines.append(f"on {_axis(p.plan, a)}: {n.op}({', '.join(states)}) -> {got}")
    return lines or [f"{n.op} of whole values is whole"]


def _axis(plan: Plan, axis: str) -> str:
    return next((f"{axis}, a part of {whole}" for whole, parts in plan.parts.items() if axis in parts), axis)


# ---- two artifacts ---------------------------------------------------------------------------------------------------

_TOTALS = (
    ("collectives", ""), ("bytes_per_token", " B a token"), ("comm_us", " us of communication"), ("arena_bytes", " B of arena"),
)  # fmt: skip


def diff(a: dict[str, Any], b: dict[str, Any]) -> str:
    """What changed from the explanation of one artifact to another's, program by program."""
    lines: list[str] = []
    mine, theirs = a["programs"], b["programs"]
    for name in sorted({*mine, *theirs}, key=_order(mine | theirs)):
        if name not in mine or name not in theirs:
            lines.append(f"{name}: only in the {'first' if name in mine else 'second'}")
            continue
        x, y = mine[name], theirs[name]
        changed = [f"{k} {x[k]:.10g} -> {y[k]:.10g}{unit}" for k, unit in _TOTALS if x[k] != y[k]]
        if (p := a["cost_us"][name]) != (q := b["cost_us"][name]):
            changed.append(f"step {p:.1f} -> {q:.1f} us")
        before, after = (_edges(e) for e in (x, y))
        rows = [f"  - {e}: {before[e]}" for e in before if e not in after]
        rows += [f"  + {e}: {after[e]}" for e in after if e not in before]
        rows += [f"  ~ {e}: {before[e]} => {after[e]}" for e in before if e in after and before[e] != after[e]]
        if changed or rows:
            lines += [f"{name}: {', '.join(changed) or 'totals alike'}", *rows]
    return "\n".join(lines) or "no difference: same collectives, bytes, times and arenas in every program"


def _order(programs: dict[str, Any]) -> Callable[[str], tuple[bool, int]]:
    """As `explain` prints them: by variant, then by bucket."""
    return lambda name: (programs[name]["variant"] != "gumbel", programs[name]["bucket"]["t"])


def _edges(info: dict[str, Any]) -> dict[str, str]:
    """Folded edges: how often, and how each is repaired."""
    found: dict[str, dict[str, int]] = {}
    for r in info["redistributions"]:
        how = f"{r['op']} over {','.join(r['axes'])}, {r['from']} to {r['to']}"
        ways = found.setdefault(fold(r["edge"].replace("'", "")), {})
        ways[how] = ways.get(how, 0) + 1
    return {e: "; ".join(f"{k}x {how}" for how, k in sorted(ways.items())) for e, ways in sorted(found.items())}
