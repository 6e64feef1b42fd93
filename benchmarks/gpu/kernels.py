"""Verifies and times the GPU kernels on one GPU: `python -m benchmarks.gpu.kernels --json FILE [--seconds 460]`.

Verification is verify.py's. Timing: calls in a captured graph, medians of replays, each call on other data until 256 MB have
gone by, so that nothing large is met again in L2; the rate is set against a device copy of the same run. A call's time has
its share of the graph's launch gaps in it, as in a decode step.

Needs torch and triton; run it from the repository's root. A failure is printed and the rest goes on; exit code 1 then.
"""

# ruff: noqa: B023 (a case runs in the turn of the loop that makes it)

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.gpu.fused import verify_fused
from benchmarks.gpu.run import BF16, DEVICE, F32, I32, Run, copy_rate, ints, rand, sets_for, timed
from benchmarks.gpu.verify import (
    params_of,
    verify_attention,
    verify_large,
    verify_linear,
    verify_norms,
    verify_pages,
    verify_rows,
    verify_sampling,
    verify_warp_specialised,
)
from tokenspeed import kernels as K
from tokenspeed.kernels.attention import triton as attention
from tokenspeed.kernels.gemm import triton as gemm
from tokenspeed.kernels.launch import processors, scratch_bytes

MODELS = {
    "0.6B": {"hidden": 1024, "heads": 16, "kv": 8, "d": 128, "ffn": 3072, "vocab": 151936},
    "8B": {"hidden": 4096, "heads": 32, "kv": 8, "d": 128, "ffn": 14336, "vocab": 128256},
}
BATCHES = (1, 16, 64, 256)


def bench_attention(run: Run) -> None:
    page, kv, d = 16, 8, 128
    free = torch.cuda.mem_get_info()[0]
    slots = min(256 * 32768, int(free * 0.7) // (2 * kv * d * 2)) // page * page
    k = torch.empty((slots, kv, d), dtype=BF16, device=DEVICE).normal_()
    v = torch.empty_like(k).normal_()

    def tables(batch: int, context: int, count: int) -> list[Tensor]:
        need = -(-context // page)
        out = []
        for _ in range(count):
            order = torch.randperm(slots // page, device=DEVICE)[: batch * need].int()
            out.append(order.view(batch, need).contiguous())
        return out

    def decode(n: int, batch: int, context: int, tiling: attention.Tiling | None = None) -> tuple[float, float, float]:
        moved = batch * context * kv * d * 2 * 2
        q, out = rand(batch, n, d), rand(batch, n, d)
        pos, row = ints([context - 1] * batch), ints(list(range(batch)))
        calls = [
            lambda t=t: attention.attend(q, k, v, pos, row, t, page=page, scale=0.088, out=out, tiling=tiling)
            for t in tables(batch, context, sets_for(moved))
        ]
        return timed(calls), moved, 4.0 * batch * context * n * d

    def chunk(n: int, tokens: int, prefix: int, tiling: attention.Tiling | None = None) -> tuple[float, float, float]:
        q, out = rand(tokens, n, d), rand(tokens, n, d)
        (table,) = tables(1, prefix + tokens, 1)
        pos, row = ints(torch.arange(prefix, prefix + tokens)), ints([0] * tokens)
        seconds = timed(
            [lambda: attention.attend(q, k, v, pos, row, table, page=page, scale=0.088, out=out, tiling=tiling)]
        )
        pairs = tokens * prefix + tokens * (tokens + 1) / 2
        return seconds, 2 * 2 * ((prefix + tokens) * kv * d + tokens * n * d), 4.0 * pairs * n * d

    for model in MODELS:
        n = MODELS[model]["heads"]
        for context in (1024, 32768):
            for batch in (*BATCHES, 4):
                if batch * context <= slots:
                    run.bench(
                        "bench", f"attend {model} decode {batch} x {context}",
                        lambda a=(n, batch, context): decode(*a), op="attend", model=model, batch=batch, context=context,
                    )  # fmt: skip
        for tokens, prefix in ((1024, 0), (8192, 0), (32768, 0), (800, 50000)):
            run.bench(
                "bench", f"attend {model} chunk {tokens} on {prefix}", lambda a=(n, tokens, prefix): chunk(*a),
                op="attend", model=model, tokens=tokens, prefix=prefix,
            )  # fmt: skip
    run.save()

    def sweep() -> Iterator[tuple[str, Callable[[], tuple[float, float, float]], attention.Tiling]]:
        T = attention.Tiling
        for batch, context in ((1, 32768), (16, 32768), (64, 1024), (16, 1024)):
            chosen = attention.tiling_of(batch, True, 32, kv, d, False, processors(DEVICE))
            for keys, warps, stages in ((32, 4, 4), (64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 8, 3), (64, 2, 3)):
                t = T(16, keys, chosen.parts, max(keys, chosen.least), warps, stages)
                yield f"attend 8B decode {batch} x {context}", lambda a=(32, batch, context, t): decode(*a), t
            for parts in {max(1, chosen.parts // 2), chosen.parts * 2, chosen.parts * 4} - {chosen.parts}:
                t = T(16, chosen.keys, min(64, parts), chosen.least, chosen.warps, chosen.stages)
                yield f"attend 8B decode {batch} x {context}", lambda a=(32, batch, context, t): decode(*a), t
        for tokens, prefix in ((8192, 0), (800, 50000)):
            for rows, keys, warps, stages in ((128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 4, 3)):
                for parts in (1, 2, 4) if prefix else (1,):
                    t = T(rows, keys, parts, 1024, warps, stages)
                    yield f"attend 8B chunk {tokens} on {prefix}", lambda a=(32, tokens, prefix, t): chunk(*a), t

    run.later = [(name, case, repr(tiling)) for name, case, tiling in sweep()]


def bench_linear(run: Run) -> None:
    for model, m in MODELS.items():
        h, n, kv, d = m["hidden"], m["heads"], m["kv"], m["d"]
        shapes = {
            "qkv": ((n + 2 * kv) * d, h), "o": (h, n * d), "gate_up": (2 * m["ffn"], h), "down": (h, m["ffn"]),
            "head": (m["vocab"], h),
        }  # fmt: skip
        for what, (columns, depth) in shapes.items():
            count = sets_for(2 * columns * depth)
            weights = [rand(columns, depth) for _ in range(count)]

            def product(
                t: int, fn: Callable[..., None], weights: list[Tensor] = weights, what: str = what, **more: Any
            ) -> tuple[float, float, float]:
                columns, depth = weights[0].shape
                x, out = rand(t, depth), torch.empty((t, columns), dtype=F32 if what == "head" else BF16, device=DEVICE)
                seconds = timed([lambda w=w: fn(x, w, None, out=out, **more) for w in weights])
                return seconds, 2.0 * columns * depth + 2 * t * depth + out.nbytes, 2.0 * t * columns * depth

            for t in BATCHES:
                for solution in ("cublas", "triton") if t <= 64 else ("cublas",):
                    fn = K.get(f"{solution}.linear").fn
                    run.bench(
                        "bench", f"linear {model} {what} {t} rows {solution}",
                        lambda t=t, fn=fn, product=product: product(t, fn),
                        op="linear", model=model, what=what, batch=t, solution=solution,
                    )  # fmt: skip
                if model == "8B" and what != "head" and t in (1, 16, 64):
                    chosen = gemm.tiling_of(t, columns, depth, False, processors(DEVICE))
                    options = [(64, 128, 4, 5), (64, 256, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3), (32, 256, 4, 3)]
                    tilings = [gemm.Tiling(c, k, chosen.parts, w, s) for c, k, w, s in options if t < 64 or k < 256]
                    tilings += [
                        gemm.Tiling(chosen.columns, chosen.depth, p, chosen.warps, chosen.stages)
                        for p in (1, 2, 4, 8) if p != chosen.parts
                    ]  # fmt: skip
                    for tiling in tilings:
                        if run.left() > 60:
                            try:
                                seconds, moved, _ = product(t, gemm.linear, tiling=tiling)
                                run.data["sweep"].append(
                                    {"name": f"linear 8B {what} {t} rows", "us": round(seconds * 1e6, 2),
                                     "gbps": round(moved / seconds / 1e9, 1), "tiling": repr(tiling)}
                                )  # fmt: skip
                            except Exception as error:
                                run.data["sweep"].append({"name": f"linear 8B {what} {t} rows", "tiling": repr(tiling),
                                                          "error": f"{type(error).__name__}: {error}"[:200]})  # fmt: skip
            del weights
            torch.cuda.empty_cache()
    run.save()


def bench_rows(run: Run) -> None:
    for model, m in MODELS.items():
        h, n, kv, d, v = m["hidden"], m["heads"], m["kv"], m["d"], m["vocab"]
        table, w, wd, embedding = rand(4096, d, dtype=F32), rand(h), rand(d), rand(v, h)
        pool = [rand(1 << 14, kv, d) for _ in range(2)]
        for t in (*BATCHES, 8192):
            x, y, total, normed = (rand(t, h) for _ in range(4))
            gate_up, act = rand(t, 2 * m["ffn"]), rand(t, m["ffn"])
            qkv = rand(t, (n + 2 * kv) * d)
            q = qkv[:, : n * d].unflatten(1, (n, d))
            key = qkv[:, n * d : (n + kv) * d].unflatten(1, (kv, d))
            pos, idx = ints(torch.randint(0, 4096, (t,))), ints(torch.randint(0, v, (t,)))
            slot, q_out = ints(torch.randperm(1 << 14)[:t]), rand(t, n, d)
            gate, up = gate_up[:, : m["ffn"]], gate_up[:, m["ffn"] :]
            fn = {
                op: K.get(f"triton.{op}").fn
                for op in ("lookup", "rms_norm", "add_rms_norm", "rope", "silu_mul", "append")
            }
            cases: list[tuple[str, Callable[[], None], int]] = [
                ("lookup", lambda: fn["lookup"](idx, embedding, offset=0, out=x), 4 * t * h),
                ("rms_norm", lambda: fn["rms_norm"](x, w, eps=1e-6, out=y), 4 * t * h),
                ("add_rms_norm", lambda: fn["add_rms_norm"](x, y, w, eps=1e-6, out=(total, normed)), 8 * t * h),
                ("rms_norm of heads", lambda: fn["rms_norm"](q, wd, eps=1e-6, out=q_out), 4 * t * n * d),
                ("rope", lambda: fn["rope"](q, pos, table, out=q_out), 4 * t * n * d),
                ("silu_mul", lambda: fn["silu_mul"](gate, up, out=act), 6 * t * m["ffn"]),
                ("append", lambda: fn["append"](key, key, slot, *pool), 8 * t * kv * d),
            ]
            for name, call, moved in cases:
                run.bench(
                    "bench", f"{name} {model} {t} rows", lambda call=call, moved=moved: (timed([call] * 20), moved, 0),
                    op=name, model=model, batch=t,
                )  # fmt: skip
        for t in BATCHES:
            sets = [rand(t, v, dtype=F32) for _ in range(sets_for(4 * t * v, 16))]
            params = params_of(t)
            picks = (torch.empty(t, device=DEVICE), torch.empty(t, dtype=I32, device=DEVICE))
            for name, extra in (("argmax", ()), ("gumbel_argmax", (params,))):
                fn_ = K.get(f"triton.{name}").fn
                run.bench(
                    "bench", f"{name} {model} {t} rows",
                    lambda fn_=fn_, extra=extra, sets=sets, t=t, picks=picks: (
                        timed([lambda z=z: fn_(z, *extra, offset=0, out=picks) for z in sets]), 4 * t * v, 0,
                    ),
                    op=name, model=model, batch=t,
                )  # fmt: skip
        torch.cuda.empty_cache()
    run.save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--seconds", type=float, default=460.0, help="stop starting new cases after this long")
    parser.add_argument("--only", choices=("verify", "bench"), help="one half of the work")
    parser.add_argument("--part", action="append", metavar="NAME", help="only parts whose names begin so (repeatable)")
    args = parser.parse_args()
    torch.manual_seed(0)
    run = Run(args.json, args.seconds)
    torch.backends.cuda.matmul.allow_tf32 = False
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    run.data["machine"] = {
        "gpu": torch.cuda.get_device_name(), "processors": processors(DEVICE), "torch": torch.__version__,
        "cuda": torch.version.cuda, "triton": triton.__version__, "python": platform.python_version(), "commit": commit,
    }  # fmt: skip
    print(run.data["machine"], flush=True)
    parts: list[tuple[str, Callable[[Run], None]]] = []
    if args.only != "bench":
        parts += [("fused bf16", lambda r: verify_fused(r, BF16)), ("fused f32", lambda r: verify_fused(r, F32)),
                  ("attention", verify_attention), ("linear", verify_linear), ("norms", verify_norms),
                  ("warp-specialised", verify_warp_specialised), ("pages", verify_pages), ("sampling", verify_sampling),
                  ("rows bf16", lambda r: verify_rows(r, BF16)), ("rows f32", lambda r: verify_rows(r, F32)),
                  ("large", verify_large)]  # fmt: skip
    if args.only != "verify":
        parts += [("copy", copy_rate), ("attention timing", bench_attention), ("rows timing", bench_rows),
                  ("linear timing", bench_linear)]  # fmt: skip
    for name, part in parts:
        if args.part and not name.startswith(tuple(args.part)):
            continue
        began = time.monotonic()
        try:
            part(run)
            torch.cuda.empty_cache()
        except Exception as error:
            run.data["verify"].append({"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:500],
                                       "trace": traceback.format_exc()[-2000:]})  # fmt: skip
            print(f"FAILED part {name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        print(f"-- {name}: {time.monotonic() - began:.0f} s, {run.left():.0f} s left", flush=True)
        run.save()
    for name, case, tiling in run.later:
        if run.left() > 20:
            run.bench("sweep", name, case, tiling=tiling)
    run.data["scratch_bytes"] = scratch_bytes(torch.device("cuda", torch.cuda.current_device())) + scratch_bytes(DEVICE)
    run.save()
    failed = [v["name"] for v in run.data["verify"] if not v["ok"]]
    errors = [b["name"] for b in run.data["bench"] if "error" in b]
    print(f"verified {len(run.data['verify']) - len(failed)} of {len(run.data['verify'])}; failed: {failed[:40]}")
    print(f"timed {len(run.data['bench'])}, errors: {errors[:20]}; skipped: {len(run.data['skipped'])}; "
          f"{run.data['seconds']} s")  # fmt: skip
    return 1 if failed or errors else 0


if __name__ == "__main__":
    sys.exit(main())
