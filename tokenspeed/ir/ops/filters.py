"""The full sampler in parts, for a vocabulary that is sharded: each part works on a rank's block of ids. The first, the
allow-mask, stands before the sampler of whole rows too.

Invariant: the parts draw the token and report the log-probabilities that `sample` does of whole rows. What ranks add up is
exact: maxima, counts, and masses in whole units of 2^-35, so neither the number of ranks nor the order of a sum moves a
threshold. A threshold is searched over the bits of float32 in their order, 8 bits a round: `tally` says how much lies in
each of 256 digits (pending), `narrow` goes to the digit in which the wanted amount is reached; four rounds by count find
the k-th largest value, four by mass where the nucleus of what top-k keeps ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.mesh import Plan
from tokenspeed.ir.ops.base import Local, Op, OutSpec, States, refuse, wide
from tokenspeed.ir.ops.sampling import NO_LOGPROB, Flag, Slotted, Word, as_float, is_greedy
from tokenspeed.ir.types import Type

UNIT = 2.0**35  # of a mass: e^0 of the best logit
WORD = 12  # bits of the three words of an amount, which are added up apart: those of 2^19 ids fit 31 bits
ROUNDS = 4
EVERYTHING = 1 << 60  # an amount that no tally reaches: nothing is rejected


def ordered(x: Tensor) -> Tensor:
    """The bits of float32 as i64 in [0, 2^32) that compare like the numbers, both zeros alike."""
    bits = (x.float() + 0.0).contiguous().view(torch.int32).long()
    return torch.where(bits < 0, ~bits, bits | 1 << 31) & 0xFFFFFFFF


def filtered(params: Tensor) -> Tensor:
    """Rows that sample among what top-k, top-p and min-p keep."""
    wanted = int(Flag.VALID | Flag.FILTERS)
    return (params[:, Word.FLAGS] & (wanted | int(Flag.GREEDY))) == wanted


class _OnBlock(Op):
    """Operands are logits [s, v], values a row [s, ..] and slots' state [r, v]; rows may be sharded, and the vocabulary."""

    over = "v"  # what a result is where the vocabulary is sharded: "v" itself, pending by a sum or a maximum

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        logits = next((t for t in ins if "v" in t.names), ins[0])
        n, v = len(self.shape(ins, attrs)), logits.names[-1]
        if all(x == "R" for x in states):
            return ["R"] * n
        if list(states) == [t.names[0] for t in ins]:
            return [next(t.names[0] for t in ins if t.names[0] != "r")] * n
        if "v" in logits.names and list(states) == [v if v in t.names else "R" for t in ins]:
            return [v if self.over == "v" else self.over] * n
        raise refuse(
            self.name, axis, states, ins, "operands lie on the same rows or, of a block of ids, whole beside it", "P011"
        )


class MaskLogits(Slotted, _OnBlock):
    """z [s, v], params [s, p], allow i32 [r, words] -> z, of a row with the flag MASK -inf at each id whose bit is 0. Bit i % 32 of
    word i // 32 of the request's row of `allow` is that of GLOBAL id i, as grammar engines pack it; the row is whole on every
    rank of the vocabulary, and each reads its ids' bits. Other rows read nothing."""

    name = "mask_logits"
    integers = (1, 2)
    in_place_ok = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names)]

    def check_extents(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int]
    ) -> None:
        (v, words) = (t.dims[1].name for t in (ins[0], ins[2]))
        if sizes[words] < words_of(sizes[v]):
            raise RuleError(
                "P004", f"mask_logits of {sizes[v]} logits takes {words_of(sizes[v])} words, not {sizes[words]}"
            )

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"offset": at.offset(ins[0].dims[1])}

    def reference(self, z: Tensor, params: Tensor, allow: Tensor, *, offset: int) -> Tensor:
        wanted, slot = int(Flag.VALID | Flag.MASK), params[:, Word.SLOT].long()
        live = ((params[:, Word.FLAGS] & wanted) == wanted) & (slot >= 0) & (slot < allow.shape[0])
        ids = torch.arange(offset, offset + z.shape[1], device=z.device)
        bits = allow[torch.where(live, slot, 0)][:, ids // 32] >> (ids % 32).int() & 1
        return torch.where(live[:, None] & (bits == 0), float("-inf"), z)


def words_of(ids: int) -> int:
    """i32 words of an allow-mask of so many ids."""
    return -(-ids // 32)


class ShapeLogits(Slotted, _OnBlock):
    """z [s, v], params [s, p], counts, seen, bias [r, v] -> (raw, shaped): z without NaN, and what the row samples from: biased,
    penalised, divided by its temperature. Ids beyond the vocabulary are -inf in both, all of a row that is not valid in the latter."""

    name = "shape_logits"
    integers = (1, 2)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names)] * 2

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        d = ins[0].dims[1]
        width = at.sizes[d.name] // at.plan.mesh.size(d.axes)
        return {"valid": min(max(at.logical[d.name] - at.offset(d), 0), width)}

    def reference(
        self, z: Tensor, params: Tensor, counts: Tensor, seen: Tensor, bias: Tensor, *, valid: int
    ) -> tuple[Tensor, Tensor]:
        low = float("-inf")
        raw = torch.where(z.isnan(), low, z)
        raw[:, valid:] = low
        flags, slot = params[:, Word.FLAGS], params[:, Word.SLOT].long()
        valid_row = (flags & int(Flag.VALID)) != 0
        live = valid_row & (slot >= 0) & (slot < counts.shape[0])
        slot = torch.where(live, slot, 0)
        x = torch.where((live & ((flags & int(Flag.BIAS)) != 0))[:, None], raw + bias[slot], raw)
        count, repetition = counts[slot], as_float(params, Word.REPETITION)[:, None]
        y = torch.where((count > 0) | (seen[slot] > 0), torch.where(x > 0, x / repetition, x * repetition), x)
        y = (
            y
            - as_float(params, Word.PRESENCE)[:, None] * (count > 0)
            - as_float(params, Word.FREQUENCY)[:, None] * count
        )
        x = torch.where((live & ((flags & int(Flag.PENALTIES)) != 0))[:, None], y, x)
        plain = is_greedy(params) | ~live
        x = x / torch.where(plain, 1.0, as_float(params, Word.TEMPERATURE))[:, None]
        return raw, torch.where(x.isnan() | ~valid_row[:, None], low, x).to(z.dtype)


class Tally(_OnBlock):
    """x [s, v], params [s, p], of `by` mass x's maximum and the floor [s], after round 0 the prefix [s] -> i32 [s, digit]: in each
    digit of round `round` the count or the mass of x that has the prefix and is not below the floor."""

    name = "tally"
    over = "P"

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        if attrs["by"] not in ("count", "mass") or len(ins) != 2 + 2 * (attrs["by"] == "mass") + (attrs["round"] > 0):
            raise RuleError(
                "P004", f"tally by {attrs['by']} in round {attrs['round']} takes other operands than {len(ins)}"
            )
        return [("i32", (ins[0].names[0], "digit"))]

    def which_integers(self, count: int) -> tuple[int, ...]:
        return {2: (1,), 3: (1, 2), 4: (1, 3), 5: (1, 3, 4)}.get(count, ())

    def reference(self, x: Tensor, params: Tensor, *rest: Tensor, by: str, round: int) -> Tensor:
        bits, shift = ordered(x), 8 * (ROUNDS - 1 - round)
        inside = filtered(params)[:, None].expand_as(bits)
        if by == "mass":
            inside = inside & (bits >= (rest[1].long() & 0xFFFFFFFF)[:, None])
        if round:
            inside = inside & (bits >> shift + 8 == (rest[-1].long() & 0xFFFFFFFF)[:, None])
        amount = inside.long()
        if by == "mass":
            share = (x.float() - rest[0].float()[:, None]).exp().double() * UNIT  # of float32, as the bits are
            amount = torch.where(inside & ~share.isnan(), share, 0.0).long()
        digits = torch.zeros(x.shape[0], 3 * 256, dtype=torch.int64, device=x.device)
        for word in range(3 if by == "mass" else 1):
            part = amount >> word * WORD & (1 << WORD) - 1
            digits.scatter_add_(1, (bits >> shift & 0xFF) + 256 * word, part)
        return digits.int()


class Narrow(_OnBlock):
    """A tally [s, digit], and in round 0 params [s, p], later prefix, and high and low word of the amount still wanted [s] -> those
    three one digit further: the lowest digit above which less than that amount lies."""

    name = "narrow"
    integers = (0, 1, 2, 3)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [("i32", ins[0].names[:1])] * 3

    def reference(self, h: Tensor, *rest: Tensor, by: str, round: int) -> tuple[Tensor, Tensor, Tensor]:
        low, middle, high = h.long().unflatten(1, (3, 256)).unbind(1)
        digits = low + (middle << WORD) + (high << 2 * WORD)
        above = digits.flip(1).cumsum(1).flip(1) - digits
        if round:
            prefix, wanted = rest[0].long(), (rest[1].long() << 31) + rest[2].long()
        else:
            prefix, wanted = torch.zeros_like(above[:, 0]), _aim(digits.sum(1), rest[0], by)
        digit = (above >= wanted[:, None]).sum(1)
        wanted = wanted - above.gather(1, digit[:, None])[:, 0]
        return (prefix << 8 | digit).int(), (wanted >> 31).int(), (wanted & (1 << 31) - 1).int()


def _aim(total: Tensor, params: Tensor, by: str) -> Tensor:
    """The amount of each row that is kept: the k best, or a part of all mass, at least the best one."""
    if by == "count":
        k = params[:, Word.TOP_K].long()
        return torch.where(filtered(params) & (k > 0), k, EVERYTHING)
    part = as_float(params, Word.TOP_P).double()
    return torch.where(
        filtered(params) & (part < 1.0), (total.double() * part).ceil().clamp(min=1.0).long(), EVERYTHING
    )


class Sift(_OnBlock):
    """x [s, v] with -inf where it is below the floor or the cut [s], or less likely than min-p times the best."""

    name = "sift"
    integers = (2, 3, 4)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names)]

    def reference(self, x: Tensor, top: Tensor, params: Tensor, floor: Tensor, cut: Tensor) -> Tensor:
        least = torch.maximum(floor.long() & 0xFFFFFFFF, cut.long() & 0xFFFFFFFF)
        share, min_p = (wide(x) - wide(top)[:, None]).exp(), as_float(params, Word.MIN_P)[:, None]
        keep = (ordered(x) >= least[:, None]) & ((min_p <= 0.0) | (share >= min_p))
        return torch.where(keep | ~filtered(params)[:, None], x, float("-inf"))


class CountToken(Slotted, _OnBlock):
    """Adds the token [s] of each row that has penalties to counts [r, v], if anything could be drawn: its top [s] is above -inf."""

    name = "count_token"
    integers = (0, 2, 3)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return []

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"offset": at.offset(ins[3].dims[1])}

    def reference(self, token: Tensor, top: Tensor, params: Tensor, counts: Tensor, *, offset: int) -> None:
        wanted = int(Flag.VALID | Flag.PENALTIES)
        at, slot = token.long() - offset, params[:, Word.SLOT].long()
        mine = ((params[:, Word.FLAGS] & wanted) == wanted) & (top > float("-inf"))
        mine = mine & (at >= 0) & (at < counts.shape[1]) & (slot >= 0) & (slot < counts.shape[0])
        slot, at = (torch.where(mine, i, 0) for i in (slot, at))
        counts.index_put_((slot, at), mine.to(counts.dtype), accumulate=True)


class ExpSum(_OnBlock):
    """z [s, v], its maximum [s] -> the sum of e^(z - maximum) [s]."""

    name = "exp_sum"
    integers = ()
    over = "P"

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [("f32", ins[0].names[:1])]

    def reference(self, z: Tensor, peak: Tensor) -> Tensor:
        share = (wide(z) - wide(peak)[:, None]).exp()
        return torch.where(share.isnan(), 0.0, share).sum(1)


class Pick(_OnBlock):
    """z [s, v] at global ids i32 [s] or [s, top] -> the values there; -inf of an id in another block."""

    name = "pick"
    integers = (1,)
    over = "P:max"

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[1].names)]

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"offset": at.offset(ins[0].dims[1])}

    def reference(self, z: Tensor, ids: Tensor, *, offset: int) -> Tensor:
        at = ids.long().reshape(ids.shape[0], -1) - offset
        mine = (at >= 0) & (at < z.shape[1])
        return torch.where(mine, z.gather(1, torch.where(mine, at, 0)), float("-inf")).reshape(ids.shape)


class ReportLogprobs(_OnBlock):
    """Raw logits of the token [s] and of the best ids [s, top], the ids, the row's maximum and mass [s], the maximum it sampled
    from, params -> log-probability [s], ids [s, top] and their log-probabilities, as many as the row asks for."""

    name = "report_logprobs"
    integers = (2, 6)

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [("f32", ins[0].names), ("i32", ins[2].names), ("f32", ins[1].names)]

    def reference(
        self, chosen: Tensor, best: Tensor, ids: Tensor, peak: Tensor, mass: Tensor, top: Tensor, params: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = int(Flag.VALID | Flag.LOGPROBS)
        asked = (params[:, Word.FLAGS] & wanted) == wanted
        shift = peak + mass.log()

        def logprob(z: Tensor, shift: Tensor) -> Tensor:
            lp = torch.where(z == float("inf"), 0.0, z - shift)
            return torch.where(lp >= NO_LOGPROB, lp, NO_LOGPROB)

        place = torch.arange(ids.shape[1], device=ids.device)
        shown = asked[:, None] & (place < params[:, Word.LOGPROBS, None]) & (best > float("-inf"))
        drawn = asked & (top > float("-inf"))
        return (
            torch.where(drawn, logprob(chosen, shift), 0.0),
            torch.where(shown, ids, -1),
            torch.where(shown, logprob(best, shift[:, None]), NO_LOGPROB),
        )


FILTERS = [MaskLogits(), ShapeLogits(), Tally(), Narrow(), Sift(), CountToken(), ExpSum(), Pick(), ReportLogprobs()]
