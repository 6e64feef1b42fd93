"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from tokenspeed.models.llama import Attention as LlamaAttention
from tokenspeed.models.llama import CausalLM as LlamaCausalLM
from tokenspeed.models.llama import Layer as LlamaLayer
from tokenspeed.models.nn import Config, Linear, Rope
from tokenspeed.models.nn.decoder import layer_windows


class Attention(LlamaAttention):
    def __init__(self, c: Config, rope: Rope, window: int | None = None) -> None:
        super().__init__(c, rope, window)
        self.qkv = Linear("h -> n@tp*d | kv@tp:kv*d | kv@tp:kv*d", bias=True)
        self.o = Linear("n@tp*d -> h")


class Layer(LlamaLayer):
    attention = Attention


class CausalLM(LlamaCausalLM):
    layer = Layer

    @staticmethod
    def windows(c: Config) -> list[int | None]:
        """From layer `max_window_layers` on, and only with `use_sliding_window`: the files carry a window in any case."""
        if not c.get("use_sliding_window", False):
            return [None] * c.num_hidden_layers
        return layer_windows(c, lambda i: i >= c.get("max_window_layers", 28))
