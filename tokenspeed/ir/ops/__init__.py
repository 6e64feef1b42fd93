"""The closed table of semantic ops. `OPS[name]` is the op; `REFERENCES[name]` its reference implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenspeed.ir.ops.attention import ATTENTION
from tokenspeed.ir.ops.base import Local, Op
from tokenspeed.ir.ops.comm import COMM, Redistribute
from tokenspeed.ir.ops.dense import DENSE
from tokenspeed.ir.ops.filters import FILTERS
from tokenspeed.ir.ops.fused import FUSED, Fused
from tokenspeed.ir.ops.index import INDEX
from tokenspeed.ir.ops.latent import LATENT
from tokenspeed.ir.ops.moe import MOE
from tokenspeed.ir.ops.sampling import SAMPLING
from tokenspeed.ir.ops.state import STATE

OPS: dict[str, Op] = {
    op.name: op for op in (*DENSE, *ATTENTION, *LATENT, *INDEX, *MOE, *STATE, *SAMPLING, *FILTERS, *COMM, *FUSED)
}
REFERENCES: dict[str, Callable[..., Any]] = {
    name: op.reference for name, op in OPS.items() if type(op).reference is not Op.reference
}

__all__ = ["OPS", "REFERENCES", "Fused", "Local", "Op", "Redistribute"]
