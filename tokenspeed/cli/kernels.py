"""`tokenspeed kernels`: the registered kernels, which of them a request gets and why, and whether they compute what they should.

kernels list                         every kernel: family, mode, solution, targets, verified here or not
kernels explain FAMILY MODE          every candidate for a request, the chosen one first, the others with their reasons
kernels verify                       this machine's CPU kernels against the references; kept for `list`
kernels bench MODEL                  what each kernel of the model's steps takes on this device
kernels tune MODEL                   the fastest of the kernels that can run each call, kept where selection finds it
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tokenspeed.runtime import options
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.options import OptionError

RECORD = "verified-kernels.json"  # in the cache: kernel name -> source hash that was verified


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The things to ask for, each with its own flags."""
    asked = parser.add_subparsers(dest="what", required=True, metavar="list|explain|verify|bench|tune")
    every = asked.add_parser("list", help="every registered kernel")
    every.add_argument(
        "--json", action="store_true", help='{"kernels": [{family, mode, solution, name, targets, verified}]}'
    )
    why = asked.add_parser("explain", help="which kernel a request gets, and why the others do not")
    why.add_argument("family", help="for example gemm")
    why.add_argument("mode", help="for example linear")
    why.add_argument(
        "--formats", default="", metavar="ROLE=FORMAT,..", help="for example x=bfloat16,w=q4_1,out=bfloat16"
    )
    why.add_argument("--facts", default="", metavar="NAME=N,..", help="what is known of the bucket: tokens=8,k=4096")
    why.add_argument("--device", default="cpu", help="cpu, cuda (this machine's), or an architecture: cuda:90")
    why.add_argument(
        "--objective", default="default", help="default, latency, throughput, portability, determinism, debug"
    )
    verify = asked.add_parser("verify", help="check this machine's CPU kernels against their references")
    verify.add_argument("--json", action="store_true", help="print what was checked as JSON")
    bench = asked.add_parser("bench", help="time the kernels of a model's steps on this device")
    bench.add_argument("--json", action="store_true", help="[{bucket, request, kernel, calls, us, share}]")
    tune = asked.add_parser("tune", help="find the fastest kernels for a model's steps on this device, and keep them")
    tune.add_argument(
        "--out", default="", help="the table to write; empty: the one that selection reads on this machine"
    )
    for sub in (bench, tune):
        sub.add_argument("--context", type=int, default=1024, help="tokens of context of the decodes that are timed")
        options.add_arguments(sub, EngineConfig)
    for sub in (every, verify):
        sub.add_argument("--cache", default="~/.cache/tokenspeed", help="where it is kept which kernels were verified")


def run(args: argparse.Namespace) -> int:
    """0; 1 where a kernel does not compute what its op means. OptionError for a request that cannot be."""
    from tokenspeed.kernels.tuned import SettingsError

    try:
        return {"explain": _explain, "verify": _verify, "bench": _bench, "tune": _tune, "list": _list}[args.what](args)
    except SettingsError as error:
        raise OptionError(str(error)) from None


def _list(args: argparse.Namespace) -> int:
    from tokenspeed.kernels.registry import default_registry

    known = _record(args.cache)
    rows = [
        {
            "family": k.family, "mode": k.mode, "solution": k.solution, "name": k.name, "targets": _targets(k),
            "verified": known.get(k.name) == k.source_hash,
        }
        for k in sorted(default_registry(), key=lambda k: (k.family, k.mode, -k.priority, k.name))
    ]  # fmt: skip
    if args.json:
        print(json.dumps({"kernels": rows}, indent=1))
        return 0
    line = "{:34} {:10} {:18} {:9} {}"
    print(line.format("FAMILY/MODE", "SOLUTION", "TARGETS", "VERIFIED", "NAME"))
    for r in rows:
        mark = "verified" if r["verified"] else ""
        print(line.format(f"{r['family']}/{r['mode']}", r["solution"], ", ".join(r["targets"]), mark, r["name"]))
    return 0


def _targets(k: Any) -> list[str]:
    c = k.capability
    if c.device != "cuda":
        return [" ".join((c.device, *sorted(c.features - {"cpu_extension"})))]
    return [f"sm_{c.min_arch}" if c.max_arch == c.min_arch else f"sm_{c.min_arch}+"]


def _explain(args: argparse.Namespace) -> int:
    from tokenspeed.kernels.ops import OPS
    from tokenspeed.kernels.registry import default_registry
    from tokenspeed.kernels.select import SelectionError, explain

    by_key = {op.key: op.name for op in OPS.values()}
    op = by_key.get(f"{args.family}/{args.mode}")
    if op is None:
        of_family = sorted(key.partition("/")[2] for key in by_key if key.startswith(f"{args.family}/"))
        known = ", ".join(of_family or sorted({key.partition("/")[0] for key in by_key}))
        raise OptionError(f"no op is {args.family}/{args.mode}; known {'modes' if of_family else 'families'}: {known}")
    formats = _pairs("--formats", args.formats)
    facts: dict[str, Any] = {
        name: _number("--facts", name, value) for name, value in _pairs("--facts", args.facts).items()
    }
    known = {"tokens", "head_dim", "k", "n"} | {name for spec in default_registry().of(op) for name in spec.traits}
    for name, value in facts.items():
        if name not in known:
            raise OptionError(f"--facts has {name!r}; kernels of {op} ask for: {', '.join(sorted(known))}")
        if value < 1:
            raise OptionError(f"--facts {name} is {value}: expected a whole number from 1 on")
    try:
        found = explain(op, signature=formats, traits=facts, device=args.device, objective=args.objective)
    except SelectionError as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, KeyError) as error:
        raise OptionError(str(error)) from None
    for c in found:
        if c.chosen_by:
            print(f"{c.spec.name}  <- chosen by {c.chosen_by} (priority {c.spec.priority})")
        elif c.eligible:
            print(f"{c.spec.name}  could run it (priority {c.spec.priority})")
        else:
            print(f"{c.spec.name}  {'; '.join(c.reasons)}")
    return 0


def _pairs(flag: str, text: str) -> dict[str, str]:
    out: dict[str, str] = {}
    for part in (p.strip() for p in text.split(",") if p.strip()):
        name, equals, value = part.partition("=")
        if not equals or not name or not value:
            raise OptionError(f"{flag} has {part!r}: write NAME=VALUE, several with commas")
        out[name] = value
    return out


def _number(flag: str, name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise OptionError(f"{flag} {name} is {value!r}: expected a whole number") from None


def _verify(args: argparse.Namespace) -> int:
    from tokenspeed.compiler.rulecheck_kernels import check, elsewhere
    from tokenspeed.kernels.registry import default_registry

    path = _writable("--cache", Path(args.cache).expanduser() / RECORD)
    report = check()
    bad, good = report.wrong, sorted(report.kernels - report.wrong)
    registry = default_registry()
    known = _record(args.cache) | {name: registry.get(name).source_hash for name in good}
    path.write_text(json.dumps({k: v for k, v in known.items() if k not in bad}, indent=1, sort_keys=True) + "\n")
    if args.json:
        print(json.dumps(report.summary() | {"verified": good, "wrong": report.unsound}, indent=1))
    else:
        for name in good:
            print(f"verified  {name}")
        for name, why in sorted(elsewhere(report.kernels).items()):
            print(f"elsewhere {name}: {why}")
        for line in report.unsound:
            print(f"WRONG     {line}")
        print(f"{len(good)} kernels compute what their references do, on {report.rules} placements; kept in {path}")
    return 1 if bad else 0


def _bench(args: argparse.Namespace) -> int:
    from tokenspeed.runtime.tuning import as_json, bench

    rows = bench(_engine(args), args.context, _say)
    if args.json:
        print(as_json(rows))
        return 0
    for bucket in sorted({r.bucket for r in rows}):
        mine = [r for r in rows if r.bucket == bucket]
        print(
            f"{bucket} tokens: {sum(r.calls * r.microseconds for r in mine):.0f} us in {sum(r.calls for r in mine)} calls"
        )
        for r in sorted(mine, key=lambda r: -r.calls * r.microseconds):
            print(
                f"  {r.calls * r.microseconds:10.1f} us  {r.calls:4} x {r.microseconds:9.2f}  {r.kernel:28} {r.request}"
            )
    return 0


def _tune(args: argparse.Namespace) -> int:
    from tokenspeed.kernels.target import target_of
    from tokenspeed.kernels.tuned import TunedTable, cached_path
    from tokenspeed.runtime.compiling import device_of
    from tokenspeed.runtime.tuning import tune

    config = _engine(args)
    path = Path(args.out).expanduser() if args.out else cached_path(target_of(device_of(config)).name)
    _writable("--out", path)
    before = TunedTable.load(path) if path.exists() else None
    table = tune(config, args.context, _say)
    if not table.entries:
        print(
            f"no call of these steps has a second kernel on {table.device} that computes as exactly: nothing to choose"
        )
        return 0
    path.write_text((table.over(before) if before else table).dump())
    for e in table.entries:
        low, high = e.traits["tokens"]
        shape = ", ".join(f"{k} {v[0]}" for k, v in sorted(e.traits.items()) if k != "tokens")
        print(f"{e.op:16} {low:5} to {high:5} tokens  {e.kernel:24} {e.microseconds:9.2f} us  {shape}")
    print(f"{len(table.entries)} choices measured on {table.device}; kept in {path}")
    return 0


def _engine(args: argparse.Namespace) -> EngineConfig:
    if args.context < 1:
        raise OptionError(f"--context is {args.context}: at least one token")
    return options.from_args(EngineConfig, args)


def _writable(flag: str, path: Path) -> Path:
    """The path, its folder made; asked before minutes are spent on what is to be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{flag}: {path} cannot be written: {error}") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(f"{flag}: {path} cannot be written: name a file in a folder of yours")
    return path


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _record(cache: str) -> dict[str, str]:
    """What was verified; nothing where there is no record or one that cannot be read."""
    path = Path(cache).expanduser() / RECORD
    try:
        held: object = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in held.items()} if isinstance(held, dict) else {}
