"""Models of the end-to-end tests: tiny random checkpoints written by transformers, and the reference's verdict on tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

#: near-ties: a difference counts as equal where the reference's two best logits lie within this
TIE = 1e-4

PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "The best way to learn a language is",
    "import numpy as np\n", "In 1969, humans", "The quick brown fox", "SELECT name FROM", "Dear Sir or Madam,",
    "The square root of 144 is", "<html>\n<head>", "A good recipe for bread", "Photosynthesis is", "To be, or not to be",
    "The mitochondria", "for i in range(10):", "The largest planet", "Roses are red,", "git commit -m",
]  # fmt: skip


CONFIGS = {
    "deepseek_v2": "DeepseekV2Config", "deepseek_v3": "DeepseekV3Config", "deepseek_v32": "DeepseekV32Config",
    "gemma3": "Gemma3TextConfig", "gpt_oss": "GptOssConfig", "glm4_moe": "Glm4MoeConfig",
    "minimax_m2": "MiniMaxM2Config", "llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config", "qwen3_moe": "Qwen3MoeConfig",
    "qwen3_next": "Qwen3NextConfig", "qwen3_5": "Qwen3_5TextConfig", "qwen3_5_moe": "Qwen3_5MoeTextConfig",
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 8, "head_dim": None, "kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1, "num_hidden_layers": 3,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
_SHARED = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
#: families whose norms transformers makes alike, at zeros or ones
SHIFTED = ("gemma3", "minimax_m2", "qwen3_next", "qwen3_5", "qwen3_5_moe")
#: what a family has beside the common fields
EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK | {"index_n_heads": 32, "index_head_dim": 12, "index_topk": 16},
    "gemma3": {"num_hidden_layers": 3, "sliding_window": 20, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
    "glm4_moe": {
        "num_hidden_layers": 3,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
        "attention_bias": True,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    "gpt_oss": {
        "num_hidden_layers": 3,
        "sliding_window": 20,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_limit": 1.0,
        "intermediate_size": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": None},
    "qwen3_next": _DELTA | _SHARED,
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _DELTA | _SHARED,
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
}


def tiny_config(kind: str, **over: Any) -> Any:
    """A transformers configuration: 8 query heads on 2 KV heads, a vocabulary of 1,003."""
    import transformers

    common: dict[str, Any] = {
        "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
        "vocab_size": 1003, "num_hidden_layers": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
    }  # fmt: skip
    fields = common | EXTRA.get(kind, {}) | over
    return getattr(transformers, CONFIGS[kind])(**{k: v for k, v in fields.items() if (k, v) != ("head_dim", None)})


def write_tiny(path: Path, kind: str, seed: int = 0, **over: Any) -> Path:
    """Saves a random model (float32 safetensors) and returns its directory."""
    from transformers import AutoModelForCausalLM

    if not (path / "config.json").exists():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **over), dtype=torch.float32)
        with torch.no_grad():
            for name, p in (*model.named_parameters(), *model.named_buffers()):
                if "bias" in name or (kind in SHIFTED and "norm" in name):
                    p.normal_(0, 0.1)
                if "sinks" in name:
                    p.normal_(0, 2)
        model.save_pretrained(path)
    return path


def disagreements(model: Any, prompts: list[list[int]], outputs: list[list[int]]) -> tuple[int, int]:
    """(near-ties, real differences) between `outputs` and the greedy choices of a teacher-forced reference forward."""
    ties = real = 0
    for prompt, out in zip(prompts, outputs):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + out])).logits[0].float()
        for k, token in enumerate(out):
            row = logits[len(prompt) - 1 + k]
            best = row.topk(2).values
            if token != int(row.argmax()):
                if float(best[0] - row[token]) <= TIE and float(best[0] - best[1]) <= TIE:
                    ties += 1
                else:
                    real += 1
    return ties, real
