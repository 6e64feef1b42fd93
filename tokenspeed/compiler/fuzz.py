"""The program fuzzer: what the compiler makes of a random program on a random plan means what the program means on one rank.

    python -m tokenspeed.compiler.fuzz [--programs N] [--seed S] [--jobs N] [--part I/N] [--json]

Each program is compiled under random prices, so that unusual legal plans are chosen, printed, read back, verified and run
in the n-rank simulator; every result must equal the one-rank program's. Then one annotation is changed: the compiler must
reject it, or compile a program that still means the same. A failure is shrunk and printed as source.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from tokenspeed.compiler.costs import CostModel, load_costs
from tokenspeed.compiler.exchange import CALLS as EXCHANGE
from tokenspeed.compiler.fuzz_programs import AXES, PLANS, Fuzzed, altered, annotation_spans, generate, smaller
from tokenspeed.compiler.passes.pipeline import Request, Result, run_passes
from tokenspeed.compiler.trial import random_ports, random_weights, runtime_sizes
from tokenspeed.ir.errors import TokenSpeedError
from tokenspeed.ir.jobs import add_jobs, add_part, each, part_of
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.ir.simulate import Simulator
from tokenspeed.ir.text import parse_program
from tokenspeed.ir.verifier import verify
from tokenspeed.models.nn.config import Config

#: a plan that does not concern this program: axes that meet in one signature, or that nobody uses
OUT_OF_PLAN = ("P031", "P034")


@dataclass
class Outcome:
    """Counts, and the shrunk source of every failure."""

    programs: int = 0
    ops: int = 0
    skipped: int = 0  # no plan fits the program, or its values tell nothing
    rejected: int = 0  # altered programs
    equivalent: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def summary(self) -> dict[str, int]:
        return {"programs": self.programs, "ops": self.ops, "skipped": self.skipped, "altered_rejected": self.rejected,
                "altered_equivalent": self.equivalent, "failures": len(self.failures)}  # fmt: skip


def random_costs(rng: random.Random) -> CostModel:
    """Prices that make unusual programs cheap."""
    return replace(
        load_costs("cpu"), alpha_us={n: rng.uniform(0, 1) for n in (2, 4, 8)}, beta_gbs=10 ** rng.uniform(-4, 2),
        memory_gbs=10 ** rng.uniform(-4, 2), launch_us=rng.uniform(0, 1),
        measured={"all_to_all": {8: (rng.uniform(0, 1), 10 ** rng.uniform(-4, 2))}},
    )  # fmt: skip


def compile_source(source: str, mesh: str, axes: str, rows: tuple[int, int], costs: CostModel) -> Result:
    """Compiles the class `Root` of a program's source. Raises TokenSpeedError."""
    scope: dict[str, Any] = {"__name__": "fuzzed"}
    exec(compile(source, "<fuzzed>", "exec"), scope)
    plan = make_plan(parse_mesh(mesh), axes)
    request = Request(
        scope["Root"], Config({}), plan, [rows], "f32", "f32", costs, variants=("gumbel",), collectives=frozenset(EXCHANGE),
    )  # fmt: skip
    return run_passes(request)


def meaning(r: Result, groups: int, seed: int) -> list[Tensor]:
    """Results of the one program of `r`, read back from its text, on the contents of `seed`."""
    (text,) = r.texts.values()
    p = parse_program(text)
    verify(p)
    weights = random_weights(r.weights, seed)
    return Simulator(p, runtime_sizes(p)).run(random_ports(p, groups, seed), weights, {})[0]


def valid(x: Tensor, groups: int) -> Tensor:
    """The rows that are no holes: those are the last third of each home block."""
    rows = x.shape[0] // groups
    return x.unflatten(0, (groups, rows))[:, : max(rows - rows // 3, 1)]


def telling(x: Tensor) -> bool:
    """Whether values can be compared: beyond float64, what is infinite and what is none depends on the order of a sum, and so
    does which of several logits is the largest where a row cancels to nothing."""
    return bool(x.isfinite().all()) and not (x.is_floating_point() and bool((x.flatten(2).abs().amax(-1) < 1e-9).any()))


def equal(got: Sequence[Tensor], want: Sequence[Tensor], groups: int) -> bool:
    """Equal on the valid rows."""
    for a, b in zip(got, want):
        if a.shape != b.shape:
            return False
        a, b = valid(a, groups), valid(b, groups)
        if not torch.allclose(a.double(), b.double(), rtol=1e-8, atol=1e-8):
            return False
    return len(got) == len(want)


def groups_of(p: Fuzzed) -> int:
    plan = make_plan(parse_mesh(p.plan[0]), p.plan[1])
    return plan.mesh.size(plan.home)


def one_rank(p: Fuzzed) -> list[Tensor]:
    n = groups_of(p)
    return meaning(compile_source(p.source(), "", "", (p.rows[0] * n, p.rows[1] * n), load_costs("cpu")), n, p.seed)


def overlap(p: Fuzzed) -> bool:
    """Whether logical axes share mesh axes, so that a leaf that uses two of them is not for this plan."""
    plan = make_plan(parse_mesh(p.plan[0]), p.plan[1])
    used = [a for name in AXES for a in plan.axes(name)]
    return len(set(used)) < len(used)


def fault(p: Fuzzed) -> str:
    """What is wrong with the compiler's work on a valid program; "" if nothing, "skip" where the plan does not fit it or its
    values tell nothing."""
    try:
        got = compile_source(p.source(), *p.plan, p.rows, random_costs(random.Random(p.seed)))
    except TokenSpeedError as e:
        return "skip" if e.code in OUT_OF_PLAN or (e.code != "P030" and overlap(p)) else f"rejected: {e}"
    except Exception as e:  # any other exception is a fault of the compiler
        return f"{type(e).__name__}: {e}"
    try:
        want, groups = one_rank(p), groups_of(p)
        if not all(telling(valid(x, groups)) for x in want):
            return "skip"
        same = equal(meaning(got, groups, p.seed), want, groups)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "" if same else "another meaning"


def fitted(p: Fuzzed) -> tuple[Fuzzed, str]:
    """The program on the first plan from its own on that it fits, and what is wrong there; "skip" where there is none."""
    first = PLANS.index(p.plan)
    for plan in (*PLANS[first:], *PLANS[:first]):
        q = replace(p, plan=plan)
        if (what := fault(q)) != "skip":
            return q, what
    return p, "skip"


def altered_fault(p: Fuzzed, rng: random.Random) -> tuple[str, str]:
    """One annotation changed: ("rejected" | "equivalent" | what is wrong, the changed source)."""
    source = p.source()
    start, stop = rng.choice(annotation_spans(source))
    changed = source[:start] + altered(source[start:stop], rng) + source[stop:]
    try:
        got = compile_source(changed, *p.plan, p.rows, random_costs(rng))
    except TokenSpeedError:
        return "rejected", changed
    except Exception as e:
        return f"{type(e).__name__}: {e}", changed
    try:
        same = equal(meaning(got, groups_of(p), p.seed), one_rank(p), groups_of(p))
    except Exception as e:
        return f"{type(e).__name__}: {e}", changed
    return ("equivalent" if same else "another meaning"), changed


def shrink(p: Fuzzed, fails: Callable[[Fuzzed], bool]) -> Fuzzed:
    """The smallest program found that still fails, one step at a time."""
    while (less := next((q for q in smaller(p) if fails(q)), None)) is not None:
        p = less
    return p


def tried(s: int) -> Outcome:
    """What the program of seed `s` shows, as it is and with one annotation changed."""
    p = generate(s)
    out = Outcome(programs=1, ops=p.ops())
    p, what = fitted(p)
    if what == "skip":
        out.skipped = 1
    elif what:
        least = shrink(p, lambda q: fault(q)[:8] == what[:8])
        out.failures = [f"seed {s}, plan {p.plan}, rows {p.rows}: {fault(least)}\n{least.source()}"]
    else:
        verdict, changed = altered_fault(p, random.Random(s))
        out.rejected, out.equivalent = int(verdict == "rejected"), int(verdict == "equivalent")
        if verdict not in ("rejected", "equivalent"):
            at = f"seed {s}, plan {p.plan}, rows {p.rows}"
            out.failures = [f"{at}, one annotation changed: {verdict}\n{changed}"]
    return out


def fuzz(
    programs: int, seed: int = 0, stop_after: int = 5, jobs: int = 1, label: str = "", part: tuple[int, int] = (0, 1)
) -> Outcome:
    """Runs `programs` programs from `seed` on, or a part of them; gives up after `stop_after` failures. The same for any number
    of jobs."""
    out = Outcome()
    for one in each(tried, part_of(range(seed, seed + programs), part), jobs, label, chunk=8):
        out.add(one)
        for failure in one.failures if label else ():
            print(failure, file=sys.stderr, flush=True)
        if len(out.failures) >= stop_after:
            break
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tokenspeed.compiler.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=300, help="how many programs (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object of counts")
    add_jobs(parser)
    add_part(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    out = fuzz(args.programs, args.seed, jobs=args.jobs, label="fuzz", part=args.part)
    print(json.dumps(out.summary()) if args.json else ", ".join(f"{k} {v}" for k, v in out.summary().items()))
    return 1 if out.failures else 0


if __name__ == "__main__":
    sys.exit(main())
