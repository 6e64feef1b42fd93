"""Tries tilings of the decode kernels on one GPU, each in a captured graph behind the kernel it stands behind in a step:
`python -m benchmarks.gpu.sweep --json FILE`. What it finds goes into `tiling_of` of the kernel."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.run import BF16, DEVICE, ints, rand, sets_for, timed
from tokenspeed.kernels import launch as launching
from tokenspeed.kernels.attention import triton as attention
from tokenspeed.kernels.gemm import triton as gemm
from tokenspeed.kernels.launch import processors
from tokenspeed.kernels.norm import triton as norm

SHAPES = {
    "0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gated": (6144, 1024), "down": (1024, 3072)},
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gated": (28672, 4096), "down": (4096, 14336)},
}


def attend(heads: int, batch: int, context: int) -> Callable[[attention.Tiling | None], float]:
    """Microseconds of one decode attention; the pages are others at every call."""
    page, kv, d = 16, 8, 128
    moved = batch * context * kv * d * 4
    need = -(-context // page)
    count = sets_for(moved)
    slots = max(batch * context * 2, 1 << 17)
    k, v = (torch.empty((slots, kv, d), dtype=BF16, device=DEVICE).normal_() for _ in range(2))
    tables = [
        torch.randperm(slots // page, device=DEVICE)[: batch * need].int().view(batch, need).contiguous()
        for _ in range(count)
    ]
    q, out = rand(batch, heads, d), rand(batch, heads, d)
    pos, row = ints([context - 1] * batch), ints(list(range(batch)))

    def run(tiling: attention.Tiling | None) -> float:
        return 1e6 * timed([
            lambda t=t: attention.attend(q, k, v, pos, row, t, page=page, scale=0.088, out=out, tiling=tiling)
            for t in tables
        ])  # fmt: skip

    return run


def linear(model: str, what: str, rows: int) -> Callable[[gemm.Tiling | None], float]:
    """Microseconds of a product behind a norm, less those of the norm."""
    n, k = SHAPES[model][what]
    weights = [rand(n, k) for _ in range(sets_for(2 * n * k))]
    x, y, w = rand(rows, k), rand(rows, k), rand(k)
    out = rand(rows, n // 2 if what == "gated" else n)
    alone = timed([lambda: norm.rms_norm(x, w, eps=1e-6, out=y)] * 20)

    def call(weight: torch.Tensor, tiling: gemm.Tiling | None) -> None:
        norm.rms_norm(x, w, eps=1e-6, out=y)
        if what == "gated":
            gemm.linear_silu_mul(y, weight, out=out, tiling=tiling)
        else:
            gemm.linear(y, weight, None, out=out, tiling=tiling)

    def run(tiling: gemm.Tiling | None) -> float:
        return 1e6 * (timed([lambda w=w: call(w, tiling) for w in weights]) - alone)

    return run


def cublas(model: str, what: str, rows: int) -> float:
    from tokenspeed.kernels.gemm.cublas import linear as product

    n, k = SHAPES[model][what]
    weights = [rand(n, k) for _ in range(sets_for(2 * n * k))]
    x, y, w, out = rand(rows, k), rand(rows, k), rand(k), rand(rows, n)
    alone = timed([lambda: norm.rms_norm(x, w, eps=1e-6, out=y)] * 20)

    def call(weight: torch.Tensor) -> None:
        norm.rms_norm(x, w, eps=1e-6, out=y)
        product(y, weight, None, out=out)

    return 1e6 * (timed([lambda w=w: call(w) for w in weights]) - alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--only", choices=("attend", "linear"), default=None)
    parser.add_argument("--models", default="8B,0.6B")
    args = parser.parse_args()
    import time

    end = time.monotonic() + args.seconds
    rows: list[dict[str, Any]] = []

    def note(name: str, tiling: Any, us: float, moved: float) -> None:
        rows.append({"name": name, "tiling": repr(tiling), "us": round(us, 2), "gbps": round(moved / us / 1e3)})
        if args.json:
            args.json.write_text(json.dumps(rows, indent=0))

    def best(name: str) -> None:
        mine = sorted((r for r in rows if r["name"] == name), key=lambda r: r["us"])
        chosen = next((r["us"] for r in mine if r["tiling"] == "None"), 0)
        tops = " | ".join(f"{r['us']} {r['gbps']} {r['tiling'].replace('Tiling', '')}" for r in mine[:3])
        print(f"{name}: chosen {chosen}; {tops}", flush=True)

    if args.only != "linear":
        for heads, batch, context in ((32, 1, 32768), (32, 16, 32768), (16, 1, 1024), (16, 4, 1024), (32, 64, 1024)):
            if time.monotonic() > end:
                break
            name = f"attend {heads}/8 {batch} x {context}"
            run = attend(heads, batch, context)
            moved = batch * context * 4096
            note(name, None, run(None), moved)
            chosen = attention.tiling_of(batch, True, heads, 8, 128, False, processors(DEVICE))
            half = max(1, chosen.parts // 2)
            for keys, warps, stages in ((64, 4, 3), (32, 2, 4), (64, 4, 4)):
                for parts in sorted({half, chosen.parts, chosen.parts * 4 // 3, chosen.parts * 2}):
                    t = attention.Tiling(16, keys, parts, max(chosen.least, keys), warps, stages)
                    try:
                        note(name, t, run(t), moved)
                    except Exception as error:
                        print(name, t, type(error).__name__, str(error)[:100])
            best(name)
            del run
            torch.cuda.empty_cache()
    if args.only != "attend":
        for model, rows_of, what in itertools.product(args.models.split(","), (1, 64), ("qkv", "o", "gated", "down")):
            if time.monotonic() > end:
                break
            n, k = SHAPES[model][what]
            name = f"linear {model} {what} {rows_of}"
            run_linear = linear(model, what, rows_of)
            moved = 2 * n * k
            note(name, None, run_linear(None), moved)
            note(name, "cublas", cublas(model, what, rows_of), moved)
            chosen_l = gemm.tiling_of(rows_of, n, k, False, processors(DEVICE))
            options = [
                (64, 128, 4, 3),
                (64, 128, 4, 4),
                (64, 256, 4, 2),
                (64, 256, 4, 3),
                (128, 64, 4, 4),
                (128, 128, 8, 3),
                (64, 64, 4, 6),
            ]
            for columns, depth, warps, stages in options:
                if rows_of == 64 and depth == 256:
                    continue
                tiles = -(-n // columns)
                for parts in sorted(
                    {1, max(1, 132 // tiles), max(1, 264 // tiles), max(1, 396 // tiles), chosen_l.parts}
                ):
                    if parts > 16 or parts * depth > k:
                        continue
                    t = gemm.Tiling(columns, depth, parts, warps, stages)
                    try:
                        note(name, t, run_linear(t), moved)
                    except Exception as error:
                        print(name, t, type(error).__name__, str(error)[:100])
            launching.dependent_launch = False
            note(name, "chosen, without dependent launch", run_linear(None), moved)
            launching.dependent_launch = True
            best(name)
            vendor = next(r["us"] for r in rows if r["name"] == name and r["tiling"] == "'cublas'")
            print(f"   without dependent launch {rows[-1]['us']}, cublas {vendor}", flush=True)
            del run_linear
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
