"""`tokenspeed compile MODEL -o DIR`: checks a model on a deployment plan and writes the artifact a server runs."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from tokenspeed.runtime import options
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.progress import bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options (those that decide the program matter here), and where to write."""
    options.add_arguments(parser, EngineConfig)
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="directory of the artifact")
    parser.add_argument(
        "--calibration", default="cpu", metavar="TABLE", help="cost table: cpu, h200 or a JSON file (default: cpu)"
    )
    parser.add_argument(
        "--tactic", action="append", default=[], metavar="NAME=VALUE",
        help="pin a choice of the solver: an edge as explain names it (* for any text) and a repair "
             "(all_reduce, reduce_scatter+all_gather, none ...) or a placement ('t@tp h'); or a .json file of them; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--memory-limit", type=_nbytes, metavar="BYTES",
        help="what a rank may hold of weights and activations (KV pages come on top), e.g. 80GiB: a plan that needs more is not chosen",
    )  # fmt: skip
    parser.add_argument(
        "--no-certificate", action="store_true", help="do not run the programs at reduced extents beside one rank"
    )
    parser.add_argument(
        "--no-kernels", action="store_true",
        help="for a GPU: do not compile its kernels into the artifact; a server then compiles what it needs at its start",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="print every redistribution, identical layers folded")


def _nbytes(text: str) -> int:
    """`80GiB`, `512MiB`, `1000000` -> bytes."""
    m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|B)?", text.strip())
    if not m:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or e.g. 512MiB or 80GiB")
    return int(float(m[1]) * 2 ** {"KiB": 10, "MiB": 20, "GiB": 30}.get(m[2] or "B", 0))


def run(args: argparse.Namespace) -> int:
    """Compile and print the program's summary. A model or plan that cannot be is an error with code, place and fix."""
    from tokenspeed.compiler import api  # noqa: F401 (imports are not part of the time)
    from tokenspeed.runtime.compiling import compile_options, write_artifact

    if not args.output.strip():
        raise StartupError("--output is empty: name the directory of the artifact")
    config = options.from_args(EngineConfig, args)
    started = time.perf_counter()
    compiled = compile_options(
        config, bar(), args.calibration, tactics=args.tactic, memory_limit=args.memory_limit,
        certificate=not args.no_certificate,
    )  # fmt: skip
    try:
        path = write_artifact(config, compiled, args.output)
    except OSError as fault:
        raise StartupError(f"cannot write the artifact to {args.output}: {fault}") from None
    total = time.perf_counter() - started
    print(compiled.summary())
    if args.verbose:
        print(compiled.files["explain.txt"], end="")
    certified = f", certified in {compiled.certified:.2f} s" if compiled.certified >= 0.005 else ""
    passes = f"{compiled.seconds - compiled.certified:.2f} s (all passes){certified}"
    print(f"compiled in {passes}, {total:.2f} s with reading the checkpoint and writing {path}")
    if not args.no_kernels and (device := compiled.manifest["device"]) != "cpu":
        _kernels(path, device, config.page_size)
    return 0


def _kernels(path: Path, device: str, page: int) -> None:
    """Compiles the kernels of an artifact for a GPU into it, for pages of `page` tokens (0: the default)."""
    from tokenspeed.runtime.ahead import compile_kernels
    from tokenspeed.runtime.executor import default_page

    started = time.perf_counter()
    count = compile_kernels(path, page or default_page(device), bar())
    if count:
        print(f"compiled {count} kernels into it in {time.perf_counter() - started:.1f} s")
    else:
        print(
            "compiled no kernels into it: no bucket of it runs on one GPU by kernels alone (`tokenspeed explain`, `kernels.json`)"
        )
