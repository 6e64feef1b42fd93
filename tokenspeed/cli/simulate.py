"""`tokenspeed simulate`: agents' sessions served by the real scheduler on a virtual clock, for one policy or several."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, TypeVar

from tokenspeed.runtime.errors import StartupError

T = TypeVar("T")
MAY_BE_ZERO = (
    "seed", "host_gib", "storage_gib", "prefill_chunk", "decode_stall_tokens", "human_scale", "step_ms", "storage_ms",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the traffic, the machine and the policy that others vary, each a field with its default."""
    from tokenspeed.runtime.simulate.costs import Machine
    from tokenspeed.runtime.simulate.virtual import Policy
    from tokenspeed.runtime.simulate.workload import Traffic

    parser.add_argument(
        "--vary", action="append", default=[], metavar="NAME=VALUE,...",
        help="a further policy: the base with these values, as in host_gib=0,storage_gib=0; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", default="", metavar="TABLE", help="memory_gbs and tflops from a calibration table"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures; -: print them instead of the table")
    parser.add_argument("--plot", metavar="FILE", help="write an SVG")
    for cls in (Policy, Traffic, Machine):
        group = parser.add_argument_group((cls.__doc__ or "").partition(".")[0])
        for field in dataclasses.fields(cls):
            kind = type(field.default)
            flag = "--" + field.name.replace("_", "-")
            group.add_argument(
                flag, type=kind, default=field.default, metavar=kind.__name__.upper(), help="(default: %(default)s)"
            )


def run(args: argparse.Namespace) -> int:
    """Simulate and report. StartupError for values that cannot work."""
    from tokenspeed.compiler.costs import load_costs
    from tokenspeed.runtime.simulate.costs import Machine
    from tokenspeed.runtime.simulate.plot import svg
    from tokenspeed.runtime.simulate.report import as_json, as_table, name_of
    from tokenspeed.runtime.simulate.virtual import Policy, Simulation
    from tokenspeed.runtime.simulate.workload import Traffic

    traffic, machine, base = _from(Traffic, args), _from(Machine, args), _from(Policy, args)
    if args.calibration:
        table = load_costs(args.calibration)
        machine = dataclasses.replace(machine, memory_gbs=table.memory_gbs, tflops=table.tflops)
    policies = [base, *(_varied(base, text) for text in args.vary)]
    outcomes = [(name_of(policy, base), Simulation(traffic, machine, policy).run()) for policy in policies]
    rows = as_json(outcomes)
    text = json.dumps(rows, indent=1)
    if args.plot:
        _write(args.plot, svg(outcomes))
    if args.json and args.json != "-":
        _write(args.json, text + "\n")
    print(text if args.json == "-" else as_table(rows))
    return 0


def _from(cls: type[T], args: argparse.Namespace) -> T:
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    for name, value in values.items():
        _check(f"--{name.replace('_', '-')}", name, value)
    return cls(**values)


def _check(where: str, name: str, value: float) -> None:
    zero = name in MAY_BE_ZERO
    if not math.isfinite(value) or value < 0 or (not zero and value == 0):
        raise StartupError(f"{where} is {value}: give {'0 or more' if zero else 'more than 0'}")


def _varied(base: Any, text: str) -> Any:
    """The base with NAME=VALUE pairs."""
    changes: dict[str, Any] = {}
    known = {field.name: type(field.default) for field in dataclasses.fields(base)}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            raise StartupError(f"--vary {text}: {name!r} is none of {', '.join(known)}")
        if name in changes:
            raise StartupError(f"--vary {text}: {name} is there twice")
        try:
            changes[name] = known[name](value)
        except ValueError:
            raise StartupError(f"--vary {text}: {name} takes a number, not {value!r}") from None
        _check(f"--vary {text}: {name}", name, changes[name])
    return dataclasses.replace(base, **changes)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as fault:
        raise StartupError(f"cannot write {path}: {fault.strerror}") from None
