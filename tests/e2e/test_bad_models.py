"""Configurations, checkpoints and author's files that cannot be: one error each, with the cause and where it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tokenspeed
from tests.compiler.layouts import config
from tests.compiler.sim import compile_tiny
from tokenspeed import Engine
from tokenspeed.cli import main
from tokenspeed.kernels.target import target_of
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.tokenizer import load_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip


def compiled(folder: Path, config: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """What `tokenspeed compile` says of a configuration that it refuses."""
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    code = main(["compile", str(folder), "--buckets", "1", "--device", "cpu", "-o", str(folder / "out")])
    assert code in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", -1), ("num_hidden_layers", 0), ("num_hidden_layers", 1.5), ("num_hidden_layers", "2"),
        ("hidden_size", 0), ("hidden_size", 1e30), ("intermediate_size", 0), ("num_attention_heads", True),
        ("num_key_value_heads", 0), ("vocab_size", -3), ("max_position_embeddings", 0),
        ("max_position_embeddings", 10**9), ("max_position_embeddings", "64"), ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", -1), ("rms_norm_eps", float("nan")), ("rope_theta", 0), ("rope_theta", "x"), ("rope_theta", 1),
        ("attention_bias", "false"), ("mlp_bias", "no"), ("tie_word_embeddings", 1), ("hidden_act", 3), ("rope_parameters", "yarn"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_names_its_field(
    field: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = compiled(tmp_path, CONFIG | {field: value}, capsys)
    assert field in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ("[1]", "no JSON object"), ("null", "no JSON object"), ("[" * 100_000, "not valid JSON"), ("{", "not valid JSON"),
        (CONFIG | {"head_dim": 7}, "must be even"), (CONFIG | {"head_dim": 1}, "must be even"),
        (CONFIG | {"rope_scaling": [1]}, "must be an object"), (CONFIG | {"architectures": "LlamaForCausalLM"}, "architectures"),
        (CONFIG | {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
    ],
)  # fmt: skip
def test_a_configuration_of_another_form(
    config: Any, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert word in compiled(tmp_path, config, capsys)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"rope_type": "divisors"}, "divisors"), ({"rope_type": "divisors", "divisors": []}, "divisors"),
        ({"rope_type": "divisors", "divisors": [1.0] * 3}, "divisors"), ({"rope_type": "divisors", "divisors": [0] * 4}, "divisors"),
        ({"rope_type": "dynamic"}, "factor"), ({"rope_type": "dynamic", "factor": 0.5}, "factor"),
        ({"rope_type": 7}, "rope_type"), ({"rope_type": "default", "rope_theta": 1}, "rope_theta"),
        (YARN | {"attention_factor": "2"}, "attention_factor"), (YARN | {"attention_factor": -1}, "attention_factor"),
        (YARN | {"mscale": "1"}, "mscale"), (YARN | {"mscale_all_dim": [1]}, "mscale_all_dim"), (YARN | {"factor": True}, "factor"),
        (YARN | {"beta_fast": 1, "beta_slow": 32}, "beta_slow"), (YARN | {"truncate": "yes"}, "truncate"),
        (YARN | {"factor": float("inf")}, "factor"), (YARN | {"original_max_position_embeddings": 16.5}, "original_max_position"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor"), (LLAMA3 | {"high_freq_factor": 0}, "high_freq_factor"),
        (LLAMA3 | {"factor": 0.1}, "factor"), (LONG | {"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        (LONG | {"short_factor": []}, "short_factor"), (LONG | {"long_factor": [1.0] * 3}, "long_factor"),
        (LONG | {"long_factor": [float("nan")] * 4}, "long_factor"),
    ],
)  # fmt: skip
def test_ropes_that_cannot_be_name_their_field(
    rope: dict[str, Any], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = compiled(tmp_path, CONFIG | {"rope_scaling": rope}, capsys)
    assert field in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("family", "over", "field"),
    [
        ("GptOssForCausalLM", {"swiglu_limit": 0}, "swiglu_limit"), ("GptOssForCausalLM", {"swiglu_limit": -7.0}, "swiglu_limit"),
        ("GptOssForCausalLM", {"swiglu_limit": "a"}, "swiglu_limit"),
        ("GptOssForCausalLM", {"num_experts_per_tok": 25}, "num_experts_per_tok"),
        ("Gemma3ForCausalLM", {"rope_parameters": [1]}, "rope_parameters"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": "x"}}, "rope_parameters"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": "true"}, "norm_topk_prob"),
        ("Glm4MoeForCausalLM", {"n_group": 5}, "n_group"), ("Glm4MoeForCausalLM", {"topk_group": 9}, "topk_group"),
        ("Qwen3NextForCausalLM", {"intermediate_size": None}, "intermediate_size"), ("Qwen3NextForCausalLM", {"head_dim": 7}, "head_dim"),
        ("Qwen3_5ForCausalLM", {"num_key_value_heads": 7}, "num_key_value_heads=7"),
        ("DeepseekV3ForCausalLM", {"topk_group": 1, "num_experts_per_tok": 7}, "topk_group"),
        ("DeepseekV3ForCausalLM", {"n_shared_experts": -1}, "n_shared_experts"),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {"rope_type": "dynamic", "mscale_all_dim": 1.0}}, "factor"),
    ],
)  # fmt: skip
def test_families_name_the_field(
    family: str, over: dict[str, Any], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = compiled(tmp_path, config(family) | over, capsys)
    assert field in said and "Traceback" not in said


@pytest.mark.parametrize(
    "rope", [{}, {"rope_scaling": {**LONG, "short_factor": [1.0], "long_factor": [2.0], "mscale_all_dim": 1.0}}]
)
def test_no_shared_expert_and_a_scale_beside_longrope_are_possible(rope: dict[str, Any]) -> None:
    given = config("DeepseekV3ForCausalLM") | {"n_shared_experts": 0} | rope
    r = compile_tiny(given, "tp=2", "", [(4, 4)], variants=("gumbel",))
    assert not any("shared" in e.name for e in r.weights.entries)


@pytest.mark.parametrize("device", ["cuda:12", "cuda:0", "cuda:79"])
def test_a_device_s_index_is_no_architecture(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["compile", str(tmp_path), "--device", device, "-o", str(tmp_path / "out")]) in (1, 2)
    assert "cuda:90" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"unknown device|sm_80 or later"):
        target_of(device)


def test_memory_that_cannot_be_had_names_the_options() -> None:
    options = {"core": "inproc", "buckets": [1, 8], "max_num_batched_tokens": 8, "max_num_seqs": 2}
    with pytest.raises(StartupError, match=r"MiB of memory cannot be had .*--page-size"):
        Engine(model="smollm2", device="cpu", page_size=1_000_000, num_pages=2_000, **options)


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_map(index: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "weight_map" in compiled(tmp_path, CONFIG, capsys)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def f(:\n", "SyntaxError"), ("import nothing_of_this_name\n", "ModuleNotFoundError"), ("raise SystemExit(3)\n", "SystemExit"),
        ("Model = 3\n", "no class"), ("class Model: pass\n", "no class"),
        (
            "from tokenspeed.models.llama import CausalLM\n"
            "class Model(CausalLM):\n"
            "    def __init__(self, c):\n"
            "        raise KeyError('oh')\n",
            "model.py:4 cannot be traced: KeyError: 'oh'",
        ),
    ],
)  # fmt: skip
def test_an_authors_file_that_fails(source: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(source)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code = main([
        "compile", f"{tmp_path / 'model.py'}:Model", "--config", str(tmp_path / "config.json"), "--buckets", "1",
        "--device", "cpu", "-o", str(tmp_path / "out"),
    ])  # fmt: skip
    assert code == 1
    said = capsys.readouterr().err
    assert word in said and "model.py" in said


def test_a_mesh_of_too_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["compile", str(tmp_path), "-tp", "100000", "--device", "cpu", "-o", str(tmp_path / "out")]) == 1
    assert "P034" in capsys.readouterr().err


def test_files_of_the_current_directory_do_not_stand_in_for_modules(tmp_path: Path) -> None:
    """A core in its own process starts beside files that are called like modules it needs."""
    for name in ("http", "queue", "random", "uuid"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong module')\n")
    code = (
        "from tokenspeed import Engine, SamplingParams\n"
        "with Engine(model='smollm2', device='cpu', num_pages=16, max_num_seqs=2, buckets=[1, 8], max_num_batched_tokens=8) as e:\n"
        "    print(e.generate('Hi', SamplingParams(max_tokens=1)).finish_reason)\n"
    )
    where = str(Path(tokenspeed.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": where},
    )  # fmt: skip
    assert done.stdout.strip() == "length", done.stderr[-2000:]


def test_an_engine_is_not_a_forks(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from tokenspeed import Engine\n"
        "e = Engine(model='smollm2', device='cpu', core='inproc', num_pages=16, max_num_seqs=2, buckets=[1, 8], max_num_batched_tokens=8)\n"
        "if (child := os.fork()) == 0:\n"
        "    try:\n"
        "        e.generate('Hi')\n"
        "    except Exception as fault:\n"
        "        print('fork:', fault, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(e.generate('Hi', {'max_tokens': 1}).finish_reason)\n"
        "e.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "is a fork of it" in done.stdout and "length" in done.stdout, done.stderr[-2000:]


def test_a_long_text_is_tokenized_beside_other_work() -> None:
    """The interpreter's lock is free meanwhile: another thread goes on counting."""
    import threading

    from tokenspeed.runtime.config import EngineConfig

    tokenizer = load_tokenizer(EngineConfig("smollm2"))
    assert tokenizer is not None
    counted, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1
            done.wait(0.001)

    other = threading.Thread(target=count)
    other.start()
    before = counted[0]
    ids = tokenizer.encode("a b " * 250_000)
    during = counted[0] - before
    done.set()
    other.join()
    assert len(ids) > 400_000 and during > 5


def test_tensors_that_the_model_has_no_place_for_are_refused() -> None:
    """A bias that the configuration does not speak of, or a layer too many, would silently be left out."""
    from tokenspeed.compiler.api import compile_model
    from tokenspeed.models import find_family
    from tokenspeed.runtime.checkpoint import CheckpointError, DummyCheckpoint
    from tokenspeed.runtime.loader import load_weights

    weights = compile_model(find_family("LlamaForCausalLM"), CONFIG, buckets=(1,), variants=("gumbel",)).result.weights
    known = {source for e in weights.entries for s in e.segments for source in s.sources}

    class Files(DummyCheckpoint):
        extra = ""

        def names(self) -> list[str]:
            return [*known, "model.layers.0.self_attn.rotary_emb.inv_freq", *([self.extra] if self.extra else [])]

    files = Files(CONFIG)
    assert "embed.w" in load_weights(weights, files, 0)
    for files.extra in ("model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.up_proj.weight"):
        with pytest.raises(CheckpointError, match=files.extra):
            load_weights(weights, files, 0)
