"""Ahead-of-time compilation of every Triton kernel without a GPU: `python -m tokenspeed.kernels.crosscompile --json`.

Invariant: what is compiled is what the wrappers would launch. They are called with meta tensors at the shapes of real
models, the launches are recorded, and each distinct variant (constants, argument types, alignment) is compiled for
every target. Per variant and target the report gives registers a thread, shared memory and stack or spilled bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenspeed.kernels.activation import triton as activation
from tokenspeed.kernels.attention import hopper, rope_append
from tokenspeed.kernels.attention import triton as attention
from tokenspeed.kernels.embedding import triton as embedding
from tokenspeed.kernels.gemm import chain
from tokenspeed.kernels.gemm import hopper as gemm_hopper
from tokenspeed.kernels.gemm import triton as gemm
from tokenspeed.kernels.launch import Launch, recording
from tokenspeed.kernels.norm import triton as norm
from tokenspeed.kernels.pages import triton as pages
from tokenspeed.kernels.pointwise import triton as pointwise
from tokenspeed.kernels.rope import triton as rope
from tokenspeed.kernels.rows import triton as rows
from tokenspeed.kernels.sampling import full, mask
from tokenspeed.kernels.sampling import triton as sampling
from tokenspeed.kernels.step import triton as step

TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
HOPPER = ("sm_90",)  # targets of the kernels that are written for one architecture
DEPENDENT = ("sm_90", "sm_100")  # targets with programmatic dependent launch


@dataclass(frozen=True, slots=True)
class Shape:
    """The facts of a model that its kernels' constants come from."""

    name: str
    hidden: int
    heads: int
    kv: int
    head_dim: int
    ffn: int
    vocab: int


MODELS = (
    Shape("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936),
    Shape("Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256),
)


@dataclass(frozen=True, slots=True)
class Report:
    """One compiled variant. `registers` a thread, `shared` and `spilled` in bytes (stack frames count as spilled)."""

    kernel: str
    use: str
    target: str
    registers: int
    shared: int
    spilled: int
    warps: int
    stages: int
    constants: dict[str, Any]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def uses(model: Shape, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """(what it is, a call of the wrapper) for every kernel a step of `model` in `dtype` may run."""
    i32, f32 = torch.int32, torch.float32
    h, n, kv, d = model.hidden, model.heads, model.kv, model.head_dim

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return _meta(*shape, dtype=dtype)

    params = new(16, 16, dtype=i32)
    for t in (16, 1024):
        x, w = new(t, h), new(h)
        yield "lookup", lambda t=t, x=x: embedding.lookup(new(t, dtype=i32), new(model.vocab, h), offset=0, out=x)
        yield "rms_norm", lambda x=x, w=w: norm.rms_norm(x, w, eps=1e-6, out=x)
        yield "add_rms_norm", lambda x=x, w=w: norm.add_rms_norm(x, x, w, eps=1e-6, out=(x, x))
        q = new(t, n, d)
        yield "rms_norm of heads", lambda q=q: norm.rms_norm(q, new(d), eps=1e-6, out=q)
        table = new(4096, d, dtype=f32)
        yield "rope", lambda t=t, q=q, table=table: rope.rope(q, new(t, dtype=i32), table, out=q)
        wide = new(t, model.ffn)
        yield "silu_mul", lambda wide=wide: activation.silu_mul(wide, wide, out=wide)
        yield "gelu_mul", lambda wide=wide: activation.gelu_mul(wide, wide, out=wide)
        yield "add", lambda x=x: pointwise.add(x, x, out=x)
        k, cache = new(t, kv, d), new(1 << 16, kv, d)
        yield "append", lambda t=t, k=k, cache=cache: attention.append(k, k, new(t, dtype=i32), cache, cache)
        pos = new(t, dtype=i32)
        prepared = (q, k, k), (pos, table, pos, cache, cache)
        yield "rope_append", lambda p=prepared, q=q: rope_append.rope_append(*p[0], *p[1], out=q)
        yield (
            "norm_rope_append",
            lambda p=prepared, q=q: rope_append.norm_rope_append(*p[0], new(d), new(d), *p[1], eps=1e-6, out=q),
        )
        other = new(1 << 16, kv, d, dtype=torch.bfloat16)
        yield (
            "rope_append to bf16",
            lambda p=prepared, q=q, o=other: rope_append.rope_append(*p[0], *p[1][:3], o, o, out=q),
        )
        for s in (16, 256):
            if t < s:
                continue
            yield (
                f"attend, {t} tokens of {s} requests",
                lambda q=q, cache=cache, pos=pos, s=s: attention.attend(
                    q, cache, cache, pos, pos, new(s, 2048, dtype=i32), page=16, scale=0.1, out=q
                ),
            )
            yield (
                f"attend, {t} tokens of {s} requests, window, sinks and softcap",
                lambda q=q, cache=cache, pos=pos, s=s: attention.attend(
                    q, cache, cache, pos, pos, new(s, 2048, dtype=i32), new(n), page=16, scale=0.1, window=128,
                    softcap=50.0, out=q,
                ),
            )  # fmt: skip
        if t > 16 and dtype == torch.bfloat16:
            for page in (16, 64):
                yield (
                    f"attend, {t} tokens, pages of {page}, warp-specialised",
                    lambda q=q, cache=cache, pos=pos, page=page: hopper.attend(
                        q, cache, cache, pos, pos, new(16, 2048, dtype=i32), page=page, scale=0.1, out=q
                    ),
                )
        yield "select_rows", lambda x=x: rows.select_rows(x, new(16, dtype=i32), out=new(16, h))
    for t in (1, 48, 160, 256):
        q, pos, cache = new(t, n, d), new(t, dtype=i32), new(1 << 16, kv, d)
        yield (
            f"attend, decode of {t}",
            lambda t=t, q=q, cache=cache, pos=pos: attention.attend(
                q, cache, cache, pos, pos, new(t, 2048, dtype=i32), page=16, scale=0.1, out=q
            ),
        )
        yield (
            f"attend, decode of {t}, window and sinks",
            lambda t=t, q=q, cache=cache, pos=pos: attention.attend(
                q, cache, cache, pos, pos, new(t, 2048, dtype=i32), new(n), page=16, scale=0.1, window=128, out=q
            ),
        )
    for t in (1, 32, 64):
        for what, columns, depth in (
            ("qkv", (n + 2 * kv) * d, h), ("o", h, n * d), ("gate_up", 2 * model.ffn, h), ("down", h, model.ffn),
        ):  # fmt: skip
            yield (
                f"linear {what}, {t} rows",
                lambda t=t, columns=columns, depth=depth: gemm.linear(
                    new(t, depth), new(columns, depth), out=new(t, columns)
                ),
            )
        yield (
            f"linear_silu_mul, {t} rows",
            lambda t=t: gemm.linear_silu_mul(new(t, h), new(2 * model.ffn, h), out=new(t, model.ffn)),
        )
        yield (
            f"linear head, {t} rows",
            lambda t=t: gemm.linear(new(t, h), new(model.vocab, h), out=new(t, model.vocab, dtype=f32)),
        )
    if dtype == torch.bfloat16:
        yield (
            "linear_silu_mul, 1024 rows, warp-specialised",
            lambda: gemm_hopper.linear_silu_mul(new(1024, h), new(2 * model.ffn, h), out=new(1024, model.ffn)),
        )
        for t in (1, 8, 16):
            yield (
                f"linear_chain, {t} rows",
                lambda t=t: chain.linear_chain(
                    new(t, n * d), new(h, n * d), new(t, h), new(h), new(2 * model.ffn, h), new(h, model.ffn), new(h),
                    new((n + 2 * kv) * d, h), eps=1e-6, out=(new(t, h), new(t, (n + 2 * kv) * d)),
                ),
            )  # fmt: skip
    z = new(16, model.vocab, dtype=f32)
    picked = (new(16, dtype=f32), new(16, dtype=i32))
    yield "silu", lambda: activation.silu(new(16, h), out=new(16, h))
    yield "mul", lambda: pointwise.mul(new(16, h), new(16, h), out=new(16, h))
    yield "scale", lambda: pointwise.scale(new(16, h), factor=0.5, out=new(16, h))
    yield "gelu", lambda: activation.gelu(new(16, h), out=new(16, h))
    yield "softcap", lambda: pointwise.softcap(z, cap=30.0, out=z)
    yield "fill", lambda: rows.fill(z, start=model.vocab - 100, value=float("-inf"), out=z)
    yield "temper", lambda: sampling.temper(z, params, out=z)
    yield "add_gumbel", lambda: sampling.add_gumbel(z, params, out=z)
    yield "mask_logits", lambda: mask.mask_logits(z, params, new(256, 4748, dtype=i32), offset=0, out=z)
    yield "argmax", lambda: sampling.argmax(z, out=picked)
    yield "gumbel_argmax", lambda: sampling.gumbel_argmax(z, params, out=picked)
    states = (
        new(256, model.vocab, dtype=i32),
        new(256, model.vocab, dtype=torch.uint8),
        new(256, model.vocab, dtype=f32),
    )
    results = new(16, dtype=i32), new(16, dtype=f32), new(16, 20, dtype=i32), new(16, 20, dtype=f32)
    yield "sample", lambda: full.sample(z, params, *states, vocab=model.vocab, out=results)
    ring, one = new(4, 1 << 16, dtype=i32), new(1, dtype=i32)
    ports = {name: new(16, dtype=i32) for name in ("ids", "pos", "slot", "row", "last", "request_slots")}
    ports |= {"params": params, "table": new(16, 2048, dtype=i32)}
    table, row, some = new(3, 64, dtype=torch.int64), new(3, 8 << 20, dtype=torch.uint8), new(3, dtype=torch.int64)
    yield "gather_pages", lambda: pages.gather_pages(table, 8, some, out=row)
    yield "scatter_pages", lambda: pages.scatter_pages(table, 8, some, row)
    yield "begin_step", lambda: step.begin_step(ring, one, ports, new(16, dtype=i32), 16, 16)
    yield "end_step", lambda: step.end_step(new(16, dtype=i32), ports, new(16, dtype=i32), ring, one)


@dataclass(frozen=True, slots=True)
class Variant:
    """A recorded launch as the compiler takes it."""

    launch: Launch
    use: str
    signature: dict[str, str]
    constants: dict[str, Any]
    attrs: dict[tuple[int], list[list[Any]]]

    @property
    def targets(self) -> tuple[str, ...]:
        return HOPPER if self.launch.kernel.is_gluon() else tuple(TARGETS)

    @property
    def key(self) -> tuple[str, str]:
        options = {k: v for k, v in self.launch.meta.items() if k in ("num_warps", "num_stages")}
        return self.launch.kernel.__name__, repr((self.signature, self.constants, self.attrs, options))


def variant_of(launch: Launch, use: str) -> Variant:
    """The signature that Triton's own launcher would derive: types, constants (arguments equal to 1), alignment by 16."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attrs: dict[tuple[int], list[list[Any]]] = {}
    given = iter(launch.args)
    for at, param in enumerate(launch.kernel.params):
        value = launch.meta[param.name] if param.name in launch.meta else False if param.name == "PDL" else next(given)
        if param.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[param.name] = "*" + _TYPES[value.dtype]
            attrs[(at,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            box = ",".join(map(str, value.block_shape))
            signature[param.name] = f"tensordesc<{_TYPES[value.base.dtype]}[{box}],{value.layout!r}>"
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attrs[(at,)] = [["tt.divisibility", 16]]
    return Variant(launch, use, signature, constants, attrs)


_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.uint8: "u8", torch.int64: "i64",
}  # fmt: skip


def variants(
    models: Iterable[Shape] = MODELS, dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float32)
) -> list[Variant]:
    """Every distinct variant of the kernels at the models' shapes."""
    found: dict[tuple[str, str], Variant] = {}
    for model in models:
        for dtype in dtypes:
            for use, call in uses(model, dtype):
                with recording() as launches:
                    call()
                for launch in launches:
                    variant = variant_of(launch, f"{model.name} {_TYPES[dtype]}: {use}")
                    found.setdefault(variant.key, variant)
    return list(found.values())


def compile_for(variant: Variant, target: str) -> Report:
    """Compiles one variant; Triton's or the assembler's error passes through."""
    meta = variant.launch.meta
    options: dict[str, Any] = {name: meta[name] for name in ("num_warps", "num_stages") if name in meta}
    constants = dict(variant.constants)
    if "PDL" in constants:  # what `launch` decides from the device
        constants["PDL"] = target in DEPENDENT
        if constants["PDL"]:
            options["launch_pdl"] = True
    kind = GluonASTSource if variant.launch.kernel.is_gluon() else ASTSource
    source = kind(variant.launch.kernel, variant.signature, constants, variant.attrs)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    registers, spilled = (
        _amd(compiled.asm["amdgcn"]) if target.startswith("gfx") else cubin_usage(compiled.asm["cubin"])
    )
    metadata: Any = compiled.metadata
    return Report(
        variant.launch.kernel.__name__, variant.use, target, registers, metadata.shared, spilled, metadata.num_warps,
        metadata.num_stages, constants,
    )  # fmt: skip


_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # EIATTR_FRAME_SIZE, EIATTR_REGCOUNT of a cubin's .nv.info section
_SIZED_VALUE = 4  # EIFMT_SVAL: a 16-bit size and as many bytes; the other formats take two bytes


def cubin_usage(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, stack bytes a thread) of the one kernel of a cubin, read from its ELF attributes.

    What a kernel of ours keeps on the stack is what the assembler spilled: none calls a function or indexes an array.
    """
    at, size, count = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HH", cubin, 58)
    found: dict[int, int] = {}
    for section in range(count):
        kind, _, _, start, length = struct.unpack_from("<IQQQQ", cubin, at + section * size + 4)
        if kind != 0x70000000:  # SHT_CUDA_INFO
            continue
        end = start + length
        while start < end:
            form, attribute, width = struct.unpack_from("<BBH", cubin, start)
            if form == _SIZED_VALUE and attribute in (_FRAME_SIZE, _REGISTERS):
                found[attribute] = struct.unpack_from("<II", cubin, start + 4)[1]  # symbol, value
            start += 4 + (width if form == _SIZED_VALUE else 0)
    if found.keys() != {_FRAME_SIZE, _REGISTERS}:
        raise RuntimeError(f"the cubin's .nv.info sections hold the attributes {sorted(found)}, not 0x11 and 0x2f")
    return found[_REGISTERS], found[_FRAME_SIZE]


def _amd(assembly: str) -> tuple[int, int]:
    """(vector registers, scratch bytes a thread) from the kernel's metadata."""
    registers = re.search(r"\.vgpr_count:\s*(\d+)", assembly)
    private = re.search(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    if registers is None or private is None:
        raise RuntimeError("the assembly holds no .vgpr_count or .private_segment_fixed_size")
    return int(registers[1]), int(private[1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel for GPUs that are not here.")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="repeatable; all of them by default")
    args = parser.parse_args(argv)
    reports: list[Report] = []
    failures: list[dict[str, str]] = []
    for variant in variants():
        for target in (x for x in args.target or TARGETS if x in variant.targets):
            try:
                reports.append(compile_for(variant, target))
            except Exception as error:
                failures.append({"kernel": variant.launch.kernel.__name__, "use": variant.use, "target": target,
                                 "error": f"{type(error).__name__}: {error}"[:2000]})  # fmt: skip
    if args.json:
        print(json.dumps({"reports": [asdict(r) for r in reports], "failures": failures}, indent=1))
    else:
        for r in reports:
            print(f"{r.target:7} {r.kernel:14} regs {r.registers:3} shared {r.shared:6} spilled {r.spilled:4}  {r.use}")
        for failure in failures:
            print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
