"""A model compiled for a GPU, run whole on CPU: its Triton kernels in the interpreter, the executor's ring and feedback as
they are, a graph replayed as its calls; run by test_triton_interpret.py in a process of its own."""

from __future__ import annotations

import tests.kernels.interpreter  # isort: skip  # noqa: F401

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.compiler.api import compile_model
from tokenspeed.compiler.artifact import load_artifact
from tokenspeed.ir.ops.sampling import PARAM_WORDS, Flag, Word
from tokenspeed.models import find_family
from tokenspeed.runtime import cuda_executor
from tokenspeed.runtime.checkpoint import DummyCheckpoint
from tokenspeed.runtime.cuda_executor import CudaExecutor
from tokenspeed.runtime.executor import Executor, RankConfig, Step
from tokenspeed.runtime.progress import silent

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 203,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
CHAINED = CONFIG | {"hidden_size": 64, "intermediate_size": 128}  # wide enough for what fuses two layers
SINKS = CONFIG | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": 3, "num_local_experts": 4,
    "num_experts_per_tok": 2, "swiglu_limit": 1.0, "attention_bias": True,
}  # fmt: skip
GEMMA = CONFIG | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 3, "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
}  # fmt: skip
PAGE, PAGES = 4, 24


class _Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Host:
    """Stands in for the device: work is done when it is asked for."""

    device = torch.device("cpu")

    def current(self) -> Any:
        return contextlib.nullcontext()

    def event(self) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def capture(self, step: Callable[[], None]) -> Callable[[], object]:
        return step


class _Interpreted(CudaExecutor):
    gpu_type = _Host


def _executor(kind: type[Executor], device: str, folder: Path, dtype: str, config: dict[str, Any] = CONFIG) -> Executor:
    compiled = compile_model(
        find_family(config["architectures"][0]), config, dtype=dtype, cache_dtype=dtype, buckets=(1, 2, 4, 8), max_rows=4,
        device=device,
    )  # fmt: skip
    artifact = load_artifact(compiled.write(folder / device.replace(":", "-")))
    return kind(
        RankConfig("", {}, 0, PAGE, PAGES, 64, 1, window_pages=PAGES), artifact, DummyCheckpoint(config, 3), silent
    )


def _step(rows: list[tuple[int, int, list[int]]], bucket: int, variant: str, flags: int) -> Step:
    """rows: (request slot, first position, ids)."""
    tables = np.arange(8, dtype=np.int32).reshape(4, 2)[:, ::-1] * 2 + 1
    groups = {"": tables, "window_": tables - 1}
    s = min(bucket, 4)
    arrays = {n: np.full(bucket, -1, np.int32) for n in ("ids", "pos", "slot", "window_slot", "row")}
    arrays |= {n: np.full(s, -1, np.int32) for n in ("last", "request_slots")}
    arrays |= {n: np.zeros((s, 2), np.int32) for n in ("table", "window_table")}
    params = np.zeros((s, PARAM_WORDS), np.int32)
    at = 0
    for i, (slot, start, ids) in enumerate(rows):
        for j, token in enumerate(ids):
            p = start + j
            arrays["ids"][at], arrays["pos"][at], arrays["row"][at] = token, p, i
            for prefix, table in groups.items():
                arrays[f"{prefix}slot"][at] = table[slot, p // PAGE] * PAGE + p % PAGE
            at += 1
        arrays["last"][i], arrays["request_slots"][i] = at - 1, slot
        for prefix, table in groups.items():
            arrays[f"{prefix}table"][i] = table[slot]
        params[i, Word.FLAGS] = flags
        params[i, Word.SEED_LO], params[i, Word.POSITION], params[i, Word.SLOT] = 7 + slot, start + len(ids), slot
        params[i, Word.TEMPERATURE] = np.float32(0.8).view(np.int32)
    return Step(bucket, s, variant, arrays, params, [])


def _steps() -> list[tuple[str, Step]]:
    """Two prompts of 3 and 5 tokens in one step, then decodes whose ids wait for the step before, then one request alone
    with log-probabilities."""
    greedy, random = int(Flag.VALID | Flag.GREEDY), int(Flag.VALID)
    return [
        ("prompts", _step([(2, 0, [5, 9, 20]), (0, 0, [1, 2, 3, 4, 150])], 8, "gumbel", greedy)),
        ("decode", _step([(0, 5, [-1]), (2, 3, [-3])], 2, "gumbel", greedy)),
        ("sampled", _step([(2, 4, [-3]), (0, 6, [-1])], 4, "gumbel", random)),
        ("alone", _step([(0, 7, [-1])], 1, "full", greedy | int(Flag.LOGPROBS))),
    ]


@pytest.mark.parametrize(
    ("dtype", "config"),
    [("float32", CONFIG), ("bfloat16", CONFIG), ("bfloat16", CHAINED), ("float32", GEMMA), ("float32", SINKS)],
    ids=["f32", "bf16", "chained", "gemma3", "gpt_oss"],
)
def test_tokens_equal_those_of_the_cpu(dtype: str, config: dict[str, Any], tmp_path: Path) -> None:
    cpu = _executor(Executor, "cpu", tmp_path, dtype, config)
    gpu = _executor(_Interpreted, "cuda:90", tmp_path, dtype, config)
    assert isinstance(gpu, CudaExecutor)
    assert any(k.startswith("linear_chain|") for k in gpu.program("gumbel", 8).requests) == (config is CHAINED)
    for name, step in _steps()[: 2 if config in (GEMMA, SINKS) else 4]:  # the sampler is the same
        want, pending = cpu.run(step), gpu.launch(step)
        got = pending()
        live = step.arrays["last"] >= 0
        assert got.tokens[live].tolist() == want.tokens[live].tolist(), name
        if want.logprobs is not None:
            assert got.logprobs is not None
            np.testing.assert_allclose(
                got.logprobs[live], want.logprobs[live], atol=1e-4 if dtype == "float32" else 0.1
            )


def test_a_chunk_in_a_bucket_of_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as tokens, and one request of three: the graph that takes them together runs, with equal tokens."""
    monkeypatch.setattr(cuda_executor, "CHUNK", 4)
    cpu = _executor(Executor, "cpu", tmp_path, "bfloat16")
    gpu = _executor(_Interpreted, "cuda:90", tmp_path, "bfloat16")
    assert isinstance(gpu, CudaExecutor) and gpu.mixed == {4}
    ran: list[str] = []
    for name, graphs in (("alone", gpu.replays), ("together", gpu.chunked)):
        for key, replay in list(graphs.items()):
            graphs[key] = lambda name=name, replay=replay: (ran.append(name), replay())
    greedy = int(Flag.VALID | Flag.GREEDY)
    for rows in ([(2, 0, [5, 9, 20]), (0, 0, [7])], [(2, 3, [4]), (0, 1, [8]), (1, 0, [3]), (3, 0, [2])]):
        step = _step(rows, 4, "gumbel", greedy)
        want, got = cpu.run(step), gpu.run(step)
        live = step.arrays["last"] >= 0
        assert got.tokens[live].tolist() == want.tokens[live].tolist()
    assert ran == ["together", "alone"]


def test_two_steps_in_flight(tmp_path: Path) -> None:
    """The second step is launched before the first one's tokens are read, and takes them on the device."""
    cpu = _executor(Executor, "cpu", tmp_path, "float32")
    gpu = _executor(_Interpreted, "cuda:90", tmp_path, "float32")
    steps = [s for _, s in _steps()][:3]
    pending = [gpu.launch(s) for s in steps]
    for step, wait in zip(steps, pending, strict=True):
        live = step.arrays["last"] >= 0
        assert wait().tokens[live].tolist() == cpu.run(step).tokens[live].tolist()
