"""Tiny checkpoints made without transformers (which takes seconds to import).

A vocabulary of 301: the 256 bytes, then control tokens and words; so a prompt's length in tokens is its length in bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tokenspeed.runtime.tokenizer import byte_alphabet

VOCAB = 301
BOS, EOS, START, END = "<s>", "</s>", "<|start|>", "<|end|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def tiny_config(kind: str = "llama", **over: Any) -> dict[str, Any]:
    """A config.json: 4 query heads of 16 on 2 KV heads, two layers. A value of None leaves the field out."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]], "model_type": kind, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 256, "eos_token_id": 257,
    }  # fmt: skip
    return {k: v for k, v in (config | over).items() if v is not None}


def tiny_weights(config: dict[str, Any], seed: int = 0, head: bool | None = None) -> dict[str, Tensor]:
    """Random float32 tensors by Hugging Face name. `head`: whether lm_head is among them (None: where it is untied)."""
    g = torch.Generator().manual_seed(seed)
    h, f, v, d = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=g) * (2.0 / columns**0.5)

    def norm(n: int) -> Tensor:
        return 1 + 0.2 * torch.randn(n, generator=g)

    out = {"model.embed_tokens.weight": torch.randn(v, h, generator=g), "model.norm.weight": norm(h)}
    for i in range(config["num_hidden_layers"]):
        layer: dict[str, Tensor] = {
            "input_layernorm": norm(h), "post_attention_layernorm": norm(h), "self_attn.q_proj": matrix(q, h),
            "self_attn.k_proj": matrix(kv, h), "self_attn.v_proj": matrix(kv, h), "self_attn.o_proj": matrix(h, q),
            "mlp.gate_proj": matrix(f, h), "mlp.up_proj": matrix(f, h), "mlp.down_proj": matrix(h, f),
        }  # fmt: skip
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": norm(d), "self_attn.k_norm": norm(d)}
        out |= {f"model.layers.{i}.{name}.weight": t for name, t in layer.items()}
        if config["model_type"] == "qwen2":
            biases = {"q": q, "k": kv, "v": kv}
            out |= {
                f"model.layers.{i}.self_attn.{p}_proj.bias": torch.randn(n, generator=g) / 4 for p, n in biases.items()
            }
    if head if head is not None else not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(v, h)
    return out


def tiny_tokenizer() -> Tokenizer:
    """Bytes 0..255, BOS, EOS and the chat marks as control tokens, then words that no merge makes."""
    words = [*byte_alphabet(), BOS, EOS, START, END]
    words += [f"word{i}" for i in range(VOCAB - len(words))]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(w, normalized=False, special=True) for w in (BOS, EOS, START, END)])
    return backend


def save_tokenizer(path: Path) -> None:
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def save_model(
    path: Path, config: dict[str, Any], weights: dict[str, Tensor], *, shards: int = 1, tokenizer: bool = False
) -> Path:
    """A Hugging Face directory; with more than one shard an index and `model-0000i-of-0000n.safetensors`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tokenizer:
        save_tokenizer(path)
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    names = sorted(weights)
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({n: weights[n] for n in names if where[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def tiny_model(path: Path, kind: str = "llama", seed: int = 0, tokenizer: bool = False, **over: Any) -> Path:
    """A random model's directory."""
    config = tiny_config(kind, **over)
    return save_model(path, config, tiny_weights(config, seed), tokenizer=tokenizer)
