"""Layers that draft (multi-token prediction, DeepSeek-V3, 2412.19437): one more layer of a family, which reads the embedding of
the token behind a row beside the main model's last state of the row, and says which token may come next."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from tokenspeed.models import deepseek, deepseek_sparse, glm4_moe
from tokenspeed.models.nn import (
    Config,
    DraftBatch,
    DraftHead,
    DraftSampler,
    Embed,
    Linear,
    Module,
    RMSNorm,
    Rows,
    cat,
    select_rows,
)


class Joined(Module):
    def __init__(self, c: Config) -> None:
        self.enorm, self.hnorm = RMSNorm("h", c.rms_norm_eps), RMSNorm("h", c.rms_norm_eps)
        self.proj = Linear("eh -> h")

    def forward(self, e: Rows, x: Rows) -> Rows:
        return self.proj(cat([self.enorm(e), self.hnorm(x)], "eh"))


class Deepseek(Module):
    """The layer behind the last one of a checkpoint, which shares the main model's embedding and head."""

    def __init__(self, c: Config) -> None:
        c.refuse("num_nextn_predict_layers", (1,), "one layer drafts one token")
        main = self.main(c)(c)
        self.embed, self.joined = Embed(), Joined(c)
        self.rope, self.layers = main.rope, [main.layers[-1]]
        self.norm = RMSNorm("h", c.rms_norm_eps)
        self.head, self.sampler = DraftHead(), DraftSampler()

    def forward(self, b: DraftBatch) -> Annotated[Tensor, "drafted@dp"]:
        x = self.joined(self.embed(b.ids), b.hidden)
        for layer in self.layers:
            x = layer(x, b)
        return self.sampler(self.head(self.norm(select_rows(x, b.last))), b.params)

    @classmethod
    def main(cls, c: Config) -> Any:
        """The root class of the main model."""
        return deepseek_sparse.CausalLM if c.get("index_topk") else deepseek.CausalLM

    @classmethod
    def dims(cls, c: Config) -> dict[str, int]:
        """A step has verified one drafted token a request: it is right or not, so one may be drafted behind either row."""
        return cls.main(c).dims(c) | {"eh": 2 * c.hidden_size, "drafted": c.num_nextn_predict_layers + 1}

    @classmethod
    def names(cls, c: Config) -> dict[str, str]:
        mine = f"model.layers.{c.num_hidden_layers}"
        theirs = {path: name.replace("model.layers.{i}", mine) for path, name in cls.main(c).names(c).items()}
        return theirs | {
            "joined.enorm": f"{mine}.enorm",
            "joined.hnorm": f"{mine}.hnorm",
            "joined.proj": f"{mine}.eh_proj",
            "norm": f"{mine}.shared_head.norm",
        }


class Glm4Moe(Deepseek):
    @classmethod
    def main(cls, c: Config) -> Any:
        return glm4_moe.CausalLM
