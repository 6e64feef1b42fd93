"""Speed of the CPU kernels against the read bandwidth that this machine gives in the same run.

    python benchmarks/cpu_kernels.py [--json FILE] [--threads N] [--quick]

Each row: best-of-rounds microseconds, GB/s of the bytes that must be read, and the share of the measured read ceiling
(memory-bound rows), or GFLOP/s (compute-bound rows). Weights rotate through a working set larger than the last-level
cache, so a decode row measures memory and not cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from tokenspeed import _cpu
from tokenspeed import kernels as K
from tokenspeed.kernels.memory import zeros
from tokenspeed.kernels.packing import PackedWeight

WORKING_SET = 256 << 20  # bytes: several times a last-level cache


def best(fn: Callable[[int], object], calls: int, rounds: int) -> float:
    """Microseconds a call, the best of `rounds` rounds of `calls`."""
    fn(0)
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        for i in range(calls):
            fn(i)
        times.append((time.perf_counter() - start) / calls)
    return min(times) * 1e6


def ceiling(rounds: int) -> float:
    """GB/s of reading a buffer much larger than the caches with every thread."""
    data = zeros(WORKING_SET, dtype=torch.uint8)
    data.fill_(1)
    us = best(lambda _: _cpu.read_sum(data.data_ptr(), data.numel()), 2, rounds)
    return data.numel() / us / 1e3


def random_weight(fmt: str, n: int, k: int) -> Any:
    if fmt in ("float32", "bfloat16"):
        return torch.randn(n, k, dtype=getattr(torch, fmt))
    block = {"q4_0": (32, 18), "q4_1": (32, 20), "q8_0": (32, 34), "q4_k": (256, 144), "q6_k": (256, 210)}[fmt]
    raw = torch.randint(0, 60, (n, k // block[0] * block[1]), dtype=torch.uint8)  # small bytes: every f16 is finite
    return K.QuantWeight(raw, fmt, (n, k))


def stored_bytes(packed: PackedWeight) -> int:
    return packed.nbytes


def linear_rows(rounds: int, quick: bool, limit: float) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    n, k = 1536, 576
    for fmt, kernel, dtype in (
        ("q4_1", "cpu.linear_int8", torch.bfloat16),
        ("q4_1", "cpu.linear", torch.float32),
        ("q4_0", "cpu.linear_int8", torch.bfloat16),
        ("q8_0", "cpu.linear_int8", torch.bfloat16),
        ("q8_0", "cpu.linear", torch.float32),
        ("q4_k", "cpu.linear_int8", torch.bfloat16),
        ("q6_k", "cpu.linear_int8", torch.bfloat16),
        ("bfloat16", "cpu.linear", torch.bfloat16),
        ("bfloat16", "cpu.linear", torch.float32),
        ("float32", "cpu.linear", torch.float32),
        ("bfloat16", "torch.linear", torch.bfloat16),
        ("float32", "torch.linear", torch.float32),
    ):
        width = k if fmt not in ("q4_k", "q6_k") else 512
        spec = K.get(kernel)
        first = spec.pack(random_weight(fmt, n, width))
        size = first.nbytes
        count = max(2, WORKING_SET // size // (4 if quick else 1))
        packs = [first] + [spec.pack(random_weight(fmt, n, width)) for _ in range(count - 1)]
        for m in (1, 8, 64, 512):
            x = torch.randn(m, width).to(dtype)
            y = torch.empty(m, n, dtype=dtype)
            fn = spec.fn
            calls = count if m <= 8 else max(2, min(count, 64 // (m // 64)))
            us = best(lambda i, fn=fn, x=x, y=y, packs=packs: fn(x, packs[i % len(packs)], None, out=y), calls, rounds)
            gbs = size / us / 1e3
            out.append(
                {"kernel": kernel, "weights": fmt, "x": str(dtype)[6:], "m": m, "us": round(us, 2),
                 "gb_s": round(gbs, 2), "of_read": round(gbs / limit, 3),
                 "gflop_s": round(2 * m * n * width / us / 1e3, 1)}
            )  # fmt: skip
    return out


def attend_rows(rounds: int, quick: bool, limit: float) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    fn = K.get("cpu.attend").fn
    n, kv, d, page = 9, 3, 64, 16
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, context, requests in ((1, 512, 1), (1, 8192, 1), (8, 2048, 8), (512, 512, 1), (512, 4096, 1)):
            pages = requests * context // page
            layers = max(1, (WORKING_SET // (4 if quick else 1)) // (pages * page * kv * d * dtype.itemsize * 2))
            layers = min(layers, 30 if tokens < 64 else 2)
            caches = [
                (zeros(pages * page, kv, d, dtype=dtype).normal_(), zeros(pages * page, kv, d, dtype=dtype).normal_())
                for _ in range(layers)
            ]
            table = torch.randperm(pages, dtype=torch.int32).view(requests, -1)
            if requests == 1:
                row = torch.zeros(tokens, dtype=torch.int32)
                pos = torch.arange(context - tokens, context, dtype=torch.int32)
            else:
                row = torch.arange(tokens, dtype=torch.int32)
                pos = torch.full((tokens,), context - 1, dtype=torch.int32)
            q = torch.randn(tokens, n, d, dtype=dtype)
            y = torch.empty_like(q)

            def call(i: int, q=q, caches=caches, pos=pos, row=row, table=table, y=y) -> None:
                k, v = caches[i % len(caches)]
                fn(q, k, v, pos, row, table, page=page, scale=0.125, out=y)

            us = best(call, len(caches), rounds)
            read = requests * context * kv * d * dtype.itemsize * 2
            flops = 4 * n * d * float((pos + 1).sum())
            out.append(
                {"kernel": "cpu.attend", "cache": str(dtype)[6:], "tokens": tokens, "context": context,
                 "requests": requests, "us": round(us, 2), "gb_s": round(read / us / 1e3, 2),
                 "of_read": round(read / us / 1e3 / limit, 3), "gflop_s": round(flops / us / 1e3, 1)}
            )  # fmt: skip
    return out


def small_rows(rounds: int) -> list[dict[str, Any]]:
    """Calls of a decode step at batch 1: mostly Python and binding."""
    x, y = torch.randn(1, 576), torch.randn(1, 576)
    a, b = torch.empty(1, 576), torch.empty(1, 576)
    w = torch.ones(576)
    gate, up, f = torch.randn(1, 1536), torch.randn(1, 1536), torch.empty(1, 1536)
    q, pos, table = torch.randn(1, 9, 64), torch.zeros(1, dtype=torch.int32), torch.randn(2048, 64)
    kc, vc = torch.zeros(256, 3, 64), torch.zeros(256, 3, 64)
    k = torch.randn(1, 3, 64)
    z = torch.randn(1, 49152)
    value, index = torch.empty(1), torch.empty(1, dtype=torch.int32)
    params = torch.tensor([[32, 1, 2, 3, 0x3F800000] + [0] * 11], dtype=torch.int32)
    cases: dict[str, Callable[[int], object]] = {
        "rms_norm": lambda _: K.get("cpu.rms_norm").fn(x, w, eps=1e-5, out=a),
        "add_rms_norm": lambda _: K.get("cpu.add_rms_norm").fn(x, y, w, eps=1e-5, out=(a, b)),
        "rope": lambda _: K.get("cpu.rope").fn(q, pos, table, out=q),
        "silu_mul": lambda _: K.get("cpu.silu_mul").fn(gate, up, out=f),
        "add": lambda _: K.get("cpu.add").fn(x, y, out=a),
        "append": lambda _: K.get("cpu.append").fn(k, k, pos, kc, vc),
        "argmax 49152": lambda _: K.get("cpu.argmax").fn(z, out=(value, index)),
        "gumbel_argmax 49152": lambda _: K.get("cpu.gumbel_argmax").fn(z, params, out=(value, index)),
    }
    return [{"kernel": name, "us": round(best(fn, 500, rounds), 2)} for name, fn in cases.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--threads", type=int, default=0, help="threads of the pool (0: all processors)")
    parser.add_argument("--quick", action="store_true", help="a smaller working set and fewer rounds")
    args = parser.parse_args()
    _cpu.set_threads(args.threads)
    torch.set_num_threads(_cpu.threads())
    torch.manual_seed(0)
    rounds = 3 if args.quick else 7
    limit = ceiling(rounds)
    report = {"isa": _cpu.isa(), "threads": _cpu.threads(), "read_gb_s": round(limit, 2), "rows": []}
    print(f"{report['isa']}, {report['threads']} threads, read ceiling {limit:.1f} GB/s", flush=True)
    for part in (small_rows(rounds), linear_rows(rounds, args.quick, limit), attend_rows(rounds, args.quick, limit)):
        for row in part:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        report["rows"] += part
    report["read_gb_s_after"] = round(ceiling(rounds), 2)
    print(f"read ceiling after: {report['read_gb_s_after']} GB/s")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
