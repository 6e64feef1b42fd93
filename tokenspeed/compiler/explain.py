"""Explain: every collective of a program with its edge, bytes a token and reason, read from the program itself."""

from __future__ import annotations

import re
from typing import Any

from tokenspeed.ir.graph import Node, Program
from tokenspeed.ir.ops import OPS, Redistribute
from tokenspeed.ir.types import DTYPE_BYTES, ROW_DIMS, Type


def wire_bytes(p: Program, op: str, axes: tuple[str, ...], before: Type, after: Type) -> float:
    """Bytes one rank sends for one row of the value (a token, or a request row), by the ring optimum."""
    n = p.plan.mesh.size(axes)
    t = after if op == "all_gather" else before
    whole = DTYPE_BYTES[t.dtype] * (2 if before.kind == "argmax" else 1)
    rows = 1.0
    for d in t.dims:
        if d.name in ROW_DIMS:
            rows = p.sizes[d.name] / p.plan.mesh.size(d.axes) / p.bucket[d.name]
        else:
            whole *= p.sizes.get(d.name, 16) // p.plan.mesh.size(d.axes)
    share = (n - 1) / n * whole * rows
    return {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share}.get(op, 0.0)


def explain_program(p: Program) -> dict[str, Any]:
    """Rows of one program: {edge, from, to, op, axes, bytes_per_token, reason} for each inserted redistribution."""
    rows: list[dict[str, Any]] = []

    def row(n: Node, types: dict[str, Type], where: str) -> None:
        op = OPS.get(n.op)
        if not isinstance(op, Redistribute):
            return
        before, after = types[n.inputs[0]], types[n.outputs[0]]
        rows.append(
            {
                "edge": f"{where}{n.inputs[0]} -> {n.note.rpartition(' for ')[2] or 'place'}",
                "from": before.text(p.plan), "to": after.text(p.plan), "op": n.op,
                "axes": list(p.plan.fold(tuple(n.attrs["axes"]))),
                "bytes_per_token": wire_bytes(p, n.op, tuple(n.attrs["axes"]), before, after),
                "reason": _reason(n, before),
            }
        )  # fmt: skip

    for n in p.nodes:
        if n.op == "call":
            leaf = p.leaves[n.attrs["leaf"]]
            for inner in leaf.nodes:
                row(inner, leaf.types, n.attrs["path"] + "/")
        else:
            row(n, p.types, "")
    pending: dict[str, int] = {}
    for t in p.types.values():
        for a in p.plan.fold(t.pending):
            pending[a] = pending.get(a, 0) + 1
    return {
        "bucket": dict(p.bucket), "variant": p.variant, "redistributions": rows,
        "collectives": sum(OPS[r["op"]].wire for r in rows),  # type: ignore[attr-defined]
        "bytes_per_token": sum(r["bytes_per_token"] for r in rows), "pending_values": pending,
        "agreement": agreement(p),
    }  # fmt: skip


def _reason(n: Node, before: Type) -> str:
    who = n.note.rpartition(" for ")[2]
    if before.pending and n.op in ("all_reduce", "reduce_scatter"):
        return f"pending {before.kind} over {','.join(n.attrs['axes'])}, and {who or 'place'} needs it complete"
    if n.op == "all_gather":
        return f"rows or columns are spread over {','.join(n.attrs['axes'])}, and {who or 'place'} needs them whole"
    return f"{who or 'place'} wants its part only" if n.op == "slice" else f"joins a pending sum at {who or 'place'}"


def agreement(p: Program) -> list[str]:
    """Home axes over which the program communicates: their ranks must replay the same bucket."""
    used: set[str] = set()
    for nodes in (p.nodes, *(leaf.nodes for leaf in p.leaves.values())):
        for n in nodes:
            op = OPS.get(n.op)
            if isinstance(op, Redistribute) and op.wire:
                used.update(n.attrs["axes"])
    return [a for a in p.plan.home if a in used]


def explain_text(info: dict[str, Any]) -> str:
    """The table a person reads; identical layers are folded."""
    lines = [
        f"bucket t={info['bucket']['t']} s={info['bucket']['s']} {info['variant']}: {info['collectives']} collectives, "
        f"{info['bytes_per_token']:.0f} B sent a token a rank, agreement {','.join(info['agreement']) or 'none'}"
    ]
    folded: dict[tuple[str, ...], list[str]] = {}
    for r in info["redistributions"]:
        edge, reason = (re.sub(r"\.\d+(?=\.)", ".*", r[k]) for k in ("edge", "reason"))
        key = (edge, r["op"], ",".join(r["axes"]), r["from"], r["to"], f"{r['bytes_per_token']:.0f}", reason)
        folded.setdefault(key, []).append(r["edge"])
    for (edge, op, axes, src, dst, nbytes, reason), edges in folded.items():
        lines.append(
            f"  {len(edges):>3}x {op} over {axes}: {edge}\n        {src} => {dst}, {nbytes} B a token; {reason}"
        )
    return "\n".join(lines)
