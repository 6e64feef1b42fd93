"""Layers that draft (multi-token prediction, DeepSeek-V3, 2412.19437): one more layer of a family, which reads the embedding of
the token behind a row beside the main model's last state of the row, and says which token may come next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from torch import Tensor

from tokenspeed.models import deepseek, deepseek_sparse, glm4_moe, qwen3_5, qwen3_next
from tokenspeed.models.nn import (
    Batch,
    Config,
    DraftBatch,
    DraftHead,
    DraftSampler,
    Embed,
    Linear,
    Module,
    RMSNorm,
    Rows,
    Stream,
    cat,
    select_rows,
)


class Joined(Module):
    def __init__(self, enorm: RMSNorm, hnorm: RMSNorm) -> None:
        self.enorm, self.hnorm, self.proj = enorm, hnorm, Linear("eh -> h")

    def forward(self, e: Rows, x: Rows) -> Rows:
        return self.proj(cat([self.enorm(e), self.hnorm(x)], "eh"))


class Draft(Module):
    """One layer of a family between a projection and a norm of its own; it shares the main model's embedding and head."""

    family: ClassVar[Callable[[Config], Any]]  # the root class of the main model

    def __init__(self, c: Config) -> None:
        for field in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            c.refuse(field, (1,), "one layer drafts one token")
        main = type(self).family(c)(c)
        self.embed, self.joined = Embed(), Joined(self.own_norm(c), self.own_norm(c))
        self.rope, self.layers = main.rope, [self.layer(c, main)]
        self.norm = self.own_norm(c)
        self.head, self.sampler = DraftHead(), DraftSampler()

    def forward(self, b: DraftBatch) -> Annotated[Tensor, "drafted@dp"]:
        x = self.joined(self.embed(b.ids), b.hidden)
        for layer in self.layers:
            x = layer(x, b)
        return self.sampler(self.head(self.norm(select_rows(x, b.last))), b.params)

    def own_norm(self, c: Config) -> RMSNorm:
        return RMSNorm("h", c.rms_norm_eps)

    def layer(self, c: Config, main: Any) -> Module:
        return main.layers[-1]

    @classmethod
    def dims(cls, c: Config) -> dict[str, int]:
        """A step has verified one drafted token a request: it is right or not, so one may be drafted behind either row."""
        return cls.family(c).dims(c) | {"eh": 2 * c.hidden_size, "drafted": 2}

    @classmethod
    def own_names(cls, c: Config, layer: str, own: tuple[str, str, str, str]) -> dict[str, str]:
        """The main model's names with those of this layer (`layer`), its norms and its projection (`own`)."""
        theirs: dict[str, str] = {
            path: name.replace("model.layers.{i}", layer) for path, name in cls.family(c).names(c).items()
        }
        return theirs | dict(zip(("joined.enorm", "joined.hnorm", "joined.proj", "norm"), own))


class Deepseek(Draft):
    """The layer behind the last one of a checkpoint; with an index where the main model has one."""

    family = staticmethod(lambda c: deepseek_sparse.CausalLM if c.get("index_topk") else deepseek.CausalLM)

    @classmethod
    def names(cls, c: Config) -> dict[str, str]:
        layer = f"model.layers.{c.num_hidden_layers}"
        own = (f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj", f"{layer}.shared_head.norm")
        return cls.own_names(c, layer, own)


class Glm4Moe(Deepseek):
    family = staticmethod(lambda c: glm4_moe.CausalLM)


class AttentionLayer(qwen3_next.Layer):
    """A layer that keeps no state."""

    def forward(self, x: Stream, b: Batch) -> Stream:
        x = x + self.mixer(self.norm1(x), b)
        return x + self.mlp(self.norm2(x))


class Qwen3Next(Draft):
    """A layer of gated attention, whose tensors lie under `mtp`."""

    def own_norm(self, c: Config) -> RMSNorm:
        return qwen3_next.shifted_norm("h", c)

    def layer(self, c: Config, main: Any) -> Module:
        return AttentionLayer(c, qwen3_next.GatedAttention(c, main.rope), main.mlp(c, c.num_hidden_layers - 1))

    family = staticmethod(lambda c: qwen3_next.CausalLM)

    @classmethod
    def names(cls, c: Config) -> dict[str, str]:
        own = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        return cls.own_names(c, "mtp.layers.{i}", own)


class Qwen3_5(Qwen3Next):
    """Dense, or with experts where the model has them."""

    family = staticmethod(lambda c: qwen3_5.MoeCausalLM if c.get("num_experts") else qwen3_5.CausalLM)
