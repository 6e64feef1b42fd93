"""DeepSeek V3.2: V3 with sparse attention. A few index heads score all positions before a token by keys of their own, and the
token attends the `index_topk` best."""

from __future__ import annotations

from typing import Any

from tokenspeed.models.deepseek import Attention as DenseAttention
from tokenspeed.models.deepseek import CausalLM as DenseCausalLM
from tokenspeed.models.nn import Batch, Config, ConfigError, LatentIndex, LayerNorm, Linear, Module, Rope
from tokenspeed.models.nn.module import Param

KEY_EPS = 1e-6  # of the norm of index keys, whatever rms_norm_eps says


class Indexer(Param):
    """Index heads, whole on every rank. They turn in halves where attention turns pairs, and the turned values come first."""

    def __init__(self, c: Config, rope: Rope) -> None:
        self.q_b, self.weights = Linear("ql -> m*di"), Linear("h -> m", dtype="f32")
        self.k, self.k_norm = Linear("h -> di"), LayerNorm("di", KEY_EPS)
        self.rope, self.best = rope, LatentIndex("di", c.index_topk)

    def __call__(self, x: Any, ql: Any, b: Batch) -> Any:
        q, k = self.rope(self.q_b(ql), self.k_norm(self.k(x)), b.pos, pairs=False)
        return self.best(q, self.weights(x), k, b)


class Attention(DenseAttention):
    def __init__(self, c: Config, rope: Rope) -> None:
        super().__init__(c, rope)
        self.indexer = Indexer(c, rope)

    def picked(self, x: Any, ql: Any, b: Batch) -> Any:
        return self.indexer(x, ql, b)


class CausalLM(DenseCausalLM):
    def attention(self, c: Config) -> Module:
        if c.index_head_dim < c.qk_rope_head_dim:
            raise ConfigError(
                f"index_head_dim={c.index_head_dim}: {c.qk_rope_head_dim} values of an index head turn (qk_rope_head_dim)"
            )
        return Attention(c, self.rope)

    @staticmethod
    def dims(c: Config) -> dict[str, int]:
        index = {"ql": c.q_lora_rank, "m": c.index_n_heads, "di": c.index_head_dim, "ik": c.index_topk}
        return DenseCausalLM.dims(c) | index

    @staticmethod
    def names(c: Config) -> dict[str, str]:
        mine, theirs = "layers.{i}.attn.indexer", "model.layers.{i}.self_attn.indexer"
        return DenseCausalLM.names(c) | {
            f"{mine}.q_b": f"{theirs}.wq_b",
            f"{mine}.k": f"{theirs}.wk",
            f"{mine}.k_norm.w": f"={theirs}.k_norm.weight",
            f"{mine}.k_norm.b": f"={theirs}.k_norm.bias",
            f"{mine}.weights": f"{theirs}.weights_proj",
        }
