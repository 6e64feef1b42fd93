"""`tokenspeed explain`: what a compiled model communicates, why, what else it could do, and what that would cost.

explain DIR                 the table of redistributions, a bucket at a time, and totals
explain DIR why %VALUE      the chain of rules behind one value's placement
explain diff A B            what changed between two artifacts
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The artifact, and what of it to show."""
    parser.add_argument(
        "words", nargs="+", metavar="DIR",
        help="an artifact directory (tokenspeed compile -o DIR); DIR why %%VALUE: the rules behind a value; diff A B: two artifacts",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print all programs as JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page with each program's graph and table")
    parser.add_argument("--bucket", type=int, metavar="T", help="only the program of this token bucket")
    parser.add_argument("--variant", choices=("gumbel", "full"), help="only this way of sampling")


def run(args: argparse.Namespace) -> int:
    """Print. An incomplete artifact, or a bucket or value it does not have, is an error that names it."""
    from tokenspeed.compiler.artifact import ArtifactError, load_artifact
    from tokenspeed.compiler.why import diff, why

    match args.words:
        case ["diff", first, second]:
            print(diff(*(load_artifact(d).explain() for d in (first, second))))
            return 0
        case [folder, "why", value]:
            artifact, programs = _programs(folder, args)
            e = next(iter(programs.values()))
            print(f"bucket {e['bucket']['t']}, {e['variant']} (--bucket and --variant choose another):")
            print(why(artifact.program(e["variant"], e["bucket"]["t"]), value, e))
            return 0
        case [folder]:
            artifact, programs = _programs(folder, args)
        case _:
            raise ArtifactError(
                f"cannot read {' '.join(args.words)!r}: write `explain DIR`, `explain DIR why %VALUE` or `explain diff A B`"
            )
    if args.html:
        return _page(artifact, programs, args.html)
    if args.json:
        costs = artifact.explain()["cost_us"]
        out = {"plan": artifact.manifest["plan"], "programs": list(programs.values()), "cost_us": costs}
        print(json.dumps(out | {"certificate": artifact.certificate()}, indent=1))
        return 0
    _table(artifact, programs)
    return 0


def _programs(folder: str, args: argparse.Namespace) -> tuple[Any, dict[str, dict[str, Any]]]:
    from tokenspeed.compiler.artifact import ArtifactError, load_artifact

    artifact = load_artifact(folder)
    info = artifact.explain()
    programs = {
        name: e
        for name, e in info["programs"].items()
        if args.bucket in (None, e["bucket"]["t"]) and args.variant in (None, e["variant"])
    }
    if not programs:
        have = sorted({e["bucket"]["t"] for e in info["programs"].values()})
        asked = f"bucket {args.bucket}" + (f", {args.variant}" if args.variant else "")
        raise ArtifactError(f"{folder} has no program for {asked}; its buckets are {have}")
    return artifact, dict(
        sorted(programs.items(), key=lambda item: (item[1]["variant"] != "gumbel", item[1]["bucket"]["t"]))
    )


def _title(artifact: Any) -> str:
    m = artifact.manifest
    return f"{m['model']}  {m['plan']}  {artifact.weights.arithmetic(m['dtype'])}"


def _table(artifact: Any, programs: dict[str, dict[str, Any]]) -> None:
    from tokenspeed.compiler.explain import explain_text

    m, memory = artifact.manifest, artifact.ports["memory"]
    print(_title(artifact))
    print(f"prices: {m['calibration']}; weights {memory['weight_bytes']} B a rank")
    if m["tactics"]:
        print("pinned: " + ", ".join(f"{k}={v}" for k, v in m["tactics"].items()))
    certificate = artifact.certificate()
    if certificate:
        worst = max(b["max_error"] for b in certificate["bodies"])
        print(
            f"certificate: {len(certificate['bodies'])} bodies equal one rank to {worst:.0e} (bound {certificate['bound']:.0e})"
        )
    for e in programs.values():
        print(explain_text(e))


def _page(artifact: Any, programs: dict[str, dict[str, Any]], file: str) -> int:
    from tokenspeed.compiler.artifact import ArtifactError
    from tokenspeed.compiler.page import page

    text = page(
        _title(artifact), {k: (artifact.program(e["variant"], e["bucket"]["t"]), e) for k, e in programs.items()}
    )
    try:
        Path(file).write_text(text, "utf-8")
    except OSError as fault:
        raise ArtifactError(f"cannot write {file}: {fault}") from None
    print(f"wrote {file}: {len(programs)} programs")
    return 0
