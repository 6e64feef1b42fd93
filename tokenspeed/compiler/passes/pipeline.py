"""The passes in order: trace, check leaves, lay out, choose, insert, verify, print, bind.

Invariant: nothing here reads a weight, a clock or the environment; equal requests give equal text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenspeed.compiler.explain import explain_program
from tokenspeed.compiler.passes.costs import CostModel
from tokenspeed.compiler.passes.insert import LeafCache, build_program
from tokenspeed.compiler.passes.layout import Layout, make_layout
from tokenspeed.compiler.passes.leaves import Binding, check_disjoint, check_leaf
from tokenspeed.compiler.passes.repair import Repairs
from tokenspeed.compiler.passes.rows import Choices
from tokenspeed.compiler.passes.solve import Solution, solve
from tokenspeed.compiler.passes.trace import Flat, trace_model
from tokenspeed.compiler.passes.weights import Names, build_weight_map, choose_formats
from tokenspeed.compiler.weightmap import WeightMap, verify_weights
from tokenspeed.ir.graph import Program, row_factors
from tokenspeed.ir.mesh import Axes, Plan
from tokenspeed.ir.text import parse_program, print_header, print_program
from tokenspeed.ir.types import Type
from tokenspeed.ir.verifier import verify
from tokenspeed.models.nn.config import Config

#: stand-ins for extents that the runtime fixes, for sizes in the cost model only
_NOMINAL = {"p": 16, "l": 16, "top": 20, "slots": 16, "r": 16, "pos_table": 16, "rope_dim": 16}


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


def run_passes(r: Request) -> Result:
    """All programs of one model on one plan. Raises PlacementError, PlanError, ConfigError or VerifyError."""
    result: Result | None = None
    names = Names(getattr(r.model, "names", lambda c: {})(r.config))
    total, done = len(r.variants) * len(r.buckets), 0
    checked: set[Any] = set()
    for variant in r.variants:
        flat = trace_model(r.model, r.config, variant)
        for leaf in flat.leaves:
            if (key := (leaf.kind, leaf.first_path)) not in checked:
                check_leaf(leaf, r.dtype)
                checked.add(key)
        layout = make_layout(flat, r.plan)
        for leaf in flat.leaves:
            check_disjoint(leaf, layout)
        formats = choose_formats(flat, layout, names, r.stored, r.dtype)
        if len(set(formats.values())) > 1:  # leaves whose weights are stored differently are different leaves
            flat = trace_model(r.model, r.config, variant, lambda path, f=formats: f.get(path, ""))
        b = _binding(layout, formats, r)
        choices = Choices(flat, layout, b, r.costs)
        if result is None:
            weights = build_weight_map(flat, layout, b, names)
            verify_weights(weights)
            ports = {n: (t, flat.ports[n][1]) for n, t in choices.ports.items()}
            result = Result(layout, ports, weights, {})
        result.results[variant] = ["token", *flat.exports]
        cache = LeafCache()
        known: dict[object, tuple[Program, str, dict[str, Any]]] = {}
        for t, rows in r.buckets:
            bucket = {"t": t, "s": rows}
            factors, extents, repairs, solution, results = _choose(flat, choices, r, bucket)
            key = (tuple(sorted(factors.items())), solution.picks)
            if key not in known:  # buckets that choose alike differ in their extents only
                p = build_program(flat, choices, repairs, solution.rows, results, bucket, cache)
                verify(p)
                text = print_program(p)
                if print_program(parse_program(text)) != text:
                    raise AssertionError("V16: the printed program does not read back as itself")
                known[key] = p, text.partition("\n")[2], explain_program(p)
            first, body, explained = known[key]
            p = replace(first, bucket=bucket, sizes=first.sizes | extents, logical=first.logical | extents)
            result.texts[variant, t] = print_header(p) + "\n" + body
            result.programs[variant, t] = p
            result.explain[f"{variant}.t{t}"] = explained | {"bucket": bucket}
            result.costs_us[f"{variant}.t{t}"] = round(solution.cost, 3)
            done += 1
            r.progress("compile", done, total)
    assert result is not None
    return result


def _binding(layout: Layout, formats: Mapping[str, str], r: Request) -> Binding:
    plan = layout.plan

    def fmt(name: str) -> str:
        return formats.get(name, r.dtype)

    return Binding(layout.axes, plan.axes, plan.mesh.ordered, plan.home, r.dtype, r.cache_dtype, fmt)


def _choose(
    flat: Flat, choices: Choices, r: Request, bucket: dict[str, int]
) -> tuple[dict[str, Axes], dict[str, int], Repairs, Solution, list[Type]]:
    """Row factors of a bucket, its global rows, its repairs, the cheapest rows, and the types of the results."""
    plan = choices.layout.plan
    groups = plan.mesh.size(plan.home)
    factors = {d: row_factors(plan, n) for d, n in bucket.items()}
    count = {d: n * groups for d, n in bucket.items()}
    repairs = Repairs(plan, choices.layout.sizes | count | _NOMINAL, factors, r.costs)
    rows = [choices.rows(n, factors, count) for n in flat.nodes]
    results = [choices.b.spec(spec, choices.base[v].dtype) for v, spec in flat.results]
    return factors, count, repairs, solve(flat, choices, repairs, rows, results), results
