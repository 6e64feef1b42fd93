"""The table of our engine beside its peer from the files of one or several runs: `python -m benchmarks.gpu.table [DIR ...]`.

A DIR (default: every folder of benchmarks/gpu/results) holds the JSON files of ONE run on one card: ours of engine.py
and the peer's (vLLM 0.23.0, the same scenarios, prompts and made-up weights). Only what both have measured in one run is
compared, and the newest such run of a row counts; what ours measured alone in a later one, on a card of its own, stands in
the last column. A star marks a figure whose code has changed since (commits that touch the package), so that it wants
measuring again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Rows = dict[tuple[str, str], tuple[float, str, bool]]  # (model, scenario) -> figure, unit, whether less is better


def rows(data: dict[str, Any]) -> Iterator[tuple[tuple[str, str], tuple[float, str, bool]]]:
    """The figures of one file, ours or the peer's: both name their fields alike."""
    model = data["model"]
    for kind in ("decode", "long"):
        for r in data.get(kind) or []:
            if isinstance(r, dict) and "tpot_ms" in r:
                yield (model, f"decode {r['batch']} x {r['context']}"), (r["tpot_ms"], "ms", True)
    for r in data.get("prefill") or []:
        yield (model, f"prefill {r['tokens']}"), (r["ttft_ms"], "ms", True)
    append = data.get("append") or {}
    if "ttft_ms" in append:
        yield (model, f"append {append['append']} on {append['prefix']}"), (append["ttft_ms"], "ms", True)
    throughput = data.get("throughput") or {}
    best = throughput.get("streamed", throughput)
    if "output_tps" in best:
        yield (model, "256 requests at once"), (best["output_tps"], "output tok/s", False)
    for r in data.get("agentic") or []:
        yield (model, f"agentic {r['concurrency']}: tokens"), (r["tpot_median_ms"], "ms", True)
        yield (model, f"agentic {r['concurrency']}: later turns"), (r["ttft_later_ms"], "ms to first token", True)
    start = data.get("ready_s", data.get("start_s"))
    if start:
        yield (model, "start"), (start, "s", True)


def run(folder: Path) -> tuple[Rows, Rows, str]:
    """Ours, the peer's, and the commit that ours were measured at."""
    ours: Rows = {}
    peer: Rows = {}
    commit = ""
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        mine = data.get("engine") == "tokenspeed"
        (ours if mine else peer).update(rows(data))
        commit = data["versions"]["commit"] if mine else commit
    return ours, peer, commit


def changed_since(commit: str) -> bool:
    """Whether the package differs from what it was at `commit` (also where git cannot tell)."""
    command = ["git", "diff", "--quiet", commit, "HEAD", "--", "tokenspeed", "scheduler_cpp"]
    return not commit or subprocess.run(command, capture_output=True, check=False).returncode != 0


def table(folders: list[Path]) -> str:
    beside: dict[tuple[str, str], str] = {}
    alone: dict[tuple[str, str], str] = {}
    for folder in folders:
        ours, peer, commit = run(folder)
        star = " *" if changed_since(commit) else ""
        for key, (value, unit, less) in ours.items():
            figure = f"{value:.4g} {unit}{star}"
            if other := peer.get(key):
                ratio = other[0] / value if less else value / other[0]
                beside[key] = f"{figure} | {other[0]:.4g} | {ratio:.2f}"
                alone.pop(key, None)
            else:
                alone[key] = figure
    head = "| model | scenario | ours | vLLM | times as fast | ours alone, later |\n|---|---|---|---|---|---|"
    keys = sorted(dict.fromkeys((*beside, *alone)), key=lambda key: key[0], reverse=True)
    return "\n".join(
        [head, *(f"| {m} | {s} | {beside.get((m, s), '- | - | -')} | {alone.get((m, s), '')} |" for m, s in keys)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders, oldest first")
    args = parser.parse_args()
    print(table(args.runs or sorted(p for p in RESULTS.iterdir() if p.is_dir())))


if __name__ == "__main__":
    main()
