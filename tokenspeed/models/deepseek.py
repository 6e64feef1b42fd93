"""DeepSeek V2 and V3, and Kimi K2, which is a V3: attention over latents (MLA), dense first layers, then routed experts
beside a shared one."""

from __future__ import annotations

from typing import Any

from tokenspeed.models.nn import (
    MLP,
    Batch,
    Config,
    ConfigError,
    Embed,
    Head,
    HeadLinear,
    LatentAttention,
    Linear,
    Mixture,
    Module,
    Partial,
    RMSNorm,
    Rope,
    Routed,
    Routing,
    Sampler,
    Shared,
    Stream,
    Tokens,
    select_rows,
)  # fmt: skip
from tokenspeed.models.nn.config import yarn_scale
from tokenspeed.models.nn.decoder import TokenIds, decoder_names, expert_names, parts

LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps says


class Attention(Module):
    """Queries and results take in the matrices that would make keys and values of latents; heads are split over tp."""

    def __init__(self, c: Config, rope: Rope) -> None:
        rank = c.get("q_lora_rank")
        self.q_a, self.q_norm = (Linear("h -> ql"), RMSNorm("ql", LATENT_EPS)) if rank else (None, None)
        self.q_b = Linear(f"{'ql' if rank else 'h'} -> n@tp*dn | n@tp*dr")
        self.kv_a, self.kv_norm = Linear("h -> kl | dr"), RMSNorm("kl", LATENT_EPS)
        self.k_b, self.v_b = HeadLinear("n@tp: dn -> kl", transposed=True), HeadLinear("n@tp: kl -> dv")
        self.rope, self.attn = rope, LatentAttention("n@tp kl dr", score_scale(c))
        self.o = Linear("n@tp*dv -> h")

    def forward(self, x: Tokens, b: Batch) -> Partial:
        latent, kr = self.kv_a(x)
        ql = self.q_norm(self.q_a(x)) if self.q_a and self.q_norm else x
        q, qr = self.q_b(ql)
        qr, kr = self.rope(qr, kr, b.pos)
        mixed = self.attn(self.k_b(q), qr, self.kv_norm(latent), kr, b, self.picked(x, ql, b))
        return self.o(self.v_b(mixed))

    def picked(self, x: Any, ql: Any, b: Batch) -> Any:
        """The positions that each token attends, where they are not all before it; from x and the latent of its queries."""
        return None


class Layer(Module):
    def __init__(self, c: Config, attn: Module, mlp: Module) -> None:
        self.norm1, self.norm2 = RMSNorm("h", c.rms_norm_eps), RMSNorm("h", c.rms_norm_eps)
        self.attn, self.mlp = attn, mlp

    def forward(self, x: Stream, b: Batch) -> Stream:
        x = x + self.attn(self.norm1(x), b)
        return x + self.mlp(self.norm2(x))


def score_scale(c: Config) -> float:
    """1 / sqrt(head width), times the square of what YaRN makes of a model's `mscale_all_dim`."""
    p = c.rope_parameters
    whole = p.get("mscale_all_dim") if p["rope_type"] != "default" else None
    return (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * (yarn_scale(p["factor"], whole) ** 2 if whole else 1.0)


class CausalLM(Module):
    """V3: experts are picked by sigmoid scores and a bias, from groups ranked by their best two."""

    def __init__(self, c: Config) -> None:
        c.refuse("hidden_act", ("silu",), "this family's MLP is silu(gate) * up")
        c.refuse("attention_bias", (False,), "this family's projections have no bias")
        c.refuse("moe_layer_freq", (1,), "every layer behind the dense first ones has experts")
        if c.qk_rope_head_dim % 2:
            raise ConfigError(
                f"qk_rope_head_dim={c.qk_rope_head_dim}: rotary position embedding turns pairs, so it must be even"
            )
        self.rope = Rope(c.qk_rope_head_dim, c.max_position_embeddings, c.rope_parameters, self.pairs(c))
        self.embed, self.head, self.sampler = Embed(), Head(), Sampler()
        dense = c.get("first_k_dense_replace", 0)
        mlps = [MLP() if i < dense else self.experts(c) for i in range(c.num_hidden_layers)]
        self.layers = [Layer(c, self.attention(c), mlp) for mlp in mlps]
        self.norm = RMSNorm("h", c.rms_norm_eps)

    def forward(self, b: Batch) -> TokenIds:
        x = self.embed(b.ids)
        for layer in self.layers:
            x = layer(x, b)
        return self.sampler(self.head(self.norm(select_rows(x, b.last))), b.params)

    def attention(self, c: Config) -> Module:
        return Attention(c, self.rope)

    def pairs(self, c: Config) -> bool:
        return bool(c.get("rope_interleave", True))

    def experts(self, c: Config) -> Module:
        routed = Routed(self.routing(c), bias=self.has_bias(c))
        return Mixture(routed, Shared()) if c.get("n_shared_experts") else routed

    def has_bias(self, c: Config) -> bool:
        return True

    def routing(self, c: Config) -> Routing:
        c.refuse("scoring_func", ("sigmoid",), "experts of this family are picked by sigmoid scores")
        c.refuse("topk_method", ("noaux_tc",), "experts of this family are picked with a bias, from groups")
        groups, kept = c.expert_groups()
        return Routing(
            c.experts_per_tok, bool(c.get("norm_topk_prob", True)), "sigmoid", groups, kept, min(2, c.experts // groups),
            float(c.get("routed_scaling_factor", 1.0)),
        )  # fmt: skip

    @staticmethod
    def dims(c: Config) -> dict[str, int]:
        ranks = {"ql": c.get("q_lora_rank"), "fs": c.moe_intermediate_size * c.get("n_shared_experts", 0)}
        return {
            "h": c.hidden_size, "n": c.num_attention_heads, "dn": c.qk_nope_head_dim, "dr": c.qk_rope_head_dim,
            "dv": c.v_head_dim, "kl": c.kv_lora_rank, "f": c.intermediate_size, "v": c.vocab_size, "e": c.experts,
            "k": c.experts_per_tok, "fe": c.moe_intermediate_size,
        } | {d: n for d, n in ranks.items() if n}  # fmt: skip

    @staticmethod
    def names(c: Config) -> dict[str, str]:
        attn = "model.layers.{i}.self_attn"
        nope, turned, value, latent = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank
        q = f"{attn}.q_b_proj" if c.get("q_lora_rank") else f"{attn}.q_proj"
        kv, both = f"{attn}.kv_b_proj", f"{attn}.kv_a_proj_with_mqa"
        return (
            decoder_names(c)
            | expert_names(bool(c.get("n_shared_experts")))
            | {
                "layers.{i}.attn.q_a": f"{attn}.q_a_proj",
                "layers.{i}.attn.q_norm": f"{attn}.q_a_layernorm",
                "layers.{i}.attn.q_b": " | ".join(parts(q, nope, turned)),
                "layers.{i}.attn.kv_a": " | ".join(parts(both, latent, turned)),
                "layers.{i}.attn.kv_norm": f"{attn}.kv_a_layernorm",
                "layers.{i}.attn.k_b": parts(kv, nope, value)[0],
                "layers.{i}.attn.v_b": parts(kv, nope, value)[1],
            }
        )


class V2(CausalLM):
    """V2: experts are picked by softmax probabilities, from all or from groups ranked by their best one."""

    def pairs(self, c: Config) -> bool:
        return True

    def has_bias(self, c: Config) -> bool:
        return False

    def routing(self, c: Config) -> Routing:
        c.refuse("scoring_func", ("softmax",), "experts of this family are picked by softmax scores")
        c.refuse("norm_topk_prob", (False,), "shares of this family's experts are scaled, not normalised")
        c.refuse("topk_method", ("greedy", "group_limited_greedy"), "experts of this family are picked without a bias")
        grouped = c.get("topk_method", "greedy") == "group_limited_greedy"
        return Routing(
            c.experts_per_tok, False, "softmax", *(c.expert_groups() if grouped else (1, 1)), 1,
            float(c.get("routed_scaling_factor", 1.0)),
        )  # fmt: skip
