"""The author's vocabulary: modules, ops with weights, ports. `from tokenspeed.models.nn import ...` is the public surface."""

from tokenspeed.models.nn.blocks import (
    MLP,
    Batch,
    DraftBatch,
    DraftHead,
    DraftSampler,
    Embed,
    FullSampler,
    GumbelSampler,
    Head,
    Partial,
    Rows,
    Sampler,
    Stream,
    Tokens,
)  # fmt: skip
from tokenspeed.models.nn.config import Config, ConfigError
from tokenspeed.models.nn.maps import Experts, HeadLinear, Linear, Weight
from tokenspeed.models.nn.module import Module, Port, Ports
from tokenspeed.models.nn.moe import Mixture, Routed, Shared
from tokenspeed.models.nn.params import (
    Clamp,
    LatentAttention,
    LatentIndex,
    LayerNorm,
    PagedAttention,
    RMSNorm,
    Rope,
    Routing,
    SamplingState,
    add_gumbel,
    argmax,
    cat,
    experts,
    full_sample,
    gelu,
    head,
    lookup,
    mul_rows,
    norm_over,
    place,
    route,
    select_rows,
    sigmoid,
    silu,
    softcap,
    temper,
)
from tokenspeed.models.nn.state import Conv, DeltaRule, GatedRMSNorm, StateBatch, StateCache, decay, l2_norm

__all__ = [
    "MLP", "Batch", "Clamp", "Config", "ConfigError", "Embed", "Experts", "FullSampler", "GumbelSampler", "Head", "HeadLinear",
    "LatentAttention", "LatentIndex", "LayerNorm", "Linear", "Mixture",
    "Module", "PagedAttention", "Partial", "Port", "Ports", "RMSNorm", "Rope", "Routed", "Routing", "Rows", "Sampler",
    "SamplingState", "Shared", "Stream", "Tokens", "Weight", "add_gumbel", "argmax", "experts", "full_sample", "gelu", "head",
    "lookup", "norm_over", "place", "route", "select_rows", "silu", "softcap", "temper",
]  # fmt: skip
__all__ += ["Conv", "DeltaRule", "GatedRMSNorm", "StateBatch", "StateCache", "decay", "l2_norm", "mul_rows", "sigmoid"]
__all__ += ["DraftBatch", "DraftHead", "DraftSampler", "cat"]
