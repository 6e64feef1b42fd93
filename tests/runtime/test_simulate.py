"""The simulator: its traffic is what is said of it, its clock adds up, and the same run gives the same figures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenspeed.cli import main
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.simulate.costs import Machine
from tokenspeed.runtime.simulate.plot import svg
from tokenspeed.runtime.simulate.report import as_table, figures
from tokenspeed.runtime.simulate.virtual import Outcome, Policy, Simulation
from tokenspeed.runtime.simulate.workload import Session, Traffic, Turn, draw, sessions, sub_agents

SMALL = Traffic(sessions=24, max_steps=8, length_scale=0.01, human_scale=0.01, arrivals_per_minute=60)
MACHINE = Machine(kv_bytes=1 << 20, storage_gbs=40.0)
POLICY = Policy(
    device_gib=8.0, host_gib=24.0, storage_gib=64.0, page_size=16, max_model_len=4096, max_num_seqs=4,
    max_num_batched_tokens=512, storage_min_pages=1,
)  # fmt: skip


def run(**changes: Any) -> Outcome:
    return Simulation(SMALL, MACHINE, replace(POLICY, **changes)).run()


@pytest.fixture(scope="module")
def base() -> Outcome:
    return run()


def test_traffic_has_the_distributions_that_it_is_drawn_from() -> None:
    drawn = sessions(Traffic(sessions=600, max_steps=400), 1 << 30)
    turns = [t for s in drawn for t in s.turns]
    later = np.array([t.appended for s in drawn for t in s.turns[1:]])
    first = np.array([s.turns[0].appended + s.prefix for s in drawn])
    assert 13 <= np.median([len(s.turns) for s in drawn]) <= 18
    assert 105 <= np.percentile([len(s.turns) for s in drawn], 90) <= 165
    assert 76_000 <= np.median(first) <= 84_000
    assert 850 <= np.median(later) <= 1_100 and later[later >= 10_000].sum() > 0.65 * later.sum()
    assert 195 <= np.median([t.output for t in turns]) <= 235
    tool = np.array([t.gap for s in drawn for t in s.turns[1:] if not t.by_user])
    assert 0.25 <= np.median(tool) <= 0.4 and 0.03 <= (tool > 60).mean() <= 0.06
    assert 7.2 <= len(turns) / sum(t.by_user for t in turns) <= 9.5
    assert {15_000 <= s.prefix <= 25_000 for s in drawn} == {True}
    assert 0.08 <= np.mean([any(t.kept < 1 for t in s.turns) for s in drawn]) <= 0.16


def test_sessions_share_the_prefix_of_their_kind_and_grow_by_what_is_said() -> None:
    drawn = sessions(SMALL, 4096)
    again = sessions(SMALL, 4096)
    by_kind: dict[int, list[np.ndarray]] = {}
    for one, same in zip(drawn, again):
        prompt = one.prompt(0)
        assert prompt.tolist() == same.prompt(0).tolist()
        by_kind.setdefault(one.kind, []).append(prompt[: one.prefix])
    assert len(by_kind) == 2
    for kind in by_kind.values():
        assert all((p == kind[0]).all() for p in kind)
    turns = [Turn(0, 30, 5, True), Turn(1, 4, 5, False), Turn(1, 4, 5, False, kept=0.3), Turn(1, 60, 5, False)]
    session = Session(1, 0, 0.0, turns, prefix=10, limit=100)
    first, said = session.prompt(0), draw((9,), 5)
    session.said(said)
    assert session.prompt(1).tolist() == [*first, *said, *draw((2, 1, 1), 4)]
    session.said(said)
    compacted = session.prompt(2)
    assert compacted[:10].tolist() == first[:10].tolist() and len(compacted) == 4 + int(54 * 0.3)
    session.said(said)
    last = session.prompt(3)
    assert len(last) <= 95 and last[-60:].tolist() == draw((2, 1, 3), 60).tolist(), "room for the answer"
    agents = list(sub_agents(SMALL, drawn[0], 2, 7.0, 3))
    assert [a.kind for a in agents] == [drawn[0].kind] * 3 and len({a.number for a in agents}) == 3


def test_a_request_alone_takes_what_the_machine_says() -> None:
    traffics = (replace(SMALL, sessions=1, max_steps=1, seed=seed) for seed in range(9))
    traffic = next(t for t in traffics if not sessions(t, 4096)[0].turns[0].agents)
    outcome = Simulation(traffic, MACHINE, replace(POLICY, storage_gib=0.0)).run()
    (served,) = outcome.served
    assert figures(outcome)["slowdown_p50"] == pytest.approx(1.0, rel=0.02)
    assert served.first - served.submitted == pytest.approx(MACHINE.alone(0, served.prompt, 1, 512))


def test_a_step_takes_the_longer_of_memory_and_arithmetic() -> None:
    machine = Machine(step_ms=1.0, memory_gbs=1000.0, tflops=100.0, weight_gb=10.0, kv_bytes=1000, attention_flops=0.0)
    assert machine.step([(1, 1)]) == pytest.approx(0.011, rel=1e-3)
    assert machine.step([(1, 10**7)]) == pytest.approx(0.021, rel=1e-3)
    assert machine.step([(10_000, 10_000)]) == pytest.approx(0.001 + 10_000 * 16e9 / 1e14)
    assert machine.transfer("load_back", 10, 10**9) == pytest.approx(0.2, rel=1e-3)
    assert machine.transfer("prefetch", 10, 10**9) == pytest.approx(2.5005)


def test_all_are_served_and_every_hit_is_one_that_could_be(base: Outcome) -> None:
    f = figures(base)
    assert f["requests"] == len(base.served) > 20 and f["output_tokens"] == sum(s.output for s in base.served)
    for s in base.served:
        assert s.submitted < s.first <= s.last and sum(s.cached.values()) <= s.ideal + POLICY.page_size
    assert f["hit_host"] > 0 and f["hit_device"] > 0 and f["hit_total"] <= f["hit_ideal"] < 1
    assert base.busy <= base.seconds and len(base.gaps) == sum(s.output - 1 for s in base.served)
    assert 0 < f["fairness"] <= 1 <= f["slowdown_p90"]


def test_the_same_run_gives_the_same_figures(base: Outcome) -> None:
    again = figures(run())
    assert {k: v for k, v in figures(base).items() if k != "simulation_s"} == {
        k: v for k, v in again.items() if k != "simulation_s"
    }


def test_lower_tiers_find_what_the_device_has_no_room_for(base: Outcome) -> None:
    without, small = run(host_gib=0.0, storage_gib=0.0), run(host_gib=1.0)
    f, none, stored = figures(base), figures(without), figures(small)
    assert f["hit_total"] > none["hit_total"] and none["hit_host"] == none["hit_storage"] == none["write_back_gib"] == 0
    assert stored["hit_storage"] > 0 and stored["prefetch_gib"] > 0
    assert none["requests"] == f["requests"] and none["prompt_tokens"] == f["prompt_tokens"], "the same traffic"


def test_a_storage_of_few_pages_keeps_the_last_used() -> None:
    f = figures(run(host_gib=1.0, storage_gib=0.5))
    assert f["hit_storage"] < figures(run(host_gib=1.0))["hit_storage"]


def test_the_report_and_the_plot(base: Outcome) -> None:
    rows = [{"name": "base & more", **figures(base)}, {"name": "b", **figures(base)}]
    table = as_table(rows).splitlines()
    assert "base & more" in table[0] and len({len(line) for line in table}) == 1
    text = svg([("base & <more>", base), ("b", base)])
    root = ET.fromstring(text)
    assert len(root.findall(".//{*}polyline")) == 6 and text == svg([("base & <more>", base), ("b", base)])
    for line in root.findall(".//{*}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 900 and 0 <= y <= 200


ARGUMENTS = "simulate --sessions 3 --max-steps 3 --length-scale 0.02 --max-model-len 4096 --device-gib 1 --host-gib 1 --page-size 16"


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    more = ["--vary", "host_gib=0,storage_gib=0", "--calibration", "h200", "--json", "-", "--plot", str(plot)]
    assert main([*ARGUMENTS.split(), *more]) == 0
    base, varied = json.loads(capsys.readouterr().out)
    assert (base["name"], varied["name"]) == ("base", "host_gib=0, storage_gib=0")
    assert base["policy"]["host_gib"] == 1.0 and varied["policy"]["host_gib"] == 0.0
    assert base["requests"] == varied["requests"] > 3 and ET.parse(plot)
    assert main([*ARGUMENTS.split(), "--json", str(tmp_path / "f.json")]) == 0
    assert "by a cache without end" in capsys.readouterr().out and json.loads((tmp_path / "f.json").read_text())


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["--vary", "pages=3"], "'pages' is none of device_gib"),
        (["--vary", "host_gib=much"], "host_gib takes a number, not 'much'"),
        (["--vary", "host_gib=nan"], "host_gib is nan: give 0 or more"),
        (["--vary", "page_size=0"], "page_size is 0: give more than 0"),
        (["--vary", "host_gib=1,host-gib=0"], "host_gib is there twice"),
        (["--host-gib", "inf"], "--host-gib is inf: give 0 or more"),
        (["--sessions", "0"], "--sessions is 0: give more than 0"),
        (["--host-gib", "-1"], "--host-gib is -1.0: give 0 or more"),
        (["--device-gib", "0.1"], "less than max_model_len=4096"),
        (["--host-gib", "0", "--storage-gib", "1"], "storage_gib needs host_gib"),
        (["--plot", "/nowhere/a.svg"], "cannot write /nowhere/a.svg"),
    ],
)
def test_what_cannot_be_is_refused(given: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS.split(), *given]) == 1
    assert fault in capsys.readouterr().err


def test_storage_needs_host_pages() -> None:
    with pytest.raises(StartupError, match="passes through host pages"):
        run(host_gib=0.0)


@pytest.mark.parametrize(("device", "host", "storage"), [("2.01", "1", "1"), ("2.5", "1", "1"), ("2.01", "1", "0")])
def test_pools_that_one_request_nearly_fills_serve_them_all(
    device: str, host: str, storage: str, tmp_path: Path
) -> None:
    few = ["--sessions", "5", "--max-steps", "10", "--max-model-len", "16384"]
    pools = ["--device-gib", device, "--host-gib", host, "--storage-gib", storage]
    assert main(["simulate", *few, *pools, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())
