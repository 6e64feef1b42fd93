"""The thread pool and the choice of instruction set: sizes, concurrent callers, forks, settings by the environment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from tokenspeed import _cpu
from tokenspeed import kernels as K


def linear(x: torch.Tensor, packed: K.PackedWeight) -> torch.Tensor:
    out = torch.empty(x.shape[0], packed.n)
    K.get("cpu.linear").fn(x, packed, None, out=out)
    return out


@pytest.fixture
def three_threads() -> object:
    before = _cpu.threads()
    _cpu.set_threads(3)
    yield
    _cpu.set_threads(before)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )


def test_sizes() -> None:
    before = _cpu.threads()
    try:
        _cpu.set_threads(0)
        assert _cpu.threads() == _cpu.available_threads() == len(os.sched_getaffinity(0))
        _cpu.set_threads(5)
        assert _cpu.threads() == 5
        for bad in (-1, 1025):
            with pytest.raises(ValueError, match=r"0 .* to 1024"):
                _cpu.set_threads(bad)
        assert _cpu.threads() == 5
    finally:
        _cpu.set_threads(before)


def test_concurrent_callers_and_resizes_get_right_answers(three_threads: object) -> None:
    packed = K.get("cpu.linear").pack(torch.randn(300, 256))
    inputs = [torch.randn(4, 256) for _ in range(4)]
    want = [linear(x, packed) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(200) if not torch.equal(linear(inputs[i], packed), want[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for size in (1, 4, 2, 3):
        _cpu.set_threads(size)
    for thread in threads:
        thread.join()
    assert not wrong


def test_more_threads_than_processors_lose_no_wake_up() -> None:
    """Workers and callers block and are woken all the time; every call returns, and right."""
    before = _cpu.threads()
    packed = K.get("cpu.linear").pack(torch.randn(2048, 1024))
    x = torch.randn(4, 1024)
    want = linear(x, packed)
    try:
        _cpu.set_threads(4 * len(os.sched_getaffinity(0)))
        assert all(torch.equal(linear(x, packed), want) for _ in range(1000))
    finally:
        _cpu.set_threads(before)


def test_more_items_than_a_ticket_holds(three_threads: object) -> None:
    z = torch.randn(70_000, 3)
    index = torch.empty(70_000, dtype=torch.int32)
    K.get("cpu.argmax").fn(z, out=(torch.empty(70_000), index))
    assert torch.equal(index.long(), z.argmax(1))


def test_a_forked_child_has_its_own_workers(three_threads: object) -> None:
    packed = K.get("cpu.linear").pack(torch.randn(300, 256))
    x = torch.randn(4, 256)
    want = linear(x, packed)
    pid = os.fork()
    if pid == 0:
        ok = _cpu.threads() == 3 and torch.equal(linear(x, packed), want)
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(linear(x, packed), want)


def test_environment_variables() -> None:
    done = run_python("from tokenspeed import _cpu; print(_cpu.threads(), _cpu.isa())",
                      TOKENSPEED_NUM_THREADS="7", TOKENSPEED_CPU_ISA="portable")  # fmt: skip
    assert done.stdout.split() == ["7", "portable"], done.stderr
    done = run_python("from tokenspeed import _cpu; _cpu.threads()", TOKENSPEED_NUM_THREADS="two")
    assert "TOKENSPEED_NUM_THREADS must be a number from 1 to 1024, got 'two'" in done.stderr
    done = run_python("from tokenspeed import _cpu; _cpu.isa()", TOKENSPEED_CPU_ISA="mmx")
    assert "unknown or unsupported instruction set 'mmx'; this machine supports: portable" in done.stderr


def test_unknown_isa_is_refused_and_nothing_changes() -> None:
    before = _cpu.isa()
    with pytest.raises(ValueError, match="this machine supports: portable"):
        _cpu.set_isa("neon9")
    assert _cpu.isa() == before


def test_read_sum_reads_every_word() -> None:
    data = torch.randint(0, 2**31, (300_000 // 64 * 16,), dtype=torch.int32)
    want = int(data.view(-1, 16).long().sum())
    got = _cpu.read_sum(data.data_ptr(), data.numel() * 4)
    assert (got - want) % 2**32 == 0
