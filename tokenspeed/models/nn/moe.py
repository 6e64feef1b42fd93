"""Routed experts: a block every mixture-of-experts decoder shares. Its sum is pending over the experts' axes."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from tokenspeed.models.nn.blocks import Rows
from tokenspeed.models.nn.module import Module
from tokenspeed.models.nn.params import Experts, Linear, experts, route


class Routed(Module):
    """Each row through its `k` most probable experts, gated MLPs of width fe, by softmax shares.

    `e` experts lie on `ep`, the width of each on `etp`. Every rank routes the rows it sees and adds its own experts' share.
    `normalise`: the shares of a row sum to one.
    """

    def __init__(self, k: int, normalise: bool) -> None:
        self.k, self.normalise = k, normalise
        self.router = Linear("h -> e", dtype="f32")
        self.w13, self.w2 = Experts("e@ep h -> fe@etp | fe@etp"), Experts("e@ep fe@etp -> h")

    def forward(self, x: Rows) -> Annotated[Tensor, "t* h +ep? +etp"]:
        ids, shares = route(self.router(x), self.k, normalise=self.normalise)
        return experts(x, ids, shares, self.w13, self.w2)
