"""The passes in order: trace, check leaves, lay out, choose, insert, verify, print, bind.

Invariant: nothing here reads a weight, a clock or the environment; equal requests give equal text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tokenspeed.compiler.costs import CostModel
from tokenspeed.compiler.exchange import CALLS as EXCHANGE
from tokenspeed.compiler.explain import Explainer
from tokenspeed.compiler.passes.bind import Binder
from tokenspeed.compiler.passes.decisions import Decisions
from tokenspeed.compiler.passes.eliminate import Factor
from tokenspeed.compiler.passes.footprint import Arenas, Holding, NothingHolds, weight_bytes
from tokenspeed.compiler.passes.fusions import fuse, fused_factors, joins
from tokenspeed.compiler.passes.insert import LeafCache, build_program
from tokenspeed.compiler.passes.layout import Layout, make_layout
from tokenspeed.compiler.passes.leaves import Binding, check_disjoint, check_leaf
from tokenspeed.compiler.passes.repair import Repairs
from tokenspeed.compiler.passes.rows import Choices, Row
from tokenspeed.compiler.passes.simplify import simplify, worthwhile
from tokenspeed.compiler.passes.solve import Solution, Value, solve, values_of
from tokenspeed.compiler.passes.tactics import Edge, Tactics
from tokenspeed.compiler.passes.trace import Flat, trace_model
from tokenspeed.compiler.passes.weights import Names, build_weight_map, choose_formats
from tokenspeed.compiler.weightmap import WeightMap, verify_weights
from tokenspeed.ir.errors import PlanError, VerifyError
from tokenspeed.ir.graph import Node, Program, row_factors
from tokenspeed.ir.mesh import Axes, Plan
from tokenspeed.ir.ops.sampling import SAMPLING_DIMS
from tokenspeed.ir.text import parse_program, print_header, print_program
from tokenspeed.ir.types import Type
from tokenspeed.ir.verifier import verify
from tokenspeed.models.nn.config import Config

#: stand-ins for extents that the runtime fixes, for sizes in the cost model only
_NOMINAL = SAMPLING_DIMS | {
    "l": 16,
    "slots": 16,
    "window_slots": 16,
    "states": 16,
    "r": 16,
    "pos_table": 16,
    "rope_dim": 16,
}


@dataclass
class Request:
    """What to compile."""

    model: Any  # root module class
    config: Config
    plan: Plan
    buckets: Sequence[tuple[int, int]]  # (token rows, request rows) a home group
    dtype: str  # of the activation stream: f32 | bf16
    cache_dtype: str
    costs: CostModel
    stored: Callable[[str], str | None] = lambda _: None  # format of a checkpoint tensor, None: no such tensor
    variants: Sequence[str] = ("gumbel", "full")
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    tactics: Tactics = field(default_factory=Tactics)
    memory_limit: int | None = None  # bytes a rank may hold of weights and arena
    binder: Binder = field(default_factory=Binder)
    collectives: frozenset[str] = frozenset()  # of the target, beside the plain ones: fused ones, exchanges of rows


@dataclass
class Result:
    """What came out, before it is written."""

    layout: Layout
    ports: dict[str, tuple[Type, str]]
    weights: WeightMap
    results: dict[str, list[str]]
    texts: dict[tuple[str, int], str] = field(default_factory=dict)
    programs: dict[tuple[str, int], Program] = field(default_factory=dict)
    explain: dict[str, dict[str, Any]] = field(default_factory=dict)
    costs_us: dict[str, float] = field(default_factory=dict)
    weight_bytes: int = 0  # of the rank that holds most
    arena_bytes: dict[str, int] = field(default_factory=dict)
    bodies: list[Body] = field(default_factory=list)


@dataclass
class Prepared:
    """One variant, traced, checked and laid out: passes 1 to 3."""

    flat: Flat
    choices: Choices
    names: Names
    costs: CostModel

    @cached_property
    def joins(self) -> list[tuple[int, int, int]]:
        return joins(self.flat)

    def bucket(self, bucket: dict[str, int]) -> Problem:
        """Pass 4: the rows of every node for one bucket ({"t", "s"}: rows a home group). Of a further row dim there are as many
        rows as the requests have, but no more than tokens."""
        flat, choices = self.flat, self.choices
        bucket = bucket | {d: min(bucket["t"], bucket["s"] * n) for d, n in flat.per_request.items()}
        plan = choices.layout.plan
        factors = {d: row_factors(plan, n) for d, n in bucket.items()}
        count = {d: n * plan.mesh.size(plan.home) for d, n in bucket.items()}
        repairs = Repairs(plan, choices.layout.sizes | count | _NOMINAL, factors, self.costs)
        rows = choices.rows(factors, count)
        results = [choices.b.spec(spec, choices.base[v].dtype) for v, spec in flat.results]
        values = values_of(flat, choices, rows, results)
        return Problem(flat, choices, repairs, rows, results, values, self.joins, bucket, factors, count)


@dataclass
class Problem:
    """The choices of one bucket."""

    flat: Flat
    choices: Choices
    repairs: Repairs
    rows: list[list[Row]]  # one list a flat node
    results: list[Type]
    values: dict[str, Value]
    joins: list[tuple[int, int, int]]  # where a fused collective may stand
    bucket: dict[str, int]
    factors: dict[str, Axes]  # row factors
    count: dict[str, int]  # global rows

    def solve(
        self, tactics: Tactics | None = None, extra: Sequence[Factor] = (), fused: frozenset[str] = frozenset()
    ) -> Solution:
        """Pass 5."""
        factors = [*extra, *fused_factors(self.flat, self.joins, self.rows, self.values, self.repairs, fused)]
        return solve(self.flat, self.choices, self.repairs, self.rows, self.results, self.values, tactics, factors)


@dataclass
class Body:
    """One program body that was chosen, and the buckets that run it."""

    problem: Problem  # of the first of them
    rows: list[Row]
    buckets: list[int] = field(default_factory=list)


def build(
    problem: Problem, rows: list[Row], cache: LeafCache, fused: frozenset[str] = frozenset()
) -> tuple[Program, bool]:
    """Passes 6 to 9: the program of these rows, and whether its body depends on the bucket's prices."""
    p = build_program(problem.flat, problem.choices, problem.repairs, rows, problem.results, problem.bucket, cache)
    priced = worthwhile(p.nodes, p.results)
    if priced:
        p = simplify(p, problem.repairs)
    return fuse(p, fused), priced


def prepare(r: Request, variant: str, checked: set[Any] | None = None) -> Prepared:
    """Passes 1 to 3 of one variant; `checked`: leaves known to be right."""
    checked = set() if checked is None else checked
    names = Names(getattr(r.model, "names", lambda c: {})(r.config))
    vocabulary = r.plan.axes("vp")
    sharded = r.plan.mesh.size(vocabulary) > 1 and not set(vocabulary) & set(r.plan.home)
    flat = trace_model(r.model, r.config, variant, sharded)
    for leaf in flat.leaves:
        if (key := (leaf.kind, leaf.first_path)) not in checked:
            check_leaf(leaf, r.dtype)
            checked.add(key)
    layout = _laid_out(flat, r)
    for leaf in flat.leaves:
        check_disjoint(leaf, layout)
    formats = choose_formats(flat, layout, names, r.stored, r.dtype)
    if len(set(formats.values())) > 1:  # leaves whose weights are stored differently are different leaves
        flat = trace_model(r.model, r.config, variant, sharded, lambda path: formats.get(path, ""))
    choices = Choices(flat, layout, _binding(layout, formats, r), r.costs, r.collectives.issuperset(EXCHANGE))
    return Prepared(flat, choices, names, r.costs)


def _laid_out(flat: Flat, r: Request) -> Layout:
    """Pass 2; what does not divide names the fields of the configuration that say so."""
    try:
        return make_layout(flat, r.plan)
    except PlanError as e:
        if e.code not in ("P032", "P033"):
            raise
        named = {int(n) for dim, n in re.findall(r"(\w+)=(\d+)", e.message) if flat.dims.get(dim) == int(n)}
        fields = [f"{k}={v}" for k, v in sorted(r.config.read.items()) if type(v) is int and v in named]
        head, _, fixes = e.message.partition("\n")
        said = [head, f"  config.json says {', '.join(fields)}"] if fields else [head]
        raise PlanError(e.code, "\n".join([*said, fixes] if fixes else said)) from None


def run_passes(r: Request) -> Result:
    """All programs of one model on one plan. Raises PlacementError, PlanError, ConfigError or VerifyError."""
    result: Result | None = None
    total, done = len(r.variants) * len(r.buckets), 0
    checked: set[Any] = set()
    edges: dict[Edge, None] = {}
    arenas = Arenas(r.binder)
    for variant in r.variants:
        ready = prepare(r, variant, checked)
        flat, choices = ready.flat, ready.choices
        if result is None:
            weights = build_weight_map(flat, choices.layout, choices.b, ready.names)
            verify_weights(weights)
            ports = {n: (t, t.dtype) for n, t in choices.ports.items()}
            result = Result(choices.layout, ports, weights, {}, weight_bytes=weight_bytes(weights))
        result.results[variant] = ["token", *flat.exports]
        cache = LeafCache()
        known: _Known = {}
        bodies: dict[int, Body] = {}
        for t, rows in r.buckets:
            problem = ready.bucket({"t": t, "s": rows})
            if t == r.buckets[0][0]:
                takes = ((v.name, i) for v in problem.values.values() for i, _ in v.consumers)
                edges |= dict.fromkeys(Edge(name, flat.consumer_name(i)) for name, i in takes)
            made = _Made(problem, r, cache, known, arenas)
            solution = made.within(result.weight_bytes)
            p, body, explainer = made.program(solution)
            bodies.setdefault(id(explainer), Body(problem, solution.rows)).buckets.append(t)
            result.texts[variant, t] = print_header(p) + "\n" + body
            result.programs[variant, t] = p
            explained = explainer.at(p, r.costs, Decisions(flat, solution, r.tactics))
            result.arena_bytes[f"{variant}.t{t}"] = explained["arena_bytes"] = arenas.nbytes(p)
            result.explain[f"{variant}.t{t}"] = explained
            result.costs_us[f"{variant}.t{t}"] = round(solution.cost, 3)
            done += 1
            r.progress("compile", done, total)
        result.bodies += bodies.values()
    assert result is not None
    r.tactics.check(list(edges))
    return result


_Known = dict[object, tuple[Program, str, Explainer]]  # by row factors and choices, and by row factors and text


@dataclass
class _Made:
    """Passes 5 to 12 of one bucket. Buckets that choose alike share one program body (`known`)."""

    problem: Problem
    request: Request
    cache: LeafCache
    known: _Known
    arenas: Arenas

    def program(self, solution: Solution) -> tuple[Program, str, Explainer]:
        """The program of a solution, the text of its body, and what explains it."""
        problem = self.problem
        key = (tuple(sorted(problem.factors.items())), solution.picks)
        if key not in self.known:
            p, priced = build(problem, solution.rows, self.cache, self.request.collectives)
            key = (key, problem.bucket["t"]) if priced else key  # what pays here may not pay in another bucket
            text = print_program(p)
            body = text.partition("\n")[2]
            made = (tuple(sorted(problem.factors.items())), body)
            if made not in self.known:
                verify(p)
                verify_round_trip(text, p)
                self.known[made] = p, body, Explainer(p)
            self.known[key] = self.known[made]
        first, body, explainer = self.known[key]
        extents = problem.count
        p = replace(first, bucket=problem.bucket, sizes=first.sizes | extents, logical=first.logical | extents)
        return p, body, explainer

    def within(self, weights: int) -> Solution:
        """The cheapest plan that fits the memory limit. PlanError P039 with the figures where none does."""
        r, problem = self.request, self.problem
        solution = problem.solve(r.tactics, fused=r.collectives)
        if r.memory_limit is None:
            return solution
        holding = Holding(list(problem.values.values()), problem.rows, problem.repairs)
        least: int | None = None
        while True:
            arena = self.arenas.nbytes(self.program(solution)[0])
            if weights + arena <= r.memory_limit:
                return solution
            least = arena if least is None else min(arena, least)
            try:
                solution = problem.solve(r.tactics, holding.below(holding.peak(solution.picks)), r.collectives)
            except (NothingHolds, PlanError):
                t = problem.bucket["t"]
                raise PlanError(
                    "P039",
                    f"no plan of the bucket of {t} tokens fits: weights {weights} B + arena {least} B = {weights + least} B a "
                    f"rank, the limit is {r.memory_limit} B\n  fix 1: smaller buckets (--buckets, --max-num-batched-tokens)\n"
                    "  fix 2: split over more ranks (--mesh)\n  fix 3: a narrower dtype, or a larger --memory-limit",
                ) from None


def verify_round_trip(text: str, p: Program | None = None) -> None:
    """VerifyError V16 where a printed program does not read back as itself. `p`: the program, to compare with what is read."""
    read = parse_program(text)
    if p is not None and _content(read) == _content(p):
        return
    again = print_program(read)
    if again != text:
        line = next((a for a, b in zip(text.splitlines(), again.splitlines()) if a != b), "its end")
        raise VerifyError("V16", f"the printed program does not read back as itself, from {line!r} on")


def _content(p: Program) -> object:
    """All that the text of a program says."""

    def body(nodes: Sequence[Node]) -> list[object]:
        return [(n.op, n.inputs, n.outputs, n.attrs, n.note) for n in nodes]

    leaves = {k: (f.inputs, f.outputs, body(f.nodes), f.types, f.params) for k, f in p.leaves.items()}
    ends = (p.name, p.variant, p.plan.describe(), p.bucket, p.ports, p.results, p.result_types)
    return ends, p.sizes, p.logical, body(p.nodes), p.types, p.params, leaves


def _binding(layout: Layout, formats: Mapping[str, str], r: Request) -> Binding:
    plan = layout.plan

    def fmt(name: str) -> str:
        return formats.get(name, r.dtype)

    return Binding(layout.axes, plan.axes, plan.mesh.ordered, plan.home, r.dtype, r.cache_dtype, fmt)
