"""Kernels of an artifact, compiled where no GPU is: they lie in its folder, and whoever looks there compiles nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "intermediate_size": 256, "vocab_size": 512, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 256, "hidden_act": "silu",
}  # fmt: skip

#: what a server of the artifact does before it runs anything; prints how many kernels it had to compile
AGAIN = """
import sys
from contextlib import nullcontext
from pathlib import Path
from tokenspeed.kernels.shipped import shipped
from tokenspeed.runtime import ahead
path, own = Path(sys.argv[1]), Path(sys.argv[2])
from triton import knobs
knobs.cache.dir = str(own)
ahead.shipping = lambda folder: nullcontext()
with shipped(path / "kernels"):
    ahead.compile_kernels(path, int(sys.argv[3]))
print(len(list(own.glob("*/*.cubin"))))
"""


def _compiled_again(path: Path, own: Path, page: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(path), str(own), str(page)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_an_artifact_for_a_gpu_brings_its_kernels(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "artifact"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    command = [
        sys.executable, "-m", "tokenspeed", "compile", str(model), "--load-format", "dummy", "--device", "cuda:90",
        "--dtype", "bfloat16", "--buckets", "4", "--max-num-batched-tokens", "4", "--max-num-seqs", "4", "-o", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    code = sorted((out / "kernels").glob("*/*"))
    count = sum(f.suffix == ".cubin" for f in code)
    assert f"compiled {count} kernels" in done.stdout
    assert count > 5
    assert {f.suffix for f in code} == {".cubin", ".json"}

    elsewhere = tmp_path / "moved"  # an artifact is a folder that travels
    shutil.move(out, elsewhere)
    assert _compiled_again(elsewhere, tmp_path / "own", 64) == 0
    damaged = next((elsewhere / "kernels").glob("*/__grp__*"))
    damaged.write_text("{")  # as if it were not there
    assert _compiled_again(elsewhere, tmp_path / "other", 64) == 1


def test_an_artifact_for_a_cpu_brings_none(tmp_path: Path) -> None:
    from tokenspeed.cli import main

    model, out = tmp_path / "model", tmp_path / "artifact"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    asked = ["compile", str(model), "--load-format", "dummy", "--device", "cpu", "--buckets", "4"]
    assert main([*asked, "--max-num-batched-tokens", "4", "--max-num-seqs", "4", "-o", str(out)]) == 0
    assert not (out / "kernels").exists()
