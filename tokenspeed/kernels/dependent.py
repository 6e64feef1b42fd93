"""Programmatic dependent launch, the device side. Invariant: every block of a kernel that was launched with it passes
`await_inputs` before it reads or writes anything that the step changes, so that the kernel's end implies the end of all
before it; what it touches earlier are weights, ports of the step and, as a hint to the cache alone, addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Waits until the kernels before this one have ended, and lets the next one start its own prologue."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, nbytes):
    """Asks for nbytes (i32, multiples of 16) from each of `pointers` (aligned to 16) to be brought into L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [pointers.to(tl.int64), nbytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
