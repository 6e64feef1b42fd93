"""linear on CPU: out[T, N] = x[T, K] @ w[N, K]^T + bias, on packed weights, float32 accumulation.

Invariant: a row's result does not depend on the other rows of the batch. Two kernels: `linear` multiplies dequantised
weights by the activations as they are; `linear_int8` quantises the activations to int8 a block of 32 first, which is
faster and costs about 0.4 % of a block's largest activation in error a value.
"""

from __future__ import annotations

from torch import Tensor

from tokenspeed import _cpu
from tokenspeed.kernels.arguments import CODE, code, fail
from tokenspeed.kernels.formats import DENSE, QUANTISED
from tokenspeed.kernels.packing import PackedWeight, pack
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability, KernelSpec, Priority

_linear = _cpu.linear


def linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None, *, out: Tensor) -> None:
    """x f32|bf16 [T, K] (or [T, ...] flattened), bias [N] or None, out f32|bf16 [T, N]; last dimensions contiguous."""
    _run(x, w, bias, out, False)


def linear_int8(x: Tensor, w: PackedWeight, bias: Tensor | None = None, *, out: Tensor) -> None:
    """`linear` with activations quantised to int8 a block; w must be quantised."""
    if not w.quantised:
        raise ValueError("linear_int8 needs a quantised weight; use the kernel cpu.linear for a dense one")
    _run(x, w, bias, out, True)


def _run(x: Tensor, w: PackedWeight, bias: Tensor | None, out: Tensor, int8: bool) -> None:
    if x.dim() != 2:
        x = x.flatten(1)
    if out.dim() != 2:
        out = out.view(out.shape[0], -1)
    rows, k = x.shape
    ldx, sx = x.stride()
    ldo, so = out.stride()
    n = w.n
    if k != w.k or out.shape != (rows, n) or (sx != 1 and k != 1) or (so != 1 and n != 1):
        raise fail("linear", x=x, w=f"packed [{n}, {w.k}]", out=out)
    try:
        kinds = CODE[x.dtype], CODE[out.dtype]
    except KeyError:
        raise fail("linear", x=x, out=out) from None
    if bias is None:
        _linear(x.data_ptr(), ldx, kinds[0], w.pointer, w.layout, rows, n, k, 0, 0, out.data_ptr(), ldo, kinds[1], int8)
        return
    if bias.shape != (n,) or not bias.is_contiguous():
        raise fail("linear", bias=bias, w=f"packed [{n}, {k}]")
    _linear(
        x.data_ptr(), ldx, kinds[0], w.pointer, w.layout, rows, n, k, bias.data_ptr(), code("linear", bias.dtype),
        out.data_ptr(), ldo, kinds[1], int8,
    )  # fmt: skip


def register(registry: Registry, capability: Capability) -> None:
    flops = lambda facts: 2 * facts["tokens"] * facts["n"] * facts["k"]  # noqa: E731
    registry.register(
        KernelSpec(
            name="cpu.linear",
            op="linear",
            solution="cpu",
            fn=linear,
            pack=pack,
            signatures=({"x": DENSE, "w": DENSE | QUANTISED, "out": DENSE},),
            priority=Priority.PERFORMANT,
            capability=capability,
            native=True,
            tags=frozenset({"determinism", "throughput"}),
            flops=flops,
            summary="weights dequantised in registers, float32 products (bf16 pairs where the processor has them)",
        )
    )
    for name, x, priority in (
        ("cpu.linear_int8", "bfloat16", Priority.SPECIALIZED),
        ("cpu.linear_int8_f32", "float32", Priority.PORTABLE),  # float32 activations ask for float32 results
    ):
        registry.register(
            KernelSpec(
                name=name,
                op="linear",
                solution="cpu_int8",
                fn=linear_int8,
                pack=pack,
                signatures=({"x": frozenset({x}), "w": QUANTISED, "out": DENSE},),
                priority=priority,
                capability=capability,
                native=True,
                tags=frozenset({"determinism", "latency", "throughput"}),
                flops=flops,
                summary="quantised weights times activations quantised to int8 a block of 32",
            )
        )
