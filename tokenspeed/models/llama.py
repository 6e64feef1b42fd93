"""The Llama family: SmolLM2, Llama 2 and 3.x, Mistral."""

from __future__ import annotations

from tokenspeed.models.nn import (
    MLP,
    Batch,
    Config,
    Embed,
    Head,
    Linear,
    Module,
    PagedAttention,
    Partial,
    RMSNorm,
    Rope,
    Sampler,
    Stream,
    Tokens,
    select_rows,
)  # fmt: skip
from tokenspeed.models.nn.decoder import TokenIds, decoder_dims, decoder_names, layer_windows


class Attention(Module):
    def __init__(self, c: Config, rope: Rope, window: int | None = None) -> None:
        bias = bool(c.get("attention_bias", False))
        self.qkv = Linear("h -> n@tp*d | kv@tp:kv*d | kv@tp:kv*d", bias=bias or None)
        self.rope, self.attn = rope, PagedAttention("n@tp kv@tp:kv d", scale=c.head_dim**-0.5, window=window)
        self.o = Linear("n@tp*d -> h", bias="h +tp" if bias else None)

    def forward(self, x: Tokens, b: Batch) -> Partial:
        q, k, v = self.qkv(x)
        q, k = self.rope(q, k, b.pos)
        return self.o(self.attn(q, k, v, b))


class Layer(Module):
    attention = Attention

    def __init__(self, c: Config, rope: Rope, window: int | None = None) -> None:
        self.norm1, self.norm2 = RMSNorm("h", c.rms_norm_eps), RMSNorm("h", c.rms_norm_eps)
        self.attn, self.mlp = self.attention(c, rope, window), MLP(bias=bool(c.get("mlp_bias", False)))

    def forward(self, x: Stream, b: Batch) -> Stream:
        x = x + self.attn(self.norm1(x), b)
        return x + self.mlp(self.norm2(x))


class CausalLM(Module):
    """Decoder stack from token ids to sampled tokens. `dims` names the extents, `names` the checkpoint's tensors."""

    layer = Layer
    dims, names = staticmethod(decoder_dims), staticmethod(decoder_names)

    def __init__(self, c: Config) -> None:
        c.refuse("hidden_act", ("silu",), "this family's MLP is silu(gate) * up")
        self.rope = self.make_rope(c)
        self.embed, self.head, self.sampler = Embed(), Head(), Sampler()
        self.layers = [self.layer(c, self.rope, window) for window in self.windows(c)]
        self.norm = RMSNorm("h", c.rms_norm_eps)

    def make_rope(self, c: Config) -> Rope:
        return Rope(c.head_dim, c.max_position_embeddings, c.rope_parameters)

    @staticmethod
    def windows(c: Config) -> list[int | None]:
        return layer_windows(c, lambda _: c.get("sliding_window") is not None)

    def forward(self, b: Batch) -> TokenIds:
        x = self.embed(b.ids)
        for layer in self.layers:
            x = layer(x, b)
        return self.sampler(self.head(self.norm(select_rows(x, b.last))), b.params)
