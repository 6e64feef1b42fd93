"""Programmatic dependent launch, the device side. Invariant: every block of a kernel that was launched with it passes
`await_inputs` before it reads or writes anything that the step changes, so that the kernel's end implies the end of all
before it; what it touches earlier are weights and ports of the step.
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
