"""Kernels of CuTe DSL: made ahead of time for GPUs that are not here, and what is said where they cannot be."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tokenspeed import kernels as K
from tokenspeed.kernels import cute
from tokenspeed.kernels.norm import cute as norm


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENSPEED_CUTE_KERNELS", str(tmp_path))
    return tmp_path


def test_every_kernel_is_made_for_hopper_and_blackwell(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = pytest.importorskip("tokenspeed.kernels.norm.cute_kernels", reason="CuTe DSL is not installed")
    assert cute.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {r["target"] for r in rows} == {"sm_90a", "sm_100a"}
    assert {tuple(r["constants"]) for r in rows} == {(w, add) for w in kernels.WIDTHS for add in (0, 1)}
    assert all(0 < r["registers"] <= 128 and r["spilled"] == 0 and r["bytes"] > 1000 for r in rows)
    made = sorted(folder.glob("*/*.cubin"))
    assert len(made) == len(rows) and len({f.parent for f in made}) == 1
    before = [f.stat().st_mtime_ns for f in made]
    assert cute.main([]) == 0  # what is there is not made again
    assert [f.stat().st_mtime_ns for f in made] == before
    for file in made:
        assert not asked_apart(file), f"{file.name}: a warp that has parted waits for itself for ever"


def asked_apart(cubin: Path) -> list[str]:
    """Instructions for a whole warp or block between a conditional branch and the place it goes to."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    lines = subprocess.run([tool, cubin], capture_output=True, text=True, check=True).stdout.splitlines()
    found: list[str] = []
    for at, line in enumerate(lines):
        branch = re.search(r"@!?U?P\d\s+BRA `\((\.L_x_\d+)\)", line)
        if branch and f"{branch[1]}:" in lines[at:]:
            inside = lines[at + 1 : at + lines[at:].index(f"{branch[1]}:")]
            found += [i for i in inside if re.search(r"SHFL|WARPSYNC\.ALL|BAR\.SYNC|VOTE|REDUX", i)]
    return found


def test_without_cute_dsl_the_way_out_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.setitem(sys.modules, "cutlass.cute", None)
    with pytest.raises(cute.CuteError, match=r"tokenspeed\[cute\].*TOKENSPEED_CUTE_KERNELS"):
        cute.build("rms", (4096, 1), "sm_90a")
    monkeypatch.delitem(sys.modules, "tokenspeed.kernels.norm.cute_kernels", raising=False)
    assert cute.main([]) == 1 and "cutlass" in capsys.readouterr().err
    kept = cute.file_of("rms", (4096, 1), "sm_90a")
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"made elsewhere")
    assert cute.build("rms", (4096, 1), "sm_90a") == kept  # a cubin that is there serves without it


@pytest.mark.parametrize(("width", "threads"), [(1024, 128), (4096, 512), (7168, 448), (8192, 512), (100, 0), (264, 0)])
def test_rows_are_dealt_to_threads_in_whole_vectors(width: int, threads: int) -> None:
    assert norm.threads_of(width) == threads


def test_selection_offers_it_on_hopper_and_blackwell_and_the_triton_kernel_first() -> None:
    for device, can in (("cuda:90", True), ("cuda:100", True), ("cuda:80", False)):
        found = K.explain("add_rms_norm", signature=dict.fromkeys(("x", "w", "out"), "bfloat16"), device=device)
        assert found[0].spec.name == "triton.add_rms_norm"
        mine = next(c for c in found if c.spec.name == "cute_dsl.add_rms_norm")
        assert mine.eligible == can and mine.spec.solution == "cute_dsl"
    chosen = K.select("add_rms_norm", signature={"x": "bfloat16"}, device="cuda:90", override="cute_dsl")
    assert chosen.name == "cute_dsl.add_rms_norm"


def test_what_it_does_not_take_goes_to_the_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(norm.portable, "rms_norm", lambda *_, **__: calls.append("rms_norm"))
    monkeypatch.setattr(norm.portable, "add_rms_norm", lambda *_, **__: calls.append("add_rms_norm"))
    x = torch.zeros(2, 4096, dtype=torch.bfloat16)  # on CPU
    norm.rms_norm(x, x[0], eps=1e-6, out=x)
    norm.add_rms_norm(x, x, x[0], eps=1e-6, out=(x, x))
    assert calls == ["rms_norm", "add_rms_norm"]
