"""Work on several processes: results in order and alike for any number of jobs, failures not lost."""

from __future__ import annotations

import argparse
import os

import pytest

from tokenspeed.compiler.fuzz import fuzz
from tokenspeed.compiler.mutate import run
from tokenspeed.ir.jobs import add_jobs, add_part, each, part_of


def _slow_when_small(i: int) -> tuple[int, int]:
    for _ in range(200_000 // (i + 1)):
        pass
    return i, os.getpid()


def _fails(i: int) -> int:
    if i == 3:
        raise ValueError("three")
    return i


def test_results_come_in_the_order_of_the_items_from_other_processes() -> None:
    found = list(each(_slow_when_small, range(12), 2, chunk=2))
    assert [i for i, _ in found] == list(range(12))
    assert os.getpid() not in {pid for _, pid in found}
    assert {pid for _, pid in each(_slow_when_small, range(3), 1)} == {os.getpid()}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_caller_may_stop_and_an_error_reaches_it(jobs: int) -> None:
    results = each(_fails, range(100), jobs)
    assert [next(results) for _ in range(2)] == [0, 1]
    results.close()
    with pytest.raises(ValueError, match="three"):
        list(each(_fails, range(6), jobs))


def test_the_fuzzer_and_the_mutants_are_the_same_on_two_processes() -> None:
    assert fuzz(24, seed=4000, jobs=1) == fuzz(24, seed=4000, jobs=2)
    one, two = (run(20, (), per_program=4, seed=4000, jobs=n) for n in (1, 2))
    assert one == two
    assert one.killed > 0


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_number_of_jobs_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_jobs(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--jobs", text])
    assert "give 1 or more" in capsys.readouterr().err


def test_parts_are_disjoint_and_together_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_part(parser)
    parts = [part_of(range(11), parser.parse_args(["--part", f"{i}/4"]).part) for i in range(4)]
    assert [list(p) for p in parts[::3]] == [[0, 4, 8], [3, 7]]
    assert (
        sorted(i for p in parts for i in p) == list(range(11)) == list(part_of(range(11), parser.parse_args([]).part))
    )
    for wrong in ("4/4", "0/0", "1", "-1/2"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--part={wrong}"])
        assert "give I/N" in capsys.readouterr().err
