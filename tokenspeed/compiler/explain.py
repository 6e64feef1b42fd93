"""Explain: every collective of a program with its edge, bytes, time, the rule that asks for it and the runner-up.

Invariant: edges, types, bytes and rules are read from the program itself; times come from the calibration table, and
runner-up and gap from the solver. The rule of a redistribution is the one its consumer would break without it; `cost`
where none would be broken and the solver found this cheaper.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from tokenspeed.compiler.binding import rows_of
from tokenspeed.compiler.costs import CostModel
from tokenspeed.compiler.exchange import Load, load_of
from tokenspeed.ir.agreement import agreement, met_over
from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.graph import Leaf, Node, Param, Program, param_type
from tokenspeed.ir.ops import OPS, Fused, Redistribute
from tokenspeed.ir.ops.fused import expand
from tokenspeed.ir.types import DTYPE_BYTES, ROW_DIMS, Type


class Decide(Protocol):
    """Runner-up and gap: of an edge (value, consumer), or of how the rows of a module lie."""

    def __call__(self, value: str, consumer: str) -> dict[str, Any]: ...

    def module(self, path: str) -> dict[str, Any]: ...


def moved_bytes(p: Program, op: str, before: Type, after: Type) -> float:
    """Bytes of the operand whole on the axes that move, of one rank, for the bucket's rows."""
    t = after if op == "all_gather" else before
    n = float(DTYPE_BYTES[t.dtype] * (2 if before.kind in ("argmax", "topk") else 1))
    for d in t.dims:
        n *= p.sizes.get(d.name, 16) // p.plan.mesh.size(d.axes)
    return n


def wire_bytes(p: Program, op: str, axes: tuple[str, ...], before: Type, after: Type) -> float:
    """Bytes one rank sends for one row of the value (a token, or a request row), by the ring optimum."""
    rows = next((p.bucket[d.name] for d in before.dims if d.name in ROW_DIMS), 1)
    n = p.plan.mesh.size(axes)
    share = (n - 1) / n * moved_bytes(p, op, before, after) / rows
    return {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share}.get(op, 0.0)


class Explainer:
    """The rows of one program body; `at` prices them for each bucket that runs it."""

    def __init__(self, p: Program) -> None:
        self.rows: list[tuple[dict[str, Any], Node, Type, Type, tuple[str, str] | Load]] = []
        whole, p = p, expand(p)
        self.fused = {
            part.outputs[0]: n.op for n in whole.nodes if isinstance(op := OPS.get(n.op), Fused) for part in op.parts(n)
        }
        makers = {n.attrs["path"] if n.op == "call" else n.outputs[0]: n for n in p.nodes if n.outputs}
        memo: dict[Any, tuple[str, str]] = {}
        moving = {
            name: [i for i in f.nodes if isinstance(OPS[i.op], Redistribute) or met_over(i, f.types, f.params)]
            for name, f in p.leaves.items()
        }
        for n in p.nodes:
            if n.op == "call":
                leaf, where = p.leaves[n.attrs["leaf"]], n.attrs["path"] + "/"
                for inner in moving[n.attrs["leaf"]]:
                    self._row(p, inner, leaf.types, where, ("place", "the author placed it so"))
                    self._exchange(p, inner, leaf, where)
            elif isinstance(OPS[n.op], Redistribute):
                who = _consumer(n)
                self._row(p, n, p.types, "", _rule(p, n, makers.get(who), p.params, memo))
        self.pending: dict[str, int] = {}
        for t in p.types.values():
            for a in p.plan.fold(t.pending):
                self.pending[a] = self.pending.get(a, 0) + 1
        self.agreement = list(agreement(p))

    def _row(self, p: Program, n: Node, types: dict[str, Type], where: str, rule: tuple[str, str]) -> None:
        if not isinstance(OPS.get(n.op), Redistribute):
            return
        before, after = types[n.inputs[0]], types[n.outputs[0]]
        who = _consumer(n)
        row = {
            "value": f"{where}{n.outputs[0]}", "edge": f"{where}{n.inputs[0]} -> {who}",
            "from": before.text(p.plan), "to": after.text(p.plan), "op": n.op,
            "axes": list(p.plan.fold(tuple(n.attrs["axes"]))), "reason": _reason(n, before), "rule": rule[0],
            "fused": self.fused.get(n.outputs[0], ""),
        }  # fmt: skip
        self.rows.append((row, n, before, after, (n.note.partition(" ")[0], who)))

    def _exchange(self, p: Program, n: Node, leaf: Leaf, where: str) -> None:
        """An op that moves rows itself: out and back, two collectives."""
        if isinstance(OPS[n.op], Redistribute):
            return
        ins = [param_type(leaf.params, i) if i.startswith("@") else leaf.types[i] for i in n.inputs]
        load = load_of(n, ins, leaf.nodes, p.plan, p.sizes)
        assert load is not None
        x, out = n.inputs[0], n.outputs[0]
        row = {
            "value": f"{where}{out}", "edge": f"{where}{x} -> {n.op}", "from": ins[0].text(p.plan), "to": leaf.types[out].text(p.plan),
            "op": "exchange", "axes": list(p.plan.fold(load.axes)), "rule": "cost", "fused": "",
            "reason": f"rows go to the {load.visits:.1f} of {load.ranks} ranks that hold experts they picked",
        }  # fmt: skip
        self.rows.append((row, n, ins[0], leaf.types[out], load))

    def at(self, p: Program, costs: CostModel, decide: Decide) -> dict[str, Any]:
        """All of it for the bucket of `p`, which has this explainer's body."""
        rows: list[dict[str, Any]] = []
        for row, n, before, after, how in self.rows:
            if isinstance(how, Load):
                held = rows_of(before, p)
                own = decide.module(row["value"].rpartition("/")[0])
                priced = {
                    "bytes_per_token": how.wire * held / p.bucket["t"],
                    "time_us": round(how.price(costs, held), 3),
                }
                rows.append(row | priced | own)
                continue
            value, who = how
            axes = tuple(n.attrs["axes"])
            moved = moved_bytes(p, n.op, before, after)
            wire = OPS[n.op].wire  # type: ignore[attr-defined]
            time = costs.collective(n.op, p.plan.mesh.size(axes), moved) if wire else costs.compute(moved, 0.0, 1)
            priced = {"bytes_per_token": wire_bytes(p, n.op, axes, before, after), "time_us": round(time, 3)}
            rows.append(row | priced | decide(value, who))
        return {
            "bucket": dict(p.bucket), "variant": p.variant, "redistributions": rows,
            "collectives": sum(2 if r["op"] == "exchange" else OPS[r["op"]].wire for r in rows),  # type: ignore[attr-defined]
            "bytes_per_token": sum(r["bytes_per_token"] for r in rows),
            "comm_us": round(sum(r["time_us"] for r in rows), 3),
            "pending_values": self.pending, "agreement": self.agreement,
        }  # fmt: skip


def _rule(
    p: Program, n: Node, consumer: Node | None, params: dict[str, Param], memo: dict[Any, tuple[str, str]]
) -> tuple[str, str]:
    """Code and reason of what the consumer would break, did it take the value as it was."""
    if consumer is None:
        return ("V3", "a result of the program is placed as its signature declares")
    if consumer.op == "call":
        return ("V3", f"@{consumer.attrs['leaf']} declares its argument so")
    before = p.types[n.inputs[0]]
    types = p.types | {n.outputs[0]: before}
    args = [param_type(params, i) if i.startswith("@") else types[i] for i in consumer.inputs]
    key = (consumer.op, tuple(args))
    if key not in memo:
        try:
            OPS[consumer.op].infer(args, consumer.attrs, p.plan.mesh.ordered, p.plan.home)
            memo[key] = ("cost", "legal without it, and dearer")
        except RuleError as e:
            memo[key] = (e.code, e.reason)
    return memo[key]


def _consumer(n: Node) -> str:
    """Whom a redistribution serves, by its note; "place" where the author wrote it."""
    return n.note.rpartition(" for ")[2] if " for " in n.note else "place"


def _reason(n: Node, before: Type) -> str:
    who = "the author" if (who := _consumer(n)) == "place" else who
    if before.pending and n.op in ("all_reduce", "reduce_scatter"):
        return f"pending {before.kind} over {','.join(n.attrs['axes'])}, and {who} needs it complete"
    if n.op == "all_gather":
        return f"rows or columns are spread over {','.join(n.attrs['axes'])}, and {who} needs them whole"
    return f"{who} wants its part only" if n.op == "slice" else f"joins a pending sum at {who}"


def explain_text(info: dict[str, Any]) -> str:
    """The table a person reads; identical layers are folded."""
    lines = [
        f"bucket t={info['bucket']['t']} s={info['bucket']['s']} {info['variant']}: {info['collectives']} collectives, "
        f"{info['bytes_per_token']:.0f} B sent a token a rank, {info['comm_us']:.0f} us, "
        + (f"arena {info['arena_bytes']} B, " if "arena_bytes" in info else "")
        + f"agreement {','.join(info['agreement']) or 'none'}"
    ]
    folded: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for r in info["redistributions"]:
        op = f"{r['op']} (in {r['fused']})" if r["fused"] else r["op"]
        key = (fold(r["edge"]), op, ",".join(r["axes"]), r["from"], r["to"], fold(r["reason"]), r["rule"])
        folded.setdefault(key, []).append(r)
    for (edge, op, axes, src, dst, reason, rule), rows in folded.items():
        lines.append(
            f"  {len(rows):>3}x {op} over {axes}: {edge}\n        {src} => {dst}, {rows[0]['bytes_per_token']:.0f} B a token, "
            f"{rows[0]['time_us']:.1f} us; {rule}: {reason}\n        runner-up: {_runner_up(rows)}"
        )
    return "\n".join(lines)


def _runner_up(rows: list[dict[str, Any]]) -> str:
    """Of folded rows: the closest one's."""
    gaps = [r for r in rows if r["gap_us"] is not None]
    if not gaps:
        return str(rows[0]["runner_up"])
    best = min(gaps, key=lambda r: (r["gap_us"], r["edge"]))
    return f"{best['runner_up']}, +{best['gap_us']:.2f} us a step"


def fold(text: str) -> str:
    """List positions in module paths as `*`."""
    return re.sub(r"\.\d+(?=\.)", ".*", text)
