"""Pass 15: the equivalence certificate. Every program body that was chosen is built again for the same model at reduced
extents, run in the n-rank simulator in float64 beside the one-rank program, and compared value by value and token by token: a
prefill each, and a decode step behind it for the first of a variant.

Invariant: the reduced program has the placements and redistributions of the real one (first and last layer), because its
rows are the chosen ones and only extents differ; heads, KV heads and what divides by the ranks are kept. A difference is
V17. The certificate names the programs it stands for by their digest, and loading checks that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tokenspeed.compiler.passes.insert import LeafCache
from tokenspeed.compiler.passes.pipeline import Body, Prepared, Problem, Request, build, prepare
from tokenspeed.compiler.passes.rows import Row
from tokenspeed.compiler.passes.weights import build_weight_map
from tokenspeed.compiler.trial import batch, outcomes, random_weights, runtime_sizes
from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.graph import Program, row_factors
from tokenspeed.ir.mesh import Mesh, Plan, make_plan
from tokenspeed.ir.simulate import Simulator
from tokenspeed.ir.types import ROW_DIMS, Type
from tokenspeed.ir.verifier import verify
from tokenspeed.models.nn.config import Config, ConfigError

SEED = 20
BOUND = 1e-9  # of a value, relative to the largest of its kind; float64 sums in another order stay far below
FLOOR = 1e-12  # errors below are reported as this, so that a certificate does not depend on the machine

#: widths, and what is kept of each a rank
_WIDTHS = (
    ("hidden_size", 8), ("intermediate_size", 8), ("vocab_size", 16),
    ("moe_intermediate_size", 4), ("shared_expert_intermediate_size", 4), ("num_experts", 2), ("num_local_experts", 2),
)  # fmt: skip

_ROPES = ("rope_scaling", "rope_parameters")

#: configuration fields that are cut to these, where they are larger; `ranks` keeps what divides dividing
_DEPTH, _WIDTH, _POSITIONS = "num_hidden_layers", "head_dim", "max_position_embeddings"
#: what no axis splits, and the first layers that are unlike the rest: one of each kind is left
_CUT = (
    (_DEPTH, 2), (_POSITIONS, 64), ("first_k_dense_replace", 1), ("kv_lora_rank", 8), ("q_lora_rank", 8), ("qk_nope_head_dim", 4),
    ("qk_rope_head_dim", 4), ("v_head_dim", 4), ("sliding_window", 3), ("linear_key_head_dim", 8), ("linear_value_head_dim", 8),
    ("index_n_heads", 4), ("index_head_dim", 8), ("index_topk", 2),
)  # fmt: skip


def certify(r: Request, bodies: Sequence[Body]) -> dict[str, Any]:
    """What was run and how far apart the results were. VerifyError V17 where they differ."""
    over = reduced(r.config.values(), r.plan.mesh.ranks)
    small = replace(r, config=r.config.replaced(**over), dtype="f32", cache_dtype="f32", stored=lambda _: None)
    alone = replace(small, plan=make_plan(Mesh(()), ""))
    rows: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: threads cost more than they do, and sums keep one order
    try:
        for variant in r.variants:
            mine = [b for b in bodies if b.problem.flat.variant == variant]
            pair = _Pair(
                prepare(small, variant), prepare(alone, variant), r.config.values().get(_DEPTH, 0), r.collectives
            )
            rows += [{"variant": variant, "buckets": b.buckets} | pair.check(b) for b in mine]
    finally:
        torch.set_num_threads(threads)
    return {"seed": SEED, "precision": "float64", "bound": BOUND, "reduced": over, "bodies": rows}


def reduced(config: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Fields to overwrite: two layers, narrow heads, and widths that divide by the ranks exactly where the real ones do."""

    def width(name: str, units: int) -> int:
        n = config[name]
        return min(n, ranks * max(units, 32 // ranks) + n % ranks)

    out: dict[str, Any] = {}
    for name, units in _WIDTHS:
        if isinstance(config.get(name), int):
            out[name] = width(name, units)
    for name, most in _CUT:
        if isinstance(config.get(name), int):
            out[name] = min(config[name], most)
    if len(kinds := (config.get("layer_types") or [])[: config.get(_DEPTH)]) > 1:  # the first and the last layer's
        out["layer_types"] = [kinds[0], kinds[-1]]
    if config.get("full_attention_interval"):
        out["full_attention_interval"] = min(config["full_attention_interval"], 2)
    if isinstance(config.get("n_routed_experts"), int):
        out["n_routed_experts"] = _experts(config["n_routed_experts"], config.get("n_group") or 1, ranks)
    _fewer_a_token(config, out)
    if isinstance(config.get("hidden_size"), int) and config.get("num_attention_heads"):
        head = config.get(_WIDTH) or config["hidden_size"] // config["num_attention_heads"]
        out[_WIDTH] = min(head, next((w for w in range(8, head, 8) if _turned(config, w)), head))
        if isinstance(turned := config.get("rotary_dim"), int):
            out["rotary_dim"] = max(turned * out[_WIDTH] // head // 2 * 2, 2)
        turns = out.get("qk_rope_head_dim") or out.get("rotary_dim") or _turned(config, out[_WIDTH])
        cut = {name: _shorter(r, turns // 2) for name in _ROPES if isinstance(r := config.get(name), dict)}
        out |= {name: r for name, r in cut.items() if r != config[name]}
    return out


def _turned(config: Mapping[str, Any], width: int) -> int:
    """Values of a head of `width` that the configuration's rope turns; 0 where it cannot turn so narrow a head."""
    try:
        return Config({**config, _WIDTH: width}).rotary_dim()
    except ConfigError:
        return 0


def _fewer_a_token(config: Mapping[str, Any], out: dict[str, Any]) -> None:
    """No more experts a token than the reduced model has in the groups that are kept."""
    left = next((out[n] for n in ("n_routed_experts", "num_experts", "num_local_experts") if n in out), 0)
    if config.get("n_group") and config.get("topk_group"):
        left = left // config["n_group"] * config["topk_group"]
    if left and isinstance(k := config.get("num_experts_per_tok"), int) and k > left:
        out["num_experts_per_tok"] = left


def _shorter(rope: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Rope parameters with lists of divisors cut to `count`, also those of kinds of layers."""
    cut = lambda v: v[:count] if isinstance(v, list) else _shorter(v, count) if isinstance(v, dict) else v  # noqa: E731
    return {name: cut(value) for name, value in rope.items()}


def _experts(n: int, groups: int, ranks: int) -> int:
    """The fewest that come in as many groups of two or more, and divide by the same numbers of ranks."""
    sizes = [d for d in range(2, ranks + 1) if ranks % d == 0]
    fit = (m for m in range(groups, n, groups) if m >= max(2 * groups, 2 * ranks, 16))
    return next((m for m in fit if all((m % d == 0) == (n % d == 0) for d in sizes)), n)


@dataclass
class _Pair:
    """The reduced model on the plan and on one rank."""

    many: Prepared
    one: Prepared
    layers: int  # of the real model
    fused: frozenset[str]
    known: dict[object, dict[str, Any]] = field(default_factory=dict)  # by the reduced program
    expected: dict[tuple[int, int], list[Ran]] = field(default_factory=dict)  # one rank's, by rows a home group

    def __post_init__(self) -> None:
        self.weights = [
            random_weights(build_weight_map(p.flat, p.choices.layout, p.choices.b, p.names), SEED) for p in (self.many, self.one)
        ]  # fmt: skip
        self.moved: list[dict[tuple[str, Type], list[Tensor]]] = [{}, {}]  # these as locals, which all bodies share

    def check(self, body: Body) -> dict[str, Any]:
        plan = self.many.choices.layout.plan
        t, s = _rows(plan, body.problem.bucket)
        problem = self.many.bucket({"t": t, "s": s})
        chosen = self._rows_of(body, problem)
        key = (t, s, tuple(map(_placed, chosen)))
        if key not in self.known:
            self.known[key] = self._run(problem, chosen)
        return self.known[key]

    def _run(self, problem: Problem, chosen: list[Row]) -> dict[str, Any]:
        plan, t, s = problem.repairs.plan, problem.bucket["t"], problem.bucket["s"]
        p, _ = build(problem, chosen, LeafCache(), self.fused)
        verify(p)
        groups = plan.mesh.size(plan.home)
        work = _work(p, groups)[: 1 if self.known else 2]  # what a decode step reads is laid out alike in all bodies
        if len(self.expected.get((t, s), ())) < len(work):
            single = self.one.bucket({"t": t * groups, "s": s * groups})
            q, _ = build(single, single.solve().rows, LeafCache())
            self.expected[t, s] = _steps(
                q, self.weights[1], self.moved[1], [[[r for g in step for r in g]] for step in work]
            )
        values, tokens, error = _compare(p, _steps(p, self.weights[0], self.moved[0], work), self.expected[t, s], work)
        return {"rows": {"t": t, "s": s}, "steps": len(work), "values": values, "tokens": tokens, "max_error": error}

    def _rows_of(self, body: Body, problem: Problem) -> list[Row]:
        """The chosen rows of the real program's first and last layer; the cheapest where they do not fit together."""
        real = {n.name: row for n, row in zip(body.problem.flat.nodes, body.rows)}
        last = str(max(self.layers - 1, 0))
        out: list[Row] = []
        for n, options in zip(problem.flat.nodes, problem.rows):
            want = real.get(re.sub(r"(?<=layers\.)1(?=\.)", last, n.name))
            match = [o for o in options if want is not None and _placed(o) == _placed(want)]
            if not match:
                return problem.solve().rows
            out.append(match[0])
        return out


def _placed(row: Row) -> object:
    def bare(t: Type) -> object:
        return t.dims, t.pending, t.kind, t.index

    return tuple(map(bare, row.ins)), tuple(map(bare, row.outs)), row.stars


def _rows(plan: Plan, bucket: Mapping[str, int]) -> tuple[int, int]:
    """The smallest rows a home group that split over the same axes as the bucket's, and hold two requests where it can."""

    def like(n: int, least: int) -> int:
        want = row_factors(plan, n)
        return next(m for m in range(min(n, least), n + 1) if row_factors(plan, m) == want)

    t = like(bucket["t"], 6)
    return t, min(like(bucket["s"], 2), t)


Work = list[list[list[tuple[int, list[int], int]]]]  # a step, a home group: requests
Ran = tuple[Simulator, list[Tensor], dict[str, list[Any]]]  # who ran, the results, every value


def _work(p: Program, groups: int) -> Work:
    """A prefill of one or two requests a home group, and a decode step behind it."""
    t, s = p.bucket["t"], p.bucket["s"]
    g = torch.Generator().manual_seed(SEED)
    each = max(1, min(2, s, t))
    length = max(1, t // each - 1) if t > each else 1
    prompts = torch.randint(0, p.logical.get("v", 64), (groups, each, length), generator=g).tolist()
    first = [[(i * each + k, prompts[i][k], 0) for k in range(each)] for i in range(groups)]
    return [first, [[(n, [7 + n], length) for n, _, _ in requests] for requests in first]]


def _steps(
    p: Program, weights: Mapping[str, Tensor], moved: dict[tuple[str, Type], list[Tensor]], work: Work
) -> list[Ran]:
    """The steps on one plan, each request sampled with its own noise, on caches that are kept."""
    sim = Simulator(p, runtime_sizes(p), moved=moved)
    caches: dict[str, list[Tensor]] = {}
    seeds = {n: SEED for requests in work[0] for n, _, _ in requests}
    return [(sim, *sim.run(batch(p, step, seeds), weights, caches)) for step in work]


def _compare(p: Program, many: list[Ran], one: list[Ran], work: Work) -> tuple[int, int, float]:
    """(values compared, tokens compared, largest relative error) of a program and the one-rank run of the same steps."""
    t, s = p.bucket["t"], p.bucket["s"]
    groups, each = len(work[0]), len(work[0][0])
    last = p.types[p.results[0]].dims[0].name
    values = tokens = 0
    error = 0.0
    for step, (sim, results, env), (_, expected, reference) in zip(work, many, one):
        size = each * len(step[0][0][1])
        index = {
            "t": (torch.cat([torch.arange(i * t, i * t + size) for i in range(groups)]), torch.arange(size * groups)),
            "s": (torch.cat([torch.arange(i * s, i * s + each) for i in range(groups)]), torch.arange(each * groups)),
        }  # fmt: skip
        if "drafted" in p.bucket:
            rows = torch.tensor([k for k, _ in outcomes(p, step, results[0])])
            index["drafted"] = rows, torch.arange(len(rows))
        for name, theirs in reference.items():
            if name in p.ports or name not in env or name not in p.types or p.types[name].index:
                continue
            kind = p.types[name]
            mine, right = sim.meaning.assemble(env[name], kind), theirs[0]
            if isinstance(right, tuple):
                right = right[1] if kind.kind == "argmax" or not kind.pending else right[0]
            if isinstance(mine, tuple):
                mine = mine[-1]
            row = kind.dims[0].name
            if row not in ROW_DIMS or mine.shape[1:] != right.shape[1:]:
                continue  # padded dims of another extent on one rank
            a, b = mine[index[row][0]], right[index[row][1]]
            error = max(error, _apart(a.double(), b.double(), name, p))
            values += 1
        a, b = results[0][index[last][0]], expected[0][index[last][1]]
        if not torch.equal(a, b):
            raise VerifyError("V17", f"{p.variant}, {t} tokens: the plan samples {a.tolist()}, one rank {b.tolist()}")
        tokens += a.numel()
    return values, tokens, 10.0 ** math.ceil(math.log10(max(error, FLOOR)))


def _apart(a: Tensor, b: Tensor, name: str, p: Program) -> float:
    finite = b.isfinite()
    same = torch.equal(finite, a.isfinite())
    scale = float(b[finite].abs().max().clamp(min=1.0)) if finite.any() else 1.0
    error = float((a[finite] - b[finite]).abs().max()) / scale if same and finite.any() else 0.0 if same else math.inf
    if error > BOUND:
        raise VerifyError(
            "V17", f"{p.variant}, {p.bucket['t']} tokens: %{name} : {p.types[name]} is {error:.1e} away from one rank's"
        )
    return error
