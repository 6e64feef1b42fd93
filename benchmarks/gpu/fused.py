"""Verification of the fused kernels on a device, against the chains they stand for; a part of kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenspeed import kernels as K
from tokenspeed.kernels.fused import FUSED
from tokenspeed.kernels.tolerance import tolerance

NAN = float("nan")
DEVICE = torch.device("cuda")


# hidden, heads' width, half of gate and up, width of queries, keys and values
CHAINS = ((1024, 2048, 3072, 4096), (4096, 4096, 14336, 6144), (256, 256, 512, 384), (64, 64, 64, 16), (960, 576, 1536, 960),
          (2048, 2048, 8192, 2568), (5120, 4096, 13824, 6144))  # fmt: skip

# rows, half of gate and up, K of the product for many rows: tiles that fill rounds, that are shared out, that are few, and edges
MANY_ROWS = ((0, 128, 64), (1, 128, 64), (65, 3072, 1024), (127, 1000, 1000), (128, 14336, 4096), (129, 136, 72), (256, 14336, 4096),
             (257, 1536, 576), (512, 14336, 4096), (832, 14336, 4096), (832, 3072, 1024), (1023, 14336, 4096), (2049, 3072, 1024),
             (3000, 1000, 1000), (8192, 3072, 1024), (640, 14336, 64), (700, 14328, 136))  # fmt: skip


class Runner(Protocol):
    def verify(self, name: str, case: Callable[[], float]) -> None: ...


def verify_fused(run: Runner, dtype: torch.dtype) -> None:
    tag = "bf16" if dtype == torch.bfloat16 else "f32"
    for rows in (0, 1, 7, 257):
        for n, kv, d, r in ((16, 8, 128, 128), (32, 8, 128, 128), (9, 3, 64, 64), (6, 1, 80, 32)):
            for op in ("rope_append", "norm_rope_append"):
                case = f"{op} {tag} [{rows}, {n}+{kv}, {d}] turns {r}"
                run.verify(case, lambda a=(op, rows, n, kv, d, r): _prepare(*a, dtype))  # type: ignore[misc]
    if dtype == torch.bfloat16:
        for rows in (0, 1, 15, 16, 17, 33, 64):
            for f, k in ((3072, 1024), (14336, 4096), (1000, 1000)):
                case = f"linear_silu_mul [{rows}, {k}] x 2 x {f}"
                run.verify(case, lambda a=(rows, f, k): _gated("triton", *a))  # type: ignore[misc]
        for rows, f, k in MANY_ROWS:
            case = f"linear_silu_mul, many rows [{rows}, {k}] x 2 x {f}"
            run.verify(case, lambda a=(rows, f, k): _gated("gluon", *a))  # type: ignore[misc]
        for shape in CHAINS:
            for rows in (0, 1, 2, 3, 7, 8, 9, 16):
                run.verify(f"linear_chain {rows} x {shape}", lambda a=(rows, *shape): _chain(*a))  # type: ignore[misc]


def _with_device(call: Callable[..., Any], *args: Any, **attrs: Any) -> Any:
    with DEVICE:  # references make index tensors on the default device
        return call(*args, **attrs)


def _prepare(op: str, rows: int, n: int, kv: int, d: int, r: int, dtype: torch.dtype) -> float:
    slots = max(16, 2 * rows)
    whole = torch.randn(rows, (n + 2 * kv) * d, device=DEVICE).to(dtype)
    q, k, v = (s.unflatten(1, (-1, d)) for s in whole.split([n * d, kv * d, kv * d], 1))
    pos = torch.randint(-1, 4096, (rows,), device=DEVICE).int()
    slot = torch.randperm(slots, device=DEVICE)[:rows].int()
    slot[::3] = -1
    table = torch.randn(4096, r, device=DEVICE)
    norm = op.startswith("norm")
    weights = tuple(torch.randn(d, device=DEVICE).to(dtype) for _ in range(2)) if norm else ()
    attrs = {"eps": 1e-6} if norm else {}
    got, want = (
        [torch.full((slots, kv, d), NAN, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)] for _ in range(2)
    )
    outs = []
    for _ in range(2):
        out = torch.full((rows, n, d), NAN, dtype=dtype, device=DEVICE)
        K.get(f"triton.{op}").fn(q, k, v, *weights, pos, table, slot, *got, out=out, **attrs)
        outs.append(out)
    if not torch.equal(*outs):
        raise AssertionError("two runs differ")
    expected: Tensor = _with_device(FUSED[op], q, k, v, *weights, pos, table, slot, *want, **attrs)
    worst = tolerance(op if norm else "rope", dtype, terms=d).excess(outs[0], expected) if rows else 0.0
    for a, b in zip(got, want, strict=True):
        if not torch.equal(a.isnan(), b.isnan()):
            raise AssertionError("other slots were written")
        if rows:
            limits = tolerance(op if norm else "rope", torch.bfloat16, terms=d)
            worst = max(worst, limits.excess(a.nan_to_num(0).float(), b.nan_to_num(0).float()))
    return worst


def _gated(solution: str, rows: int, f: int, k: int) -> float:
    x, w = (torch.randn(m, k, device=DEVICE).bfloat16() for m in (rows, 2 * f))
    outs = [torch.full((rows, f), NAN, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    for out in outs:
        K.get(f"{solution}.linear_silu_mul").fn(x, w, out=out)
    if not torch.equal(*outs):
        raise AssertionError("two runs differ")
    if not rows:
        return 0.0
    gate, up = (x.double() @ w.double().t()).chunk(2, 1)
    allowed = 4.5 * 2.0**-8 * (gate.abs() + 1) * (up.abs() + 1)  # four roundings, each of half a unit in the last place
    return float(((outs[0].double() - torch.nn.functional.silu(gate) * up).abs() / allowed).max())


def _chain(t: int, h: int, k: int, f: int, n: int) -> float:
    """Beside float32, in units of what the chain of separate kernels' rounding costs; three runs alike."""

    def rand(*shape: int) -> Tensor:
        return (torch.randn(shape, device=DEVICE) / shape[-1] ** 0.5).to(torch.bfloat16)

    def weight() -> Tensor:
        return (torch.rand(h, device=DEVICE) + 0.5).to(torch.bfloat16)

    args = [rand(t, k), rand(h, k), rand(t, h) * 30, weight(), rand(2 * f, h), rand(h, f), weight(), rand(n, h)]
    exact = _with_device(FUSED["linear_chain"], *(a.float() for a in args), eps=1e-6)
    apart = _with_device(FUSED["linear_chain"], *args, eps=1e-6)
    runs = []
    for _ in range(3):
        out = tuple(torch.full((t, w), NAN, dtype=torch.bfloat16, device=DEVICE) for w in (h, n))
        K.get("gluon.linear_chain").fn(*args, eps=1e-6, out=out)
        runs.append(out)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True)), "two runs differ"
    if not t:
        return 0.0
    worst = 0.0
    for got, want, beside in zip(runs[0], exact, apart, strict=True):
        scale = want.abs().max()
        allowed = 2 * (beside.float() - want).abs().max() / scale + 0.004
        worst = max(worst, float((got.float() - want).abs().max() / scale / allowed))
    return worst
