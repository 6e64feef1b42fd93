"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from tokenspeed.models.llama import Attention as LlamaAttention
from tokenspeed.models.llama import CausalLM as LlamaCausalLM
from tokenspeed.models.llama import Layer as LlamaLayer
from tokenspeed.models.nn import Config, Linear, Rope


class Attention(LlamaAttention):
    def __init__(self, c: Config, rope: Rope) -> None:
        super().__init__(c, rope)
        self.qkv = Linear("h -> n@tp*d | kv@tp:kv*d | kv@tp:kv*d", bias=True)
        self.o = Linear("n@tp*d -> h")


class Layer(LlamaLayer):
    attention = Attention


class CausalLM(LlamaCausalLM):
    layer = Layer

    def __init__(self, c: Config) -> None:
        super().__init__(sliding_window_off(c))


def sliding_window_off(c: Config) -> Config:
    """Qwen configurations carry a window that `use_sliding_window` turns off; drop it then, refuse it otherwise."""
    return c if c.get("use_sliding_window", False) else c.without("sliding_window")
