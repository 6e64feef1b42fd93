"""Every Triton kernel compiles for GPUs that are not here, and none spills on Hopper."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from tokenspeed.kernels import crosscompile as cross
from tokenspeed.kernels.gpu import TRITON, source_hash
from tokenspeed.kernels.registry import Registry, default_registry

LLAMA = cross.MODELS[1]


def named(variant: cross.Variant) -> str:
    """A kernel and what tells its main forms apart."""
    constants = variant.constants
    form = [f"{k}{constants[k]}" for k in ("KIND", "ADD", "PLANNED", "TOKENS", "GUMBEL") if k in constants]
    return "-".join([variant.launch.kernel.__name__, *form])


@pytest.fixture(scope="module")
def variants() -> dict[str, cross.Variant]:
    """One bfloat16 variant of each form, at the shapes of an 8B model."""
    out: dict[str, cross.Variant] = {}
    for variant in cross.variants([LLAMA], [torch.bfloat16]):
        out.setdefault(named(variant), variant)
    return out


@pytest.mark.parametrize("target", sorted(cross.TARGETS))
def test_every_kernel_compiles(target: str, variants: dict[str, cross.Variant]) -> None:
    seen = set()
    mine = {name: variant for name, variant in variants.items() if target in variant.targets}
    for name, variant in mine.items():
        if target != "sm_90" and variant.launch.kernel.__name__ in seen and "PLANNED" not in variant.constants:
            continue  # off the main target one form a kernel is enough, but for attention
        report = cross.compile_for(variant, target)
        seen.add(report.kernel)
        assert report.registers > 0, name
        if target == "sm_90":
            assert report.spilled == 0, f"{name}: {report}"
            assert report.shared <= 227 * 1024, f"{name}: {report}"
    assert seen == {v.launch.kernel.__name__ for v in mine.values()}


def test_float32_attention_and_products_do_not_spill_on_hopper() -> None:
    wanted = ("attend_tile", "few_rows", "rms_rows", "rotate")
    compiled: dict[str, cross.Report] = {}
    for variant in cross.variants([LLAMA], [torch.float32]):
        name = named(variant)
        if variant.launch.kernel.__name__ in wanted and name not in compiled:
            compiled[name] = cross.compile_for(variant, "sm_90")
    assert {r.kernel for r in compiled.values()} == set(wanted)
    assert all(r.spilled == 0 for r in compiled.values()), compiled


def test_a_spill_is_seen(variants: dict[str, cross.Variant]) -> None:
    """The report is not blind: a tile far too large for its warps reports spilled bytes."""
    from tokenspeed.kernels.attention import triton as attention
    from tokenspeed.kernels.launch import recording

    q, cache = (torch.empty(shape, device="meta") for shape in ((64, 32, 128), (4096, 8, 128)))
    i32 = torch.empty(64, dtype=torch.int32, device="meta")
    with recording() as launches:
        attention.attend(
            q, cache, cache, i32, i32, torch.empty(4, 64, dtype=torch.int32, device="meta"), page=16, scale=0.1, out=q,
            tiling=attention.Tiling(32, 32, 1, 64, 4, 1),
        )  # fmt: skip
    assert cross.compile_for(cross.variant_of(launches[-1], "too large"), "sm_90").spilled > 0


def test_the_report_covers_every_registered_kernel() -> None:
    uses = [use.split(",")[0].split(" ")[0] for use, _ in cross.uses(LLAMA, torch.bfloat16)]
    assert set(TRITON) | {
        "linear",
        "linear_silu_mul",
        "linear_chain",
        "begin_step",
        "end_step",
        "gather_pages",
        "scatter_pages",
    } == set(uses)


def test_no_argument_hides_in_the_launcher() -> None:
    """Triton's launcher has names of its own: an argument called like one of them is not passed on."""
    for variant in cross.variants([LLAMA], [torch.bfloat16]):
        assert not {"params", "options", "grid", "warmup", "specialization"} & set(variant.launch.kernel.arg_names)


def test_registration_needs_no_triton() -> None:
    """Listing and selecting for a GPU imports neither Triton nor a kernel's module."""
    code = (
        "import sys, json; from tokenspeed import kernels as K; sys.modules['triton'] = None\n"
        "facts = dict(signature={'x': 'bfloat16', 'w': 'bfloat16', 'out': 'bfloat16'}, device='cuda:90')\n"
        "few = K.select('linear', traits={'tokens': 16}, **facts).name\n"
        "many = K.select('linear', traits={'tokens': 65}, **facts).name\n"
        "norm = K.select('rms_norm', traits={'tokens': 16}, **facts).name\n"
        "cpu = K.select('add', signature={'x': 'float32', 'out': 'float32'}, traits={'tokens': 1}).name\n"
        "loaded = [m for m in sys.modules if m.startswith('tokenspeed') and m.endswith('.triton')]\n"
        "print(json.dumps([few, many, norm, cpu, loaded]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    few, many, norm, cpu, loaded = json.loads(out)
    assert (few, many, norm) == ("triton.linear", "cublas.linear", "triton.rms_norm")
    assert not cpu.startswith("triton") and loaded == []


def test_a_kernel_has_its_modules_hash() -> None:
    registry: Registry = default_registry()
    assert registry.get("triton.silu").source_hash == source_hash("activation.triton", "pointwise.triton")
    assert registry.get("triton.silu").source_hash != registry.get("triton.add").source_hash
