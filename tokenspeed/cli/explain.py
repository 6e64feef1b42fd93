"""`tokenspeed explain DIR`: every collective of a compiled model, with its edge, bytes a token and reason."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The artifact, and what of it to show."""
    parser.add_argument("artifact", metavar="DIR", help="an artifact directory (tokenspeed compile -o DIR)")
    parser.add_argument("--json", action="store_true", help="print all programs as JSON")
    parser.add_argument("--bucket", type=int, metavar="T", help="only the program of this token bucket")
    parser.add_argument("--variant", choices=("gumbel", "full"), help="only this way of sampling")


def run(args: argparse.Namespace) -> int:
    """Print. An incomplete artifact, or a bucket it does not have, is an error that names it."""
    from tokenspeed.compiler.artifact import ArtifactError, load_artifact
    from tokenspeed.compiler.explain import explain_text

    artifact = load_artifact(args.artifact)
    info = artifact.explain()
    programs = [
        e
        for e in info["programs"].values()
        if args.bucket in (None, e["bucket"]["t"]) and args.variant in (None, e["variant"])
    ]
    if not programs:
        have = sorted({e["bucket"]["t"] for e in info["programs"].values()})
        raise ArtifactError(
            f"{args.artifact} has no program for bucket {args.bucket} {args.variant or ''}; its buckets are {have}"
        )
    if args.json:
        print(
            json.dumps({"plan": artifact.manifest["plan"], "programs": programs, "cost_us": info["cost_us"]}, indent=1)
        )
        return 0
    m = artifact.manifest
    print(f"{m['model']}  {m['plan']}  {artifact.weights.arithmetic(m['dtype'])}")
    for e in programs:
        print(explain_text(e))
    return 0
