"""Rule discovery: re-derives the placement rule of every op by brute force and compares it with the declared one.

    python -m tokenspeed.ir.rulecheck [--jobs N] [--json]

Invariant: a declared row that does not hold is a failure; a row that holds and is not declared must be in the reviewed list
`rulecheck_reviewed.json` with a reason, and every reason there must still be needed. One axis of 2, 3 and 4 ranks finds
rows; meshes 2x2 and 2x3 try every product of them, in both orders of the axes; bfloat16 runs each declared row once more.
A row holds if the meaning of the local results is the op of the meanings, in several random trials.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.collectives import collective, outer_blocks
from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.graph import row_factors
from tokenspeed.ir.jobs import add_jobs, each
from tokenspeed.ir.meaning import Meaning, Value
from tokenspeed.ir.mesh import Axes, Mesh, Plan
from tokenspeed.ir.ops import OPS, REFERENCES, Redistribute
from tokenspeed.ir.rulecheck_bench import Bench, Run, reference
from tokenspeed.ir.rulecheck_forms import BLOCKED, FORMS, Form
from tokenspeed.ir.types import ROW_DIMS, Dim, Type

REVIEWED = Path(__file__).with_name("rulecheck_reviewed.json")
PENDING = {"sum": "P", "max": "P:max", "min": "P:min", "argmax": "P:argmax", "topk": "P:topk", "lse": "P:lse"}
PICKING = ("argmax", "topk", "sample", "tally")  # in bfloat16 their results are other ids or numbers
Found = dict[tuple[str, ...], list[set[str]]]  # input states -> output states that hold, output by output


@dataclass
class Report:
    """What was tried, and what does not hold. Keys of `--json`: ops, rules, unsound, missing, seconds."""

    ops: set[str] = field(default_factory=set)
    rules: int = 0
    unsound: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)  # reviewed rows that no longer turn up
    seconds: float = 0.0

    def add(self, other: Report) -> None:
        self.ops |= other.ops
        self.rules += other.rules
        self.unsound += other.unsound
        self.missing += other.missing

    def summary(self) -> dict[str, Any]:
        return {"ops": len(self.ops), "rules": self.rules, "unsound": len(self.unsound), "missing": len(self.missing),
                "seconds": round(self.seconds, 1)}  # fmt: skip


# ---- one axis: discovery ---------------------------------------------------------------------------------------------


def options(form: Form, i: int) -> list[str]:
    """States of operand i on one axis that are worth trying."""
    o = form.operands[i]
    out = ["R", *(d for d in o.dims if d not in form.single or form.single[d] > 20)]
    return [*out, "P", "P:max", "P:min"] if o.dtype == "f32" else out


def combinations(form: Form) -> Iterator[tuple[str, ...]]:
    """States of all operands; where there are many operands, at most one of them pending."""
    every = [options(form, i) for i in range(len(form.operands))]
    free = [i for i in range(len(every)) if i not in form.tied]
    for picked in itertools.product(*(range(len(every[i])) for i in free)):
        at = dict(zip(free, picked))
        combo = tuple(states[at[form.tied.get(i, i)]] for i, states in enumerate(every))
        if len(combo) < 5 or sum(combo[i][0] == "P" for i in free) <= 1:
            yield combo


def declared(b: Bench, ins: Sequence[Type]) -> list[Type] | None:
    try:
        b.op.check_extents(ins, b.form.attrs, b.plan, b.sizes)
        return b.op.infer(ins, b.form.attrs, b.plan.mesh.ordered, b.plan.home)
    except RuleError:
        return None


def sound(b: Bench, k: int, xs: list[Value]) -> set[str]:
    """Output states on the one axis that hold for output k."""
    (axis,) = b.plan.mesh.names
    t = b.out_type(k)
    kinds = ["sum", "max", "min"]
    if isinstance(xs[0], tuple):
        kinds = ["lse"] if xs[0][1].dtype != torch.int32 else ["argmax" if xs[0][0].dim() == 1 else "topk"]
    states = ["R", *t.names, *(PENDING[kind] for kind in kinds)]
    found: set[str] = set()
    for s in states:
        if s in t.names and b.sizes[s] % b.plan.mesh.ranks:
            continue
        at = t.with_state(axis, s.partition(":")[0], b.plan.mesh.ordered, s.partition(":")[2] or "sum")
        if b.holds(k, xs, at, 1e-9):
            found.add(s)
    return found


def discover(form: Form, n: int, home: bool, trials: int, known: Found | None) -> Found:
    """Input states -> sound states of each output, on one axis of n ranks; only those in `known`, if given."""
    axis = "dp" if home else "x"
    mesh = Mesh(((axis, n),))
    benches = [Bench(form, mesh, (axis,) if home else (), seed) for seed in range(trials)]
    combos = known if known is not None else combinations(form)
    found: Found = {}
    for combo in combos:
        result: list[set[str]] | None = None
        for b in benches:
            ins = b.types([{axis: s} for s in combo])
            outs = declared(b, ins) or [b.out_type(k) for k in range(len(form.outputs))]
            if any(s == "P:lse" for s in combo):
                break
            try:
                got = b.local_results(ins, outs, reference)
                states = [sound(b, k, xs) for k, xs in enumerate(got)]
            except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
                result = None
                break
            result = states if result is None else [a & c for a, c in zip(result, states)]
            if not all(result):
                break
        if result is not None and all(result):
            found[tuple(combo)] = result
    return found


def check_axis(form: Form, n: int, home: bool, trials: int, report: Report,
               known: Found | None = None) -> Found:  # fmt: skip
    """Compares declared and discovered rows of one form on one axis; returns the discovered ones."""
    axis = "dp" if home else "x"
    found = discover(form, n, home, trials, known)
    where = f"{form.name}{' (home axis)' if home else ''}"
    rows = rows_of(form, home, n)
    report.rules += len(rows)
    for combo, outs in rows.items():
        says = [_state(t, axis) for t in outs] + [combo[i] for i in form.stored]
        holds = found.get(combo, [set()] * len(says))
        if not all(s in h for s, h in zip(says, holds)):
            report.unsound.append(f"{where}: {_row(combo)} -> {_row(says)} on {n} ranks; what holds: {_sets(holds)}")
    return found


def rows_of(form: Form, home: bool, n: int = 4) -> dict[tuple[str, ...], list[Type]]:
    """The declared rows of a form on one axis of n ranks: input states -> output types."""
    axis = "dp" if home else "x"
    b = Bench(form, Mesh(((axis, n),)), (axis,) if home else (), 0)
    rows: dict[tuple[str, ...], list[Type]] = {}
    for c in combinations(form):
        outs = declared(b, b.types([{axis: s} for s in c]))
        if outs is not None:
            rows[c] = outs
    return rows


def _missing(form: Form, home: bool, combo: tuple[str, ...], holds: Sequence[set[str]]) -> str:
    return f"{form.name}{' (home axis)' if home else ''}: {_row(combo)} -> {_sets(holds)}"


def _state(t: Type, axis: str) -> str:
    s = t.state(axis)
    return PENDING[t.kind] if s == "P" else s


def _row(states: Sequence[str]) -> str:
    return ", ".join(states)


def _sets(holds: Sequence[set[str]]) -> str:
    return ", ".join("|".join(sorted(h)) or "nothing" for h in holds)


# ---- two axes: products ----------------------------------------------------------------------------------------------


def check_products(form: Form, sizes: tuple[int, int], home: bool, report: Report, run: Run = reference,
                   dtype: torch.dtype = torch.float64, tolerance: float = 1e-9) -> None:  # fmt: skip
    """Every product of two declared one-axis rows, in both orders of the axes."""
    names = ("dp", "x") if home else ("x", "y")
    mesh = Mesh(tuple(zip(names, sizes)))
    b = Bench(form, mesh, ("dp",) if home else (), 7, dtype)
    per_axis = [
        [c for c in combinations(form) if declared(b, b.types([{a: s} for s in c])) is not None or _other(b, a, c)]
        for a in names
    ]
    for first, second in itertools.product(*per_axis):
        pairs = [{names[0]: s, names[1]: u} for s, u in zip(first, second)]
        turned = [dict(reversed(p.items())) for p in pairs]
        choices = [
            (p, q) if p[names[0]] == p[names[1]] not in ("R", "P", *ROW_DIMS) else (p,) for p, q in zip(pairs, turned)
        ]
        for states in itertools.product(*choices):
            ins = b.types(states)
            if any({p.partition(":")[0] for p in d.values()} == {"P"} and len(set(d.values())) > 1 for d in states):
                continue  # a value is pending by one kind
            outs = declared(b, ins)
            if outs is None or not _fits(b, [*ins, *outs]):
                continue
            report.rules += 1
            if not row_holds(b, ins, outs, run, tolerance):
                report.unsound.append(f"{form.name} on {'x'.join(map(str, sizes))}: {_types(ins)} -> {_types(outs)}")


def _other(b: Bench, axis: str, combo: tuple[str, ...]) -> bool:
    """Whether the row is legal beside the home axis' own row (an index op has none without it)."""
    if axis in b.plan.home or not b.plan.home:
        return False
    rows = [o.dims[0] if o.dims and o.dims[0] in BLOCKED else "R" for o in b.form.operands]
    return declared(b, b.types([{**dict.fromkeys(b.plan.home, r), axis: s} for r, s in zip(rows, combo)])) is not None


def _fits(b: Bench, types: Sequence[Type]) -> bool:
    return all(
        b.sizes[d.name] % b.plan.mesh.size(d.axes) == 0
        and (d.name not in ROW_DIMS or set(d.axes) <= set(b.m.factors[d.name]))
        for t in types
        for d in t.dims
        if d.axes
    )


def row_holds(b: Bench, ins: Sequence[Type], outs: Sequence[Type], run: Run, tolerance: float) -> bool:
    """Whether one declared row holds on the bench's contents."""
    try:
        got = b.local_results(ins, outs, run)
    except (RuntimeError, IndexError, ValueError):
        return False
    types = [*outs, *(ins[i] for i in b.form.stored)]
    return all(b.holds(k, xs, t, tolerance) for k, (xs, t) in enumerate(zip(got, types)))


def _types(ts: Sequence[Type]) -> str:
    return ", ".join(t.text() for t in ts)


# ---- redistributions -------------------------------------------------------------------------------------------------


def check_redistributions(report: Report) -> None:
    """Each redistribution of a value [t, h] and of pairs on 2x2, 2x3 and 2x2x2 ranks keeps the meaning."""
    for shape in ((2, 2), (2, 3), (2, 2, 2)):
        mesh = Mesh(tuple(zip("abc", shape)))
        plan = Plan(mesh, {"dp": ("a",)} | {a: (a,) for a in mesh.names}, {})
        sizes = {"t": 2 * mesh.ranks, "h": mesh.ranks}
        m = Meaning(plan, sizes, {"t": row_factors(plan, sizes["t"] // shape[0])})
        g = torch.Generator().manual_seed(1)
        x = torch.randint(-8, 9, (sizes["t"], sizes["h"]), generator=g).double()
        for source in _layouts(mesh, len(shape)):
            for op, axes, dim in _moves(mesh):
                report.ops.add(op)
                try:
                    (after,) = OPS[op].infer([source], {"axes": axes, "dim": dim, "kind": source.kind}, mesh.ordered)
                    if dim == "t":
                        held = tuple(a for a in source.dim(dim).axes if a not in axes)
                        outer_blocks(plan, m.factors["t"], held, axes, dim)
                    moved = collective(op, m.distribute(x, source, _halves), source, axes, dim, m)
                except RuleError:
                    continue
                report.rules += 1
                if not torch.equal(m.assemble(moved, after), x):
                    report.unsound.append(
                        f"{op} over {axes} {dim} of {source} on {'x'.join(map(str, shape))} -> {after}"
                    )


def _halves(x: Tensor, n: int, kind: str) -> list[Tensor]:
    if kind == "sum":
        return [x - (n - 1) * 3.0, *(torch.full_like(x, 3.0) for _ in range(n - 1))]
    return [x if i == n - 1 else x - i - 1 if kind == "max" else x + i + 1 for i in range(n)]


def _layouts(mesh: Mesh, depth: int) -> Iterator[Type]:
    """Every type of f32[t, h] on the mesh, ordered dims in every order of the axes."""
    base = Type("f32", (Dim("t"), Dim("h")))
    for states in itertools.product(("R", "t", "h", "P"), repeat=depth):
        for order in itertools.permutations(range(depth)):
            t = base
            for i in order:
                t = t.with_state(mesh.names[i], states[i], mesh.ordered)
            if order == tuple(range(depth)) or t.dim("h").axes != mesh.ordered(t.dim("h").axes):
                yield t
                if t.pending:
                    yield Type(t.dtype, t.dims, t.pending, "max")
                    yield Type(t.dtype, t.dims, t.pending, "min")


def _moves(mesh: Mesh) -> Iterator[tuple[str, Axes, str]]:
    groups = [p for k in range(1, len(mesh.names) + 1) for p in itertools.permutations(mesh.names, k)]
    for axes in groups:
        for op in ("all_reduce", "keep_first"):
            yield op, axes, ""
        for op in ("all_gather", "reduce_scatter", "slice"):
            yield op, axes, "t"
            yield op, axes, "h"


# ---- the whole check -------------------------------------------------------------------------------------------------


def homes(form: Form) -> tuple[bool, ...]:
    """An op that follows an index is judged on the home axis and beside it."""
    return (True, False) if any(o.index for o in form.operands) or OPS[form.op].slotted else (False,)


def check_form(form: Form, home: bool, discovering: bool = True) -> Report:
    """One form, on the home axis or beside it; without `discovering` only declared rows are tried."""
    report = Report({form.op})
    found: Found | None = None if discovering else {c: [] for c in rows_of(form, home)}
    for n in (2, 3, 4):  # what does not hold on 2 ranks is not tried on more
        found = check_axis(form, n, home, 2, report, found)
    rows = rows_of(form, home)
    report.missing = [_missing(form, home, c, holds) for c, holds in (found or {}).items() if c not in rows]
    for sizes in ((2, 2), (2, 3)):
        check_products(form, sizes, home, report)
    if home == homes(form)[0] and any(o.dtype == "f32" for o in form.operands) and form.op not in PICKING:
        check_products(form, (2, 2), home, report, dtype=torch.bfloat16, tolerance=0.25)
    return report


def _checked(part: tuple[int, bool]) -> Report:
    """Part (number of a form, home) of the whole check; number -1: the redistributions."""
    number, home = part
    if number >= 0:
        return check_form(FORMS[number], home)
    report = Report()
    check_redistributions(report)
    return report


def check(jobs: int = 1) -> Report:
    """Every form and redistribution; the reviewed list is applied to what is missing. The same for any number of jobs."""
    start = time.perf_counter()
    report = Report()
    parts = [(i, home) for i, form in enumerate(FORMS) for home in homes(form)]
    for one in each(_checked, [*parts, (-1, False)], jobs):
        report.add(one)
    report.missing, report.stale = _review(report.missing)
    without = set(REFERENCES) - report.ops - {n for n, op in OPS.items() if isinstance(op, Redistribute)}
    report.unsound += [f"{name} has a reference and no form in rulecheck_forms" for name in sorted(without)]
    report.seconds = time.perf_counter() - start
    return report


def _review(missing: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is missing and not reviewed, and what was reviewed and is not missing."""
    reviewed: dict[str, list[str]] = json.loads(REVIEWED.read_text())
    known = {row for rows in reviewed.values() for row in rows}
    return sorted(set(missing) - known), sorted(known - set(missing))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tokenspeed.ir.rulecheck", description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: ops, rules, unsound, missing, seconds"
    )
    add_jobs(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = check(args.jobs)
    for title, rows in (
        ("unsound", report.unsound),
        ("missing, not reviewed", report.missing),
        ("reviewed in vain", report.stale),
    ):
        for row in rows:
            print(f"{title}: {row}", file=sys.stderr)
    print(json.dumps(report.summary()) if args.json else ", ".join(f"{k} {v}" for k, v in report.summary().items()))
    return 1 if report.unsound or report.missing or report.stale else 0


if __name__ == "__main__":
    sys.exit(main())
