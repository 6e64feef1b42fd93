"""One request with a field beyond its machine word ends that request at most; the engine goes on. A rank that dies is named."""

from __future__ import annotations

import multiprocessing
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.e2e.models import write_tiny
from tokenspeed import Engine, SamplingParams
from tokenspeed.runtime.build import build_engine
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.core import EngineLoop
from tokenspeed.runtime.messages import Control, CoreParams, Deltas, Submit, ToCore, ToFront, packed


class _Inbox:
    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[ToCore] = queue.SimpleQueue()

    def get(self, timeout: float | None) -> ToCore | None:
        return None if self.messages.empty() else self.messages.get()

    def drain(self) -> list[ToCore]:
        return []


class _Outbox:
    def __init__(self) -> None:
        self.sent: list[ToFront] = []

    def put(self, message: ToFront) -> None:
        self.sent.append(message)


def test_values_beyond_a_word_end_one_request_at_most(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "llama")
    built = build_engine(
        EngineConfig(str(model), num_pages=32, max_num_seqs=4, buckets=[1, 4, 16], artifact_cache=str(tmp_path))
    )
    inbox, outbox = _Inbox(), _Outbox()
    loop = EngineLoop(built, 0, inbox, outbox)
    odd = [
        Submit(1, packed([5, 6]), CoreParams(max_tokens=3, temperature=1.0, top_k=2**40)),
        Submit(2, packed([5, 6]), CoreParams(max_tokens=3), priority=2**40),
        Submit(3, packed([5, 6]), CoreParams(max_tokens=3), priority=-(2**40)),
        Submit(4, packed([5, 6]), CoreParams(max_tokens=2**40)),
        Submit(5, packed([5, 6]), CoreParams(max_tokens=3), cache_salt="\ud800"),
        Submit(6, b"\0\0\0\0\0", CoreParams(max_tokens=3)),
        Submit(7, packed([5, 6]), CoreParams(max_tokens=3, temperature=0.0)),
    ]
    for m in odd:
        loop._handle(m)
    while loop._has_work():
        assert loop._launch()
        loop._collect()
    loop._handle(Control(1, "check"))
    built.ranks.close()
    ends = {
        d.request_id: d.finish_reason for m in outbox.sent if isinstance(m, Deltas) for d in m.deltas if d.finish_reason
    }
    assert ends == {1: "length", 2: "error", 3: "error", 4: "error", 5: "error", 6: "error", 7: "length"}


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    """What a collective says of it is that a connection closed; the engine says whose."""
    model = write_tiny(tmp_path / "model", "llama")
    options = {"num_pages": 64, "max_num_seqs": 4, "buckets": [1, 4, 16], "artifact_cache": str(tmp_path)}
    with Engine(model=str(model), mesh="tp=2", core="inproc", load_format="dummy", **options) as engine:
        (worker,) = [p for p in multiprocessing.active_children() if p.name == "tokenspeed-rank1"]
        threading.Timer(0.3, worker.kill).start()
        with pytest.raises(Exception, match="tokenspeed-rank1 ended with exit code -9"):
            for _ in range(100):
                engine.generate(input_ids=[[1, 2, 3]], sampling_params=SamplingParams(max_tokens=100, ignore_eos=True))


def test_a_rank_that_dies_at_the_start_is_told_of(tmp_path: Path) -> None:
    """Each rank imports the script that makes the engine; without a guard it makes one too, and ends."""
    model = write_tiny(tmp_path / "model", "llama")
    script = tmp_path / "script.py"
    script.write_text(f"from tokenspeed import Engine\nEngine(model={str(model)!r}, mesh='tp=2', core='inproc', "
                      f"load_format='dummy', num_pages=64, buckets=[1], artifact_cache={str(tmp_path)!r})\n")  # fmt: skip
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "tokenspeed-rank1 ended with exit code 1 before it could take part" in ended.stderr
    assert 'if __name__ == "__main__"' in ended.stderr
