"""What checkpoints come as: one file or many, tied or not, older keys and newer, GGUF; and what is wrong with them, named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Format
from safetensors.torch import save_file
from torch import Tensor

from tests.e2e.processes import tokenspeed
from tests.e2e.tiny import save_model, tiny_config, tiny_model, tiny_tokenizer, tiny_weights
from tokenspeed import Engine, SamplingParams
from tokenspeed.runtime.compiling import compile_options
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError

PROMPTS = [[7, 3, 99, 250], [11] * 9, list(range(40, 75))]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


def tokens(path: Path, **options: Any) -> list[list[int]]:
    """Greedy tokens of three prompts."""
    given = {
        "core": "inproc",
        "num_pages": 40,
        "max_num_seqs": 4,
        "buckets": [1, 4, 64],
        "max_num_batched_tokens": 64,
    } | options
    with Engine(str(path), **given) as engine:
        outputs = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    found = [output.token_ids for output in outputs]
    assert len({token for row in found for token in row}) > 10, "a model that repeats itself proves little"
    return found


def refusal(path: Path | str, **options: Any) -> str:
    """Why an engine does not come up."""
    with pytest.raises(StartupError) as fault, Engine(str(path), core="inproc", num_pages=20, buckets=[1], **options):
        pass
    return str(fault.value)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of the default tiny model from one safetensors file."""
    return tokens(tiny_model(tmp_path_factory.mktemp("plain")))


def first_logprobs(path: Path, **options: Any) -> list[dict[int, float]]:
    """For each prompt the log-probabilities of the 20 best first tokens, by id."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, detokenize=False)
    given = {
        "core": "inproc",
        "num_pages": 40,
        "max_num_seqs": 4,
        "buckets": [1, 64],
        "max_num_batched_tokens": 64,
    } | options
    with Engine(str(path), **given) as engine:
        outputs = engine.generate(input_ids=PROMPTS, sampling_params=params)
    (found, *_) = zip(*(output.logprobs for output in outputs))
    return [dict(zip(entry.top_ids, entry.top_logprobs)) for entry in found]


def assert_close(found: list[dict[int, float]], expected: list[dict[int, float]]) -> None:
    """Activations rounded to int8 move logits by hundredths of their range; rows in a wrong place make other ones."""
    for a, b in zip(found, expected):
        both = a.keys() & b.keys()
        assert len(both) >= 15 and max(abs(a[i] - b[i]) for i in both) < 0.1 * (max(b.values()) - min(b.values()))


# ---- safetensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_are_one_model(tmp_path: Path, plain: list[list[int]], shards: int) -> None:
    config = tiny_config()
    path = save_model(tmp_path, config, tiny_weights(config), shards=shards)
    assert len(list(path.glob("*.safetensors"))) == shards
    assert tokens(path) == plain


def test_b84_several_files_without_an_index(tmp_path: Path, plain: list[list[int]]) -> None:  # speculators#184
    config = tiny_config()
    path = save_model(tmp_path, config, tiny_weights(config), shards=3)
    (path / "model.safetensors.index.json").unlink()
    assert tokens(path) == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_read_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    config = tiny_config()
    rounded = {name: t.to(dtype) for name, t in tiny_weights(config).items()}
    stored = save_model(tmp_path / "half", config, rounded)
    whole = save_model(tmp_path / "whole", config, {name: t.float() for name, t in rounded.items()})
    assert tokens(stored, dtype="float32") == tokens(whole)


def test_b83_a_tied_head_is_the_embedding_also_where_the_file_holds_one(tmp_path: Path) -> None:  # vllm#6758
    config = tiny_config(tie_word_embeddings=True)
    bare, both = tiny_weights(config), tiny_weights(config, head=True)
    assert both.keys() - bare.keys() == {"lm_head.weight"}
    tied = tokens(save_model(tmp_path / "bare", config, bare))
    assert tokens(save_model(tmp_path / "both", config, both)) == tied
    explicit = {**bare, "lm_head.weight": bare["model.embed_tokens.weight"].clone()}
    untied = tiny_config(tie_word_embeddings=False)
    assert tokens(save_model(tmp_path / "untied", untied, explicit)) == tied
    assert tokens(save_model(tmp_path / "other", untied, both)) != tied


def test_b90_scales_of_an_fp8_cache_change_no_other_cache(
    tmp_path: Path, plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:  # vllm#6761, sglang#18818, #20705
    """The cache is kept in bfloat16 or float32, so its values need no scales; that they are left out is told."""
    config = tiny_config()
    scale = torch.tensor([0.04])
    names = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.k_scale", "self_attn.v_proj.output_scale")
    scales = {f"model.layers.{i}.{name}": scale.clone() for i in range(2) for name in names}
    path = save_model(tmp_path / "scales", config, tiny_weights(config) | scales)
    with caplog.at_level(logging.INFO, "tokenspeed.runtime.loader"):
        assert tokens(path) == plain
    assert any("8 scales of an FP8 cache" in r.getMessage() for r in caplog.records)
    strange = save_model(tmp_path / "odd", config, tiny_weights(config) | {"model.layers.0.mlp.k_scale": scale})
    assert "model.layers.0.mlp.k_scale" in refusal(strange)


def test_b85_an_untied_model_without_a_head_is_tied_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # Qwen3-VL-Embedding#89, transformers#43159
    tied, untied = tiny_config(tie_word_embeddings=True), tiny_config(tie_word_embeddings=False)
    weights = tiny_weights(tied)
    with caplog.at_level(logging.WARNING, "tokenspeed.runtime.loader"):
        expected = tokens(save_model(tmp_path / "tied", tied, weights))
        assert not [r for r in caplog.records if r.name == "tokenspeed.runtime.loader"]
        assert tokens(save_model(tmp_path / "untied", untied, weights)) == expected
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "tokenspeed.runtime.loader"]
    assert "'lm_head.weight'" in warning and "'model.embed_tokens.weight'" in warning


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ROPES = [
    ({"rope_theta": 500.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    (
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    ),
    (
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}},
    ),
]


@pytest.mark.parametrize(("older", "newer"), ROPES, ids=["default", "linear", "llama3"])
def test_older_and_newer_rope_keys_mean_the_same(
    tmp_path: Path, plain: list[list[int]], older: dict[str, Any], newer: dict[str, Any]
) -> None:
    first = tokens(tiny_model(tmp_path / "older", **older))
    assert tokens(tiny_model(tmp_path / "newer", **newer, rope_theta=None)) == first != plain


def test_an_unknown_rope_is_refused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, rope_scaling={"rope_type": "spiral", "factor": 4.0})
    assert "'spiral' is not supported; supported: default, linear, dynamic, llama3" in refusal(path)


# ---- what is wrong with a directory ----------------------------------------------------------------------------------


def test_b84_a_missing_shard_is_named(tmp_path: Path) -> None:  # speculators#184
    config = tiny_config()
    path = save_model(tmp_path, config, tiny_weights(config), shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    reason = refusal(path)
    assert str(path) in reason and "1 of 3 shards are missing: model-00002-of-00003.safetensors" in reason


def test_a_tensor_that_the_index_promises_is_named_with_its_file(tmp_path: Path) -> None:
    config = tiny_config()
    path = save_model(tmp_path, config, tiny_weights(config), shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.mlp.down_proj.weight"
    kept = {n: t for n, t in tiny_weights(config).items() if index[n] == index[name] and n != name}
    save_file(kept, path / index[name])
    reason = refusal(path)
    assert repr(name) in reason and index[name] in reason


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    del weights["model.layers.0.self_attn.k_proj.weight"]
    assert "no tensor 'model.layers.0.self_attn.k_proj.weight'" in refusal(save_model(tmp_path, config, weights))


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 96)
    reason = refusal(save_model(tmp_path, config, weights))
    assert "'model.layers.0.mlp.up_proj.weight' has shape [64, 96]" in reason and "[96, 64]" in reason


def test_a_format_that_needs_scales_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    reason = refusal(save_model(tmp_path, config, weights))
    assert repr(name) in reason and "F8_E4M3" in reason and "bfloat16" in reason


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("keep", [0.5, 0.01, 0.0])
def test_a_truncated_safetensors_file_is_named(tmp_path: Path, shards: int, keep: float) -> None:
    config = tiny_config()
    path = save_model(tmp_path, config, tiny_weights(config), shards=shards)
    file = max(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    reason = refusal(path)
    assert str(file) in reason and "incomplete" in reason


def test_the_command_line_says_it_too(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    (path / "model.safetensors").write_bytes(b"\0" * 100)
    done = tokenspeed("serve", path, "--port", "0", "--core", "inproc")
    assert done.returncode == 1 and str(path / "model.safetensors") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_rank_s_reason_is_the_server_s(tmp_path: Path) -> None:
    """Two ranks read the same broken shard; whichever speaks first, the reason is plain."""
    config = tiny_config()
    weights = tiny_weights(config)
    del weights["model.layers.1.mlp.down_proj.weight"]
    path = save_model(tmp_path, config, weights)
    with pytest.raises(StartupError) as fault, Engine(str(path), mesh="tp=2", num_pages=20, buckets=[1]):
        pass
    assert "no tensor 'model.layers.1.mlp.down_proj.weight'" in str(fault.value)
    assert "Traceback" not in str(fault.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is not valid JSON"),
        ("{}", "`architectures`"),
        ('{"architectures": ["LlamaForCausalLM"]}', "config.json has no"),
    ],
)
def test_a_broken_configuration_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tiny_model(tmp_path)
    (path / "config.json").write_text(text)
    assert named in refusal(path)


def test_an_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    reason = refusal(tiny_model(tmp_path, architectures=["GrokForCausalLM"]))
    for name in ("'GrokForCausalLM'", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in reason


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_multi_modal_model_the_language_model_is_read(tmp_path: Path, prefix: str) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    plain = tokens(save_model(tmp_path / "plain", config, weights))
    head = "language_model.lm_head" if prefix.startswith("language") else "lm_head"
    whole = {n.replace("model.", prefix, 1).replace("lm_head", head): w for n, w in weights.items()}
    whole["vision_tower.layers.0.weight"] = torch.zeros(4)
    nested = {"architectures": config.pop("architectures"), "model_type": "x_vl", "text_config": config}
    assert tokens(save_model(tmp_path / "nested", nested, whole)) == plain


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    plain = tokens(save_model(tmp_path / "plain", config, weights))
    weights["model.layers.2.enorm.weight"] = torch.ones(64)
    more = save_model(tmp_path / "more", config | {"num_nextn_predict_layers": 1}, weights)
    assert tokens(more) == plain
    assert "model.layers.2.enorm.weight" in refusal(save_model(tmp_path / "undeclared", config, weights))


def test_a_text_config_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "text_config": 7}))
    assert "text_config is 7" in refusal(path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        assert str(path) in refusal(path)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_window_that_is_not_used_changes_nothing(tmp_path: Path, kind: str) -> None:
    off = tokens(tiny_model(tmp_path / "off", kind, sliding_window=2, use_sliding_window=False))
    assert off == tokens(tiny_model(tmp_path / "none", kind))
    on = tiny_model(tmp_path / "on", kind, sliding_window=2, use_sliding_window=True, max_window_layers=0)
    assert tokens(on) != off


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": ["sliding_attention"] * 2}, "no 'sliding_window'"),
        ({"layer_types": ["full_attention"], "sliding_window": 8}, "layer_types names 1 for 2 layers"),
        ({"layer_types": ["chunked_attention"] * 2, "sliding_window": 8}, "chunked_attention"),
    ],
)
def test_windows_that_cannot_be_are_refused(tmp_path: Path, over: dict, named: str) -> None:
    assert named in refusal(tiny_model(tmp_path, "mistral", **over))


def test_b87_positions_beyond_the_rope_table_are_refused(tmp_path: Path) -> None:  # vllm#44286
    path = tiny_model(tmp_path)
    reason = refusal(path, max_model_len=513)
    assert "max_model_len=513" in reason and "512" in reason
    with pytest.raises(StartupError, match=r"max_model_len=513 is beyond the model's positions \(512\)"):
        compile_options(EngineConfig(str(path), buckets=[1], max_model_len=513))
    assert "max_position_embeddings is 1: a prompt" in refusal(tiny_model(tmp_path / "one", max_position_embeddings=1))
    with Engine(str(path), core="inproc", num_pages=40, max_num_batched_tokens=512, max_num_seqs=1) as engine:
        out = engine.generate(input_ids=[5] * 500, sampling_params=SamplingParams(max_tokens=12, ignore_eos=True))
        assert len(out.token_ids) == 12
        with pytest.raises(ValueError, match="the context holds 512 tokens"):
            engine.generate(input_ids=[5] * 500, sampling_params=SamplingParams(max_tokens=13))


# ---- heads that do not divide ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv", "ranks", "padded_heads", "padded_kv", "copies"),
    [
        (8, 2, 4, 8, 2, 2),  # two ranks share a KV head
        (8, 2, 8, 8, 2, 4),
        (9, 3, 2, 12, 4, 1),  # one KV head with its queries is padding
        (8, 1, 4, 8, 1, 4),
        (6, 2, 4, 8, 2, 2),  # three queries a KV head become four, two a rank
    ],
)
def test_b89_heads_that_do_not_divide_are_replicated_or_padded(
    tmp_path: Path, heads: int, kv: int, ranks: int, padded_heads: int, padded_kv: int, copies: int
) -> None:  # torchtitan#2577, torchtitan#2574, vllm#1735
    config = tiny_config(num_attention_heads=heads, num_key_value_heads=kv, hidden_size=48)
    path = save_model(tmp_path, config, tiny_weights(config))
    compiled = compile_options(EngineConfig(str(path), mesh=f"tp={ranks}", buckets=[1, 8]))
    assert (compiled.manifest["sizes"]["n"], compiled.manifest["sizes"]["kv"]) == (padded_heads, padded_kv)
    assert (compiled.manifest["logical"]["n"], compiled.manifest["logical"]["kv"]) == (heads, kv)
    weights = compiled.result.weights
    key = next(s for e in weights.entries for s in e.segments if "k_proj.weight" in s.sources[0])
    held = [weights.matrix_pieces(key, rank)[0] for rank in range(ranks)]
    assert sum(n for rows in held for _, _, n in rows) == kv * 16 * copies


def test_query_heads_that_are_no_multiple_of_the_kv_heads_are_refused(tmp_path: Path) -> None:
    config = tiny_config(num_attention_heads=6, num_key_value_heads=4)
    reason = refusal(save_model(tmp_path, config, tiny_weights(config)))
    assert "num_attention_heads=6 is not a multiple of num_key_value_heads=4" in reason


# ---- GGUF ------------------------------------------------------------------------------------------------------------

_HF = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, suffix = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{next(short for short, long in _HF.items() if long == part)}.{suffix}"


def interleaved(t: Tensor, heads: int) -> Tensor:
    """Rows of q or k as files of the llama architecture have them: halves of a head taken in turn."""
    return t.reshape(heads, 2, t.shape[0] // heads // 2, -1).transpose(1, 2).reshape(t.shape)


def write_gguf(path: Path, config: dict[str, Any], weights: dict[str, Tensor], form: Format) -> dict[str, Tensor]:
    """Writes a GGUF file with matrices of `form`; returns the weights that it stands for, dequantised."""
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    words = sorted(tiny_tokenizer().get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([word for word, _ in words])
    writer.add_token_types([3 if 256 <= i < 260 else 1 for _, i in words])
    writer.add_token_merges([])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    meant: dict[str, Tensor] = {}
    for name, t in weights.items():
        kind = form if t.dim() == 2 else Format.F32
        data = gguf.quants.quantize(t.numpy(), kind)
        meant[name] = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind))).view(t.shape)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if arch == "llama" and heads:
            data = gguf.quants.quantize(interleaved(t, config[heads]).numpy(), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("form", [Format.F32, Format.Q8_0, Format.Q4_1], ids=lambda form: form.name)
def test_a_gguf_gives_the_tokens_of_its_dequantised_weights(tmp_path: Path, kind: str, form: Format) -> None:
    config = tiny_config(kind, tie_word_embeddings=form == Format.Q4_1)
    meant = write_gguf(tmp_path / "model.gguf", config, tiny_weights(config), form)
    expected = tokens(save_model(tmp_path / "model", config, meant))
    assert tokens(tmp_path / "model.gguf", dtype="float32") == expected
    assert_close(first_logprobs(tmp_path / "model.gguf"), first_logprobs(tmp_path / "model"))


def test_a_gguf_s_formats_are_kept_or_not_as_the_dtype_says(tmp_path: Path) -> None:
    config = tiny_config()
    write_gguf(tmp_path / "model.gguf", config, tiny_weights(config), Format.Q8_0)

    def formats(**options: Any) -> set[str]:
        compiled = compile_options(EngineConfig(str(tmp_path / "model.gguf"), buckets=[1], **options))
        return {s.type.dtype for e in compiled.result.weights.entries for s in e.segments if len(s.type.dims) > 1}

    assert formats() == {"q8_0"}
    assert formats(dtype="float32") == {"f32"}
    # 96 columns on two ranks are 48, one and a half blocks: that one is dequantised
    assert formats(mesh="tp=2") == {"q8_0", "f32"}


def test_a_file_is_found_in_its_directory_and_options_it_would_ignore_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    file = tmp_path / "model.gguf"
    write_gguf(file, config, tiny_weights(config), Format.F32)
    described = tiny_model(tmp_path / "other") / "config.json"
    for model in (file, tmp_path, "smollm2"):
        assert f"config ({described}) would be ignored" in refusal(model, config=str(described))
        if model != tmp_path:
            assert "load_format asks for safetensors" in refusal(model, load_format="safetensors")
    assert "does not belong to the weights" in refusal(described.parent, config=str(tmp_path / "else.json"))
    assert "holds 0 .gguf files" in refusal(described.parent, load_format="gguf")
    assert tokens(tmp_path, load_format="gguf") == tokens(tmp_path) == tokens(file)


def test_a_gguf_on_two_ranks(tmp_path: Path) -> None:
    config = tiny_config()
    meant = write_gguf(tmp_path / "model.gguf", config, tiny_weights(config), Format.Q8_0)
    path = save_model(tmp_path / "model", config, meant)
    assert_close(first_logprobs(tmp_path / "model.gguf", core="process", mesh="tp=2"), first_logprobs(path))


def test_a_gguf_has_its_tokenizer(tmp_path: Path) -> None:
    config = tiny_config()
    write_gguf(tmp_path / "model.gguf", config, tiny_weights(config), Format.F32)
    with Engine(str(tmp_path / "model.gguf"), core="inproc", num_pages=20, buckets=[1, 8]) as engine:
        assert engine.tokenizer.encode("hi<|end|>") == tiny_tokenizer().encode("hi<|end|>").ids
        assert engine.tokenizer.eos_ids == {257}


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.05, 0.0])
def test_a_truncated_gguf_is_named(tmp_path: Path, keep: float) -> None:
    config = tiny_config()
    file = tmp_path / "model.gguf"
    write_gguf(file, config, tiny_weights(config), Format.F32)
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    assert str(file) in refusal(file)


def test_a_gguf_of_another_architecture_lists_the_known(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reason = refusal(tmp_path / "model.gguf", tokenizer="smollm2")
    assert "'mamba'" in reason and "llama, qwen2, qwen3" in reason
