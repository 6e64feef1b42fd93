"""The CPU backend beside llama.cpp, vLLM and transformers: the embedded model, the same prompts, one machine, in turn.

    python -m benchmarks.cpu_vs_peers [--json FILE] [--only LINE ...] [--rounds N] [--engines NAME ...]
        [--llama-python PYTHON] [--vllm-python PYTHON] [--transformers-python PYTHON]

It installs nothing: docs/performance.md says how to make each environment. A peer without one is left out. Each engine
runs in a process of its own, one after the other (cpu_engines.py); figures are medians of N rounds, and what memory and
arithmetic can give is measured before and after in processes of its own. With --json the figures of the lines measured
replace those that FILE holds, and the rest of it stays, so that lines can be measured one call at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu_engines import CONTEXTS, LINES, Plan

CACHE = Path("~/.cache/tokenspeed/peers").expanduser()
NEEDS = {"llama_cpp": "llama_cpp", "vllm": "vllm", "transformers": "transformers"}  # engine -> module

#: which engines a line is about, and the longest sequence it makes beyond the output
WHO = {
    "decode_1": (("ours", "llama_cpp", "ours_bf16", "vllm", "transformers"), 256),
    "batch_8": (("ours", "ours_bf16", "vllm"), 256),
    "batch_32": (("ours", "ours_bf16", "vllm"), 256),
    "prefill": (("ours", "llama_cpp", "ours_bf16", "vllm", "transformers"), 1280),
    "cached": (("ours", "ours_bf16"), 2304),
    "context": (("ours", "ours_bf16"), 8192),
}  # fmt: skip
UNITS = {"cached": "x of the new tokens alone", "context": f"ms a step at {CONTEXTS[0]} and {CONTEXTS[1]} tokens"}

Report = dict[str, Any]  # line -> engine -> figures


@dataclass(frozen=True)
class Goal:
    """`engine` over `peer` on a line is at least `ratio`."""

    line: str
    engine: str
    peer: str
    ratio: float


GOALS = (
    Goal("decode_1", "ours", "llama_cpp", 1.2), Goal("decode_1", "ours", "vllm", 3.0),
    Goal("decode_1", "ours", "transformers", 5.0), Goal("decode_1", "ours_bf16", "vllm", 1.3),
    Goal("batch_8", "ours", "vllm", 1.5), Goal("batch_32", "ours", "vllm", 1.3), Goal("prefill", "ours", "llama_cpp", 1.5),
)  # fmt: skip
CACHED_GOAL = 1.5  # times the new tokens alone, at most
CONTEXT_GOAL = 1.3  # times what reading the further keys and values takes, at most


@dataclass(frozen=True)
class Model:
    """What the figures are computed from."""

    path: Path
    vocab: int
    kv_bytes: int  # a token of context, in bfloat16
    matrix_values: int  # that a token is multiplied with, the head included
    weight_bytes: dict[str, int]  # that one step reads, by engine

    @staticmethod
    def embedded() -> Model:
        from tokenspeed.kernels.formats import FORMATS
        from tokenspeed.runtime.checkpoint import open_checkpoint
        from tokenspeed.runtime.gguf_checkpoint import GgufCheckpoint

        checkpoint = open_checkpoint("smollm2")
        assert isinstance(checkpoint, GgufCheckpoint)
        config = checkpoint.config
        stored = dense = 0.0
        for (
            t
        ) in checkpoint.tensors.values():  # every matrix once: the tied table is the head, of the lookup it is a row
            if len(t.shape) == 2:
                values, fmt = t.shape[0] * t.shape[1], FORMATS[t.format]
                stored, dense = stored + values * fmt.block_bytes / fmt.block, dense + values
        kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2
        own, bf16 = int(stored), int(2 * dense)
        read = {"ours": own, "llama_cpp": own, "ours_bf16": bf16, "vllm": bf16, "transformers": bf16}
        return Model(checkpoint.path, config["vocab_size"], kv, int(dense), read)


def ceilings(threads: int) -> dict[str, float]:
    """GB/s of reads and of copies (read and written bytes together) far beyond the caches, GFLOP/s of torch's bf16 product;
    medians, as the figures beside them."""
    code = (
        "import json, statistics, torch\n"
        "from benchmarks.cpu_engines import seconds\n"
        "from tokenspeed import _cpu\n"
        "from tokenspeed.kernels.memory import zeros\n"
        f"_cpu.set_threads({threads}), torch.set_num_threads({threads})\n"
        "a, b = zeros(256 << 20, dtype=torch.uint8).fill_(1), zeros(256 << 20, dtype=torch.uint8)\n"
        "x, w = torch.randn(1024, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()\n"
        "giga = lambda amount, work: amount / 1e9 / statistics.median([seconds(work) for _ in range(12)][1:])\n"
        "print(json.dumps({\n"
        "    'read_gb_s': giga(a.numel(), lambda: _cpu.read_sum(a.data_ptr(), a.numel())),\n"
        "    'copy_gb_s': giga(2 * a.numel(), lambda: b.copy_(a)),\n"
        "    'gemm_gflop_s': giga(2 * 1024**3, lambda: x @ w.t())}))\n"
    )
    return json.loads(run([sys.executable, "-c", code], {}).splitlines()[-1])


def run(command: list[str], env: dict[str, str]) -> str:
    """What a process prints; it sees this directory's packages. Ends the program where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"} | env)
    if done.returncode:
        sys.exit(f"{' '.join(command)[:200]} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def measure(engine: str, python: str, plan: Plan) -> dict[str, Any]:
    """The report of cpu_engines.py."""
    env = {"OMP_NUM_THREADS": str(plan.threads), "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    plan = dataclasses.replace(plan, began=time.time())
    script = str(Path(__file__).with_name("cpu_engines.py"))
    return json.loads(run([python, script, engine, json.dumps(dataclasses.asdict(plan))], env).splitlines()[-1])


def median(figures: list[Any]) -> Any:
    """Of numbers, or of each place of lists of them."""
    if isinstance(figures[0], list):
        return [statistics.median(column) for column in zip(*figures)]
    return statistics.median(figures)


def rate(model: Model, line: str, engine: str, value: Any) -> str:
    """What a figure says of the machine: bytes or operations a second."""
    if line == "decode_1":
        return f"{value * model.weight_bytes[engine] / 1e9:.1f} GB/s of weights"
    if line in ("batch_8", "batch_32", "prefill"):
        return f"{2 * value * model.matrix_values / 1e9:.0f} GFLOP/s in products"
    return ""


def verdicts(model: Model, report: Report, read: float) -> list[dict[str, Any]]:
    """Each goal whose figures are there: what, the ratio, the bound, and whether it holds."""
    out: list[dict[str, Any]] = []
    for goal in GOALS:
        row = report.get(goal.line, {})
        if goal.engine in row and goal.peer in row:
            ratio = row[goal.engine]["median"] / row[goal.peer]["median"]
            what = f"{goal.line}: {goal.engine} over {goal.peer}"
            out.append({"what": what, "is": ratio, "at_least": goal.ratio, "holds": ratio >= goal.ratio})
    for engine, figures in report.get("cached", {}).items():
        ratio = figures["median"]
        what = f"cached: {engine}, first token behind a cached prefix over that of the new tokens alone"
        out.append({"what": what, "is": ratio, "at_most": CACHED_GOAL, "holds": ratio <= CACHED_GOAL})
    for engine, figures in report.get("context", {}).items():
        short, long = figures["median"]
        reading = (CONTEXTS[1] - CONTEXTS[0]) * model.kv_bytes / read / 1e6  # ms
        ratio = (long - short) / reading
        what = f"context: {engine}, further time of a long step over reading the further keys and values"
        out.append({"what": what, "is": ratio, "at_most": CONTEXT_GOAL, "holds": ratio <= CONTEXT_GOAL})
    return out


def pythons(args: argparse.Namespace) -> dict[str, str]:
    """The interpreter of each engine that there is one for."""
    given = {"llama_cpp": args.llama_python, "vllm": args.vllm_python, "transformers": args.transformers_python}
    out = {"ours": sys.executable, "ours_bf16": sys.executable}
    for engine, module in NEEDS.items():
        if given[engine] or importlib.util.find_spec(module):
            out[engine] = given[engine] or sys.executable
    return out


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures, into those that FILE holds")
    parser.add_argument("--only", nargs="+", choices=LINES, default=list(LINES), metavar="LINE", help=", ".join(LINES))
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="those alone: ours, ours_bf16 and the peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens a request")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    for peer in ("llama", "vllm", "transformers"):
        variable = f"TOKENSPEED_BENCH_{peer.upper()}_PYTHON"
        parser.add_argument(f"--{peer}-python", metavar="PYTHON", default=os.environ.get(variable),
                            help=f"an interpreter that has it (default: ${variable}, or this one)")  # fmt: skip
    return parser.parse_args()


def main() -> None:
    args = parse()
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    model, found = Model.embedded(), pythons(args)
    weights = CACHE / f"{model.path.stem}-bf16"
    engines = [e for e in WHO["decode_1"][0] if e in found and (not args.engines or e in args.engines)]
    plan = Plan([], args.rounds, args.tokens, args.threads, model.vocab, 0, str(model.path), str(weights), 0.0)
    if not weights.exists() and {"vllm", "transformers"} & set(engines):
        weights.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=weights.parent) as made:
            python = found.get("transformers", sys.executable)
            script = str(Path(__file__).with_name("cpu_engines.py"))
            run([python, script, "weights", json.dumps(dataclasses.asdict(plan) | {"weights": f"{made}/w"})], {})
            os.rename(f"{made}/w", weights)
    file = Path(args.json) if args.json else None
    report: dict[str, Any] = json.loads(file.read_text()) if file and file.exists() else {}
    lines: Report = report.setdefault("lines", {})
    before = ceilings(args.threads)
    for name in args.only:
        row: dict[str, Any] = {}
        for engine in engines:
            if engine in WHO[name][0]:
                one = dataclasses.replace(plan, lines=[name], context=WHO[name][1])
                figures = measure(engine, found[engine], one)
                value = median(figures[name])
                row[engine] = {"median": value, "rounds": figures[name], "start_s": figures["start_s"]}
                shown = " ".join(f"{v:.4g}" for v in (value if isinstance(value, list) else [value]))
                start = f"first token {figures['start_s']:.1f} s after the start of the process"
                print(f"{name:<9} {engine:<13} {shown:>12} {UNITS.get(name, 'tok/s'):<26} "
                      f"{rate(model, name, engine, value):<28} {start}", flush=True)  # fmt: skip
        lines[name] = row
    after = ceilings(args.threads)
    top = {name: max(before[name], after[name]) for name in before}
    for name in args.only:
        lines[name]["ceilings"] = top
    print("ceilings  " + ", ".join(f"{name} {value:.1f}" for name, value in top.items()))
    for name in args.only:
        found_rows = {name: {e: f for e, f in lines[name].items() if e != "ceilings"}}
        lines[name]["goals"] = verdicts(model, found_rows, top["read_gb_s"])
        for v in lines[name]["goals"]:
            bound = f">= {v['at_least']}" if "at_least" in v else f"<= {v['at_most']}"
            print(f"{'holds ' if v['holds'] else 'MISSES'} {v['is']:6.2f} ({bound})  {v['what']}")
    if file:
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
