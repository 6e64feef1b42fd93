"""Model families by architecture name. Families outside the tree register in the entry-point group `tokenspeed.models`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from tokenspeed.models.nn.config import ConfigError

ARCHITECTURES: dict[str, str] = {
    "DeepSeekMTPModel": "tokenspeed.models.draft:Deepseek",
    "DeepseekV2ForCausalLM": "tokenspeed.models.deepseek:V2",
    "DeepseekV3ForCausalLM": "tokenspeed.models.deepseek:CausalLM",
    "DeepseekV32ForCausalLM": "tokenspeed.models.deepseek_sparse:CausalLM",
    "Gemma3ForCausalLM": "tokenspeed.models.gemma3:CausalLM",
    "Gemma3ForConditionalGeneration": "tokenspeed.models.gemma3:CausalLM",
    "Glm4MoeForCausalLM": "tokenspeed.models.glm4_moe:CausalLM",
    "Glm4MoeMTPModel": "tokenspeed.models.draft:Glm4Moe",
    "GptOssForCausalLM": "tokenspeed.models.gpt_oss:CausalLM",
    "KimiK2ForCausalLM": "tokenspeed.models.deepseek:CausalLM",
    "KimiK25ForConditionalGeneration": "tokenspeed.models.deepseek:CausalLM",
    "LlamaForCausalLM": "tokenspeed.models.llama:CausalLM",
    "MiniMaxM2ForCausalLM": "tokenspeed.models.minimax_m2:CausalLM",
    "MistralForCausalLM": "tokenspeed.models.llama:CausalLM",
    "Qwen2ForCausalLM": "tokenspeed.models.qwen2:CausalLM",
    "Qwen3_5MTP": "tokenspeed.models.draft:Qwen3_5",
    "Qwen3_5ForCausalLM": "tokenspeed.models.qwen3_5:CausalLM",
    "Qwen3_5ForConditionalGeneration": "tokenspeed.models.qwen3_5:CausalLM",
    "Qwen3_5MoeForCausalLM": "tokenspeed.models.qwen3_5:MoeCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "tokenspeed.models.qwen3_5:MoeCausalLM",
    "Qwen3NextMTP": "tokenspeed.models.draft:Qwen3Next",
    "Qwen3NextForCausalLM": "tokenspeed.models.qwen3_next:CausalLM",
    "Qwen3ForCausalLM": "tokenspeed.models.qwen3:CausalLM",
    "Qwen3MoeForCausalLM": "tokenspeed.models.qwen3_moe:CausalLM",
}


def find_family(architecture: str) -> Any:
    """The root module class of an architecture (config.json, `architectures`). ConfigError lists what is known."""
    for point in entry_points(group="tokenspeed.models"):
        if point.name == architecture:
            return point.load()
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"no model family for architecture {architecture!r}; known: {', '.join(sorted(ARCHITECTURES))}"
        )
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return getattr(importlib.import_module(module), name)
