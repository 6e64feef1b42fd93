"""An artifact is served without the models and the compiler's passes, and only where it fits: compat key, whole files."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import ROOT, Server, tokenspeed
from tests.e2e.tiny import tiny_model
from tokenspeed import Engine, SamplingParams
from tokenspeed.compiler.artifact import is_artifact, load_artifact, semantic_key
from tokenspeed.kernels.select import selection
from tokenspeed.runtime import compiled as compiled_before
from tokenspeed.runtime import compiling, sources
from tokenspeed.runtime.compiling import compile_for, compile_options, write_artifact
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError

BUCKETS = ("--buckets", "1,4,16,64", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "tokenspeed.models" or name.startswith(("tokenspeed.models.", "tokenspeed.compiler.passes")):
            raise ImportError(f"{name} is not for serving")

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def artifact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "one"
    done = tokenspeed("compile", model, "-o", path, *BUCKETS)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    """An artifact to damage."""
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process, and of its children, in which neither the models nor the passes can be imported."""
    path = tmp_path_factory.mktemp("site")
    (path / "sitecustomize.py").write_text(BLOCKER)
    return {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}


def compiled_into(out: Path, model: Path | str, **options: Any) -> Path:
    """As `tokenspeed compile`, in this process."""
    config = EngineConfig(str(model), **options)
    return write_artifact(config, compile_options(config), str(out))


def refusal(path: Path, **options: Any) -> str:
    """Why an engine does not come up."""
    with pytest.raises(StartupError) as fault, Engine(str(path), core="inproc", num_pages=20, **options):
        pass
    return str(fault.value)


def test_the_blocker_blocks(blocked: dict[str, str], model: Path) -> None:
    done = tokenspeed("serve", model, "--port", "0", "--core", "inproc", **blocked)
    assert done.returncode == 1 and "is not for serving" in done.stderr


def test_two_ranks_answer_without_models_and_passes(blocked: dict[str, str], model: Path, tmp_path: Path) -> None:
    path = tmp_path / "two"
    done = tokenspeed("compile", model, "-o", path, "--mesh", "tp=2", *BUCKETS)
    assert done.returncode == 0, done.stderr
    body = {"messages": QUESTION, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with Server(path, "--num-pages", "20", **blocked) as server:
        answer = server.ready().post("/v1/chat/completions", body).raise_for_status().json()
    assert not [line for line in server.log if "Warning" in line], "a rank warns of what its user cannot change"
    with Engine(str(model), core="inproc", num_pages=20) as engine:
        expected = engine.chat(QUESTION, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


def test_the_embedded_model_as_an_artifact(tmp_path: Path) -> None:
    """Its tokenizer and template come out of the GGUF and are read back from the artifact's own files."""
    options: dict[str, Any] = {"buckets": [1, 64], "max_num_seqs": 2, "max_num_batched_tokens": 64}
    path = compiled_into(tmp_path, "smollm2", **options)
    answers = []
    for source in (str(path), "smollm2"):
        with Engine(source, core="inproc", num_pages=20, **options) as engine:
            out = engine.chat(QUESTION, SamplingParams(temperature=0, max_tokens=8))
            answers.append((out.text, out.prompt_token_ids, engine.tokenizer.eos_ids, engine.tokenizer.special_tokens))
            assert engine.ready.summary["dtype"] == "auto (q4_1, q8_0 weights as stored, float32 between)"
    assert answers[0] == answers[1] and len(answers[0][1]) == 37
    explained = tokenspeed("explain", path, "--bucket", "1")
    assert "auto (q4_1, q8_0 weights as stored" in explained.stdout
    for dtype in ("float32", "bfloat16"):  # kept formats are neither
        reason = refusal(path, dtype=dtype)
        assert f"was compiled with dtype=auto; it cannot be served with dtype={dtype}: compile it again" in reason


def test_the_artifact_has_the_tokenizer_and_the_template(artifact: Path, model: Path) -> None:
    with Engine(str(artifact), core="inproc", num_pages=20) as served, Engine(str(model), core="inproc") as source:
        assert served.tokenizer.token_bytes == source.tokenizer.token_bytes
        assert served.tokenizer.chat_templates == source.tokenizer.chat_templates
        assert served.tokenizer.eos_ids == source.tokenizer.eos_ids == {257}
        assert served.tokenizer.bos_id == 256


def test_a_model_without_a_tokenizer_leaves_none_of_an_older_artifact(
    artifact: Path, copy: Path, tmp_path: Path
) -> None:
    assert (artifact / "tokenizer.json").exists()
    compiled_into(copy, tiny_model(tmp_path / "bare"), buckets=[1, 4])
    assert not [f.name for f in copy.iterdir() if "token" in f.name or "generation" in f.name]
    with Engine(str(copy), core="inproc", num_pages=20) as engine:
        assert engine.tokenizer is None


@pytest.mark.parametrize("field", ["device", "torch", "kernels"])
def test_another_compat_key_is_refused_by_its_name(copy: Path, field: str) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    mine = manifest["compat"][field]
    manifest["compat"][field] = "other"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    reason = refusal(copy)
    assert f"compat key {field!r} is 'other' in the artifact and {mine!r} here" in reason
    assert "tokenspeed compile" in reason


def test_a_refused_artifact_ends_the_server_with_the_reason(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["compat"]["torch"] = "1.4"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    done = tokenspeed("serve", copy, "--port", "0", "--core", "inproc")
    assert done.returncode == 1
    assert "compat key 'torch' is '1.4'" in done.stderr and "Traceback" not in done.stderr


FILES = [
    "manifest.json", "weights.json", "ports.json", "kernels.json", "checkpoint.json", "programs/gumbel.t4.ir", "programs/full.t1.ir",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    reason = refusal(copy)
    assert f"{copy} has no {name}" in reason and "tokenspeed compile" in reason


@pytest.mark.parametrize(
    ("name", "damage"),
    # a note of where the weights are is not covered by the key: it may be changed
    [(n, d) for n in FILES for d in ("cut", "changed", "bytes") if (n, d) != ("checkpoint.json", "changed")],
)
def test_a_damaged_file_is_named(copy: Path, name: str, damage: str) -> None:
    whole = (copy / name).read_bytes()
    at = len(whole) // 2
    other = {"cut": whole[:at], "changed": whole[:at] + b"0" + whole[at:], "bytes": whole[:at] + b"\xff" + whole[at:]}
    (copy / name).write_bytes(other[damage])
    reason = refusal(copy)
    assert f"{copy / name} is damaged" in reason and "tokenspeed compile" in reason


def test_another_schema_is_refused(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["schema"] = 0
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "schema is 0" in refusal(copy)


def test_an_empty_manifest_or_one_of_a_foreign_tool_is_refused(copy: Path) -> None:
    for text in ("{}", "[1]"):
        (copy / "manifest.json").write_text(text)
        assert str(copy) in refusal(copy)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "bfloat16"), ("kv_cache_dtype", "bfloat16"), ("buckets", [1, 2]), ("max_num_seqs", 9), ("mesh", "tp=2"),
        ("max_num_batched_tokens", 65), ("tensor_parallel_size", 2), ("axes", "mlp=1"), ("config", "config.json"),
        ("load_format", "dummy"),
    ],
)  # fmt: skip
def test_an_option_that_the_artifact_fixes_is_not_contradicted(artifact: Path, option: str, value: Any) -> None:
    reason = refusal(artifact, **{option: value})
    assert option in reason and "compile" in reason


def test_options_that_agree_with_the_artifact_are_taken(artifact: Path) -> None:
    with Engine(
        str(artifact), core="inproc", num_pages=20, dtype="float32", kv_cache_dtype="float32", buckets=[1, 4, 16, 64], max_num_seqs=8,
        max_num_batched_tokens=64,
    ) as engine:  # fmt: skip
        assert engine.ready.vocab_size == 301


def test_weights_that_moved_or_changed_are_named(copy: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", tokenizer=True)
    note = {"form": "safetensors", "path": str(other)}
    (copy / "checkpoint.json").write_text(json.dumps(note))
    with Engine(str(copy), core="inproc", num_pages=20):
        pass  # the same model elsewhere
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    assert "rms_norm_eps=1e-05" in refusal(copy)
    shutil.rmtree(other)
    assert str(other / "config.json") in refusal(copy)


def test_a_configuration_alone_compiles_and_is_not_served(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")
    assert "without weights" in refusal(compiled_into(tmp_path / "out", tmp_path / "bare", buckets=[1]))


def test_the_key_names_the_program_and_not_the_machine(artifact: Path) -> None:
    manifest = load_artifact(artifact).manifest
    key = semantic_key(manifest)
    assert semantic_key(manifest | {"compat": {}}) == key == manifest["semantic_key"]
    assert semantic_key(manifest | {"dtype": "bfloat16"}) != key


def test_a_checkpoint_with_a_manifest_of_its_own_is_no_artifact(model: Path, artifact: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "manifest.json").write_text("{}")
    assert not is_artifact(other) and not is_artifact(tmp_path) and is_artifact(artifact)


@pytest.mark.parametrize(("mesh", "groups"), [("", 1), ("dp=2", 2)])
def test_one_request_may_hold_the_pages_of_one_home_group(model: Path, mesh: str, groups: int) -> None:
    with Engine(
        str(model), mesh=mesh, core="process" if mesh else "inproc", num_pages=5, page_size=8, max_num_seqs=4
    ) as engine:
        assert (engine.ready.kv_tokens, engine.ready.max_running) == (40, 4 * groups)
        assert engine.control("stats")["kv_pages_total"] == 5 * groups
        done = engine.generate(
            input_ids=[7] * 30, sampling_params=SamplingParams(max_tokens=10, ignore_eos=True, temperature=0)
        )
        assert len(done.token_ids) == 10
        with pytest.raises(ValueError, match="the context holds 40 tokens"):
            engine.generate(input_ids=[7] * 31, sampling_params=SamplingParams(max_tokens=10))


def test_two_checkpoints_of_one_configuration_do_not_share_a_place_in_the_cache(tmp_path: Path) -> None:
    def place(path: Path) -> Path:
        return compile_for(EngineConfig(str(path), buckets=[1], artifact_cache=str(tmp_path / "cache")))

    first, second = place(tiny_model(tmp_path / "a")), place(tiny_model(tmp_path / "b", seed=1))
    assert first != second
    assert load_artifact(first).checkpoint()["path"] == str(tmp_path / "a")
    stamp = (first / "manifest.json").stat().st_mtime_ns
    assert place(tmp_path / "a") == first
    assert (first / "manifest.json").stat().st_mtime_ns == stamp, "another engine may be reading it"


def test_what_was_compiled_before_is_found_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a compilation reads is told apart; and where it cannot be, or the artifact is gone, it is compiled again."""
    path, cache, table = tiny_model(tmp_path / "model"), tmp_path / "cache", tmp_path / "table.json"
    config = EngineConfig(str(path), buckets=[1], artifact_cache=str(cache))
    compiled: list[EngineConfig] = []

    def counted(config: EngineConfig, *args: Any, **more: Any) -> Any:
        compiled.append(config)
        return compile_options(config, *args, **more)

    monkeypatch.setattr(compiling, "compile_options", counted)
    monkeypatch.setattr(sources, "_READ_WHOLE", 4096)

    def compiles(config: EngineConfig = config) -> bool:
        before = len(compiled)
        first, second = compile_for(config), compile_for(config)
        assert first == second
        return len(compiled) > before

    assert compiles() and not compiles()
    assert compiles(replace(config, buckets=[1, 2])) and compiles(replace(config, dtype="bfloat16"))
    described = (path / "config.json").read_text()
    (path / "config.json").write_text(described.replace("\n", " \n", 1) if "\n" in described else described + " ")
    assert compiles()
    weights = next(path.glob("*.safetensors"))
    os.utime(weights, ns=(1, 1))
    assert compiles() and not compiles()
    table.write_text('{"device": "cpu", "entries": []}')
    monkeypatch.setenv("TOKENSPEED_KERNEL_TUNED", str(table))
    assert compiles() and not compiles()
    table.write_text('{"device": "cpu",  "entries": []}')
    assert compiles() and not compiles()
    monkeypatch.setenv("TOKENSPEED_KERNEL_OVERRIDE_GEMM_LINEAR", "reference")
    assert compiles() and not compiles()
    monkeypatch.setattr(compiled_before, "package_digest", lambda: "another version")
    assert compiles() and not compiles()
    with selection(overrides={"norm/rms": "reference"}):
        assert compiles() and compiles()
    (note,) = (n for n in (cache / "compiled").iterdir() if n.name == compiled_before.key_of(config, "cpu"))
    shutil.rmtree(cache / note.read_text())
    assert compiles() and not compiles()
    note.write_bytes(b"\xff/../elsewhere")
    assert compiles() and not compiles()
    monkeypatch.setitem(compiled_before.ARCHITECTURES, "Other", "another_package:CausalLM")
    assert compiles() and compiles()
