"""Qwen3-MoE: Qwen3 attention, and routed experts in place of the MLP in every layer that is not named dense."""

from __future__ import annotations

from tokenspeed.models.nn import MLP, Batch, Config, Module, RMSNorm, Rope, Routed, Routing, Stream
from tokenspeed.models.nn.decoder import decoder_dims, decoder_names
from tokenspeed.models.qwen2 import CausalLM as Qwen2CausalLM
from tokenspeed.models.qwen3 import Attention


class Layer(Module):
    def __init__(self, c: Config, rope: Rope, window: int | None, dense: bool) -> None:
        self.norm1, self.norm2 = RMSNorm("h", c.rms_norm_eps), RMSNorm("h", c.rms_norm_eps)
        self.attn = Attention(c, rope, window)
        how = Routing(c.experts_per_tok, normalise=bool(c.get("norm_topk_prob", False)))
        self.mlp = MLP() if dense else Routed(how)

    def forward(self, x: Stream, b: Batch) -> Stream:
        x = x + self.attn(self.norm1(x), b)
        return x + self.mlp(self.norm2(x))


class CausalLM(Qwen2CausalLM):
    def __init__(self, c: Config) -> None:
        super().__init__(c)
        named, step = c.get("mlp_only_layers", []), c.get("decoder_sparse_step", 1)
        dense = [i in named or (i + 1) % step > 0 for i in range(c.num_hidden_layers)]
        self.layers = [Layer(c, self.rope, w, d) for w, d in zip(self.windows(c), dense)]

    @staticmethod
    def windows(c: Config) -> list[int | None]:
        return [c.sliding_window if c.get("use_sliding_window", False) else None] * c.num_hidden_layers

    @staticmethod
    def dims(c: Config) -> dict[str, int]:
        return decoder_dims(c) | {"e": c.experts, "k": c.experts_per_tok, "fe": c.moe_intermediate_size}

    @staticmethod
    def names(c: Config) -> dict[str, str]:
        mlp = "model.layers.{i}.mlp"
        return decoder_names(c) | {
            "layers.{i}.mlp.router": f"{mlp}.gate",
            "layers.{i}.mlp.w13": f"{mlp}.experts.{{e}}.gate_proj | {mlp}.experts.{{e}}.up_proj",
            "layers.{i}.mlp.w2": f"{mlp}.experts.{{e}}.down_proj",
        }
