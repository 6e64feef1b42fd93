"""`tokenspeed calibrate -o FILE`: measures this machine and writes the table that `compile --calibration FILE` uses."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to write, and how much to measure."""
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the table, JSON")
    parser.add_argument(
        "--ranks", default="2,3,4", metavar="N,N", help="group sizes to measure over gloo (default: 2,3,4)"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=15,
        metavar="N",
        help="timed runs of each call; the lower quartile counts (default: 15)",
    )
    parser.add_argument(
        "--name", default="", metavar="ID", help="the table's id in artifacts (default: the file's name)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and write. A file that cannot be written is known before the minutes of measuring."""
    from tokenspeed.compiler.calibrate import measure_machine, table
    from tokenspeed.compiler.costs import parse_costs
    from tokenspeed.runtime.errors import StartupError

    try:
        sizes = sorted({int(n) for n in args.ranks.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 2 or args.runs < 1:
        raise StartupError(
            f"--ranks {args.ranks} --runs {args.runs}: give group sizes of 2 or more, e.g. 2,4, and at least one run"
        )
    path = Path(args.output)
    try:
        path.touch()
    except OSError as fault:
        raise StartupError(f"cannot write {path}: {fault}") from None
    machine = measure_machine(args.runs)
    collectives: dict[int, dict[str, dict[str, float]]] = {}
    for n in sizes:
        collectives[n] = _group(n, args.runs)
        figures = (f"{op} {f['alpha_us']:.0f} us + {f['gbs']:.2f} GB/s" for op, f in collectives[n].items())
        print(f"{n} ranks: " + ", ".join(figures))
    source = f"tokenspeed calibrate, gloo on this machine, lower quartile of {args.runs}"
    out = table(args.name or path.stem, machine, collectives, source)
    parse_costs(out)
    path.write_text(json.dumps(out, indent=2) + "\n")
    print(
        f"memory {machine['memory_gbs']} GB/s, {machine['tflops']} TFLOP/s, a call {machine['launch_us']} us; wrote {path}"
    )
    return 0


def _group(ranks: int, runs: int) -> dict[str, dict[str, float]]:
    """Starts the ranks of one group; what rank 0 measured."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(ranks) as pool:
        jobs = [(r, ranks, f"{folder}/store", runs) for r in range(ranks)]
        return pool.starmap(_rank, jobs, chunksize=1)[0]


def _rank(rank: int, ranks: int, store: str, runs: int) -> Any:
    from tokenspeed.compiler.calibrate import run_rank

    return run_rank(rank, ranks, store, runs)
