"""gpt-oss: every second layer sees a window, each head has a sink, biases everywhere, and experts with a clamped gate. A
checkpoint holds a layer's experts in one tensor, gate and up row by row, in numbers or in MXFP4."""

from __future__ import annotations

from tokenspeed.models.llama import Attention as LlamaAttention
from tokenspeed.models.llama import CausalLM as LlamaCausalLM
from tokenspeed.models.nn import (
    Batch,
    Clamp,
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
)
from tokenspeed.models.nn.decoder import decoder_dims, decoder_names, layer_windows


def norm(c: Config) -> RMSNorm:
    return RMSNorm("h", c.rms_norm_eps, dtype="f32")


class Attention(LlamaAttention):
    def __init__(self, c: Config, rope: Rope, window: int | None = None) -> None:
        super().__init__(c, rope, window)
        self.sinks = Weight("n@tp")

    def forward(self, x: Tokens, b: Batch) -> Partial:
        q, k, v = self.qkv(x)
        q, k = self.rope(q, k, b.pos)
        return self.o(self.attn(q, k, v, b, self.sinks))


class Layer(Module):
    def __init__(self, c: Config, rope: Rope, window: int | None) -> None:
        self.norm1, self.norm2 = norm(c), norm(c)
        self.attn = Attention(c, rope, window)
        clamp = Clamp(c.get("swiglu_alpha", 1.702), c.get("swiglu_limit", 7.0))
        self.mlp = Routed(Routing(c.experts_per_tok), biases=True, clamp=clamp)

    def forward(self, x: Stream, b: Batch) -> Stream:
        x = x + self.attn(self.norm1(x), b)
        return x + self.mlp(self.norm2(x))


class CausalLM(LlamaCausalLM):
    layer = Layer

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.norm = norm(c)

    @staticmethod
    def windows(c: Config) -> list[int | None]:
        return layer_windows(c, lambda i: i % 2 == 0)

    @staticmethod
    def dims(c: Config) -> dict[str, int]:
        return decoder_dims(c) | {"e": c.experts, "k": c.experts_per_tok, "fe": c.intermediate_size}

    @staticmethod
    def names(c: Config) -> dict[str, str]:
        layer = "model.layers.{i}"
        experts = f"{layer}.mlp.experts"
        both = [
            f"={experts}.gate_up_proj#{{e}}'{s} or ={experts}.gate_up_proj_blocks#{{e}}{s}"
            for s in ("[0:1/2]", "[1:2/2]")
        ]
        return decoder_names(c) | {
            "layers.{i}.attn.sinks": f"={layer}.self_attn.sinks",
            "layers.{i}.mlp.router": f"{layer}.mlp.router",
            "layers.{i}.mlp.w13": " | ".join(both),
            "layers.{i}.mlp.w13.bias": f"={experts}.gate_up_proj_bias#{{e}}[0:1/2] | ={experts}.gate_up_proj_bias#{{e}}[1:2/2]",
            "layers.{i}.mlp.w2": f"={experts}.down_proj#{{e}}' or ={experts}.down_proj_blocks#{{e}}",
            "layers.{i}.mlp.w2.bias": f"={experts}.down_proj_bias#{{e}}",
        }
