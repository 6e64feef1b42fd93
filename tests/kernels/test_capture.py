"""Replays: the calls of a sequence in order, native and Python ones mixed, on static tensors whose contents change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e2e.tiny import tiny_config
from tests.kernels.support import quantised
from tokenspeed import _cpu
from tokenspeed import kernels as K
from tokenspeed.compiler.api import compile_model
from tokenspeed.compiler.artifact import load_artifact
from tokenspeed.ir.ops.sampling import PARAM_WORDS, Flag
from tokenspeed.models import find_family
from tokenspeed.runtime.checkpoint import DummyCheckpoint
from tokenspeed.runtime.executor import Executor, RankConfig, Step
from tokenspeed.runtime.progress import silent


def test_a_replay_equals_the_calls_one_by_one() -> None:
    weight = K.get("cpu.linear").pack(quantised("q4_1", 48, 64)[0])
    x, a, b, c, d = (torch.zeros(3, n) for n in (64, 48, 48, 48, 48))
    ones = torch.ones(48)
    calls = [
        (K.get("cpu.linear"), (x, weight, None), {"out": a}),
        (K.get("cpu.rms_norm"), (a, ones), {"eps": 1e-5, "out": b}),
        (K.get("cpu.fill"), (b,), {"start": 40, "value": 2.0, "out": c}),  # a Python kernel between native ones
        (K.get("cpu.silu_mul"), (c, a), {"out": d}),
        (K.get("cpu.add"), (d, b), {"out": d}),
    ]
    replay = K.record(calls)
    assert (replay.calls, replay.native_calls, len(replay.steps)) == (5, 4, 3)
    assert not a.any() and not d.any()  # recording runs nothing
    for _ in range(3):
        x.normal_()
        replay()
        got = d.clone()
        for spec, args, kwargs in calls:
            spec.fn(*args, **kwargs)
        assert torch.equal(got, d) and got.any()


def test_a_replay_keeps_its_tensors_alive() -> None:
    x, out = torch.randn(1000, 100), torch.empty(1000, 100)
    replay = K.record([(K.get("cpu.add"), (x.clone(), x.clone()), {"out": out})])
    junk = [torch.full((1000, 100), float("nan")) for _ in range(8)]
    replay()
    assert torch.equal(out, x + x) and len(junk) == 8


def test_a_failed_recording_leaves_nothing_behind() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match="pointwise"):
        K.record([(K.get("cpu.add"), (x, x), {"out": torch.empty(2, 5)})])
    out = torch.empty(2, 4)
    K.get("cpu.add").fn(x, x, out=out)
    assert torch.equal(out, x + x)


def test_captures_do_not_nest() -> None:
    _cpu.begin_capture()
    try:
        with pytest.raises(RuntimeError, match="already capturing"):
            _cpu.begin_capture()
    finally:
        assert len(_cpu.end_capture()) == 0
    with pytest.raises(RuntimeError, match="not capturing"):
        _cpu.end_capture()


def test_every_kernel_marked_native_is_one() -> None:
    """A native kernel must leave its outputs alone while it is recorded."""
    marked = {spec.name for spec in K.default_registry() if spec.native}
    assert {"cpu.linear", "cpu.linear_int8", "cpu.attend", "cpu.append", "cpu.sample", "cpu.gumbel_argmax"} <= marked
    assert not {"cpu.fill", "cpu.merge_argmax", "torch.linear", "gloo.all_reduce", "reference.linear"} & marked
    x = torch.randn(2, 8)
    for name in ("add", "mul", "silu_mul"):
        out = torch.zeros(2, 8)
        K.record([(K.get(f"cpu.{name}"), (x, x), {"out": out})])
        assert not out.any()


def test_the_graph_of_an_emitted_program_makes_the_calls_of_its_replay(tmp_path: Path) -> None:
    """Both on one step's ports: one token of a request, sampled greedily."""
    config = tiny_config()
    compiled = compile_model(find_family(config["architectures"][0]), config, buckets=(1, 4), max_rows=2)
    rank = RankConfig("", {}, 0, 4, 8, 32, 1)
    executor = Executor(rank, load_artifact(compiled.write(tmp_path)), DummyCheckpoint(config, 3), silent)
    arrays = {"ids": [7], "pos": [0], "slot": [5], "row": [0], "last": [0], "request_slots": [0], "table": [[1]]}
    params = np.zeros((1, PARAM_WORDS), np.int32)
    params[0, 0] = int(Flag.VALID | Flag.GREEDY)
    step = Step(1, 1, "gumbel", {k: np.array(v, np.int32) for k, v in arrays.items()}, params, [])
    token = executor.run(step).tokens.tolist()
    program = executor.program("gumbel", 1)
    kernels = [n for n in program.module.graph.nodes if n.op == "call_function"]
    assert len(kernels) == program.replay.calls and all(n.meta["kernel"] for n in kernels)
    program.results[0].fill_(-1)
    program.module()
    assert program.results[0][:1].tolist() == token
