"""Sampling ops: temperature, Gumbel noise from a counter RNG, argmax over a sharded vocabulary, and the full sampler.

Noise is keyed by (seed, GLOBAL vocabulary id, position), so a token does not depend on how the vocabulary is sharded,
on the batch or on the step. `params` is i32[S, 16], one row a request; the words are named in `Word`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.meaning import first_k
from tokenspeed.ir.mesh import Plan
from tokenspeed.ir.ops.base import Local, Op, OutSpec, States, refuse, wide
from tokenspeed.ir.types import Type

TOP_LOGPROBS = 20  # alternatives reported a token, at most
PARAM_WORDS = 16
DIGITS = 768  # words of a tally (ops/filters.py)
NO_LOGPROB = -9999.0  # of an alternative that is not there (id -1): JSON knows no infinity

#: extents of dims of the samplers that nothing else fixes
SAMPLING_DIMS = {"p": PARAM_WORDS, "top": TOP_LOGPROBS, "digit": DIGITS}


class Word(IntEnum):
    """Columns of `params` (32-bit words; the float ones hold the bits of a float32)."""

    FLAGS = 0
    SEED_LO = 1
    SEED_HI = 2
    POSITION = 3
    TEMPERATURE = 4
    TOP_K = 5
    TOP_P = 6
    MIN_P = 7
    REPETITION = 8
    PRESENCE = 9
    FREQUENCY = 10
    LOGPROBS = 11
    SLOT = 12


class Flag(IntFlag):
    GREEDY = 1
    PENALTIES = 2
    BIAS = 4
    LOGPROBS = 8
    FILTERS = 16
    VALID = 32
    MASK = 64  # only ids that the request's row of the allow-mask has a bit for


def philox_gumbel(seed_lo: Tensor, seed_hi: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise f32[S, V] for global ids i64[V]: Philox4x32-10 (Salmon et al., SC 2011), one 32-bit lane an id.

    Counter (id // 4, position, 0, 0), key (seed_lo, seed_hi), lane id % 4; u = ((x >> 8) + 0.5) / 2^24, g = -ln(-ln u).
    """
    word = lambda x: (x.long() & 0xFFFFFFFF).numpy().astype(np.uint64)  # noqa: E731
    low, high, lane = np.uint64(0xFFFFFFFF), np.uint64(32), ids % 4
    c0, c1 = np.broadcast_arrays(word(ids // 4)[None, :], word(position)[:, None])
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = word(seed_lo)[:, None], word(seed_hi)[:, None]
    for _ in range(10):  # a product of two words fits 64 bits
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> high) ^ c1 ^ k0, b & low, (a >> high) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    x = torch.from_numpy(np.choose(lane.numpy()[None, :], (c0, c1, c2, c3)).astype(np.int64))
    u = ((x >> 8).double() + 0.5) * 2.0**-24  # in float32 the largest words would round to 1
    return -torch.log(-torch.log(u)).float()


def as_float(params: Tensor, word: Word) -> Tensor:
    return params[:, word].contiguous().view(torch.float32)


def is_greedy(params: Tensor) -> Tensor:
    return (params[:, Word.FLAGS] & int(Flag.GREEDY)) != 0


class _OnLogits(Op):
    """Elementwise on logits z [S, V] with params [S, P]: rows may be sharded on both, the vocabulary on z alone."""

    integers = (1,)
    in_place_ok = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        if len(ins[0].dims) != 2 or len(ins[1].dims) != 2 or ins[0].names[0] != ins[1].names[0]:
            raise RuleError(
                "P004", f"{self.name} expects logits [s, v] and parameters [s, p], got {ins[0]} and {ins[1]}"
            )
        return [(ins[0].dtype, ins[0].names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        s, v = ins[0].names
        table = {("R", "R"): "R", (s, s): s, (v, "R"): v}
        if tuple(states) not in table:
            raise refuse(
                self.name, axis, states, ins, "logits must be complete, parameters whole or on the same rows", "P011"
            )
        return [table[states[0], states[1]]]

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return dict(attrs)


class Temper(_OnLogits):
    """z / temperature; greedy rows unchanged."""

    name = "temper"

    def reference(self, z: Tensor, params: Tensor) -> Tensor:
        t = torch.where(is_greedy(params), 1.0, as_float(params, Word.TEMPERATURE))
        return z / t[:, None]


class AddGumbel(_OnLogits):
    """z + Gumbel noise of the counter RNG; greedy rows unchanged."""

    name = "add_gumbel"

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"offset": at.offset(ins[0].dims[1])}

    def reference(self, z: Tensor, params: Tensor, *, offset: int = 0) -> Tensor:
        ids = torch.arange(offset, offset + z.shape[1])
        g = philox_gumbel(params[:, Word.SEED_LO], params[:, Word.SEED_HI], params[:, Word.POSITION], ids)
        return torch.where(is_greedy(params)[:, None], z, z + g)


class Argmax(Op):
    """z [S, V] -> token i32[S]: pending by argmax where V is sharded (then a pair (value f32, global id i32) a row). A row with
    nothing above -inf, all NaN or forbidden, gives -1."""

    name = "argmax"
    integers = ()
    discrete = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [("i32", ins[0].names[:1])]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        s, v = ins[0].names
        table = {"R": "R", s: s, v: "P:argmax"}
        if states[0] not in table:
            raise refuse("argmax", axis, states, ins, "the largest of pending sums is not the largest sum", "P011")  # fmt: skip
        return [table[states[0]]]

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"offset": at.offset(ins[0].dims[1])}

    def reference(self, z: Tensor, *, offset: int = 0) -> tuple[Tensor, Tensor]:
        clean = torch.where(z.isnan(), float("-inf"), z)
        value, index = clean.max(1)
        first = (clean == value[:, None]).int().argmax(1) if z.numel() else index
        return value, torch.where(value > float("-inf"), first + offset, -1).int()


class TopK(Op):
    """z [S, V] -> global ids i32[S, k] of the largest, lowest id first among equals; pending by topk where V is sharded. A block
    of fewer than k ids fills up with -inf and an id past all others.

    attrs: `k`, `dim` the name of the dim of k. The value is a pair (values [S, k], ids [S, k]).
    """

    name = "topk"
    integers = ()
    discrete = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [("i32", (ins[0].names[0], attrs["dim"]))]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        s, v = ins[0].names
        table = {"R": "R", s: s, v: "P:topk"}
        if states[0] not in table:
            raise refuse("topk", axis, states, ins, "the largest of pending sums are not the largest sums", "P011")  # fmt: skip
        return [table[states[0]]]

    def check_extents(
        self, ins: Sequence[Type], attrs: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int]
    ) -> None:
        d = ins[0].dims[1]
        if (SAMPLING_DIMS | dict(sizes))[attrs["dim"]] != attrs["k"]:
            raise RuleError(
                "P004", f"topk takes k={attrs['k']} entries of {d.name} into {attrs['dim']}, which is of another extent"
            )

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"k": attrs["k"], "offset": at.offset(ins[0].dims[1])}

    def reference(self, z: Tensor, *, k: int, offset: int = 0) -> tuple[Tensor, Tensor]:
        clean = torch.where(z.isnan(), float("-inf"), z)
        ids = torch.arange(offset, offset + z.shape[1], dtype=torch.int32, device=z.device).expand(z.shape)
        if (more := k - z.shape[1]) > 0:
            clean = torch.nn.functional.pad(clean, (0, more), value=float("-inf"))
            ids = torch.nn.functional.pad(ids, (0, more), value=torch.iinfo(torch.int32).max)
        return first_k(clean, ids, k)


class Fill(Op):
    """z [S, V] with the padding of V set to `value`."""

    name = "fill"
    integers = ()
    in_place_ok = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        return [(ins[0].dtype, ins[0].names)]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        if states[0] == "P":
            raise refuse("fill", axis, states, ins, "a constant inside a pending sum is counted once a rank", "P011")
        return [states[0]]

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        d = ins[0].dims[-1]
        width = at.sizes[d.name] // at.plan.mesh.size(d.axes)
        return {"start": min(max(at.logical[d.name] - at.offset(d), 0), width), "value": attrs["value"]}

    def reference(self, z: Tensor, *, start: int, value: float) -> Tensor:
        out = z.clone()
        out[:, start:] = value
        return out


class Slotted(Op):
    """Follows a request's slot, which counts from the start of its home block: rows lie on exactly the home axes."""

    slotted = True

    def infer(self, ins: Sequence[Type], attrs: Mapping[str, Any], order: Any, home: Any = ()) -> list[Type]:
        if set(ins[0].dims[0].axes) != set(home):
            raise RuleError("V8", f"{self.name} of {ins[0]}: its rows must lie on exactly the home axes {list(home)}")
        return super().infer(ins, attrs, order, home)


class Sample(Slotted):
    """The full sampler on whole rows: z f32[S, V], params i32[S, 16], per-slot state -> token, logprob, top ids, top logprobs.

    State: counts i32[R, V] of output tokens, seen u8[R, V] of prompt tokens, bias f32[R, V], indexed by request slot.
    Log-probabilities are of the raw logits. Order: bias; repetition, presence and frequency penalties; greedy rows stop
    here; temperature, top-k, top-p, min-p, then Gumbel-max over what is kept. A row from which nothing can be drawn gives token -1.
    """

    name = "sample"
    integers = (1, 2)
    discrete = True

    def shape(self, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[OutSpec]:
        s = ins[0].names[0]
        return [("i32", (s,)), ("f32", (s,)), ("i32", (s, "top")), ("f32", (s, "top"))]

    def axis_rule(self, axis: str, states: States, ins: Sequence[Type], attrs: Mapping[str, Any]) -> list[str]:
        s = ins[0].names[0]
        z, params, *state = states
        r = ins[2].names[0]
        if (z, params) == ("R", "R") and all(x == "R" for x in state):
            return ["R"] * 4
        if (z, params) == (s, s) and all(x == r for x in state):
            return [s] * 4
        raise refuse(
            "sample",
            axis,
            states,
            ins,
            "the full sampler needs whole logits of the rows whose state this rank holds",
            "P011",
        )

    def local_attrs(
        self, ins: Sequence[Type], outs: Sequence[Type], attrs: Mapping[str, Any], at: Local
    ) -> dict[str, Any]:
        return {"vocab": at.logical[ins[0].dims[1].name]}

    def reference(
        self, z: Tensor, params: Tensor, counts: Tensor, seen: Tensor, bias: Tensor, *, vocab: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, k = z.shape[0], min(TOP_LOGPROBS, vocab)
        raw = torch.where(z[:, :vocab].isnan(), float("-inf"), z[:, :vocab])
        tokens = torch.full((rows,), -1, dtype=torch.int32)
        logprobs = torch.zeros(rows, dtype=wide(z).dtype)
        top_ids = torch.full((rows, TOP_LOGPROBS), -1, dtype=torch.int32)
        top_lps = torch.full((rows, TOP_LOGPROBS), NO_LOGPROB, dtype=logprobs.dtype)
        for i in range(rows):
            flags = int(params[i, Word.FLAGS])
            if not flags & Flag.VALID:
                continue
            slot, x, lp = int(params[i, Word.SLOT]), raw[i].clone(), raw[i].log_softmax(0)
            if flags & Flag.LOGPROBS:
                values, best = first_k(lp, torch.arange(vocab), min(k, int(params[i, Word.LOGPROBS])))
                known = values > float("-inf")
                top_ids[i, : len(best)] = torch.where(known, best, -1).int()
                top_lps[i, : len(best)] = torch.where(known, values.clamp(min=NO_LOGPROB), NO_LOGPROB)
            f = lambda w, i=i: float(as_float(params[i : i + 1], w)[0])  # noqa: E731
            if flags & Flag.BIAS:
                x = x + bias[slot, :vocab]
            if flags & Flag.PENALTIES:
                met = (counts[slot, :vocab] > 0) | (seen[slot, :vocab] > 0)
                rep = f(Word.REPETITION)
                x = torch.where(met, torch.where(x > 0, x / rep, x * rep), x)
                x = x - f(Word.PRESENCE) * (counts[slot, :vocab] > 0) - f(Word.FREQUENCY) * counts[slot, :vocab]
            if not (x > float("-inf")).any():
                continue
            if flags & Flag.GREEDY:
                token = int(x.argmax())
            else:
                x = _keep(x / f(Word.TEMPERATURE), int(params[i, Word.TOP_K]), f(Word.TOP_P), f(Word.MIN_P), flags)
                p = params[i : i + 1]
                g = philox_gumbel(p[:, Word.SEED_LO], p[:, Word.SEED_HI], p[:, Word.POSITION], torch.arange(vocab))
                token = int((x + g[0]).argmax())
            tokens[i] = token
            if flags & Flag.PENALTIES:
                counts[slot, token] += 1
            if flags & Flag.LOGPROBS:
                logprobs[i] = max(float(lp[token]), NO_LOGPROB)
        return tokens, logprobs, top_ids, top_lps


def _keep(x: Tensor, top_k: int, top_p: float, min_p: float, flags: int) -> Tensor:
    """Logits with what top-k, top-p and min-p reject set to -inf. Ties at a threshold are kept."""
    if not flags & Flag.FILTERS:
        return x
    if 0 < top_k < x.numel():
        x = torch.where(x >= x.topk(top_k).values[-1], x, float("-inf"))
    if top_p < 1.0:
        p, order = x.softmax(0).sort(descending=True, stable=True)
        before = p.cumsum(0) - p
        least = p[before < top_p][-1] if bool((before < top_p).any()) else p[0]
        probs = torch.empty_like(p).scatter_(0, order, p)
        x = torch.where(probs >= least, x, float("-inf"))
    if min_p > 0.0:
        p = x.softmax(0)
        x = torch.where(p >= min_p * p.max(), x, float("-inf"))
    return x


SAMPLING = [Temper(), AddGumbel(), Argmax(), TopK(), Fill(), Sample()]
