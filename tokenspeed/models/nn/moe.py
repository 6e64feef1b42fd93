"""Mixtures of experts: blocks that such decoders share. The sum of routed experts is pending over their axes, that of a
shared expert over its own; a composite adds the two, and how they meet is the solver's choice."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from tokenspeed.models.nn.blocks import MLP, Rows, Stream
from tokenspeed.models.nn.maps import Experts, Linear, Weight
from tokenspeed.models.nn.module import Module
from tokenspeed.models.nn.params import Clamp, Routing, experts, route


class Routed(Module):
    """Each row through the experts that `how` picks for it, gated MLPs of width fe.

    `e` experts lie on `ep`, the width of each on `etp`. Every rank routes the rows it sees and adds its own experts' share.
    `bias`: a float32 correction of the scores, for the choice alone. `biases`: router and experts have biases of their own.
    """

    def __init__(self, how: Routing, bias: bool = False, biases: bool = False, clamp: Clamp | None = None) -> None:
        self.how, self.clamp = how, clamp
        self.router = Linear("h -> e", bias=biases, dtype="f32")
        self.correction = Weight("e", dtype="f32") if bias else None
        self.w13 = Experts("e@ep: h -> fe@etp | fe@etp", bias=biases)
        self.w2 = Experts("e@ep: fe@etp -> h", bias="e@ep h +etp" if biases else None)

    def forward(self, x: Rows) -> Annotated[Tensor, "t* h +ep? +etp"]:
        ids, shares = route(self.router(x), self.how, self.correction)
        return experts(x, ids, shares, self.w13, self.w2, self.clamp)


class Shared(MLP):
    """The expert that every row visits, a gated MLP of width fs on its own axis."""

    def __init__(self) -> None:
        self.up, self.down = Linear("h -> fs@se | fs@se"), Linear("fs@se -> h")

    def forward(self, x: Rows) -> Annotated[Tensor, "t* h +se"]:
        return super().forward(x)


class Mixture(Module):
    """Routed experts beside a shared one."""

    def __init__(self, routed: Routed, shared: Module) -> None:
        self.routed, self.shared = routed, shared

    def forward(self, x: Stream) -> Stream:
        return self.routed(x) + self.shared(x)
