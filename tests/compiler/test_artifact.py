"""The artifact: certificate and keys. What is stated beside the programs is checked when they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.sim import tiny
from tokenspeed.compiler.api import Compiled, compile_model
from tokenspeed.compiler.artifact import ArtifactError, digest, dump, load_artifact, programs_key, semantic_key
from tokenspeed.compiler.passes import certify
from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.graph import Program
from tokenspeed.models import find_family


def compiled(
    mesh: str = "dp=2,tp=2", axes: str = "mlp=dp*tp", arch: str = "LlamaForCausalLM", **options: Any
) -> Compiled:
    config = tiny(arch, num_hidden_layers=3)
    return compile_model(
        find_family(arch),
        config,
        mesh=mesh,
        axes=axes,
        buckets=[1, 4, 16, 512],
        max_rows=8,
        calibration="h200",
        **options,
    )


@pytest.mark.parametrize(
    ("mesh", "axes", "arch"),
    [("", "", "LlamaForCausalLM"), ("dp=2,tp=2", "mlp=dp*tp", "LlamaForCausalLM"), ("tp=4", "", "Qwen3ForCausalLM"),
     ("tp=3", "", "Qwen2ForCausalLM")],
)  # fmt: skip
def test_every_body_is_certified(tmp_path: Path, mesh: str, axes: str, arch: str) -> None:
    done = compiled(mesh, axes, arch, certificate=True)
    certificate = load_artifact(done.write(tmp_path)).certificate()
    assert certificate
    covered = {(b["variant"], t) for b in certificate["bodies"] for t in b["buckets"]}
    assert covered == set(done.result.programs)
    assert all(
        b["max_error"] <= certificate["bound"] and b["values"] >= 15 and b["tokens"] >= 1 for b in certificate["bodies"]
    )
    assert {b["variant"] for b in certificate["bodies"] if b["steps"] == 2} == {"gumbel", "full"}
    assert certificate["reduced"]["num_hidden_layers"] == 2 and certificate["reduced"]["hidden_size"] == 32
    assert compiled(mesh, axes, arch, certificate=True).files == done.files


def test_the_reduced_program_has_the_redistributions_of_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Program] = []
    compare = certify._compare
    monkeypatch.setattr(certify, "_compare", lambda p, *rest: seen.append(p) or compare(p, *rest))
    done = compiled(certificate=True)

    def moves(p: Program, layer: int) -> list[tuple[str, tuple[str, ...]]]:
        return [(n.op, n.attrs["axes"]) for n in p.nodes if "axes" in n.attrs and f"layers.{layer}." in n.inputs[0]]

    real = [done.result.programs["gumbel", t] for t in (1, 512)]
    for p in real:
        assert any(moves(q, 0) == moves(p, 0) and moves(q, 1) == moves(p, 2) for q in seen)


def test_a_wrong_program_gets_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:  # vllm#56900
    """V17: attention of the plan scales its scores by another factor than one rank's."""
    build = certify.build

    def broken(*args: Any) -> Any:
        p, priced = build(*args)
        for leaf in p.leaves.values():
            for n in leaf.nodes:
                if "scale" in n.attrs and p.plan.mesh.ranks > 1:
                    n.attrs = n.attrs | {"scale": 2 * n.attrs["scale"]}
        return p, priced

    monkeypatch.setattr(certify, "build", broken)
    with pytest.raises(VerifyError) as e:
        compiled(certificate=True)
    assert e.value.code == "V17" and "away from one rank's" in e.value.message


def test_a_certificate_of_other_programs_is_refused(tmp_path: Path) -> None:
    done = compiled(certificate=True)
    root = done.write(tmp_path)
    text = (root / "certificate.json").read_text()
    forged = json.loads(text) | {"programs": programs_key({"programs/x": "0"})}
    (root / "certificate.json").write_text(dump(forged))
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["files"]["certificate.json"] = digest(dump(forged))
    manifest["semantic_key"] = semantic_key(manifest)
    (root / "manifest.json").write_text(dump(manifest))
    with pytest.raises(ArtifactError, match="certificate was made for other programs"):
        load_artifact(root)


def test_without_a_certificate_there_is_none(tmp_path: Path) -> None:
    root = compiled(certificate=True).write(tmp_path)
    assert (root / "certificate.json").exists()
    plain = compiled()
    assert load_artifact(plain.write(root)).certificate() is None and not (root / "certificate.json").exists()


def test_what_an_older_artifact_held_goes_and_other_things_stay(tmp_path: Path) -> None:
    root = compiled().write(tmp_path / "a")
    for old in ("kernels/sm_90/0.cubin", "programs/old.ir"):
        (root / old).parent.mkdir(parents=True, exist_ok=True)
        (root / old).write_text("of another program")
    load_artifact(compiled().write(root))
    assert not (root / "kernels").exists() and not (root / "programs/old.ir").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="other files and no artifact"):
        compiled().write(tmp_path / "b")
    assert [f.name for f in (tmp_path / "b").iterdir()] == ["letter.txt"]


def test_what_decides_the_program_is_in_the_key() -> None:
    plain = compiled().manifest["semantic_key"]
    assert compiled().manifest["semantic_key"] == plain
    others = [
        compiled(tactics=["layers.*.attn=all_reduce"]), compiled(memory_limit=10**9), compiled("tp=2", ""), compiled(certificate=True),
    ]  # fmt: skip
    assert len({plain, *(o.manifest["semantic_key"] for o in others)}) == 5
