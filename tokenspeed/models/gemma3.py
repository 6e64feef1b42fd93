"""Gemma 3 (text): norms before and behind each branch, stored as w - 1; windows and full attention with a rope of their own
each; gelu; embeddings scaled by the root of their width."""

from __future__ import annotations

from tokenspeed.models.llama import CausalLM as LlamaCausalLM
from tokenspeed.models.nn import (
    MLP,
    Batch,
    Config,
    Embed,
    Head,
    Module,
    PagedAttention,
    RMSNorm,
    Rope,
    Sampler,
    Stream,
    gelu,
    select_rows,
)
from tokenspeed.models.nn.decoder import TokenIds, decoder_names, layer_windows
from tokenspeed.models.qwen3 import Attention as Qwen3Attention


def norm(c: Config, dim: str = "h") -> RMSNorm:
    return RMSNorm(dim, c.rms_norm_eps, dtype="f32", offset=1.0)


class Attention(Qwen3Attention):
    def __init__(self, c: Config, rope: Rope, window: int | None) -> None:
        super().__init__(c, rope)
        self.q_norm, self.k_norm = norm(c, "d"), norm(c, "d")
        scale, cap = c.get("query_pre_attn_scalar", 256) ** -0.5, c.get("attn_logit_softcapping")
        self.attn = PagedAttention("n@tp kv@tp:kv d", scale, window=window, softcap=cap)


class GeluMLP(MLP):
    act = staticmethod(gelu)


class Layer(Module):
    def __init__(self, c: Config, rope: Rope, window: int | None) -> None:
        self.norm1, self.norm2, self.norm3, self.norm4 = (norm(c) for _ in range(4))
        self.attn, self.mlp = Attention(c, rope, window), GeluMLP()

    def forward(self, x: Stream, b: Batch) -> Stream:
        x = x + self.norm2(self.attn(self.norm1(x), b))
        return x + self.norm4(self.mlp(self.norm3(x)))


class CausalLM(LlamaCausalLM):
    def __init__(self, c: Config) -> None:
        c.refuse(
            "hidden_activation", ("gelu_pytorch_tanh",), "this family's MLP is gelu(gate) * up, gelu in its tanh form"
        )
        c.refuse("use_bidirectional_attention", (False,), "tokens are computed once, from what is before them")
        kinds = c.get("rope_parameters") or {}
        wide = c.rope_of(kinds.get("full_attention") or c.get("rope_scaling"), "rope_theta", 1e6)
        near = c.rope_of(kinds.get("sliding_attention"), "rope_local_base_freq", 1e4)
        self.rope, self.rope_local = (Rope(c.head_dim, c.max_position_embeddings, p) for p in (wide, near))
        self.embed, self.sampler, self.norm = Embed(), Sampler(), norm(c)
        self.head = Head(c.get("final_logit_softcapping"))
        period = c.get("sliding_window_pattern", 6)
        windows = layer_windows(c, lambda i: (i + 1) % period > 0)
        self.layers = [Layer(c, self.rope if w is None else self.rope_local, w) for w in windows]
        self.scale = c.hidden_size**0.5

    @staticmethod
    def names(c: Config) -> dict[str, str]:
        layer = "model.layers.{i}"
        tied = c.get("tie_word_embeddings", True)
        return decoder_names(c) | {
            "layers.{i}.norm2": f"{layer}.post_attention_layernorm",
            "layers.{i}.norm3": f"{layer}.pre_feedforward_layernorm",
            "layers.{i}.norm4": f"{layer}.post_feedforward_layernorm",
            "head.w": "model.embed_tokens" if tied else "lm_head",
        }

    def forward(self, b: Batch) -> TokenIds:
        x = self.embed(b.ids) * self.scale
        for layer in self.layers:
            x = layer(x, b)
        return self.sampler(self.head(self.norm(select_rows(x, b.last))), b.params)
