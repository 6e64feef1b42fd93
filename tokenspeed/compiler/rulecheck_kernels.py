"""Rule discovery for kernels: every declared row of an op, computed by the op's kernels instead of its reference.

    python -m tokenspeed.compiler.rulecheck_kernels [--jobs N] [--json]

A kernel of an op (add_rms_norm and silu_mul among them) must make, on each rank, locals whose meaning is what one rank
computes, in float32 and within rounding. A kernel of a chain that the op table does not hold must make what the chain's
references make, one after the other, on every block that a rank may hold of its operands: then the composed rows of the
chain's ops are its rows. Tried are the kernels that run on this machine's CPU and take float32.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.jobs import add_jobs, each
from tokenspeed.ir.mesh import Mesh
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.ops.sampling import PARAM_WORDS, Flag, Word
from tokenspeed.ir.rulecheck import Report as Rules
from tokenspeed.ir.rulecheck import check_products, combinations, declared, homes, row_holds
from tokenspeed.ir.rulecheck_bench import Bench, reference
from tokenspeed.ir.rulecheck_forms import FORMS, Form
from tokenspeed.kernels.fused import FUSED
from tokenspeed.kernels.registry import default_registry
from tokenspeed.kernels.spec import KernelSpec

UNBOUND = {"cross"}  # an alias
TOLERANCE = 2e-4  # float32 against float64, values of order one


@dataclass
class Report:
    kernels: set[str] = field(default_factory=set)
    rules: int = 0
    unsound: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)  # kernels that `unsound` is about
    seconds: float = 0.0

    def blame(self, kernel: str, *rows: str) -> None:
        self.wrong |= {kernel} if rows else set()
        self.unsound += [f"{kernel}{row}" for row in rows]

    def summary(self) -> dict[str, Any]:
        return {
            "kernels": len(self.kernels),
            "rules": self.rules,
            "unsound": len(self.unsound),
            "seconds": round(self.seconds, 1),
        }


class KernelRun:
    """One rank's call of a kernel, with the outputs a reference would make."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.takes = set(inspect.signature(spec.fn).parameters)

    def __call__(self, form: Form, local: list[Tensor], attrs: Mapping[str, Any], dtype: torch.dtype) -> Any:
        if form.op == "linear":
            return self._linear(form, local)
        if set(attrs) - self.takes:  # a part of a home block's slots: no kernel is bound to it
            return reference(form, local, attrs, dtype)
        like = reference(form, [x.clone() for x in local], attrs, dtype)
        if like is None:
            self.spec.fn(*(x if i in form.stored else x.contiguous() for i, x in enumerate(local)), **attrs)
            return None
        whole: list[Tensor] = list(like) if isinstance(like, tuple) else [like]
        out: tuple[Tensor, ...] = tuple(torch.full_like(x.contiguous(), _poison(x)) for x in whole)
        args = [x if i in form.stored else x.contiguous() for i, x in enumerate(local)]
        if form.op == "experts":
            biases = [torch.cat(args[6:8], 1), args[8]] if len(args) > 6 else []
            args[3:] = [self.spec.pack(torch.cat(args[3:5], 1)), self.spec.pack(args[5]), *biases]
        if form.op == "lookup":
            args[1] = self.spec.pack(args[1])
        self.spec.fn(*args, out=out if isinstance(like, tuple) else out[0], **attrs)
        return out if isinstance(like, tuple) else out[0]

    def _linear(self, form: Form, local: list[Tensor]) -> Any:
        k, n_in = form.attrs["segments"], len(form.attrs["in_dims"])
        ws, biases = local[1 : 1 + k], local[1 + k :]
        flat = [w.flatten(w.dim() - n_in).flatten(0, -2) for w in ws]
        x = local[0].flatten(1).contiguous()
        out = torch.full((x.shape[0], sum(w.shape[0] for w in flat)), float("nan"))
        bias = torch.cat([b.flatten() for b in biases]) if biases else None
        self.spec.fn(x, self.spec.pack(torch.cat(flat).contiguous()), bias, out=out)
        parts = out.split([w.shape[0] for w in flat], 1)
        ys = [p.reshape(x.shape[0], *w.shape[: w.dim() - n_in]) for p, w in zip(parts, ws)]
        return tuple(ys) if k > 1 else ys[0]


def _poison(x: Tensor) -> float | int:
    return float("nan") if x.is_floating_point() else -7


def candidates(op: str) -> list[KernelSpec]:
    """The kernels of an op that run here on float32, or on what is counted."""
    taken = ("x", "w", "cache", "out")
    return [
        k
        for k in default_registry().of(op)
        if k.capability.device in ("cpu", "any")
        and k.solution != "reference"
        and any(
            all({"float32", "int32"} & formats for role, formats in s.items() if role in taken) for s in k.signatures
        )
    ]


def check_form(form: Form, spec: KernelSpec, report: Report) -> None:
    """A kernel of the form's op on every declared row of one axis of 2 and 3 ranks, and of their products on 2x2."""
    report.kernels.add(spec.name)
    run = KernelRun(spec)
    for home, n in itertools.product(homes(form), (2, 3)):
        axis = "dp" if home else "x"
        b = Bench(form, Mesh(((axis, n),)), (axis,) if home else (), n, torch.float32)
        for combo in combinations(form):
            ins = b.types([{axis: s} for s in combo])
            if (outs := declared(b, ins)) is not None:
                report.rules += 1
                if not row_holds(b, ins, outs, run, TOLERANCE):
                    report.blame(spec.name, f", {form.name}: {', '.join(combo)} on {n} ranks")
    rules = Rules()
    check_products(form, (2, 2), homes(form)[0], rules, run, torch.float32, TOLERANCE)
    report.rules += rules.rules
    report.blame(spec.name, *(f", {row}" for row in rules.unsound))


def _checked(number: int) -> Report:
    """The kernels of form `number`; past the forms, those of the chains."""
    report = Report()
    if number < len(FORMS):
        form = FORMS[number]
        if form.op in {op.name for op in OPS.values()} - UNBOUND:
            for spec in candidates(form.op):
                check_form(form, spec, report)
        return report
    for op in FUSED:
        for spec in candidates(op):
            if spec.solution != "reference":
                check_chain(spec, report)
    return report


def check(jobs: int = 1) -> Report:
    """Every kernel. The same for any number of jobs."""
    start = time.perf_counter()
    report = Report()
    for one in each(_checked, range(len(FORMS) + 1), jobs):
        report.kernels |= one.kernels
        report.rules += one.rules
        report.unsound += one.unsound
        report.wrong |= one.wrong
    report.seconds = time.perf_counter() - start
    return report


def elsewhere(checked: set[str]) -> dict[str, str]:
    """This machine's CPU kernels that are not among the `checked`, and which tests see to them."""
    out: dict[str, str] = {}
    for spec in default_registry():
        if spec.name in checked or spec.solution == "reference" or spec.capability.device != "cpu":
            continue
        if spec.family == "comm":
            out[spec.name] = "works between processes: tests/kernels/test_comm.py"
        elif spec.op == "linear":
            out[spec.name] = "takes weights in blocks only: tests/kernels/test_linear.py"
        else:
            out[spec.name] = "stands for no op of a program alone: tests/kernels/test_sampling.py"
    return out


def check_chain(spec: KernelSpec, report: Report) -> None:
    """A kernel of a chain beside the chain, on the blocks of 1, 2 and 3 ranks. LookupError where the chain has no operands
    here yet, so that none goes unchecked."""
    if spec.op not in CHAINS:
        raise LookupError(f"kernel '{spec.name}': give the chain '{spec.op}' operands in CHAINS")
    report.kernels.add(spec.name)
    for n in (1, 2, 3):
        for args, attrs in CHAINS[spec.op](n):
            report.rules += 1
            want = FUSED[spec.op](*args, **attrs)
            whole = want if isinstance(want, tuple) else (want,)
            out = tuple(torch.full_like(x.contiguous(), _poison(x)) for x in whole)
            spec.fn(*args, out=out if isinstance(want, tuple) else out[0], **attrs)
            for got, right in zip(out, whole, strict=True):
                near = torch.allclose(got, right, rtol=TOLERANCE, atol=TOLERANCE)
                if not (near if right.is_floating_point() else torch.equal(got, right)):
                    report.blame(spec.name, f": not the chain on a block of {n} ranks {attrs}")


def _gumbel_blocks(n: int) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """Blocks of a vocabulary of 12 n ids over n ranks, of rows that sample and rows that are greedy."""
    g = torch.Generator().manual_seed(n)
    z = torch.randn(5, 12 * n, generator=g)
    params = torch.randint(0, 1000, (5, PARAM_WORDS), generator=g, dtype=torch.int32)
    params[:, Word.FLAGS] = torch.tensor([int(Flag.VALID)] * 4 + [int(Flag.VALID | Flag.GREEDY)], dtype=torch.int32)
    params[:, Word.TEMPERATURE] = torch.full((5,), 0.7).view(torch.int32)
    for rank in range(n):
        yield (z[:, 12 * rank : 12 * (rank + 1)].contiguous(), params), {"offset": 12 * rank}


#: blocks of a chain's operands, and its attributes, on each of n ranks
CHAINS: dict[str, Callable[[int], Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]]] = {
    "gumbel_argmax": _gumbel_blocks
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tokenspeed.compiler.rulecheck_kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object: kernels, rules, unsound, seconds")
    add_jobs(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = check(args.jobs)
    for row in report.unsound:
        print(f"unsound: {row}", file=sys.stderr)
    print(json.dumps(report.summary()) if args.json else ", ".join(f"{k} {v}" for k, v in report.summary().items()))
    return 1 if report.unsound else 0


if __name__ == "__main__":
    sys.exit(main())
