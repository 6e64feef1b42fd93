"""GLM-4.5: half of a head's values turn, q, k and v have biases and may have norms; dense first layers, then routed experts
beside a shared one, picked as DeepSeek V3's are."""

from __future__ import annotations

from tokenspeed.models.deepseek import CausalLM as DeepseekCausalLM
from tokenspeed.models.deepseek import Layer
from tokenspeed.models.llama import Attention as LlamaAttention
from tokenspeed.models.nn import (
    MLP,
    Batch,
    Config,
    Embed,
    Head,
    Linear,
    Partial,
    RMSNorm,
    Rope,
    Sampler,
    Tokens,
)
from tokenspeed.models.nn.decoder import decoder_dims, decoder_names, expert_names


class Attention(LlamaAttention):
    def __init__(self, c: Config, rope: Rope) -> None:
        super().__init__(c, rope)
        self.o = Linear("n@tp*d -> h")
        normed = c.get("use_qk_norm", False)
        self.q_norm, self.k_norm = (RMSNorm("d", c.rms_norm_eps) if normed else None for _ in "qk")

    def forward(self, x: Tokens, b: Batch) -> Partial:
        q, k, v = self.qkv(x)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, b.pos)
        return self.o(self.attn(q, k, v, b))


class CausalLM(DeepseekCausalLM):
    def __init__(self, c: Config) -> None:
        c.refuse("hidden_act", ("silu",), "this family's MLP is silu(gate) * up")
        self.rope = Rope(c.rotary_dim(0.5), c.max_position_embeddings, c.rope_parameters)
        self.embed, self.head, self.sampler = Embed(), Head(), Sampler()
        dense = c.get("first_k_dense_replace", 1)
        mlps = [MLP() if i < dense else self.experts(c) for i in range(c.num_hidden_layers)]
        self.layers = [Layer(c, Attention(c, self.rope), mlp) for mlp in mlps]
        self.norm = RMSNorm("h", c.rms_norm_eps)

    @staticmethod
    def dims(c: Config) -> dict[str, int]:
        shared = c.moe_intermediate_size * c.get("n_shared_experts", 1)
        experts = {"e": c.experts, "k": c.experts_per_tok, "fe": c.moe_intermediate_size, "fs": shared}
        return decoder_dims(c) | experts

    @staticmethod
    def names(c: Config) -> dict[str, str]:
        return decoder_names(c) | expert_names(bool(c.get("n_shared_experts", 1)))
