"""Blocks every dense decoder shares: the batch ports, embedding, head, samplers and the gated MLP."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from tokenspeed.ir.builder import current
from tokenspeed.ir.ops.sampling import TOP_LOGPROBS
from tokenspeed.models.nn.maps import STREAM, Linear, Weight
from tokenspeed.models.nn.module import Module, Port, Ports
from tokenspeed.models.nn.params import (
    SamplingState,
    add_gumbel,
    argmax,
    count_token,
    exp_sum,
    export,
    full_sample,
    head,
    lookup,
    mask_logits,
    pick,
    place,
    report_logprobs,
    row_max,
    shape_logits,
    sift,
    silu,
    softcap,
    temper,
    threshold,
    topk,
)  # fmt: skip

Stream = Annotated[Tensor, "t* h +?"]  # a residual stream: any token spread, perhaps pending
Rows = Annotated[Tensor, "t* h"]  # any token spread, complete
Tokens = Annotated[Tensor, "t@dp h"]  # the tokens of this home group, whole on every tp rank
Partial = Annotated[Tensor, "t@dp h +tp"]  # sum over tp still pending


class Batch(Ports):
    """The scheduler's ABI: what one step brings. Rows of t are tokens, rows of s are requests of this home group."""

    ids = Port("t@dp")  # token ids; -1: a hole
    pos = Port("t@dp")  # position in the request, from 0; -1: a hole
    slot = Port("t@dp -> slots@dp")  # KV slot to write; -1: none
    row = Port("t@dp -> s@dp")  # request row of the token; -1: a hole
    table = Port("s@dp l -> slots@dp")  # block table: page numbers
    window_slot = Port("t@dp -> window_slots@dp", optional=True)  # as slot, and as table, of layers that see a window
    window_table = Port("s@dp l -> window_slots@dp", optional=True)
    last = Port("s@dp -> t@dp")  # token row to sample from; -1: none this step
    params = Port("s@dp p")  # sampling parameters, packed words


class DraftBatch(Batch):
    """One step of a layer that drafts. `ids` are the tokens that follow each row; drafted rows are those that a token is drafted
    behind, as many a request as may turn out to be the last that was right."""

    hidden = Port("t@dp h", dtype=STREAM)  # what the main model's head reads of each row, sampled or not
    last = Port("drafted@dp -> t@dp")  # token row to draft behind; -1: none
    params = Port("drafted@dp p")  # sampling parameters of the drafted token


class Embed(Module):
    """Token embedding, vocabulary-parallel: a rank's rows are masked, the sum over vp is pending."""

    def __init__(self) -> None:
        self.w = Weight("v@vp h", pad=("v", 64))

    def forward(self, ids: Annotated[Tensor, "t*"]) -> Annotated[Tensor, "t* h +vp"]:
        return lookup(self.w, ids)


class Head(Module):
    """Logits in float32, vocabulary-parallel; bent by a `cap` (see softcap), if there is one."""

    def __init__(self, cap: float | None = None) -> None:
        self.w, self.cap = Weight("v@vp h", pad=("v", 64)), cap

    def forward(self, x: Annotated[Tensor, "s* h"]) -> Annotated[Tensor, "s* v@vp"]:
        z = head(x, self.w)
        return z if self.cap is None else softcap(z, self.cap)


class DraftHead(Head):
    """Logits of drafted rows."""

    def forward(self, x: Annotated[Tensor, "drafted* h"]) -> Annotated[Tensor, "drafted* v@vp"]:
        return super().forward(x)


class GumbelSampler(Module):
    """Greedy or temperature sampling by Gumbel-max on a sharded vocabulary: 8 bytes a request on the wire."""

    def forward(
        self, z: Annotated[Tensor, "s* v@vp"], p: Annotated[Tensor, "s* p"]
    ) -> Annotated[Tensor, "s* argmax:vp"]:
        return argmax(add_gumbel(temper(z, p), p))


class DraftSampler(GumbelSampler):
    """Drafted tokens, with the noise that the main model's have at their position: equal logits give equal tokens."""

    def forward(
        self, z: Annotated[Tensor, "drafted* v@vp"], p: Annotated[Tensor, "drafted* p"]
    ) -> Annotated[Tensor, "drafted* argmax:vp"]:
        return super().forward(z, p)


class FullSampler(Module):
    """Every sampling parameter and log-probabilities, on whole rows of logits."""

    def __init__(self) -> None:
        self.state = SamplingState()

    def forward(self, z: Annotated[Tensor, "s@dp v"], p: Annotated[Tensor, "s@dp p"]) -> tuple[
        Annotated[Tensor, "s@dp"], Annotated[Tensor, "s@dp"], Annotated[Tensor, "s@dp top"], Annotated[Tensor, "s@dp top"]
    ]:  # fmt: skip
        return full_sample(mask_logits(z, p, self.state), p, self.state)


class ShardedSampler(Module):
    """The same on a sharded vocabulary: what crosses ranks are maxima, 3 KiB a round of a threshold, and the best ids."""

    def __init__(self) -> None:
        self.state = SamplingState("v@vp")

    def forward(self, z: Annotated[Tensor, "s@dp v@vp"], p: Annotated[Tensor, "s@dp p"]) -> tuple[
        Annotated[Tensor, "s@dp"], Annotated[Tensor, "s@dp"], Annotated[Tensor, "s@dp top"], Annotated[Tensor, "s@dp top"]
    ]:  # fmt: skip
        raw, x = shape_logits(mask_logits(z, p, self.state), p, self.state)
        top = place(row_max(x), "s@dp")
        floor = threshold(x, p, "count")
        x = sift(x, top, p, floor, threshold(x, p, "mass", top, floor))
        token = place(argmax(add_gumbel(x, p)), "s@dp")
        count_token(token, top, p, self.state)
        peak = place(row_max(raw), "s@dp")
        ids = place(topk(raw, TOP_LOGPROBS, "top"), "s@dp top")
        chosen, best = place(pick(raw, token), "s@dp"), place(pick(raw, ids), "s@dp top")
        return token, *report_logprobs(chosen, best, ids, peak, place(exp_sum(raw, peak), "s@dp"), top, p)


class Sampler(Module):
    """Picks the leaf of the program's variant and plan; the full ones also export log-probabilities as results of the program."""

    def __init__(self) -> None:
        self.gumbel, self.full, self.sharded = GumbelSampler(), FullSampler(), ShardedSampler()

    def __call__(self, z: Any, p: Any) -> Any:
        if current().variant == "gumbel":
            return self.gumbel(z, p)
        token, logprob, top_ids, top_logprobs = (self.sharded if current().sharded else self.full)(z, p)
        export("logprob", logprob, "s@dp")
        export("top_ids", top_ids, "s@dp top")
        export("top_logprobs", top_logprobs, "s@dp top")
        return token


class MLP(Module):
    """Gated MLP: act(gate) * up, column- then row-parallel."""

    act = staticmethod(silu)

    def __init__(self, bias: bool = False) -> None:
        self.up = Linear("h -> f@mlp | f@mlp", bias=bias or None)
        self.down = Linear("f@mlp -> h", bias="h +mlp" if bias else None)

    def forward(self, x: Rows) -> Annotated[Tensor, "t* h +mlp"]:
        gate, up = self.up(x)
        return self.down(self.act(gate) * up)
