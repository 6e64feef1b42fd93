"""Mutation testing of the compiler's output: the verifier alone must reject every mutant that is not equal to the original.

    python -m tokenspeed.compiler.mutate [--json] [--programs N] [--sample N] [--jobs N] [--part I/N]

Mutants of golden programs (decoders, dense and of experts, on six plans each) and of fuzzer programs are printed without
types, read back and verified. Those that pass are run in the simulator: equal to the original on random contents, they are
counted apart; otherwise they are survivors. The other half: no valid fuzzer program and no alternative plan of a golden
model is refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tokenspeed.compiler.costs import CostModel, load_costs
from tokenspeed.compiler.exchange import CALLS as EXCHANGE
from tokenspeed.compiler.fuzz import OUT_OF_PLAN, compile_source, groups_of, overlap, random_costs, shrink
from tokenspeed.compiler.fuzz_programs import PLANS as PLANS_OF_PROGRAMS
from tokenspeed.compiler.fuzz_programs import Fuzzed, generate
from tokenspeed.compiler.mutants import Mutant, mutants
from tokenspeed.compiler.passes.pipeline import Request, Result, run_passes
from tokenspeed.compiler.trial import batch, random_ports, random_weights, runtime_sizes
from tokenspeed.ir.agreement import meet, stuck, verify_ranks
from tokenspeed.ir.errors import TokenSpeedError, VerifyError
from tokenspeed.ir.graph import Program
from tokenspeed.ir.jobs import add_jobs, add_part, each, part_of
from tokenspeed.ir.meaning import same_bits
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.ir.simulate import Simulator
from tokenspeed.ir.text import parse_program
from tokenspeed.ir.verifier import verify
from tokenspeed.models import find_family
from tokenspeed.models.nn.config import Config

PLANS = (
    ("tp=2", ""), ("tp=4", ""), ("dp=2,tp=2", "vp=dp*tp"), ("dp=2,tp=2", "mlp=dp*tp"), ("a=2,b=2", "tp=a*b,mlp=b"),
    ("dp=2,a=2,b=2", "tp=a*b,mlp=dp*b,vp=a"), ("cp=2,tp=2", ""),
)  # fmt: skip
BUCKETS = ((4, 4), (8, 4))
EXPERTS = (
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepSeekMTPModel",
    "Qwen3NextForCausalLM",
    "GptOssForCausalLM",
    "MiniMaxM2ForCausalLM",
)
FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", *EXPERTS)
#: plans of families with experts: these on axes of their own, their width too
MIXED_PLANS = (
    ("tp=2", ""), ("tp=4", "ep=tp,etp=1"), ("dp=2,tp=2", "ep=dp*tp,etp=1"), ("dp=2,tp=2", "ep=dp,etp=tp,vp=dp*tp"),
    ("a=2,b=2", "tp=a*b,ep=b,etp=a"), ("dp=2,a=2,b=2", "tp=a*b,ep=dp*b,etp=a"),
)  # fmt: skip


#: of DeepSeek, beside the rest
LATENT = {
    "kv_lora_rank": 6, "q_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "n_group": 2,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
#: of Qwen3-Next, beside the rest: a recurrent layer, then one of attention
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3, "full_attention_interval": 2, "partial_rotary_factor": 0.5, "shared_expert_intermediate_size": 10,
}  # fmt: skip


OWN: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {"sliding_window": 3, "sliding_window_pattern": 2},
    "GptOssForCausalLM": {"sliding_window": 3, "num_local_experts": 4},
    "DeepseekV3ForCausalLM": {"attention_bias": False},
    "DeepSeekMTPModel": {
        "attention_bias": False,
        "num_nextn_predict_layers": 1,
        "index_n_heads": 2,
        "index_head_dim": 4,
        "index_topk": 3,
    },
    "Qwen3NextForCausalLM": {"attention_bias": False},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 2, "num_local_experts": 4, "attention_bias": False},
}


def tiny(family: str) -> dict[str, Any]:
    """Two layers, 8 query heads on 2 KV heads, a vocabulary that divides by nothing, biases where the family has them."""
    return {
        "architectures": [family], "hidden_size": 16, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
        "intermediate_size": 24, "vocab_size": 61, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 64, "hidden_act": "silu", "attention_bias": True, "mlp_bias": True,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True,
    } | LATENT | DELTA | OWN.get(family, {})  # fmt: skip


@dataclass
class Report:
    """Keys of `--json`: mutants, killed, equivalent, false_rejects, by_kind (kind -> [killed, equivalent, survived])."""

    killed: int = 0
    equivalent: int = 0
    survivors: list[str] = field(default_factory=list)
    false_rejects: list[str] = field(default_factory=list)
    valid: int = 0  # programs that must pass, and were verified
    codes: Counter[str] = field(default_factory=Counter)
    by_kind: dict[str, list[int]] = field(default_factory=dict)

    def count(self, kind: str, column: int) -> None:
        self.by_kind.setdefault(kind, [0, 0, 0])[column] += 1

    def add(self, other: Report) -> None:
        for f in ("killed", "equivalent", "survivors", "false_rejects", "valid", "codes"):
            setattr(self, f, getattr(self, f) + getattr(other, f))
        for kind, counts in other.by_kind.items():
            self.by_kind[kind] = [a + b for a, b in zip(self.by_kind.get(kind, [0, 0, 0]), counts)]

    def faults(self) -> dict[str, list[str]]:
        return {"survived": self.survivors, "false reject": self.false_rejects}

    def summary(self) -> dict[str, Any]:
        return {
            "mutants": self.killed + self.equivalent + len(self.survivors), "killed": self.killed, "equivalent": self.equivalent,
            "survived": len(self.survivors), "false_rejects": len(self.false_rejects), "valid": self.valid,
            "codes": dict(sorted(self.codes.items())), "by_kind": dict(sorted(self.by_kind.items())),
        }  # fmt: skip


def golden(family: str, mesh: str, axes: str, costs: CostModel) -> Result:
    config = tiny(family)
    plan = make_plan(parse_mesh(mesh), axes)
    request = Request(
        find_family(family), Config(config), plan, BUCKETS, "f32", "f32", costs, variants=("gumbel", "full"),
        collectives=frozenset(EXCHANGE),
    )  # fmt: skip
    return run_passes(request)


class Original:
    """A program, contents for it, and what it makes of them."""

    def __init__(
        self, text: str, weights: Mapping[str, Tensor], ports: Mapping[str, Tensor], holes: Mapping[int, Tensor]
    ) -> None:
        self.p = parse_program(text)
        self.weights, self.ports, self.holes = weights, ports, holes
        self.results, self.caches = self.run(self.p)

    def run(self, p: Program) -> tuple[list[Tensor], dict[str, Tensor]]:
        sim = Simulator(p, runtime_sizes(p))
        caches = _states(sim)
        results, _ = sim.run(self.ports, self.weights, caches)
        kept = {q.name: q for q in p.all_params() if q.kind == "cache"}
        stored = {
            f"{n}:{k}": sim.meaning.assemble(caches[f"{n}:{k}"], t)
            for n, q in kept.items()
            for k, t in enumerate(q.types)
            if f"{n}:{k}" in caches
        }
        return results, stored

    def equals(self, p: Program) -> bool:
        """Whether another program makes the same of the same contents."""
        try:
            results, caches = self.run(p)
        except (TokenSpeedError, RuntimeError, IndexError, ValueError, KeyError):
            return False
        if len(results) != len(self.results) or caches.keys() != self.caches.keys():
            return False
        pairs = [
            *((a, b, self.holes.get(a.shape[0])) for a, b in zip(results, self.results)),
            *((caches[k], self.caches[k], None) for k in caches),
        ]
        return all(_close(a, b, rows) for a, b, rows in pairs)


def _states(sim: Simulator) -> dict[str, list[Tensor]]:
    """What requests left in the state slots of a program: random, and by name alike on every placement."""
    out: dict[str, list[Tensor]] = {}
    for q in sim.p.all_params():
        for k, t in enumerate(q.types if q.kind == "cache" and q.types[0].dims[0].name == "states" else ()):
            name = f"{q.name}:{k}"
            g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            x = torch.randn([sim.sizes[d.name] for d in t.dims], generator=g, dtype=sim.dtypes[t.dtype])
            out[name] = sim.meaning.distribute(x, t)
    return out


def _close(a: Tensor, b: Tensor, rows: Tensor | None) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if rows is not None:
        a, b = a[rows], b[rows]
    if not a.is_floating_point():
        return same_bits(a, b)
    return torch.allclose(a, b, rtol=1e-8, atol=1e-8, equal_nan=True)


def of_model(r: Result, variant: str, bucket: int) -> Original:
    """A golden program on a step that prefills two requests a home group, of which the second goes on from an earlier step;
    the last group is idle where there are several."""
    text = r.texts[variant, bucket]
    p = parse_program(text)
    groups, rng = p.plan.mesh.size(p.plan.home), random.Random(5)
    vocabulary = p.logical["v"]
    busy = range(max(groups - 1, 1))
    work = [
        [(2 * g + i, [rng.randrange(vocabulary) for _ in range(2 - i)], 3 * i) for i in range(2)] if g in busy else []
        for g in range(groups)
    ]
    ports = batch(p, work, {n: 31 + n for n in range(2 * groups)})
    valid = (ports["last"] >= 0).nonzero().flatten()
    return Original(text, random_weights(r.weights), ports, {ports["last"].shape[0]: valid})


def judge(m: Mutant, original: Original, report: Report) -> None:
    """Verifies one mutant; what passes is compared with the original in the simulator."""
    try:
        by_text = {t: parse_program(t) for t in dict.fromkeys(m.texts)}
        for p in by_text.values():
            verify(p)
        if len(m.texts) > 1:
            verify_ranks([by_text[t] for t in m.texts])
    except VerifyError as e:
        report.killed += 1
        report.codes[e.code] += 1
        report.count(m.kind, 0)
        return
    if _same_on_ranks(m.texts, by_text) if len(m.texts) > 1 else original.equals(by_text[m.texts[-1]]):
        report.equivalent += 1
        report.count(m.kind, 1)
    else:
        report.survivors.append(f"{m.kind}: {m.what}\n{m.texts[0]}")
        report.count(m.kind, 2)


def _same_on_ranks(texts: Sequence[str], by_text: Mapping[str, Program]) -> bool:
    """Whether ranks with unlike programs compute what they would with one: they never meet, or each collective still finds
    its whole group (two that lie in groups apart may change places)."""
    programs = [by_text[t] for t in texts]
    return _apart(texts, by_text) or (all(p.bucket == programs[0].bucket for p in programs) and not stuck(programs))


def _apart(texts: Sequence[str], by_text: Mapping[str, Program]) -> bool:
    """Whether ranks with unlike programs share no home group and meet in no collective: each computes what it would alone."""
    first = by_text[texts[0]]
    for r, peer in itertools.combinations(range(len(texts)), 2):
        if texts[r] != texts[peer]:
            together = first.plan.mesh.index(r, first.plan.home) == first.plan.mesh.index(peer, first.plan.home)
            if together or meet(by_text[texts[r]], r, peer) or meet(by_text[texts[peer]], r, peer):
                return False
    return True


@dataclass(frozen=True)
class Task:
    """One part of the work, which depends on nothing but itself: a golden model on a plan at one of four prices, or, where
    `family` is empty, the fuzzer program of seed `number`."""

    family: str
    plan: tuple[str, str]
    number: int  # of the prices, or the seed of the program
    full: bool  # whether the full sampler's program is mutated too
    per_program: int | None
    seed: int

    def run(self) -> Report:
        return self.model() if self.family else self.program()

    def model(self) -> Report:
        """Every program of the model must pass; each mutant of one bucket's must not, or be equal."""
        report, rng = Report(), random.Random(f"{self.seed} {self.family} {self.plan} {self.number}")
        prices = load_costs(("cpu", "h200")[self.number]) if self.number < 2 else random_costs(rng)
        r = golden(self.family, *self.plan, prices)
        for text in r.texts.values():
            _valid(text, f"{self.family} on {' '.join(self.plan)}", report)
        if self.number == 3:
            for variant in ("gumbel", "full") if self.full else ("gumbel",):
                original = of_model(r, variant, BUCKETS[0][0])
                found = list(mutants(original.p, parse_program(r.texts[variant, BUCKETS[1][0]])))
                for m in _sample(found, self.per_program, rng):
                    judge(m, original, report)
        return report

    def program(self) -> Report:
        """The program must pass; of each tenth, every mutant must not, or be equal."""
        p = generate(self.number)
        first = PLANS_OF_PROGRAMS.index(p.plan)
        for plan in (*PLANS_OF_PROGRAMS[first:], *PLANS_OF_PROGRAMS[:first]):  # the first that the program fits
            report = self._mutated(q := replace(p, plan=plan))
            if report.valid or report.false_rejects:
                break
        if report.survivors:  # the smallest program of which a mutant of the same kind survives
            kind = report.survivors[0].partition(":")[0]
            least = shrink(q, lambda q: any(x.startswith(f"{kind}:") for x in self._mutated(q).survivors))
            report.survivors[0] += f"\nthe same kind survives on {least.plan} in\n{least.source()}"
        return report

    def _mutated(self, p: Fuzzed) -> Report:
        """What the program shows on its plan; nothing where it does not fit it."""
        report, s, rng = Report(), self.number, random.Random(self.number)
        try:
            r = compile_source(p.source(), *p.plan, p.rows, random_costs(rng))
        except TokenSpeedError as e:
            if e.code not in OUT_OF_PLAN and not overlap(p):
                report.false_rejects.append(f"fuzzer program {s}: {e}")
            return report
        (text,) = r.texts.values()
        if _valid(text, f"fuzzer program {s}", report) and s % 10 == 0:
            q, n = parse_program(text), groups_of(p)
            holes = {
                rows * n: torch.arange(rows * n).reshape(n, rows)[:, : max(rows - rows // 3, 1)].flatten()
                for rows in p.rows
            }
            original = Original(text, random_weights(r.weights, s), random_ports(q, n, s), holes)
            for m in _sample(list(mutants(q)), self.per_program, rng):
                judge(m, original, report)
        return report


def run(
    programs: int = 200, families: Sequence[str] = FAMILIES, per_program: int | None = None, seed: int = 0,
    plans: Sequence[tuple[str, str]] | None = None, jobs: int = 1, label: str = "", part: tuple[int, int] = (0, 1),
) -> Report:  # fmt: skip
    """Mutates golden programs and `programs` fuzzer programs; `per_program`: a random sample of that many mutants each;
    `plans`: of the golden ones, by default those of their family; `part`: of all this. The same for any number of jobs."""
    tasks = [
        Task(family, plan, number, family == families[0], per_program, seed)
        for family in families
        for plan in plans or (MIXED_PLANS if family in EXPERTS else PLANS)
        for number in (3, 0, 1, 2)
    ]
    tasks += [Task("", ("", ""), s, False, per_program, seed) for s in range(seed, seed + programs)]
    report = Report()
    for one in each(Task.run, part_of(tasks, part), jobs, label):
        for title, rows in one.faults().items():
            for row in rows if label else ():
                print(f"{title}: {row}", file=sys.stderr, flush=True)
        report.add(one)
    return report


def _sample(found: list[Mutant], n: int | None, rng: random.Random) -> list[Mutant]:
    return found if n is None or len(found) <= n else rng.sample(found, n)


def _valid(text: str, what: str, report: Report) -> bool:
    report.valid += 1
    try:
        p = parse_program(text)
        verify(p)
        verify_ranks([p] * p.plan.mesh.ranks)
    except VerifyError as e:
        report.false_rejects.append(f"{what}: {e}")
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tokenspeed.compiler.mutate", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--programs",
        type=int,
        default=2000,
        help="fuzzer programs that must pass (default 2000); each tenth is mutated",
    )
    parser.add_argument("--sample", type=int, default=None, help="mutants tried a program (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    add_jobs(parser)
    add_part(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = run(args.programs, per_program=args.sample, seed=args.seed, jobs=args.jobs, label="mutate", part=args.part)
    print(json.dumps(report.summary()) if args.json else "\n".join(f"{k}: {v}" for k, v in report.summary().items()))
    return 1 if report.survivors or report.false_rejects else 0


if __name__ == "__main__":
    sys.exit(main())
