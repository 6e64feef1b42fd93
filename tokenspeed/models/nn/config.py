"""A model's configuration, read through a tracker: the fields that were read are the fields the artifact's key covers.

Invariant: a field is read by name exactly once it matters; a field that no code reads cannot change the program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenspeed.models.nn.fields import ConfigError, checked


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
    """The factor of contexts, and that of cosines and sines where a configuration leaves it to LongRoPE's default."""
    old, gain = p["original_max_position_embeddings"], p.get("attention_factor")
    factor = p.get("factor") or p["positions"] / old
    if gain is None:
        if old < 2 <= factor:
            raise ConfigError(
                f"original_max_position_embeddings is {old} in config.json: longrope's scale takes its logarithm"
            )
        gain = math.sqrt(1 + math.log(factor) / math.log(old)) if factor > 1 else 1.0
    return {"attention_factor": gain, "factor": factor}


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
            said = "head_dim" if self.get("head_dim") else "hidden_size / num_attention_heads"
            raise ConfigError(
                f"{said} is {d} in config.json: rotary position embedding turns pairs, so it must be even"
            )
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
    def experts_per_tok(self) -> int:
        """Routed experts that a token visits, of those there are."""
        k, of = self.num_experts_per_tok, self.experts
        if k > of:
            raise ConfigError(f"num_experts_per_tok is {k} in config.json: a layer has {of} experts")
        return k

    def expert_groups(self) -> tuple[int, int]:
        """Groups of experts, and how many of them a token may visit."""
        groups, kept = self.get("n_group", 1), self.get("topk_group", 1)
        if self.experts % groups:
            raise ConfigError(
                f"n_group is {groups} in config.json: {self.experts} experts do not fall into equal groups"
            )
        if kept > groups or self.experts_per_tok > kept * (self.experts // groups):
            raise ConfigError(
                f"topk_group is {kept} in config.json: num_experts_per_tok={self.experts_per_tok} experts cannot be picked from "
                f"so many of n_group={groups} groups of {self.experts // groups}"
            )
        return groups, kept

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
        checked("rope_parameters", given)
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
            "linear": ("factor",), "dynamic": ("factor",), "divisors": ("divisors",), "yarn": ("factor",),
            "longrope": ("short_factor", "long_factor"), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        }  # fmt: skip
        for key in needed.get(out["rope_type"], ()):
            if out.get(key) is None:
                raise ConfigError(f"rope_type {out['rope_type']!r} needs {key!r} in rope_parameters / rope_scaling")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if out.get(low) is not None and out.get(high) is not None and not out[low] < out[high]:
                raise ConfigError(
                    f"{low} is {out[low]!r} and {high} {out[high]!r} in config.json: the former must be below the latter"
                )
        defaults = {"yarn": _yarn, "longrope": _longrope}.get(out["rope_type"])
        return out | defaults(out | {"positions": self.max_position_embeddings}) if defaults else out

    def refuse(self, field: str, allowed: tuple[Any, ...], why: str) -> None:
        """ConfigError unless the field is absent or one of `allowed`."""
        value = self.get(field)
        if value is not None and value not in allowed:
            raise ConfigError(f"{field}={value!r} is not supported: {why}")
