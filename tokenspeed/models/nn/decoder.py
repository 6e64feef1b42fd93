"""What Hugging Face decoder checkpoints share: names of dims, and names of tensors by module path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from torch import Tensor

from tokenspeed.models.nn.config import Config, ConfigError

TokenIds = Annotated[Tensor, "s@dp"]


def decoder_dims(c: Config) -> dict[str, int]:
    """Global extents of the named dims; `n` must be a multiple of `kv`."""
    n, kv = int(c.num_attention_heads), c.kv_heads
    if n % kv:
        raise ConfigError(f"num_attention_heads={n} is not a multiple of num_key_value_heads={kv}")
    return {"h": c.hidden_size, "n": n, "kv": kv, "d": c.head_dim, "f": c.intermediate_size, "v": c.vocab_size}


def expert_names(shared: bool, layer: str = "model.layers.{i}") -> dict[str, str]:
    """Of experts as DeepSeek's family calls them, `shared` if they stand beside a shared one."""
    mlp, routed = f"{layer}.mlp", "layers.{i}.mlp.routed" if shared else "layers.{i}.mlp"
    return {
        f"{routed}.router": f"{mlp}.gate",
        f"{routed}.correction": f"={mlp}.gate.e_score_correction_bias",
        f"{routed}.w13": f"{mlp}.experts.{{e}}.gate_proj | {mlp}.experts.{{e}}.up_proj",
        f"{routed}.w2": f"{mlp}.experts.{{e}}.down_proj",
        "layers.{i}.mlp.shared.up": f"{mlp}.shared_experts.gate_proj | {mlp}.shared_experts.up_proj",
        "layers.{i}.mlp.shared.down": f"{mlp}.shared_experts.down_proj",
    }


def layer_kinds(c: Config, other: str, is_other: Callable[[int], bool]) -> list[bool]:
    """Which layers are `other_attention` and not full: as `layer_types` says, or by layer number where the configuration names
    none."""
    count, known = c.num_hidden_layers, (f"{other}_attention", "full_attention")
    kinds = c.get("layer_types") or [known[0 if is_other(i) else 1] for i in range(count)]
    strange = sorted({str(k) for k in kinds} - set(known))
    if strange or len(kinds) < count:
        raise ConfigError(
            f"layer_types names {strange or len(kinds)} for {count} layers: each must be full or {other} attention"
        )
    return [kind == known[0] for kind in kinds[:count]]


def layer_windows(c: Config, sliding: Callable[[int], bool]) -> list[int | None]:
    """Positions that each layer's attention sees, None for all."""
    return [c.sliding_window if slides else None for slides in layer_kinds(c, "sliding", sliding)]


def decoder_names(c: Config) -> dict[str, str]:
    """Module path -> checkpoint name, one a segment ("|"); `{i}` stands for a list position. A second name after "or" is
    the fallback: a head that the file lacks is tied to the embedding, a tied one is read from it."""
    layer = "model.layers.{i}"
    tied = bool(c.get("tie_word_embeddings", False))
    names = {
        "embed.w": "model.embed_tokens",
        "layers.{i}.norm1": f"{layer}.input_layernorm",
        "layers.{i}.norm2": f"{layer}.post_attention_layernorm",
        "layers.{i}.attn.qkv": " | ".join(f"{layer}.self_attn.{p}_proj" for p in "qkv"),
        "layers.{i}.attn.q_norm": f"{layer}.self_attn.q_norm",
        "layers.{i}.attn.k_norm": f"{layer}.self_attn.k_norm",
        "layers.{i}.attn.o": f"{layer}.self_attn.o_proj",
        "layers.{i}.mlp.up": f"{layer}.mlp.gate_proj | {layer}.mlp.up_proj",
        "layers.{i}.mlp.down": f"{layer}.mlp.down_proj",
        "norm": "model.norm",
        "head.w": "model.embed_tokens" if tied else "lm_head or model.embed_tokens",
    }
    return names


def parts(name: str, *widths: int) -> tuple[str, ...]:
    """The names of what lies by turns in one checkpoint tensor: `widths` rows of each, again and again."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return tuple(f"{name}[{a}:{a + n}/{sum(widths)}]" for a, n in zip(starts, widths))
