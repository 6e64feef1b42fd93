"""Decode speed of the embedded model at batch 1, beside transformers in bf16 and the memory read ceiling of the same run.

    python benchmarks/cpu_decode.py [--tokens N] [--rounds R] [--json FILE]

Rows: ours on the file's Q4_1/Q8_0 formats, ours in bf16, transformers in bf16 (the same weights, dequantised). Each is
the median over rounds of N output tokens, the prompt's prefill left out; `read_share` is the bytes of weights and KV a
step must read, times steps a second, over the read bandwidth measured before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

PROMPT = "Write a long story about a lighthouse keeper."


def ours(dtype: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of the engine at batch 1, by the gaps between streamed tokens."""
    from tokenspeed import Engine, SamplingParams

    with Engine(model="smollm2", core="inproc", dtype=dtype, max_num_seqs=8, max_num_batched_tokens=64) as engine:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        speeds = []
        for _ in range(rounds + 1):
            stamps = [time.perf_counter() for _ in engine.generate(PROMPT, params, stream=True)]
            speeds.append((len(stamps) - 1) / (stamps[-1] - stamps[0]))
    return {"tok_s": round(statistics.median(speeds[1:]), 2)}


def transformers_bf16(tokens: int, rounds: int) -> dict[str, Any]:
    """The same with transformers' own generation loop and cache."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tokenspeed.runtime.gguf_metadata import find_embedded_model

    path = find_embedded_model()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    speeds = []
    with torch.inference_mode():
        for _ in range(rounds + 1):
            out = model(ids, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            start = time.perf_counter()
            for _ in range(tokens - 1):
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            speeds.append((tokens - 1) / (time.perf_counter() - start))
    return {"tok_s": round(statistics.median(speeds[1:]), 2)}


def read_ceiling() -> dict[str, Any]:
    """GB/s of a multi-threaded read of memory far beyond the caches."""
    from benchmarks.cpu_kernels import ceiling

    return {"read_gb_s": round(ceiling(5), 2)}


def weight_bytes(dtype: str) -> int:
    """Bytes of weights one decode step reads: every matrix once (the tied table as the head; its lookup is one row)."""
    from tokenspeed.kernels.formats import FORMATS
    from tokenspeed.runtime.checkpoint import open_checkpoint
    from tokenspeed.runtime.gguf_checkpoint import GgufCheckpoint

    checkpoint = open_checkpoint("smollm2")
    assert isinstance(checkpoint, GgufCheckpoint)
    total = 0.0
    for t in checkpoint.tensors.values():
        count = 1
        for n in t.shape:
            count *= n
        fmt = FORMATS[t.format if dtype == "auto" or len(t.shape) == 1 else dtype]
        total += count * fmt.block_bytes / fmt.block
    return int(total)


def child(part: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Runs one part in a process of its own: no part sees another's threads or memory."""
    command = [sys.executable, __file__, "--part", part, "--tokens", str(tokens), "--rounds", str(rounds)]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    if run.returncode:
        sys.exit(f"{part} failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write the figures as JSON (default: screen)"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        parts = {
            "ours_auto": lambda: ours("auto", args.tokens, args.rounds),
            "ours_bfloat16": lambda: ours("bfloat16", args.tokens, args.rounds),
            "transformers": lambda: transformers_bf16(args.tokens, args.rounds), "ceiling": read_ceiling,
        }  # fmt: skip
        print(json.dumps(parts[args.part]()))
        return
    report: dict[str, Any] = {
        "model": "smollm2",
        "batch": 1,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "threads": os.cpu_count(),
    }
    before = child("ceiling", 0, 0)["read_gb_s"]
    for part, dtype in (("ours_auto", "auto"), ("ours_bfloat16", "bfloat16"), ("transformers", "bfloat16")):
        row = child(part, args.tokens, args.rounds)
        row["gb_s"] = round(row["tok_s"] * weight_bytes(dtype) / 1e9, 2)
        report[part] = row
    after = child("ceiling", 0, 0)["read_gb_s"]
    report["read_gb_s"] = [before, after]
    for part in ("ours_auto", "ours_bfloat16", "transformers"):
        report[part]["read_share"] = round(report[part]["gb_s"] / max(before, after), 3)
        report[part]["over_transformers"] = round(report[part]["tok_s"] / report["transformers"]["tok_s"], 2)
    if args.json == "-":
        print(json.dumps(report, indent=1))
        return
    if args.json:
        with open(args.json, "w") as f:
            json.dump(report, f, indent=1)
    print(f"read ceiling {before} GB/s before, {after} after")
    for part in ("ours_auto", "ours_bfloat16", "transformers"):
        r = report[part]
        print(
            f"{part:<14} {r['tok_s']:>7} tok/s, {r['over_transformers']:>5}x transformers, {r['gb_s']} GB/s = "
            f"{100 * r['read_share']:.0f} % of the read ceiling"
        )


if __name__ == "__main__":
    main()
