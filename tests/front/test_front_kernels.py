"""`tokenspeed kernels`: what is registered, what a request gets, what was verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.tiny import tiny_model
from tokenspeed.cli import main
from tokenspeed.compiler import rulecheck_kernels
from tokenspeed.kernels.registry import default_registry

FIELDS = {"family", "mode", "solution", "name", "targets", "verified"}


def test_the_list_has_every_kernel_and_what_was_verified_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ["--cache", str(tmp_path / "cache")]
    forms = [f for f in rulecheck_kernels.FORMS if f.op in ("silu", "add")]
    monkeypatch.setattr(rulecheck_kernels, "FORMS", forms)

    def verified() -> set[str]:
        assert main(["kernels", "list", "--json", *cache]) == 0
        rows = json.loads(capsys.readouterr().out)["kernels"]
        assert {r["name"] for r in rows} == {k.name for k in default_registry()}
        assert all(set(r) == FIELDS and r["targets"] for r in rows)
        return {r["name"] for r in rows if r["verified"]}

    assert verified() == set()
    assert main(["kernels", "verify", *cache]) == 0
    said = capsys.readouterr().out
    assert "kernels compute what their references do" in said
    assert "elsewhere gloo.all_reduce: works between processes" in said
    assert "elsewhere cpu.linear_int8: takes weights in blocks only" in said
    assert main(["kernels", "list", *cache]) == 0
    assert capsys.readouterr().out.split()[:2] == ["FAMILY/MODE", "SOLUTION"]
    assert {"cpu.silu", "cpu.add"} <= verified()
    record = tmp_path / "cache" / "verified-kernels.json"
    held = json.loads(record.read_text())
    record.write_text(json.dumps(held | {"cpu.silu": "of another source"}))
    assert "cpu.silu" not in verified() and "cpu.add" in verified()
    record.write_text("[")
    assert verified() == set()


def test_a_kernel_that_is_wrong_is_named_and_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = rulecheck_kernels.Report(
        {"cpu.silu", "cpu.add"}, 2, ["cpu.silu, silu: S(0) on 2 ranks"], {"cpu.silu"}, 0.0
    )
    monkeypatch.setattr(rulecheck_kernels, "check", lambda: report)
    assert main(["kernels", "verify", "--cache", str(tmp_path)]) == 1
    assert "WRONG     cpu.silu, silu" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "verified-kernels.json").read_text())) == {"cpu.add"}


def test_explain_names_the_chosen_one_and_every_other_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["kernels", "explain", "gemm", "chain", "--formats", "x=bfloat16,w=bfloat16,out=bfloat16"]
    facts = ["--facts", "tokens=8,unit=64,width=4096"]
    assert main([*asked, *facts, "--device", "cuda:90"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("gluon.linear_chain  <- chosen by heuristic")
    assert any("reference.linear_chain  could run it" in line for line in rest)
    assert main([*asked, "--facts", "tokens=32,unit=64,width=4096", "--device", "cuda:100"]) == 0
    text = capsys.readouterr().out
    assert "needs tokens <= 16, the request has 32" in text and "needs sm_90 or earlier" in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["gemm", "lineer"], "known modes: chain, "),
        (["gem", "linear"], "known families: "),
        (["gemm", "linear", "--formats", "x"], "write NAME=VALUE"),
        (["gemm", "linear", "--formats", "y=bfloat16"], "no role 'y'"),
        (["gemm", "linear", "--facts", "tokens=many"], "expected a whole number"),
        (["gemm", "linear", "--facts", "tokens=-1"], "from 1 on"),
        (["gemm", "linear", "--facts", "rows=4"], "ask for: head_dim, k, n, tokens"),
        (["gemm", "linear", "--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_a_request_that_cannot_be_is_an_error_with_the_way_out(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", "explain", *words]) == 2
    assert named in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny")))


ENGINE = ["--device", "cpu", "--dtype", "float32", "--buckets", "1,4", "--max-num-seqs", "2", "--num-pages", "64"]


def test_bench_times_every_kernel_of_every_bucket(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--max-num-batched-tokens", "4", "--context", "32"]
    assert main(["kernels", "bench", tiny, *ENGINE, *size, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {r["bucket"] for r in rows} == {1, 4} and all(r["us"] > 0 and r["calls"] > 0 for r in rows)
    for bucket in (1, 4):
        mine = [r for r in rows if r["bucket"] == bucket]
        assert abs(sum(r["share"] for r in mine) - 1) < 0.01
        assert {"cpu.attend", "cpu.linear"} <= {r["kernel"] for r in mine}
    assert main(["kernels", "bench", tiny, *ENGINE, *size]) == 0
    assert "4 tokens: " in capsys.readouterr().out


def test_tune_says_so_where_there_is_nothing_to_choose(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    size = ["--max-num-batched-tokens", "4", "--context", "32", "--out", str(out)]
    assert main(["kernels", "tune", tiny, *ENGINE, *size]) == 0
    assert "nothing to choose" in capsys.readouterr().out and not out.exists()


def test_a_context_that_does_not_fit_is_named(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "bench", tiny, *ENGINE, "--max-num-batched-tokens", "4", "--context", "100000"]) == 2
    assert "do not fit" in capsys.readouterr().err
    assert main(["kernels", "bench", tiny, *ENGINE, "--context", "0"]) == 2
