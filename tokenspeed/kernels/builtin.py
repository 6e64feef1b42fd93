"""The kernels of this package, family by family. The C++ ones register only where the extension was built; without it
the references still serve every op, so the registry never depends on a compiler having run.
"""

from __future__ import annotations

import importlib.util

from tokenspeed.ir.ops import REFERENCES
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability

#: ops that work on the slots of a home block, or on the part of them that a rank holds
PAGED = ("append", "attend", "append_latent", "mla", "index_topk")


def register_builtin(registry: Registry) -> None:
    """Registers everything that this installation can run or select for; Triton itself is imported at a first call."""
    from tokenspeed.kernels import gpu
    from tokenspeed.kernels.comm import argmax, distributed, exchange, lse
    from tokenspeed.kernels.fused import FUSED
    from tokenspeed.kernels.gemm import torch as gemm_torch
    from tokenspeed.kernels.ops import OPS
    from tokenspeed.kernels.registry import register_references
    from tokenspeed.kernels.sampling import parts as sampling_parts

    parts = {f"{op}_part": REFERENCES[op] for op in PAGED}  # of a home block's slots
    register_references({op: fn for op, fn in (REFERENCES | FUSED | parts).items() if op in OPS}, registry)
    gemm_torch.register(registry)
    distributed.register(registry)
    argmax.register(registry)
    lse.register(registry)
    exchange.register(registry)
    sampling_parts.register(registry)
    gpu.register(registry)
    if importlib.util.find_spec("tokenspeed._cpu") is None:
        return
    from tokenspeed.kernels.activation import cpu as activation
    from tokenspeed.kernels.attention import cpu as attention
    from tokenspeed.kernels.comm import fused
    from tokenspeed.kernels.embedding import cpu as embedding
    from tokenspeed.kernels.gemm import cpu as gemm
    from tokenspeed.kernels.moe import cpu as moe
    from tokenspeed.kernels.norm import cpu as norm
    from tokenspeed.kernels.pointwise import cpu as pointwise
    from tokenspeed.kernels.rope import cpu as rope
    from tokenspeed.kernels.rows import cpu as rows
    from tokenspeed.kernels.sampling import cpu as sampling
    from tokenspeed.kernels.state import cpu as state

    capability = Capability("cpu", features=frozenset({"cpu_extension"}))
    for family in (gemm, embedding, norm, rope, activation, pointwise, attention, rows, sampling, moe, state):
        family.register(registry, capability)
    fused.register(registry, capability)
