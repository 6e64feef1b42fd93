"""Argument checks shared by the CPU wrappers: kept to a few attribute reads a call, since a decode step makes hundreds.

The fast path of a wrapper looks dtypes up in `CODE` and compares strides; only when something is off does it come here
to say what and why.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODE: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}  # csrc/types.h DType


def constant(factor: float, dtype: torch.dtype) -> float:
    """A factor of `scale` as a number of `dtype`."""
    return factor if dtype == torch.float32 else float(torch.tensor(factor, dtype=dtype))


def fail(op: str, **tensors: object) -> ValueError:
    """The error of a call whose arguments do not fit the op's contract: each tensor's dtype, shape and strides."""
    parts: list[str] = []
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            parts.append(
                f"{name} {str(value.dtype)[6:]} {tuple(value.shape)} strides {value.stride()} on {value.device}"
            )
        else:
            parts.append(f"{name} {value}")
    return ValueError(
        f"{op}: these arguments do not fit together ({'; '.join(parts)}); see tokenspeed/kernels/README.md"
    )


def code(op: str, dtype: torch.dtype) -> int:
    """The number of an activation dtype; ValueError for one the CPU kernels do not compute in."""
    try:
        return CODE[dtype]
    except KeyError:
        raise ValueError(f"{op}: dtype {dtype} is not supported on CPU; use float32 or bfloat16") from None
