"""Qwen3-Next: layers of the gated delta rule, every fourth of gated attention instead; experts beside a gated shared one."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from tokenspeed.models.nn import (
    MLP,
    Batch,
    Config,
    ConfigError,
    Conv,
    DeltaRule,
    Embed,
    GatedRMSNorm,
    Head,
    Linear,
    Mixture,
    Module,
    PagedAttention,
    Partial,
    RMSNorm,
    Rope,
    Routed,
    Routing,
    Rows,
    Sampler,
    Shared,
    StateBatch,
    Stream,
    Tokens,
    Weight,
    decay,
    l2_norm,
    mul_rows,
    select_rows,
    sigmoid,
)  # fmt: skip
from tokenspeed.models.nn.decoder import TokenIds, decoder_names, layer_kinds, parts


def shifted_norm(spec: str, c: Config) -> RMSNorm:
    """A norm whose checkpoint holds its weights minus 1."""
    return RMSNorm(spec, c.rms_norm_eps, dtype="f32", offset=1.0)


class GatedAttention(Module):
    """Attention whose results pass a gate of their own; the rotation turns the first part of a head."""

    def __init__(self, c: Config, rope: Rope) -> None:
        self.qkv = Linear("h -> n@tp*d | n@tp*d | kv@tp:kv*d | kv@tp:kv*d")  # queries, gates, keys, values
        self.q_norm, self.k_norm = shifted_norm("d", c), shifted_norm("d", c)
        self.rope, self.attn = rope, PagedAttention("n@tp kv@tp:kv d", scale=c.head_dim**-0.5)
        self.o = Linear("n@tp*d -> h")

    def forward(self, x: Tokens, b: Batch) -> Partial:
        q, gate, k, v = self.qkv(x)
        q, k = self.rope(self.q_norm(q), self.k_norm(k), b.pos)
        return self.o(self.attn(q, k, v, b) * sigmoid(gate))


class DeltaNet(Module):
    """A gated delta net: short convolutions, then the delta rule over a state of each value head, then a gated norm."""

    def __init__(self, c: Config) -> None:
        self.proj = Linear("h -> hk@tp:hk*dk | hk@tp:hk*dk | hv@tp*dv | hv@tp*dv | hv@tp | hv@tp")  # q, k, v, z, b, a
        self.conv_q, self.conv_k, self.conv_v = Conv("hk@tp:hk dk"), Conv("hk@tp:hk dk"), Conv("hv@tp dv")
        self.rate, self.dt = Weight("hv@tp", dtype="f32"), Weight("hv@tp", dtype="f32")
        self.delta = DeltaRule("hv@tp hk@tp:hk dk dv", scale=c.linear_key_head_dim**-0.5)
        self.norm, self.out = GatedRMSNorm("dv", c.rms_norm_eps), Linear("hv@tp*dv -> h")

    def forward(self, x: Tokens, b: StateBatch) -> Partial:
        q, k, v, z, beta, a = self.proj(x)
        q, k, v = self.conv_q(q, b), self.conv_k(k, b), self.conv_v(v, b)
        y = self.delta(l2_norm(q), l2_norm(k), v, decay(a, self.rate, self.dt), sigmoid(beta), b)
        return self.out(self.norm(y, z))


class GatedShared(Shared):
    """The shared expert, each row of it times a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Linear("h ->")

    def forward(self, x: Rows) -> Annotated[Tensor, "t* h +se"]:
        return mul_rows(super().forward(x), sigmoid(self.gate(x)))


class Layer(Module):
    def __init__(self, c: Config, mixer: Module, mlp: Module) -> None:
        self.norm1, self.norm2 = shifted_norm("h", c), shifted_norm("h", c)
        self.mixer, self.mlp = mixer, mlp

    def forward(self, x: Stream, b: StateBatch) -> Stream:
        x = x + self.mixer(self.norm1(x), b)
        return x + self.mlp(self.norm2(x))


class CausalLM(Module):
    def __init__(self, c: Config) -> None:
        c.refuse("hidden_act", ("silu",), "this family's MLP is silu(gate) * up")
        c.refuse("attention_bias", (False,), "this family's projections have no bias")
        c.refuse("attn_output_gate", (True,), "this family's attention passes a gate")
        c.refuse("output_gate_type", ("swish", "silu"), "a delta net's norm is gated by silu")
        self.rope = Rope(c.rotary_dim(), c.max_position_embeddings, c.rope_parameters)
        self.embed, self.head, self.sampler = Embed(), Head(), Sampler()
        self.layers = [
            Layer(c, DeltaNet(c) if recurrent else GatedAttention(c, self.rope), self.mlp(c, i))
            for i, recurrent in enumerate(recurrent_layers(c))
        ]
        self.norm = shifted_norm("h", c)

    def forward(self, b: StateBatch) -> TokenIds:
        x = self.embed(b.ids)
        for layer in self.layers:
            x = layer(x, b)
        return self.sampler(self.head(self.norm(select_rows(x, b.last))), b.params)

    def mlp(self, c: Config, layer: int) -> Module:
        """The feed-forward part of a layer."""
        how = Routing(c.experts_per_tok, normalise=bool(c.get("norm_topk_prob", True)))
        return MLP() if is_dense(c, layer) else Mixture(Routed(how), GatedShared())

    @staticmethod
    def dims(c: Config) -> dict[str, int]:
        dense = any(is_dense(c, layer) for layer in range(c.num_hidden_layers))
        return state_dims(c) | expert_dims(c) | ({"f": c.intermediate_size} if dense else {})

    @staticmethod
    def names(c: Config) -> dict[str, str]:
        delta, group = "model.layers.{i}.linear_attn", c.linear_num_value_heads // c.linear_num_key_heads
        dk, dv = c.linear_key_head_dim, group * c.linear_value_head_dim
        heads = parts(f"{delta}.in_proj_qkvz", dk, dk, dv, dv) + parts(f"{delta}.in_proj_ba", group, group)
        return state_names(c) | expert_names() | {"layers.{i}.mixer.proj": " | ".join(heads)}


def is_dense(c: Config, layer: int) -> bool:
    """Whether a layer has no experts."""
    return layer in c.get("mlp_only_layers", []) or (layer + 1) % c.get("decoder_sparse_step", 1) > 0


def recurrent_layers(c: Config) -> list[bool]:
    """Which layers are of the delta rule: those that `layer_types` names, or all but every `full_attention_interval`-th."""
    every = c.get("full_attention_interval", 4)
    return layer_kinds(c, "linear", lambda i: (i + 1) % every > 0)


def state_dims(c: Config) -> dict[str, int]:
    """Extents of a decoder with gated delta nets, but for its feed-forward parts."""
    n, kv, hk, hv = int(c.num_attention_heads), c.kv_heads, c.linear_num_key_heads, c.linear_num_value_heads
    groups = (
        ("num_attention_heads", n, "num_key_value_heads", kv),
        ("linear_num_value_heads", hv, "linear_num_key_heads", hk),
    )
    for name, many, shared, few in groups:
        if many % few:
            raise ConfigError(
                f"{name}={many} is not a multiple of {shared}={few}: as many heads must share each of those"
            )
    taps = c.linear_conv_kernel_dim
    if taps < 2:
        raise ConfigError(f"linear_conv_kernel_dim={taps} sees no token before its own: it must be 2 or more")
    return {
        "h": c.hidden_size, "n": n, "kv": kv, "d": c.head_dim, "v": c.vocab_size, "hk": hk, "hv": hv,
        "dk": c.linear_key_head_dim, "dv": c.linear_value_head_dim, "taps": taps, "past": taps - 1,
    }  # fmt: skip


def expert_dims(c: Config) -> dict[str, int]:
    """Extents of its experts."""
    shared = c.shared_expert_intermediate_size
    return {"e": c.experts, "k": c.experts_per_tok, "fe": c.moe_intermediate_size, "fs": shared}


def state_names(c: Config) -> dict[str, str]:
    """Checkpoint names of a decoder with gated delta nets, but for what each family stores in its own way."""
    attn, delta, d = "model.layers.{i}.self_attn", "model.layers.{i}.linear_attn", c.head_dim
    keys, values = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim
    conv = parts(f"{delta}.conv1d", keys, keys, values)
    return decoder_names(c) | {
        "layers.{i}.mixer.qkv": " | ".join((*parts(f"{attn}.q_proj", d, d), f"{attn}.k_proj", f"{attn}.v_proj")),
        "layers.{i}.mixer.q_norm": f"{attn}.q_norm",
        "layers.{i}.mixer.k_norm": f"{attn}.k_norm",
        "layers.{i}.mixer.o": f"{attn}.o_proj",
        "layers.{i}.mixer.conv_q.w": conv[0],
        "layers.{i}.mixer.conv_k.w": conv[1],
        "layers.{i}.mixer.conv_v.w": conv[2],
        "layers.{i}.mixer.rate": f"={delta}.A_log",
        "layers.{i}.mixer.dt": f"={delta}.dt_bias",
        "layers.{i}.mixer.norm": f"{delta}.norm",
        "layers.{i}.mixer.out": f"{delta}.out_proj",
    }


def expert_names() -> dict[str, str]:
    """Checkpoint names of its experts, a tensor each."""
    own, mlp = "layers.{i}.mlp", "model.layers.{i}.mlp"
    return {
        f"{own}.routed.router": f"{mlp}.gate",
        f"{own}.routed.w13": f"{mlp}.experts.{{e}}.gate_proj | {mlp}.experts.{{e}}.up_proj",
        f"{own}.routed.w2": f"{mlp}.experts.{{e}}.down_proj",
        f"{own}.shared.up": f"{mlp}.shared_expert.gate_proj | {mlp}.shared_expert.up_proj",
        f"{own}.shared.down": f"{mlp}.shared_expert.down_proj",
        f"{own}.shared.gate": f"{mlp}.shared_expert_gate",
    }
