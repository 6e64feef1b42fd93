"""A model's configuration, read through a tracker: the fields that were read are the fields the artifact's key covers.

Invariant: a field is read by name exactly once it matters; a field that no code reads cannot change the program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenspeed.ir.errors import TokenSpeedError


class ConfigError(TokenSpeedError):
    """A configuration this family cannot build; names the field."""

    def __init__(self, message: str) -> None:
        super().__init__("C001", message)


#: fields that count something, and fields that are a positive number, wherever a family reads them
_COUNTS = frozenset({
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "num_experts", "num_local_experts", "num_experts_per_tok",
    "moe_intermediate_size", "decoder_sparse_step", "sliding_window", "sliding_window_pattern", "query_pre_attn_scalar",
    "n_routed_experts", "n_shared_experts", "n_group", "topk_group", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "full_attention_interval", "shared_expert_intermediate_size", "rotary_dim",
})  # fmt: skip
_LISTS = frozenset({"layer_types", "mlp_only_layers"})
_WHOLE = frozenset({"first_k_dense_replace", "num_nextn_predict_layers"})  # or none
_POSITIVE = frozenset({
    "partial_rotary_factor", "attention_factor",
    "rms_norm_eps", "rope_theta", "rope_local_base_freq", "factor", "low_freq_factor", "high_freq_factor",
    "attn_logit_softcapping", "final_logit_softcapping", "original_max_position_embeddings", "routed_scaling_factor",
    "beta_fast", "beta_slow",
})  # fmt: skip


def checked(name: str, value: Any) -> Any:
    """`value` of a field, if it can be one; ConfigError that names field and value. None is an absent field."""
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in _COUNTS or name in _WHOLE:
        least = 1 if name in _COUNTS else 0
        if not (number and value == value // 1 and least <= value < 1 << 31):
            raise ConfigError(f"{name} is {value!r} in config.json: it must be a whole number from {least} on")
        return int(value)
    if name in _POSITIVE and not (number and 0 < value < float("inf")):
        raise ConfigError(f"{name} is {value!r} in config.json: it must be a positive number")
    if name in _LISTS and not isinstance(value, list):
        raise ConfigError(f"{name} is {value!r} in config.json: it must be a list")
    return value


def yarn_scale(factor: float, by: float = 1.0) -> float:
    """How much longer vectors are made for contexts `factor` times the original (YaRN, 2309.00071, eq. 22), `by` as a model
    weighs it."""
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(p: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration may leave to YaRN's defaults, its bounds in turns and the factor of cosines and sines."""
    part, whole = p.get("mscale"), p.get("mscale_all_dim")
    gain = p.get("attention_factor")
    if gain is None:
        gain = (
            yarn_scale(p["factor"], part) / yarn_scale(p["factor"], whole)
            if part and whole
            else yarn_scale(p["factor"])
        )
    fast, slow = p.get("beta_fast") or 32, p.get("beta_slow") or 1
    return {"attention_factor": gain, "beta_fast": fast, "beta_slow": slow, "truncate": p.get("truncate", True)}


def _longrope(p: Mapping[str, Any]) -> dict[str, Any]:
    """The factor of cosines and sines where a configuration leaves it to LongRoPE's default; its divisors, if they are any."""
    for key in ("short_factor", "long_factor"):
        values = p[key]
        if not isinstance(values, list) or not all(isinstance(x, int | float) and x > 0 for x in values):
            raise ConfigError(f"{key} is {values!r} in config.json: it must be a list of positive numbers")
    old, gain = p["original_max_position_embeddings"], p.get("attention_factor")
    factor = p.get("factor") or p["positions"] / old
    if gain is None:
        gain = math.sqrt(1 + math.log(factor) / math.log(old)) if factor > 1 else 1.0
    return {"attention_factor": gain}


class Config:
    """Attribute access to a config.json: `c.hidden_size`, `c.get("head_dim")`. Missing: ConfigError that names the field."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._hidden: frozenset[str] = frozenset()
        self.read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._values.get(name) is None or name in self._hidden:
            raise ConfigError(
                f"config.json has no {name!r}, which {self._values.get('model_type', 'this model')} needs"
            )
        return self.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        self.read[name] = value
        return default if value is None or name in self._hidden else checked(name, value)

    def without(self, field: str) -> Config:
        """The same configuration read as if one field were absent; the record of reads is shared and says what it is."""
        other = Config(self._values)
        other._hidden, other.read = self._hidden | {field}, self.read
        return other

    def values(self) -> dict[str, Any]:
        """All fields, read or not."""
        return dict(self._values)

    def replaced(self, **fields: Any) -> Config:
        """Another configuration with some fields overwritten; what is read of it is recorded apart."""
        return Config(self._values | fields)

    @property
    def head_dim(self) -> int:
        d = self.get("head_dim") or self.hidden_size // self.num_attention_heads
        if d < 2 or d % 2:
            raise ConfigError(f"a head has {d} values: rotary position embedding turns pairs, so it must be even")
        return d

    def rotary_dim(self, part: float = 1.0) -> int:
        """Values of a head that rotary position embedding turns: the part that the configuration names, else `part`."""
        part = self.rope_parameters.get("partial_rotary_factor") or self.get("partial_rotary_factor") or part
        dim = int(self.head_dim * part)
        if not 2 <= dim <= self.head_dim or dim % 2:
            raise ConfigError(
                f"partial_rotary_factor={part} turns {dim} of {self.head_dim} values of a head: it must be even"
            )
        return dim

    @property
    def kv_heads(self) -> int:
        return int(self.get("num_key_value_heads", self.num_attention_heads))

    @property
    def experts(self) -> int:
        """Routed experts of a layer, under the name that the configuration uses (transformers 5: `num_local_experts`)."""
        return int(self.get("num_local_experts") or self.get("n_routed_experts") or self.num_experts)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The rope settings in one form: the newer `rope_parameters`, or the older rope_theta + rope_scaling."""
        return self.rope_of(self.get("rope_parameters") or self.get("rope_scaling"))

    def rope_of(self, given: Any, theta: str = "rope_theta", default: float = 10000.0) -> dict[str, Any]:
        """One rope's settings from an object of config.json; its base may stand in the field `theta` instead."""
        if not isinstance(given or {}, Mapping):
            raise ConfigError(f"rope_parameters / rope_scaling is {given!r} in config.json: it must be an object")
        out: dict[str, Any] = dict(given or {})
        if "type" in out:
            out.setdefault("rope_type", out.pop("type"))
        out.setdefault("rope_type", "default")
        if out.get("rope_theta") is None:
            out["rope_theta"] = self.get(theta, default)
        for key, value in out.items():
            checked(key, value)
        supported = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "divisors")
        if out["rope_type"] not in supported:
            raise ConfigError(f"rope_type {out['rope_type']!r} is not supported; supported: {', '.join(supported)}")
        if out["rope_type"] in ("llama3", "yarn", "longrope"):  # some configurations have it beside the rope's
            old = self.get("original_max_position_embeddings") or out.get("original_max_position_embeddings")
            out["original_max_position_embeddings"] = old or self.max_position_embeddings
        needed = {
            "linear": ("factor",), "longrope": ("short_factor", "long_factor"), "yarn": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        }  # fmt: skip
        for key in needed.get(out["rope_type"], ()):
            if out.get(key) is None:
                raise ConfigError(f"rope_type {out['rope_type']!r} needs {key!r} in rope_parameters / rope_scaling")
        defaults = {"yarn": _yarn, "longrope": _longrope}.get(out["rope_type"])
        return out | defaults(out | {"positions": self.max_position_embeddings}) if defaults else out

    def refuse(self, field: str, allowed: tuple[Any, ...], why: str) -> None:
        """ConfigError unless the field is absent or one of `allowed`."""
        value = self.get(field)
        if value is not None and value not in allowed:
            raise ConfigError(f"{field}={value!r} is not supported: {why}")
