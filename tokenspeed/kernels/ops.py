# pyright: strict
"""The ops that kernels implement, and the family and mode each belongs to.

The table is closed: a kernel implements one of these ops; a fused op gets an entry of its own.
`roles` are the tensor arguments whose format a signature may constrain, `out` included.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the graph: `family`/`mode` name its override variable and its folder."""

    name: str
    family: str
    mode: str
    roles: tuple[str, ...]

    @property
    def key(self) -> str:
        """`family/mode`, as overrides in a config file name it."""
        return f"{self.family}/{self.mode}"

    @property
    def override_variable(self) -> str:
        """The environment variable that forces this op's kernel."""
        return f"TOKENSPEED_KERNEL_OVERRIDE_{self.family}_{self.mode}".upper()


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("lookup", "embedding", "lookup", ("w", "out")),
        Op("linear", "gemm", "linear", ("x", "w", "out")),
        Op("linear_silu_mul", "gemm", "silu_mul", ("x", "w", "out")),
        Op("linear_chain", "gemm", "chain", ("x", "w", "out")),
        Op("rms_norm", "norm", "rms", ("x", "w", "out")),
        Op("layer_norm", "norm", "layer", ("x", "w", "out")),
        Op("add_rms_norm", "norm", "add_rms", ("x", "w", "out")),
        Op("square_sum", "norm", "square_sum", ("x", "out")),
        Op("rms_scale", "norm", "scale", ("x", "w", "out")),
        Op("rope", "rope", "neox", ("x", "out")),
        Op("rope_pairs", "rope", "pairs", ("x", "out")),
        Op("silu", "activation", "silu", ("x", "out")),
        Op("silu_mul", "activation", "silu_mul", ("x", "out")),
        Op("gelu", "activation", "gelu", ("x", "out")),
        Op("gelu_mul", "activation", "gelu_mul", ("x", "out")),
        Op("add", "pointwise", "add", ("x", "out")),
        Op("mul", "pointwise", "mul", ("x", "out")),
        Op("mul_rows", "pointwise", "mul_rows", ("x", "out")),
        Op("scale", "pointwise", "scale", ("x", "out")),
        Op("softcap", "pointwise", "softcap", ("x", "out")),
        Op("cross", "pointwise", "cross", ("x", "out")),
        Op("route", "moe", "route", ("x", "w")),
        Op("experts", "moe", "experts", ("x", "w", "out")),
        Op("append", "attention", "append", ("x", "cache")),
        Op("append_latent", "attention", "append_latent", ("x", "cache")),
        Op("mla", "attention", "mla", ("x", "cache", "out")),
        Op("index_topk", "attention", "index", ("x", "cache")),
        Op("head_linear", "gemm", "heads", ("x", "w", "out")),
        Op("rope_append", "attention", "rope_append", ("x", "out", "cache")),
        Op("norm_rope_append", "attention", "norm_rope_append", ("x", "w", "out", "cache")),
        Op("attend", "attention", "paged", ("x", "w", "cache", "out")),
        Op("sigmoid", "activation", "sigmoid", ("x", "out")),
        Op("causal_conv", "state", "conv", ("x", "w", "cache", "out")),
        Op("delta_rule", "state", "delta", ("x", "cache", "out")),
        Op("decay", "state", "decay", ("x", "w", "out")),
        Op("l2_norm", "norm", "l2", ("x", "out")),
        Op("gated_rms_norm", "norm", "gated_rms", ("x", "w", "out")),
        Op("select_rows", "rows", "select", ("x", "out")),
        Op("cat", "rows", "cat", ("x", "out")),
        Op("fill", "rows", "fill", ("x", "out")),
        Op("temper", "sampling", "temper", ("x", "out")),
        Op("add_gumbel", "sampling", "gumbel", ("x", "out")),
        Op("argmax", "sampling", "argmax", ("x",)),
        Op("gumbel_argmax", "sampling", "gumbel_argmax", ("x",)),
        Op("merge_argmax", "sampling", "merge_argmax", ("x",)),
        Op("sample", "sampling", "sample", ("x",)),
        Op("topk", "sampling", "topk", ("x",)),
        Op("reduce", "sampling", "reduce", ("x", "out")),
        Op("mask_logits", "sampling", "mask", ("x", "out")),
        Op("shape_logits", "sampling", "shape", ("x",)),
        Op("tally", "sampling", "tally", ("x",)),
        Op("narrow", "sampling", "narrow", ("x",)),
        Op("sift", "sampling", "sift", ("x",)),
        Op("count_token", "sampling", "count", ("x",)),
        Op("exp_sum", "sampling", "exp_sum", ("x",)),
        Op("pick", "sampling", "pick", ("x",)),
        Op("report_logprobs", "sampling", "report", ("x",)),
        Op("all_reduce", "comm", "all_reduce", ("x", "out")),
        Op("all_gather", "comm", "all_gather", ("x", "out")),
        Op("reduce_scatter", "comm", "reduce_scatter", ("x", "out")),
        Op("slice", "comm", "slice", ("x", "out")),
        Op("append_part", "attention", "append_part", ("x", "cache")),
        Op("append_latent_part", "attention", "append_latent_part", ("x", "cache")),
        Op("mla_part", "attention", "mla_part", ("x", "cache", "out")),
        Op("index_topk_part", "attention", "index_part", ("x", "cache")),
        Op("attend_part", "attention", "paged_part", ("x", "w", "cache", "out")),
        Op("all_reduce_lse", "comm", "all_reduce_lse", ("x", "out")),
        Op("all_reduce_argmax", "comm", "all_reduce_argmax", ("x", "out")),
        Op("dispatch", "comm", "dispatch", ("x", "out")),
        Op("combine", "comm", "combine", ("x", "out")),
        Op("all_reduce_topk", "comm", "all_reduce_topk", ("x", "out")),
        Op("all_reduce_max", "comm", "all_reduce_max", ("x", "out")),
        Op("all_reduce_min", "comm", "all_reduce_min", ("x", "out")),
        Op("keep_first", "comm", "keep_first", ("x", "out")),
        Op("all_reduce_add_rms_norm", "comm", "all_reduce_add_rms", ("x", "w", "out")),
        Op("reduce_scatter_add_rms_norm", "comm", "reduce_scatter_add_rms", ("x", "w", "out")),
    )
}


def op_of(name: str) -> Op:
    """The entry of op `name`; KeyError that lists the known ops otherwise."""
    try:
        return OPS[name]
    except KeyError:
        raise KeyError(f"unknown op '{name}'; the known ops are: {', '.join(sorted(OPS))}") from None
