"""Large models compile from their configuration alone, for any number of ranks, to the same bytes everywhere."""

from __future__ import annotations

import filecmp
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.compiler.api import Compiled, compile_model
from tokenspeed.models import find_family
from tokenspeed.runtime.checkpoint import read_config

ROOT = Path(__file__).parents[2]
BUCKETS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192]
LAYERS = {"llama-3.1-8b": 32, "llama-3.3-70b": 80}


def config(model: str) -> dict[str, Any]:
    return read_config(ROOT / "tests" / "data" / model / "config.json")


@functools.cache
def compiled(model: str, ranks: int) -> Compiled:
    c = config(model)
    return compile_model(
        find_family(c["architectures"][0]), c, mesh=f"tp={ranks}" if ranks > 1 else "", dtype="bfloat16", cache_dtype="bfloat16",
        buckets=BUCKETS,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("model", LAYERS)
def test_a_large_model_compiles_without_weights(model: str, ranks: int) -> None:
    result = compiled(model, ranks)
    c, m = config(model), result.manifest
    assert m["ranks"] == ranks and [t for t, _ in m["buckets"]] == BUCKETS
    assert set(result.result.explain) == {f"{v}.t{t}" for v in ("gumbel", "full") for t in BUCKETS}
    held = [sum(_size(result, e, rank) for e in result.result.weights.entries) for rank in range(ranks)]
    width = c["hidden_size"] // c["num_attention_heads"]
    per_layer = (
        2 * c["hidden_size"] * (c["hidden_size"] + c["num_key_value_heads"] * width)
        + 3 * c["hidden_size"] * c["intermediate_size"]
    )
    split = c["num_hidden_layers"] * per_layer + 2 * c["vocab_size"] * c["hidden_size"]
    norms = (2 * c["num_hidden_layers"] + 1) * c["hidden_size"]
    assert held == [split // ranks + norms] * ranks


def _size(result: Compiled, entry: Any, rank: int) -> int:
    """Entries of the checkpoint that a rank holds of one parameter."""
    pieces = [result.result.weights.matrix_pieces(s, rank)[:2] for s in entry.segments]
    return sum(sum(n for _, _, n in rows) * sum(n for _, _, n in columns) for rows, columns in pieces)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("model", LAYERS)
def test_two_pending_sums_a_layer_and_what_repairs_them(model: str, ranks: int) -> None:
    """Attention and MLP of each layer leave a sum open; explain names for each the one collective that ends it.

    It ends right there, or at the next norm with the residual stream it was added to; the last one may stay open until
    the rows that are sampled have been selected.
    """
    result, last = compiled(model, ranks).result, LAYERS[model] - 1
    for name, program in result.explain.items():
        rows = [r for r in program["redistributions"] if r["op"] in ("all_reduce", "reduce_scatter")]
        ends = {r["edge"].split(" -> ")[0]: r for r in rows}
        assert len(ends) == len(rows), name
        for i in range(last + 1):
            first = [v for v in (f"layers.{i}.attn", f"layers.{i}.add") if v in ends]
            second = [v for v in (f"layers.{i}.mlp", f"layers.{i}.add.1") if v in ends]
            if i == last and not second:
                second = ["select_rows"]
            assert len(first) == len(second) == 1, (name, i)
            for value in (*first, *second):
                repair = ends[value]
                assert repair["from"] in ("bf16[t, h] +tp", "bf16[s, h] +tp") and repair["axes"] == ["tp"]
                assert "pending sum over tp" in repair["reason"]
                assert repair["to"].startswith(repair["from"][:6] if repair["op"] == "all_reduce" else "bf16[t@tp")
                share = (ranks - 1) / ranks * 2 * config(model)["hidden_size"]
                assert repair["bytes_per_token"] == share * (2 if repair["op"] == "all_reduce" else 1)
        if (
            program["bucket"]["t"] in (1, 8192) and ranks < 8
        ):  # a long step spreads its rows, where a collective is cheap
            assert any(r["op"] == "reduce_scatter" for r in rows) == (program["bucket"]["t"] == 8192)


@pytest.mark.parametrize("part", ["attn", "mlp"])
def test_the_sums_are_open_where_the_leaves_leave_them(part: str) -> None:
    program = compiled("llama-3.1-8b", 4).result.programs["gumbel", 8]
    for i in range(32):
        assert str(program.types[f"layers.{i}.{part}"]).endswith("[t, h] +tp")


def test_one_rank_says_nothing(model: str = "llama-3.1-8b") -> None:
    assert all(not e["redistributions"] for e in compiled(model, 1).result.explain.values())


def test_a_configuration_s_unread_fields_do_not_change_the_key() -> None:
    c = config("llama-3.1-8b")
    family = find_family(c["architectures"][0])

    def key(**over: Any) -> str:
        return compile_model(family, c | over, buckets=[1], variants=["gumbel"]).manifest["semantic_key"]

    plain = key()
    assert key(transformers_version="9", initializer_range=0.5, bos_token_id=0) == plain
    assert (
        key(rms_norm_eps=1e-6) != plain and key(rope_theta=1e6) != plain and key(max_position_embeddings=4096) != plain
    )


COMMANDS = """
import sys
from tokenspeed.cli import main

models, out = sys.argv[1], sys.argv[2]
buckets = ["--buckets", "1,8,512", "--max-num-seqs", "64"]
for name, mesh in (("llama-3.1-8b", "tp=4"), ("smollm2-135m", "dp=2,tp=2")):
    assert main(["compile", f"{models}/{name}", "-o", f"{out}/{name}", "--mesh", mesh, *buckets]) == 0
assert main(["compile", "smollm2", "-o", f"{out}/embedded", "--mesh", "tp=3", *buckets]) == 0
"""


def test_artifacts_are_equal_byte_for_byte_in_two_processes(tmp_path: Path) -> None:
    """With other hash seeds, working directories, locales, and the model named by another path."""
    outs = []
    data = ROOT / "tests" / "data"
    for number, (seed, locale, models, cwd) in enumerate(
        [("0", "C", str(data), "/"), ("4242", "de_DE.ISO-8859-1", "data", str(data.parent))]
    ):
        out = tmp_path / str(number)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": seed,
            "LC_ALL": locale,
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
        }
        done = subprocess.run(
            [sys.executable, "-c", COMMANDS, models, out], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        outs.append(out)
    names = [sorted(str(f.relative_to(out)) for f in out.rglob("*") if f.is_file()) for out in outs]
    assert names[0] == names[1] and len(names[0]) > 20
    assert any(name.endswith("tokenizer.json") for name in names[0])
    same, differ, odd = filecmp.cmpfiles(*outs, names[0], shallow=False)
    assert (differ, odd) == ([], []) and len(same) == len(names[0])
