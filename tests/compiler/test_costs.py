"""Calibration: what `tokenspeed calibrate` writes is a table that compiles; what is no table is an error that says why."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.sim import compile_tiny, tiny
from tests.compiler.test_compile_time import config
from tokenspeed.cli import main
from tokenspeed.compiler.costs import SHARES, load_costs, parse_costs
from tokenspeed.compiler.passes.repair import TIE
from tokenspeed.ir.errors import PlanError

TABLE: dict[str, Any] = {
    "id": "x", "alpha_us": {"2": 10, "8": 20}, "beta_gbs": 2.0, "memory_gbs": 10.0, "tflops": 1.0, "launch_us": 1.0,
}  # fmt: skip


def test_a_measured_table_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.json"
    assert main(["calibrate", "-o", str(file), "--ranks", "2", "--runs", "2"]) == 0
    assert "2 ranks: all_reduce " in capsys.readouterr().out
    costs = load_costs(str(file))
    assert costs.id == "here" and set(costs.measured) == set(SHARES)
    for op in SHARES:
        alpha, beta = costs.fit(op, 2)
        assert alpha > 0 and beta > 0
        assert costs.collective(op, 2, 1 << 20) > costs.collective(op, 2, 1 << 10) > alpha
    r = compile_tiny(tiny(), "tp=2", "", [(8, 4)], costs, ("gumbel",))
    assert r.explain["gumbel.t8"]["collectives"] >= 5


@pytest.mark.parametrize("table", ["cpu", "h200"])
def test_prices_add_up_alike_in_any_order(table: str) -> None:
    """So plans of one price are found to be of one price, and the solver's ties are ties."""
    costs, rng = load_costs(table), random.Random(3)
    prices = [costs.collective(op, n, rng.uniform(1, 1e9)) for op in SHARES for n in (2, 4, 8) for _ in range(40)]
    prices += [costs.compute(rng.uniform(1, 1e9), rng.uniform(1, 1e12), 3) + TIE for _ in range(40)]
    shuffled = rng.sample(prices, len(prices))
    assert sum(prices) == sum(reversed(prices)) == sum(shuffled)


def test_projections_that_ranks_of_cp_repeat_are_a_small_part_of_a_long_prefill() -> None:
    """Llama-3.1-8B on TP4 x CP2, 8,192 rows behind 131,072 positions: what spreading them over cp would save of a layer."""
    c, costs, rows, tp, cp = config("llama-3.1-8b"), load_costs("h200"), 8192, 4, 2
    h, n, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    d, f = h // n, c["intermediate_size"]
    projections = costs.compute(0, rows * h * (2 * n + 2 * kv) * d / tp, 0)
    gather = costs.collective("all_gather", cp, 2 * rows * (n + 2 * kv) * d / tp)
    saved = projections * (1 - 1 / cp) - gather
    attention = costs.compute(0, rows * (131072 / cp) * (n / tp) * 2 * d, 0)
    layer = attention + projections + costs.compute(0, rows * 3 * h * f / (tp * cp), 0)
    assert (round(projections / 2), round(gather)) == (110, 46)
    assert 0 < saved < 0.02 * layer


@pytest.mark.parametrize("words", [["--ranks", "1"], ["--ranks", "two"], ["--runs", "0"]])
def test_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["calibrate", "-o", str(tmp_path / "x.json"), *words]) == 1
    assert "give group sizes of 2 or more" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_a_file_that_cannot_be_written_is_known_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "-o", str(tmp_path / "no" / "x.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_prices_follow_the_table() -> None:
    plain = parse_costs(TABLE)
    assert plain.collective("all_reduce", 2, 1000) == pytest.approx(10 + 2 * 0.5 * 1000 / 2000)
    assert plain.collective("all_gather", 4, 1000) == pytest.approx(20 + 0.75 * 1000 / 2000)  # the next larger group
    assert plain.collective("all_gather", 16, 0) == 20
    own = parse_costs(TABLE | {"collectives": {"all_gather": {"2": {"alpha_us": 3, "gbs": 1.0}}}})
    assert own.collective("all_gather", 2, 1000) == pytest.approx(3 + 0.5) and own.fit("all_reduce", 2) == (10, 2.0)


def test_prices_decide() -> None:
    """Where a scatter and a gather cost less than one all-reduce, they replace it."""
    cheap = {op: {"4": {"alpha_us": 1000 if op == "all_reduce" else 1, "gbs": 1.0}} for op in SHARES}
    e = compile_tiny(tiny(), "tp=4", "", [(8, 4)], parse_costs(TABLE | {"collectives": cheap}), ("gumbel",)).explain[
        "gumbel.t8"
    ]
    ops = {r["op"] for r in e["redistributions"] if "argmax" not in r["from"]}
    assert {"reduce_scatter", "all_gather"} <= ops and "all_reduce" not in ops


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"beta_gbs": 0}, "no positive number"), ({"tflops": "fast"}, "no positive number"), ({"alpha_us": {}}, "alpha_us is empty"),
        ({"launch_us": None}, "no positive number"), ({"collectives": {"broadcast": {}}}, "names 'broadcast'"),
        ({"alpha_us": {"two": 1}}, "invalid literal"), ({"collectives": {"all_reduce": {"2": {"gbs": 1}}}}, "alpha_us"),
    ],
)  # fmt: skip
def test_what_is_no_table(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps(TABLE | change))
    with pytest.raises(PlanError, match=word) as e:
        load_costs(str(file))
    assert e.value.code == "P035"


def test_a_table_that_is_not_there_lists_the_shipped_ones() -> None:
    with pytest.raises(PlanError, match="shipped: cpu, h200"):
        load_costs("h300")
