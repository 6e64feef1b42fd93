# pyright: strict
"""The registered GPU kernels. Invariant: a kernel's module, and with it Triton, is imported at the kernel's first call,
so a machine without Triton or a GPU can still list, explain and select for one ("cuda:90").

A kernel's source hash covers its module and those it is built from.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenspeed.kernels.formats import DENSE
from tokenspeed.kernels.ops import op_of
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import (
    Capability,
    KernelSpec,
    Priority,
    Trait,
    at_least,
    at_most,
    identity,
    multiple_of,
    one_of,
)
from tokenspeed.kernels.target import OLDEST
from tokenspeed.kernels.weights import dense

PACKAGE = "tokenspeed.kernels"
ROOT = Path(__file__).parent
CUDA = Capability("cuda", min_arch=OLDEST)
FULL_TILES = Trait(
    "more than 64 and at least 7/8 of tiles of 128", lambda t: isinstance(t, int) and t > 64 and -t % 128 <= t / 7
)

Signatures = tuple[Mapping[str, frozenset[str]], ...]

# op -> (family's module, modules it is built from)
TRITON: dict[str, tuple[str, tuple[str, ...]]] = {
    "lookup": ("embedding.triton", ()),
    "rms_norm": ("norm.triton", ()),
    "add_rms_norm": ("norm.triton", ()),
    "rope": ("rope.triton", ()),
    "silu": ("activation.triton", ("pointwise.triton",)),
    "silu_mul": ("activation.triton", ("pointwise.triton",)),
    "gelu": ("activation.triton", ("pointwise.triton",)),
    "gelu_mul": ("activation.triton", ("pointwise.triton",)),
    "add": ("pointwise.triton", ()),
    "mul": ("pointwise.triton", ()),
    "scale": ("pointwise.triton", ()),
    "softcap": ("pointwise.triton", ()),
    "append": ("attention.triton", ()),
    "attend": ("attention.triton", ("attention.decode", "attention.softmax")),
    "rope_append": ("attention.rope_append", ()),
    "norm_rope_append": ("attention.rope_append", ()),
    "select_rows": ("rows.triton", ("embedding.triton",)),
    "fill": ("rows.triton", ()),
    "temper": ("sampling.triton", ()),
    "add_gumbel": ("sampling.triton", ()),
    "argmax": ("sampling.triton", ()),
    "gumbel_argmax": ("sampling.triton", ()),
    "sample": ("sampling.full", ("sampling.triton",)),
    "mask_logits": ("sampling.mask", ("sampling.triton",)),
}
F32_ONLY = frozenset({"temper", "add_gumbel", "argmax", "gumbel_argmax", "sample", "mask_logits"})


def late(module: str, name: str) -> Callable[..., None]:
    """The function `name` of `module`, which is imported when it is first called."""
    found: list[Callable[..., None]] = []

    def call(*args: Any, **kwargs: Any) -> None:
        if not found:
            found.append(getattr(importlib.import_module(module), name))
        found[0](*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__module__ = module
    return call


def source_hash(*modules: str) -> str:
    """16 hex digits that change with the text of `modules` (names below this package) and of what all share."""
    digest = hashlib.sha256()
    for module in ("launch", "dependent", *modules):
        digest.update((ROOT / f"{module.replace('.', '/')}.py").read_bytes())
    return digest.hexdigest()[:16]


def signatures_of(op: str) -> Signatures:
    """Roles of one dtype throughout, but for the weights, tables and caches, which may be of either."""
    roles = op_of(op).roles
    if op in F32_ONLY:
        return (dict.fromkeys(roles, frozenset({"float32"})),)
    if op == "lookup":
        return ({"w": DENSE, "out": DENSE},)
    if op == "append":
        return ({"x": DENSE, "cache": DENSE},)
    return tuple(
        {role: DENSE if role in ("w", "cache") else frozenset({name}) for role in roles} for name in sorted(DENSE)
    )


def register(registry: Registry) -> None:
    """Every Triton kernel, and linear through cuBLAS."""
    for op, (module, parts) in TRITON.items():
        _add(
            registry, f"triton.{op}", op, "triton", module, parts, signatures_of(op),
            pack=dense if op == "lookup" else identity,
            summary="decode and prefill in one kernel: context parts, GQA packing, float32 softmax"
            if op == "attend"
            else "",
        )  # fmt: skip
    both = ("float32", "bfloat16")
    _add(
        registry, "cublas.linear", "linear", "cublas", "gemm.cublas", (),
        tuple({"x": frozenset({x}), "w": frozenset({x}), "out": frozenset({x, "float32"})} for x in both),
        pack=dense, summary="torch.mm into the output, float32 sums",
    )  # fmt: skip
    _add(
        registry, "triton.linear", "linear", "triton", "gemm.triton", ("attention.softmax",),
        ({"x": frozenset({"bfloat16"}), "w": frozenset({"bfloat16"}), "out": DENSE},),
        pack=dense, priority=Priority.PERFORMANT + 1, traits={"tokens": at_most(64)},
        summary="few rows: the weight streamed once, parts of K",
    )  # fmt: skip
    _add(
        registry, "triton.linear_silu_mul", "linear_silu_mul", "triton", "gemm.triton", ("attention.softmax",),
        (dict.fromkeys(("x", "w", "out"), frozenset({"bfloat16"})),),
        pack=dense, traits={"tokens": at_most(64)}, summary="few rows, the gated activation in the epilogue",
    )  # fmt: skip
    _add(
        registry, "gluon.linear_silu_mul", "linear_silu_mul", "gluon", "gemm.hopper", ("gemm.triton",),
        (dict.fromkeys(("x", "w", "out"), frozenset({"bfloat16"})),),
        pack=dense, priority=Priority.SPECIALIZED, capability=Capability("cuda", min_arch=90, max_arch=90),
        traits={"tokens": FULL_TILES, "k": multiple_of(8), "n": multiple_of(8), "tokens*n": at_least(110 * 128 * 128)},
        summary="many rows, warp-specialised for Hopper: TMA, wgmma, the gated activation in the epilogue",
    )  # fmt: skip

    for op in ("rms_norm", "add_rms_norm"):
        _add(
            registry, f"cute_dsl.{op}", op, "cute_dsl", "norm.cute", ("cute", "norm.cute_kernels", "norm.triton"),
            (dict.fromkeys(op_of(op).roles, frozenset({"bfloat16"})),),
            priority=Priority.PORTABLE, capability=Capability("cuda", min_arch=90, max_arch=100),
            summary="a block a row, compiled ahead of time; other shapes take the Triton kernel",
        )  # fmt: skip
    _add(
        registry, "gluon.linear_chain", "linear_chain", "gluon", "gemm.chain", ("gemm.triton", "norm.triton"),
        (dict.fromkeys(("x", "w", "out"), frozenset({"bfloat16"})),),
        pack=dense, priority=Priority.SPECIALIZED, capability=Capability("cuda", min_arch=90, max_arch=90),
        traits={"tokens": at_most(16), "unit": multiple_of(64), "width": at_most(16384)},
        summary="what lies between two attentions, for few rows: the weights are one stream",
    )  # fmt: skip
    _add(
        registry, "gluon.attend", "attend", "gluon", "attention.hopper",
        ("attention.triton", "attention.decode", "attention.softmax"),
        (dict.fromkeys(("x", "cache", "out"), frozenset({"bfloat16"})),),
        priority=Priority.SPECIALIZED, traits={"head_dim": one_of(64, 128, 256)},
        capability=Capability("cuda", min_arch=90, max_arch=90),
        summary="prefill warp-specialised for Hopper: TMA, two warpgroups of wgmma; decode as triton.attend",
    )  # fmt: skip


def _add(
    registry: Registry, name: str, op: str, solution: str, module: str, parts: tuple[str, ...], signatures: Signatures,
    *, pack: Callable[[Any], Any] = identity, priority: int = Priority.PERFORMANT,
    traits: Mapping[str, Trait] | None = None, capability: Capability = CUDA, summary: str = "",
) -> None:  # fmt: skip
    registry.register(
        KernelSpec(
            name=name,
            op=op,
            solution=solution,
            fn=late(f"{PACKAGE}.{module}", op),
            signatures=signatures,
            priority=priority,
            capability=capability,
            traits=traits or {},
            tags=frozenset({"determinism"}),
            pack=pack,
            source_hash=source_hash(module, *parts),
            summary=summary,
        )
    )
