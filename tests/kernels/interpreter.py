"""Triton's interpreter, set up on import: to be imported before any module that imports Triton.

Two repairs of Triton 3.6: its scalars are arrays of one element, which numpy 2.4 no longer takes for an index; and it
cuts float32 to bfloat16 where the hardware rounds to the nearest, ties to even.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_convert = interpreter._convert_float


def _patched(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))


def _rounded(value: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert(value, source, target, mode)
    bits = value.view(np.uint32)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FC0), near)


interpreter._patch_lang_tensor = _patched
interpreter._convert_float = _rounded
