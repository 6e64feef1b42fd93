"""Tables of measured choices: where selection finds them, what they are made of, and how the fastest kernel is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.tiny import tiny_model
from tokenspeed import Engine, SamplingParams
from tokenspeed import kernels as K
from tokenspeed.cli import main
from tokenspeed.kernels import tuned
from tokenspeed.kernels.tuned import Entry, TunedTable
from tokenspeed.runtime import tuning
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.tuning import Timed

SIGNATURE = {"x": "float32", "w": "float32", "out": "float32"}
TORCH = Entry("linear", SIGNATURE, {"tokens": (1, 8), "k": (64, 64)}, "torch.linear", 3.5)
FACTS = {"tokens": 4, "k": 64}


def chosen(**more: str) -> str:
    return K.select("linear", signature=SIGNATURE, traits=FACTS, **more).name  # type: ignore[arg-type]


def test_a_table_measured_here_comes_before_one_that_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = chosen()
    assert before not in ("torch.linear", "reference.linear")
    monkeypatch.setenv("TOKENSPEED_KERNEL_TABLES", str(tmp_path / "mine"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    assert chosen() == before
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "cpu.json").write_text(TunedTable("cpu", (TORCH,)).dump())
    assert chosen() == "torch.linear"
    assert chosen(objective="latency") != "torch.linear"  # what was measured holds for the default objective
    tuned.cached_path("cpu").parent.mkdir()
    tuned.cached_path("cpu").write_text(TunedTable("cpu", (replace(TORCH, kernel=before),)).dump())
    assert chosen() == before
    tuned.cached_path("cpu").write_text("{")
    with pytest.raises(ValueError, match=r"tuned table .*cpu\.json"):
        chosen()
    assert tuned.cached_path("cuda:sm_90").name == "sm_90.json"


def test_a_table_reads_as_it_was_written_and_keeps_what_was_not_measured_again(tmp_path: Path) -> None:
    other = replace(TORCH, traits={"tokens": (9, 16), "k": (64, 64)})
    path = tmp_path / "table.json"
    path.write_text(TunedTable("a device", (TORCH, other)).dump())
    held = TunedTable.load(path)
    assert sorted(held.entries, key=lambda e: e.traits["tokens"]) == [TORCH, other] and held.device == "a device"
    again = TunedTable("a device", (replace(TORCH, kernel="cpu.linear"),)).over(held)
    assert {(e.kernel, e.traits["tokens"]) for e in again.entries} == {
        ("cpu.linear", (1, 8)),
        ("torch.linear", (9, 16)),
    }


@pytest.mark.parametrize(
    "broken",
    [
        "", "{", "[]", '{"device": "cpu"}', '{"device": "cpu", "entries": null}', '{"device": "cpu", "entries": "abc"}',
        {"us": float("nan")}, {"us": -1}, {"us": "x"}, {"traits": {"tokens": "18"}}, {"traits": {"tokens": [1]}},
        {"traits": {"tokens": [8, 1]}}, {"traits": {"tokens": [True, 2]}}, {"signature": ["a"]},
    ],
)  # fmt: skip
def test_a_damaged_table_is_refused_by_name(broken: str | dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    entry = {"op": "linear", "signature": {}, "traits": {}, "kernel": "torch.linear", "us": 1.0}
    path.write_text(broken if isinstance(broken, str) else json.dumps({"device": "", "entries": [entry | broken]}))
    with pytest.raises(tuned.SettingsError, match=r"tuned table .*table\.json.*kernels tune"):
        TunedTable.load(path)


def test_settings_that_cannot_be_end_a_compilation_and_not_an_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is bound is checked without asking what would be chosen now."""
    asked = ["compile", str(tiny_model(tmp_path / "model")), "--device", "cpu", "--buckets", "1", "--no-certificate"]
    assert main([*asked, "-o", str(tmp_path / "whole")]) == 0
    (tmp_path / "table.json").write_text("{")
    for variable, value, word in (
        ("TOKENSPEED_KERNEL_TUNED", str(tmp_path / "table.json"), "tuned table"),
        ("TOKENSPEED_KERNEL_CONFIG", str(tmp_path / "none.json"), "kernel config file"),
        ("TOKENSPEED_KERNEL_OVERRIDE_GEMM_LINEAR", "quick", "'quick'"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            capsys.readouterr()
            assert main([*asked, "-o", str(tmp_path / "none")]) == 1
            assert word in capsys.readouterr().err
            options = {"core": "inproc", "num_pages": 8, "max_num_seqs": 1, "max_num_batched_tokens": 1}
            with Engine(model=str(tmp_path / "whole"), **options) as engine:
                params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
                assert len(engine.generate(input_ids=[5], sampling_params=params).token_ids) == 2


def test_one_rank_is_timed_and_a_table_has_a_place_to_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_model(tmp_path / "model"))
    (tmp_path / "other.json").write_text("{}")
    asked = [model, "--device", "cpu", "--buckets", "1", "--num-pages", "4", "--context", "9"]
    for more, word in (
        (["bench", *asked, "-tp", "2"], "one rank"), (["tune", *asked, "--mesh", "dp=2", "--out", str(tmp_path / "t.json")], "one rank"),
        (["bench", *asked, "--context", "100"], "--context"), (["tune", *asked, "--out", str(tmp_path)], "--out"),
        (["tune", *asked, "--out", str(tmp_path / "other.json")], "tuned table"),
        (["tune", *asked, "--out", str(tmp_path / "other.json" / "x.json")], "--out"),
        (["verify", "--cache", str(tmp_path / "other.json")], "--cache"),
    ):  # fmt: skip
        assert main(["kernels", *more]) == 2
        assert word in capsys.readouterr().err


def request(tokens: int, k: int = 64) -> str:
    return f"linear|out=float32|w=float32|x=float32|k={k}|n=32|tokens={tokens}"


def test_the_fastest_of_the_kernels_of_one_exactness_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are played: each candidate has its turn, and what it takes is known."""
    takes = {("first", 1): 5.0, ("second", 1): 4.0, ("first", 8): 6.0, ("second", 8): 7.0, ("third", 8): 5.5}
    able = {1: ["first", "second"], 8: ["first", "second", "third"]}

    def played(
        config: EngineConfig, context: int, table: Path | None, say: Callable[[str], None]
    ) -> tuple[list[Timed], str]:
        assert config.model == "some" and context == 77
        out = []
        for tokens in (1, 8):
            kernel = able[tokens][0]
            if table is not None:
                advice = TunedTable.load(table).advice("linear", SIGNATURE, {"tokens": tokens, "k": 64, "n": 32})
                kernel = advice[0] if advice else kernel
            out.append(Timed(tokens, request(tokens), kernel, 3, takes[kernel, tokens]))
        out.append(Timed(8, request(8, k=128), "only", 1, 1.0))
        return out, "cpu"

    monkeypatch.setattr(tuning, "_round", played)
    monkeypatch.setattr(tuning, "_candidates", lambda t, _device: ["only"] if "k=128" in t.request else able[t.bucket])
    table = tuning.tune(EngineConfig("some"), 77)
    found = {e.traits["tokens"]: (e.kernel, e.microseconds) for e in table.entries}
    assert found == {(1, 1): ("second", 4.0), (2, 8): ("third", 5.5)}
    assert all(e.traits["k"] == (64, 64) and e.signature == SIGNATURE for e in table.entries)


@pytest.mark.parametrize(("product", "kernel", "takes"), [(2.0, tuning.APART, 4.5), (5.0, "fused", 6.0)])
def test_a_gated_product_is_taken_apart_where_that_is_faster(
    product: float, kernel: str, takes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four fused calls of 6 us for four products and, of equal shape, two activations of 5 us."""
    gated = "linear_silu_mul|out=float32|w=float32|x=float32|k=64|n=32|tokens=8"

    def played(_config: EngineConfig, _context: int, table: Path | None, _say: object) -> tuple[list[Timed], str]:
        kept = [Timed(8, request(8), "only", 1, 1.0)]
        advice = TunedTable.load(table).entries if table else ()
        if not advice:
            return [*kept, Timed(8, gated, "fused", 4, 6.0)], "cpu"
        assert [(e.op, e.kernel) for e in advice] == [("linear_silu_mul", tuning.APART)]
        activation = Timed(8, "silu_mul|out=float32|x=float32|tokens=8", "act", 2, 5.0)
        return [*kept, Timed(8, request(8, k=65), "some", 4, product), activation], "cpu"

    monkeypatch.setattr(tuning, "_round", played)
    monkeypatch.setattr(tuning, "_candidates", lambda t, _device: [t.kernel])
    (entry,) = tuning.tune(EngineConfig("some"), 77).entries
    assert (entry.op, entry.kernel, entry.microseconds) == ("linear_silu_mul", kernel, takes)


def test_kernels_that_round_activations_do_not_stand_for_exact_ones() -> None:
    quantised = "linear|out=float32|w=q4_1|x=float32|k=64|n=32|tokens=1"
    names = tuning._candidates(Timed(1, quantised, "cpu.linear", 1, 1.0), "cpu")
    assert names[0] == "cpu.linear" and not any("int8" in n or n.startswith("reference") for n in names)
    gpu = "linear|out=bfloat16|w=bfloat16|x=bfloat16|k=64|n=32|tokens=16"
    assert set(tuning._candidates(Timed(1, gpu, "triton.linear", 1, 1.0), "cuda:90")) == {
        "triton.linear",
        "cublas.linear",
    }
