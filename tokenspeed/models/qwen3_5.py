"""Qwen 3.5 and 3.6, their language models: Qwen3-Next with the projections of its delta nets apart; dense or with experts."""

from __future__ import annotations

from tokenspeed.models.nn import MLP, Config, Mixture, Module, Routed, Routing
from tokenspeed.models.nn.decoder import parts
from tokenspeed.models.qwen3_next import CausalLM as Qwen3NextCausalLM
from tokenspeed.models.qwen3_next import GatedShared, expert_dims, expert_names, state_dims, state_names


class CausalLM(Qwen3NextCausalLM):
    """The dense ones."""

    def mlp(self, c: Config, layer: int) -> Module:
        return MLP()

    @staticmethod
    def dims(c: Config) -> dict[str, int]:
        return state_dims(c) | {"f": c.intermediate_size}

    @staticmethod
    def names(c: Config) -> dict[str, str]:
        delta = "model.layers.{i}.linear_attn"
        keys, values = (
            c.linear_num_key_heads * c.linear_key_head_dim,
            c.linear_num_value_heads * c.linear_value_head_dim,
        )
        heads = [*parts(f"{delta}.in_proj_qkv", keys, keys, values), *(f"{delta}.in_proj_{p}" for p in "zba")]
        return state_names(c) | {"layers.{i}.mixer.proj": " | ".join(heads)}


class MoeCausalLM(CausalLM):
    """Those with experts in every layer."""

    def mlp(self, c: Config, layer: int) -> Module:
        return Mixture(Routed(Routing(c.experts_per_tok)), GatedShared())

    @staticmethod
    def dims(c: Config) -> dict[str, int]:
        return state_dims(c) | expert_dims(c)

    @staticmethod
    def names(c: Config) -> dict[str, str]:
        return CausalLM.names(c) | expert_names()
