"""The op forms that rule discovery tries: for every op of the table, operands with dims, extents, and random contents.

Invariant: each op with a reference has at least one form, and one for each way an index, a segment or a bias enters it.
Extents are multiples of the number of ranks, and differ where that is possible. The last row of each home block is a hole
(NaN, index -1); a padded dim's padding is NaN where the op does not ask for a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenspeed.ir.ops.filters import ordered
from tokenspeed.ir.ops.sampling import PARAM_WORDS, Flag, Word

#: rows and blocks of one rank; a dim's extent on n ranks is n times this
UNITS = {
    "t": 3,
    "s": 3,
    "drafted": 4,
    "h": 2,
    "f": 1,
    "e": 2,
    "v": 2,
    "n": 2,
    "kv": 1,
    "d": 4,
    "c": 2,
    "r2": 1,
    "slots": 8,
    "l": 2,
    "r": 4,
    "states": 4,
    "pos_table": 8,
}
PAGE = 2
BLOCKED = frozenset({"t", "s", "drafted", "slots", "states", "r"})  # dims of which each home group has a block


@dataclass(frozen=True)
class Operand:
    """One operand; `index`: the dim its values are row numbers of."""

    dtype: str
    dims: tuple[str, ...]
    index: str = ""


@dataclass(frozen=True)
class Form:
    """One way to call an op. `make` fills the operands for given global extents and home blocks; `stored` are the operands
    that the op writes, judged like outputs; `padded`: a dim whose last entry is padding."""

    name: str
    op: str
    operands: tuple[Operand, ...]
    make: Callable[[Mapping[str, int], int, torch.Generator], list[Tensor]]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[tuple[str, ...], ...] = ()
    stored: tuple[int, ...] = ()
    padded: str = ""
    single: Mapping[str, int] = field(default_factory=dict)  # extents that do not grow with the ranks
    tied: Mapping[int, int] = field(
        default_factory=dict
    )  # operand -> the one before that it lies like: no row parts them


def _real(shape: list[int], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _holes(x: Tensor, blocks: int) -> Tensor:
    rows = x.unflatten(0, (blocks, -1))
    rows[:, -1] = float("nan") if x.is_floating_point() else -1
    return x


def _plain(*operands: Operand, pad: str = "") -> Callable[[Mapping[str, int], int, torch.Generator], list[Tensor]]:
    """Reals, positive and negative; rows of t and s get holes; zeros in the padding of a weight, NaN in that of a value."""

    def make(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
        out: list[Tensor] = []
        for o in operands:
            x = _real([sizes[d] for d in o.dims], g)
            if pad in o.dims:
                x.select(o.dims.index(pad), -1)[...] = 0.0
            out.append(_holes(x, blocks) if o.dims and o.dims[0] in ("t", "s") else x)
        return out

    return make


def _ids(high: str) -> Callable[[Mapping[str, int], int, torch.Generator], list[Tensor]]:
    def make(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
        ids = torch.randint(0, sizes[high] - 1, (sizes["t"],), generator=g, dtype=torch.int32)
        return [_holes(ids, blocks), _real([sizes[high], sizes["h"]], g)]

    return make


def _select(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    x = _holes(_real([sizes["t"], sizes["h"]], g), blocks)
    last = torch.randint(0, max(sizes["t"] // blocks - 1, 1), (sizes["s"],), generator=g, dtype=torch.int32)
    return [x, _holes(last, blocks)]


def _drafted(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    """More drafted rows than token rows: several a request, some of the same row."""
    x, _ = _select(sizes, blocks, g)
    last = torch.randint(0, max(sizes["t"] // blocks - 1, 1), (sizes["drafted"],), generator=g, dtype=torch.int32)
    return [x, _holes(last, blocks)]


def _squares(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    t, n, d = (sizes[x] for x in ("t", "n", "d"))
    return [_holes(_real([t, n, d], g), blocks), _holes(_real([t, sizes["qk"]], g).square(), blocks), _real([n, d], g)]


def _rope(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    pos = torch.randint(0, sizes["pos_table"], (sizes["t"],), generator=g, dtype=torch.int32)
    return [
        _holes(_real([sizes["t"], sizes["n"], sizes["d"]], g), blocks),
        _holes(pos, blocks),
        _real([sizes["pos_table"], sizes["rope_dim"]], g),
    ]


def _experts(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    t, e, f, h, k = (sizes[d] for d in ("t", "e", "f", "h", "k"))
    ids = torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(t)]).int()
    weights = [_real(shape, g) for shape in ([e, f, h], [e, f, h], [e, h, f])]
    return [_holes(_real([t, h], g), blocks), _holes(ids, blocks), _holes(_real([t, k], g), blocks), *weights]


def _biased_experts(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    e, f, h = (sizes[d] for d in ("e", "f", "h"))
    return [*_experts(sizes, blocks, g), *(_real(shape, g) for shape in ([e, f], [e, f], [e, h]))]


def _append(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    t, slots = sizes["t"] // blocks, sizes["slots"] // blocks
    shape = [sizes["kv"], sizes["d"]]
    slot = torch.cat([torch.randperm(slots, generator=g)[:t] for _ in range(blocks)]).int()
    k, v = (_holes(_real([sizes["t"], *shape], g), blocks) for _ in range(2))
    return [k, v, _holes(slot, blocks), *(_real([sizes["slots"], *shape], g) for _ in range(2))]


def _attend(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    """Two rows of tokens a request; each request's pages spread over the slots of its block."""
    s, slots, width = sizes["s"] // blocks, sizes["slots"] // blocks, sizes["l"]
    q = _holes(_real([sizes["t"], sizes["n"], sizes["d"]], g), blocks)
    cache = [_real([sizes["slots"], sizes["kv"], sizes["d"]], g) for _ in range(2)]
    reach = min(width * PAGE, slots)
    pos = torch.randint(1, reach, (sizes["t"],), generator=g, dtype=torch.int32)
    row = torch.randint(0, s, (sizes["t"],), generator=g, dtype=torch.int32)
    pages = slots // PAGE
    table = torch.stack(
        [torch.randperm(pages, generator=g)[torch.arange(width) % pages] for _ in range(sizes["s"])]
    ).int()
    return [q, *cache, _holes(pos, blocks), _holes(row, blocks), table]


def _attend_with_sinks(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    return [*_attend(sizes, blocks, g), _real([sizes["n"]], g)]


def _scan(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    """pos, row, state: the tokens of a block belong to one or two requests in turn, of which the first starts afresh."""
    t, s = sizes["t"] // blocks, sizes["s"] // blocks
    first = min(max(t // 2, 1), t - 1)
    pos = torch.cat([torch.arange(first), 5 + torch.arange(t - first)]).int().repeat(blocks)
    row = torch.cat([torch.full((first,), s - 1), torch.zeros(t - first)]).int().repeat(blocks)
    slots = [torch.randperm(sizes["states"] // blocks, generator=g)[:s] for _ in range(blocks)]
    return [_holes(pos, blocks), _holes(row, blocks), torch.cat(slots).int()]


def _conv(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    n, d, taps = sizes["n"], sizes["d"], sizes["taps"]
    x, past = _real([sizes["t"], n, d], g), _real([sizes["states"], taps - 1, n, d], g)
    return [_holes(x, blocks), _real([n, d, taps], g), past, *_scan(sizes, blocks, g)]


def _delta(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    t, hk, hv, dk, dv = (sizes[d] for d in ("t", "kv", "n", "d", "h"))
    values = [_real([t, hk, dk], g) / 2, _real([t, hk, dk], g) / 2, _real([t, hv, dv], g)]
    values += [-torch.rand(t, hv, generator=g).double(), torch.rand(t, hv, generator=g).double()]
    return [*(_holes(x, blocks) for x in values), _real([sizes["states"], hv, dk, dv], g), *_scan(sizes, blocks, g)]


def _append_latent(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    *_, slot, _, _ = _append(sizes, blocks, g)
    c, r = (_holes(_real([sizes["t"], sizes[d]], g), blocks) for d in ("c", "r2"))
    return [c, r, slot, *(_real([sizes["slots"], sizes[d]], g) for d in ("c", "r2"))]


def _mla(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    *_, pos, row, table = _attend(sizes, blocks, g)
    q, qr = (_holes(_real([sizes["t"], sizes["n"], sizes[d]], g), blocks) for d in ("c", "r2"))
    return [q, qr, *(_real([sizes["slots"], sizes[d]], g) for d in ("c", "r2")), pos, row, table]


def _append_keys(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    c, _, slot, cache, _ = _append_latent(sizes, blocks, g)
    return [c, slot, cache]


def _mla_picked(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    """Lists of positions with gaps, some of them behind the token or none."""
    shape = (sizes["t"], sizes["ik"])
    picked = torch.randint(-1, min(sizes["l"] * PAGE, sizes["slots"] // blocks), shape, generator=g, dtype=torch.int32)
    return [*_mla(sizes, blocks, g), _holes(picked, blocks)]


def _index(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    """Tokens that have fewer positions than they may pick, as many, and more."""
    *_, pos, row, table = _attend(sizes, blocks, g)
    pos[::3] = 0
    q, w = (_holes(_real([sizes[d] for d in dims], g), blocks) for dims in (("t", "n", "d"), ("t", "n")))
    return [q, w, _real([sizes["slots"], sizes["d"]], g), _holes(pos, blocks), row, table]


def params(rows: int, blocks: int, g: torch.Generator, flags: int = 0) -> Tensor:
    """Sampling parameters of `rows` requests; every second one greedy, the last of each block a hole."""
    p = torch.zeros(rows, PARAM_WORDS, dtype=torch.int32)
    p[:, Word.SEED_LO] = torch.randint(0, 1 << 30, (rows,), generator=g, dtype=torch.int32)
    p[:, Word.POSITION] = torch.arange(rows, dtype=torch.int32)
    p[:, Word.SLOT] = torch.arange(rows, dtype=torch.int32) % (rows // blocks)
    p[:, Word.FLAGS] = int(Flag.VALID) | flags
    greedy = torch.randint(0, 2, (rows,), generator=g, dtype=torch.int32)
    p[:, Word.FLAGS] |= greedy * int(Flag.GREEDY)
    for word, low in ((Word.TEMPERATURE, 0.3), (Word.TOP_P, 0.8), (Word.REPETITION, 1.0), (Word.PRESENCE, 0.0)):
        p[:, word] = (
            (low + torch.rand(rows, generator=g)).clamp(max=1.0 if word == Word.TOP_P else 2.0).view(torch.int32)
        )
    p[:, Word.TOP_K], p[:, Word.LOGPROBS] = 3, 20
    return p


def _on_logits(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    return [_holes(_real([sizes["s"], sizes["v"]], g), blocks), params(sizes["s"], blocks, g)]


def _ties(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    """Logits of few values, so that equals meet across ranks; the padding -inf."""
    z = torch.randint(0, 3, (sizes["s"], sizes["v"]), generator=g).double()
    z[:, -1] = float("-inf")
    return [_holes(z, blocks)]


def _sample(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    z, p = _on_logits(sizes, blocks, g)
    p[:, Word.FLAGS] |= int(Flag.PENALTIES | Flag.BIAS | Flag.LOGPROBS | Flag.FILTERS)
    p.unflatten(0, (blocks, -1))[:, -1, Word.FLAGS] = 0
    shape = (sizes["r"], sizes["v"])
    counts = torch.randint(0, 2, shape, generator=g, dtype=torch.int32)
    seen = torch.randint(0, 2, shape, generator=g, dtype=torch.uint8)
    return [z, p, counts, seen, 3 * _real(list(shape), g)]


def _state(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    """z, params, counts, seen, bias of rows that ask for everything."""
    return _sample(sizes, blocks, g)


def _masked(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    """z and params, of which half have a mask of random bits."""
    z, params, *_ = _sample(sizes, blocks, g)
    params[:, Word.FLAGS] |= torch.arange(len(params)) % 2 * int(Flag.MASK)
    return [z, params, torch.randint(-(2**31), 2**31, (sizes["r"], sizes["words"]), generator=g).int()]


def _best(z: Tensor) -> Tensor:
    """The maximum of each row of logits; of a hole NaN."""
    return torch.where(z.isnan().all(1), float("nan"), z.nan_to_num(float("-inf"), float("inf"), float("-inf")).amax(1))


def _sought(by: str, number: int) -> Callable[[Mapping[str, int], int, torch.Generator], list[Tensor]]:
    """Operands of a tally in round `number`: the prefix is that of some logit, the floor another one's bits."""

    def make(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
        z, p, *_ = _sample(sizes, blocks, g)
        bits = ordered(z)
        rest = [_best(z), bits[:, 0].int()] if by == "mass" else []
        rest += [(bits[:, 1] >> 8 * (4 - number)).int()] if number else []
        return [z, p, *rest]

    return make


def _tally(number: int) -> Callable[[Mapping[str, int], int, torch.Generator], list[Tensor]]:
    def make(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
        _, p, *_ = _sample(sizes, blocks, g)
        rows = sizes["s"]
        h = torch.randint(0, 4, (rows, 768), generator=g, dtype=torch.int32)
        rest = [torch.randint(1, 3, (rows,), generator=g, dtype=torch.int32) for _ in range(3 if number else 0)]
        return [h, *(rest or [p])]

    return make


def _sifted(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    z, p, *_ = _sample(sizes, blocks, g)
    bits = ordered(z).sort(1).values
    p[:, Word.MIN_P] = torch.full((len(p),), 0.05).view(torch.int32)
    return [z, _best(z), p, bits[:, 0].int(), bits[:, z.shape[1] // 2].int()]


def _counted(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    _, p, counts, *_ = _sample(sizes, blocks, g)
    token = torch.randint(0, sizes["v"], (sizes["s"],), generator=g, dtype=torch.int32)
    return [token, _real([sizes["s"]], g), p, counts]


def _peaked(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    z, _ = _on_logits(sizes, blocks, g)
    return [z, _best(z)]


def _picked(wide: bool) -> Callable[[Mapping[str, int], int, torch.Generator], list[Tensor]]:
    def make(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
        z, _ = _on_logits(sizes, blocks, g)
        shape = (sizes["s"], sizes["top"]) if wide else (sizes["s"],)
        return [z, torch.randint(0, sizes["v"], shape, generator=g, dtype=torch.int32)]

    return make


def _reported(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    rows, top = sizes["s"], sizes["top"]
    _, p, *_ = _sample(sizes, blocks, g)
    chosen, best, peak, most = (_real(shape, g) for shape in ([rows], [rows, top], [rows], [rows]))
    ids = torch.randint(0, 50, (rows, top), generator=g, dtype=torch.int32)
    return [chosen, best, ids, peak, _real([rows], g).abs() + 1, most, p]


def _poisoned(sizes: Mapping[str, int], blocks: int, g: torch.Generator) -> list[Tensor]:
    z = _real([sizes["s"], sizes["v"]], g)
    z[:, -1] = float("nan")
    return [_holes(z, blocks)]


def _f(*dims: str) -> Operand:
    return Operand("f32", dims)


_ROW, _WORD = _f("s"), Operand("i32", ("s",))
_STATE = (Operand("i32", ("r", "v")), Operand("u8", ("r", "v")), _f("r", "v"))
_WORDS = {"p": PARAM_WORDS, "top": 20, "digit": 768}
X, Y, H3 = _f("t", "h"), _f("t", "h"), _f("t", "n", "d")
Z, P = _f("s", "v"), Operand("i32", ("s", "p"))
LAST = Operand("i32", ("s",), "t")
_LIN = {"in_dims": ("h",), "segments": 1, "bias": False, "dtype": "f32"}
_CACHE = _f("slots", "kv", "d")
_ROUTE = {"k": 2, "dim": "k", "bias": False, "normalise": True, "score": "softmax", "groups": 1, "top_groups": 1,
          "group_best": 1, "scale": 1.0}  # fmt: skip
_SEGMENTS = (Operand("i32", ("t",)), Operand("i32", ("t",), "s"), Operand("i32", ("s",), "states"))


def _same(op: str, *operands: Operand, name: str = "", pad: str = "", **attrs: Any) -> Form:
    return Form(name or op, op, operands, _plain(*operands, pad=pad), attrs, (operands[0].dims,), padded=pad)


FORMS: tuple[Form, ...] = (
    Form("lookup", "lookup", (Operand("i32", ("t",)), _f("v", "h")), _ids("v"), {"dtype": "f32"}, (("t", "h"),), padded="v"),
    Form("linear", "linear", (X, _f("f", "h")), _plain(X, _f("f", "h")), _LIN, (("t", "f"),)),
    Form("linear, padded", "linear", (X, _f("v", "h")), _plain(X, _f("v", "h"), pad="v"), _LIN, (("t", "v"),), padded="v"),
    Form("linear, bias", "linear", (X, _f("f", "h"), _f("f")), _plain(X, _f("f", "h"), _f("f")), _LIN | {"bias": True},
         (("t", "f"),)),
    Form("linear, two segments", "linear", (X, _f("n", "d", "h"), _f("kv", "d", "h")),
         _plain(X, _f("n", "d", "h"), _f("kv", "d", "h")), _LIN | {"segments": 2}, (("t", "n", "d"), ("t", "kv", "d"))),
    Form("linear, two inner dims", "linear", (H3, _f("h", "n", "d")), _plain(H3, _f("h", "n", "d")),
         _LIN | {"in_dims": ("n", "d")}, (("t", "h"),)),
    _same("rms_norm", X, _f("h"), eps=1e-5),
    _same("layer_norm", X, _f("h"), _f("h"), eps=1e-5),
    _same("rms_norm", H3, _f("d"), name="rms_norm, heads", eps=1e-5),
    Form("add_rms_norm", "add_rms_norm", (X, Y, _f("h")), _plain(X, Y, _f("h")), {"eps": 1e-5}, (("t", "h"), ("t", "h"))),
    Form("square_sum", "square_sum", (H3, _f("t", "kv", "d")), _plain(H3, _f("t", "kv", "d")), {"dim": "qk"}, (("t", "qk"),),
         single={"qk": 2}),
    Form("rms_scale", "rms_scale", (H3, _f("t", "qk"), _f("n", "d")), _squares, {"eps": 1e-5, "index": 1}, (("t", "n", "d"),),
         single={"qk": 2}),
    *(Form(op, op, (H3, Operand("i32", ("t",)), _f("pos_table", "rope_dim")), _rope, {}, (("t", "n", "d"),),
           single={"rope_dim": 2}) for op in ("rope", "rope_pairs")),
    _same("silu", X), _same("gelu", X), _same("softcap", X, cap=1.5), _same("mul", X, Y), _same("silu_mul", X, Y),
    _same("gelu_mul", X, Y), _same("add", X, Y), _same("cross", X),
    _same("sigmoid", X), _same("mul_rows", X, _f("t")),
    _same("scale", X, factor=0.5), _same("scale", X, name="scale, negative", factor=-2.0),
    *(Form(f"reduce {k}", "reduce", (X,), _plain(X), {"kind": k}, (("t",),)) for k in ("sum", "max", "min")),
    Form("select_rows", "select_rows", (X, LAST), _select, {}, (("s", "h"),)),
    Form("select_rows, drafted", "select_rows", (X, Operand("i32", ("drafted",), "t")), _drafted, {}, (("drafted", "h"),)),
    Form("cat", "cat", (X, _f("t", "f")), _plain(X, _f("t", "f")), {"dim": "hf"}, (("t", "hf"),), single={"h": 2, "f": 3, "hf": 5}),
    *(Form(f"route{', raw shares' if raw else ''}", "route", (_f("t", "e"),), _plain(_f("t", "e")), _ROUTE | {"normalise": not raw},
           (("t", "k"), ("t", "k")), single={"k": 2}) for raw in (False, True)),
    Form("route, sigmoid and groups", "route", (_f("t", "e"), _f("e")), _plain(_f("t", "e"), _f("e")),
         _ROUTE | {"bias": True, "score": "sigmoid", "groups": 2, "group_best": 2, "scale": 2.5}, (("t", "k"), ("t", "k")),
         single={"k": 2}),
    Form("experts", "experts", (X, Operand("i32", ("t", "k")), _f("t", "k"), _f("e", "f", "h"), _f("e", "f", "h"),
         _f("e", "h", "f")), _experts, {}, (("t", "h"),), single={"k": 2}),
    Form("experts, biases and clamp", "experts", (X, Operand("i32", ("t", "k")), _f("t", "k"), _f("e", "f", "h"),
         _f("e", "f", "h"), _f("e", "h", "f"), _f("e", "f"), _f("e", "f"), _f("e", "h")), _biased_experts,
         {"alpha": 1.7, "limit": 1.0}, (("t", "h"),), single={"k": 2}, tied={4: 3, 7: 6}),
    Form("append", "append", (_f("t", "kv", "d"), _f("t", "kv", "d"), Operand("i32", ("t",), "slots"), _CACHE, _CACHE), _append,
         stored=(3, 4)),
    *(Form(f"attend{', one KV head a block' if one else ''}", "attend",
           (H3, _CACHE, _CACHE, Operand("i32", ("t",)), Operand("i32", ("t",), "s"), Operand("i32", ("s", "l"), "slots")),
           _attend, {"scale": 0.5}, (("t", "n", "d"),), single={"l": 2} | ({"kv": 1} if one else {}))
      for one in (False, True)),
    Form("attend, window, softcap and sinks", "attend",
         (H3, _CACHE, _CACHE, Operand("i32", ("t",)), Operand("i32", ("t",), "s"), Operand("i32", ("s", "l"), "slots"), _f("n")),
         _attend_with_sinks, {"scale": 0.5, "window": 2, "softcap": 1.5}, (("t", "n", "d"),), single={"l": 2, "kv": 1}),
    Form("causal_conv", "causal_conv",
         (H3, _f("n", "d", "taps"), _f("states", "past", "n", "d"), *_SEGMENTS), _conv, {}, (("t", "n", "d"),), stored=(2,),
         single={"taps": 3, "past": 2}, tied={4: 3, 5: 3}),
    *(Form(f"delta_rule{', one key head a block' if one else ''}", "delta_rule",
           (_f("t", "kv", "d"), _f("t", "kv", "d"), _f("t", "n", "h"), _f("t", "n"), _f("t", "n"), _f("states", "n", "d", "h"),
            *_SEGMENTS), _delta, {"scale": 0.5}, (("t", "n", "h"),), stored=(5,), single={"kv": 1} if one else {},
           tied={1: 0, 4: 3, 7: 6, 8: 6}) for one in (False, True)),
    _same("decay", _f("t", "n"), _f("n"), _f("n")), _same("l2_norm", H3, eps=1e-6), _same("gated_rms_norm", H3, H3, _f("d"), eps=1e-5),
    Form("append_latent", "append_latent", (_f("t", "c"), _f("t", "r2"), Operand("i32", ("t",), "slots"), _f("slots", "c"),
         _f("slots", "r2")), _append_latent, stored=(3, 4)),
    Form("mla", "mla", (_f("t", "n", "c"), _f("t", "n", "r2"), _f("slots", "c"), _f("slots", "r2"), Operand("i32", ("t",)),
         Operand("i32", ("t",), "s"), Operand("i32", ("s", "l"), "slots")), _mla, {"scale": 0.5}, (("t", "n", "c"),),
         single={"l": 2, "r2": 1}, tied={5: 4}),
    Form("mla, at positions", "mla", (_f("t", "n", "c"), _f("t", "n", "r2"), _f("slots", "c"), _f("slots", "r2"),
         Operand("i32", ("t",)), Operand("i32", ("t",), "s"), Operand("i32", ("s", "l"), "slots"), Operand("i32", ("t", "ik"))),
         _mla_picked, {"scale": 0.5}, (("t", "n", "c"),), single={"l": 2, "r2": 1, "ik": 3}, tied={5: 4}),
    Form("append_latent, one value", "append_latent", (_f("t", "c"), Operand("i32", ("t",), "slots"), _f("slots", "c")),
         _append_keys, stored=(2,)),
    Form("index_topk", "index_topk", (H3, _f("t", "n"), _f("slots", "d"), Operand("i32", ("t",)), Operand("i32", ("t",), "s"),
         Operand("i32", ("s", "l"), "slots")), _index, {"k": 2, "dim": "ik"}, (("t", "ik"),), single={"l": 2, "ik": 2}),
    *(Form(f"head_linear{', transposed' if turned else ''}", "head_linear", (H3, _f("n", *inner)), _plain(H3, _f("n", *inner)), {},
           (("t", "n", "c"),)) for turned, inner in ((False, ("c", "d")), (True, ("d", "c")))),
    Form("temper", "temper", (Z, P), _on_logits, {}, (("s", "v"),), single={"p": PARAM_WORDS}),
    Form("add_gumbel", "add_gumbel", (Z, P), _on_logits, {}, (("s", "v"),), single={"p": PARAM_WORDS}),
    Form("argmax", "argmax", (Z,), _ties, {}, (("s",),), padded="v"),
    Form("topk", "topk", (Z,), _ties, {"k": 2, "dim": "top"}, (("s", "top"),), padded="v", single={"top": 2}),
    Form("fill", "fill", (Z,), _poisoned, {"value": float("-inf")}, (("s", "v"),), padded="v"),
    Form("mask_logits", "mask_logits", (Z, P, Operand("i32", ("r", "words"))), _masked, {}, (("s", "v"),),
         single=_WORDS | {"words": 2}),
    Form("shape_logits", "shape_logits", (Z, P, *_STATE), _state, {}, (("s", "v"), ("s", "v")), single=_WORDS, tied={3: 2, 4: 2}),
    *(Form(f"tally by {by}{', a later round' if n else ''}", "tally",
           (Z, P, *([_ROW, _WORD] if by == "mass" else []), *([_WORD] if n else [])), _sought(by, n), {"by": by, "round": n},
           (("s", "digit"),), single=_WORDS) for by in ("count", "mass") for n in (0, 2)),
    *(Form(f"narrow by {by}{', a later round' if n else ''}", "narrow", (Operand("i32", ("s", "digit")), *([_WORD] * 3 if n else [P])),
           _tally(n), {"by": by, "round": n}, (("s",),) * 3, single=_WORDS) for by, n in (("count", 0), ("mass", 0), ("mass", 1))),
    Form("sift", "sift", (Z, _ROW, P, _WORD, _WORD), _sifted, {}, (("s", "v"),), single=_WORDS, tied={4: 3}),
    Form("count_token", "count_token", (_WORD, _ROW, P, _STATE[0]), _counted, stored=(3,), single=_WORDS),
    Form("exp_sum", "exp_sum", (Z, _ROW), _peaked, {}, (("s",),), single=_WORDS),
    *(Form(f"pick{', several a row' if wide else ''}", "pick", (Z, Operand("i32", ("s", "top")) if wide else _WORD), _picked(wide), {},
           (("s", "top") if wide else ("s",),), single=_WORDS) for wide in (False, True)),
    Form("report_logprobs", "report_logprobs", (_ROW, _f("s", "top"), Operand("i32", ("s", "top")), _ROW, _ROW, _ROW, P), _reported,
         {}, (("s",), ("s", "top"), ("s", "top")), single=_WORDS, tied={3: 0, 4: 0, 5: 0}),
    Form("sample", "sample", (Z, P, *_STATE), _sample, {},
         (("s",), ("s",), ("s", "top"), ("s", "top")), stored=(2,), single={"p": PARAM_WORDS, "top": 20}),
)  # fmt: skip
