"""What a field of config.json may hold, by its name: one reading for every family.

Invariant: a family gets a count that is a whole number, a switch that is true or false, a number that is finite and in its
range, a list, an object or a string, or the ConfigError that names field, value and what it must be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tokenspeed.ir.errors import TokenSpeedError


class ConfigError(TokenSpeedError):
    """A configuration this family cannot build; names the field."""

    def __init__(self, message: str) -> None:
        super().__init__("C001", message)


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda x: _number(x) and x == x // 1 and least <= x < 1 << 31


#: what it must be, in words -> (test, names)
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "a whole number from 1 on": (_whole(1), """
        hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
        max_position_embeddings num_experts num_local_experts num_experts_per_tok moe_intermediate_size decoder_sparse_step
        sliding_window sliding_window_pattern query_pre_attn_scalar n_routed_experts n_group topk_group kv_lora_rank q_lora_rank
        qk_nope_head_dim qk_rope_head_dim v_head_dim index_n_heads index_head_dim index_topk linear_num_key_heads
        linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim full_attention_interval
        shared_expert_intermediate_size rotary_dim original_max_position_embeddings"""),
    "a whole number from 0 on": (_whole(0), "first_k_dense_replace num_nextn_predict_layers n_shared_experts"),
    "a positive number": (lambda x: _number(x) and x > 0, """
        partial_rotary_factor attention_factor rms_norm_eps low_freq_factor high_freq_factor attn_logit_softcapping
        final_logit_softcapping routed_scaling_factor beta_fast beta_slow swiglu_limit swiglu_alpha"""),
    "a number above 1": (lambda x: _number(x) and x > 1, "rope_theta rope_local_base_freq"),
    "a number from 1 on": (lambda x: _number(x) and x >= 1, "factor"),
    "a number from 0 on": (lambda x: _number(x) and x >= 0, "mscale mscale_all_dim"),
    "true or false": (lambda x: isinstance(x, bool), """
        attention_bias mlp_bias norm_topk_prob use_qk_norm tie_word_embeddings rope_interleave use_sliding_window
        attn_output_gate use_bidirectional_attention truncate"""),
    "a list": (lambda x: isinstance(x, list), "layer_types mlp_only_layers"),
    "a list of positive numbers": (
        lambda x: isinstance(x, list | tuple) and len(x) > 0 and all(_number(v) and v > 0 for v in x),
        "short_factor long_factor divisors"),
    "an object": (lambda x: isinstance(x, Mapping), "rope_parameters rope_scaling"),
    "a string": (lambda x: isinstance(x, str), """
        rope_type hidden_act hidden_activation scoring_func topk_method qk_norm_type output_gate_type model_type"""),
}  # fmt: skip
_BY_NAME = {name: (must, test) for must, (test, names) in _KINDS.items() for name in names.split()}


def checked(name: str, value: Any) -> Any:
    """`value` of a field, if it can be one (a count as an int); ConfigError that names field and value. None is an absent field."""
    if value is None or name not in _BY_NAME:
        return value
    must, test = _BY_NAME[name]
    if not test(value):
        raise ConfigError(f"{name} is {value!r} in config.json: it must be {must}")
    return int(value) if must.startswith("a whole number") else value
