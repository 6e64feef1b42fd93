"""MiniMax-M2: queries and keys are normed over all heads at once, half of a head's values turn, every layer has routed experts
picked by sigmoid scores and a bias."""

from __future__ import annotations

from tokenspeed.models.llama import Attention as LlamaAttention
from tokenspeed.models.llama import CausalLM as LlamaCausalLM
from tokenspeed.models.nn import (
    Batch,
    Config,
    Module,
    Partial,
    RMSNorm,
    Rope,
    Routed,
    Routing,
    Stream,
    Tokens,
    Weight,
    norm_over,
)
from tokenspeed.models.nn.decoder import decoder_dims, decoder_names


class Attention(LlamaAttention):
    def __init__(self, c: Config, rope: Rope, window: int | None = None) -> None:
        super().__init__(c, rope, window)
        self.q_norm, self.k_norm, self.eps = Weight("n@tp*d"), Weight("kv@tp:kv*d"), c.rms_norm_eps

    def forward(self, x: Tokens, b: Batch) -> Partial:
        q, k, v = self.qkv(x)
        q, k = norm_over((q, k), (self.q_norm, self.k_norm), self.eps, "qk")
        q, k = self.rope(q, k, b.pos)
        return self.o(self.attn(q, k, v, b))


class Layer(Module):
    def __init__(self, c: Config, rope: Rope, window: int | None) -> None:
        self.norm1, self.norm2 = RMSNorm("h", c.rms_norm_eps), RMSNorm("h", c.rms_norm_eps)
        self.attn, self.mlp = (
            Attention(c, rope, window),
            Routed(Routing(c.experts_per_tok, score="sigmoid"), bias=True),
        )

    def forward(self, x: Stream, b: Batch) -> Stream:
        x = x + self.attn(self.norm1(x), b)
        return x + self.mlp(self.norm2(x))


class CausalLM(LlamaCausalLM):
    layer = Layer

    def __init__(self, c: Config) -> None:
        c.refuse("scoring_func", ("sigmoid",), "experts of this family are picked by sigmoid scores")
        c.refuse("use_qk_norm", (True,), "queries and keys of this family are normed")
        c.refuse("qk_norm_type", ("per_layer",), "queries and keys of this family are normed over all heads")
        c.refuse("shared_intermediate_size", (0,), "this family has no shared expert")
        super().__init__(c)

    def make_rope(self, c: Config) -> Rope:
        turned = c.get("rotary_dim")
        return Rope(c.rotary_dim(turned / c.head_dim if turned else 1.0), c.max_position_embeddings, c.rope_parameters)

    @staticmethod
    def dims(c: Config) -> dict[str, int]:
        return decoder_dims(c) | {"e": c.experts, "k": c.experts_per_tok, "fe": c.intermediate_size, "qk": 2}

    @staticmethod
    def names(c: Config) -> dict[str, str]:
        moe = "model.layers.{i}.block_sparse_moe"
        return decoder_names(c) | {
            "layers.{i}.mlp.router": f"{moe}.gate",
            "layers.{i}.mlp.correction": f"={moe}.e_score_correction_bias",
            "layers.{i}.mlp.w13": f"{moe}.experts.{{e}}.w1 | {moe}.experts.{{e}}.w3",
            "layers.{i}.mlp.w2": f"{moe}.experts.{{e}}.w2",
        }
