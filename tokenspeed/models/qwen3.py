"""Qwen3 (dense): Llama with an RMSNorm over every query and key head before the rotation."""

from __future__ import annotations

from tokenspeed.models.llama import Attention as LlamaAttention
from tokenspeed.models.llama import Layer as LlamaLayer
from tokenspeed.models.nn import Batch, Config, Partial, RMSNorm, Rope, Tokens
from tokenspeed.models.qwen2 import CausalLM as Qwen2CausalLM


class Attention(LlamaAttention):
    def __init__(self, c: Config, rope: Rope, window: int | None = None) -> None:
        super().__init__(c, rope, window)
        self.q_norm, self.k_norm = RMSNorm("d", c.rms_norm_eps), RMSNorm("d", c.rms_norm_eps)

    def forward(self, x: Tokens, b: Batch) -> Partial:
        q, k, v = self.qkv(x)
        q, k = self.rope(self.q_norm(q), self.k_norm(k), b.pos)
        return self.o(self.attn(q, k, v, b))


class Layer(LlamaLayer):
    attention = Attention


class CausalLM(Qwen2CausalLM):
    layer = Layer
