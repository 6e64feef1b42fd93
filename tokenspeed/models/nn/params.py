"""Ops with weights beside the maps (RMSNorm, Rope, PagedAttention ...), and ops without. They are ops of the enclosing body, not
modules.

Invariant: a declaration names dims and axes only; extents come from the model's `dims` and ranks from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tokenspeed.ir.builder import apply, caller, current
from tokenspeed.ir.errors import SpecError
from tokenspeed.ir.ops.filters import ROUNDS
from tokenspeed.ir.spec import parse_spec
from tokenspeed.models.nn.config import ConfigError
from tokenspeed.models.nn.maps import STREAM, Experts, Weight, read_spec
from tokenspeed.models.nn.module import Param


class RMSNorm(Param):
    """x * rsqrt(mean(x^2) + eps) * w over the last dim.

    dtype: of w, the stream's by default; with "f32" the product is rounded once. offset: w is what the checkpoint holds plus
    this (Gemma stores w - 1)."""

    def __init__(self, spec: str, eps: float, dtype: str = STREAM, offset: float = 0.0) -> None:
        self.spec, self.eps, self.dtype, self.offset = read_spec(spec), eps, dtype, offset

    def __call__(self, x: Any) -> Any:
        current().frame.params[self.path] = self
        return apply("rms_norm", [x, f"@{self.path}"], eps=self.eps)


class LayerNorm(Param):
    """(x - mean) / sqrt(variance + eps) * w + b over the last dim."""

    def __init__(self, spec: str, eps: float) -> None:
        self.w, self.b, self.eps = Weight(spec), Weight(spec), eps

    def __call__(self, x: Any) -> Any:
        return apply("layer_norm", [x, self.w.ref(), self.b.ref()], eps=self.eps)


def norm_over(xs: Sequence[Any], ws: Sequence[Weight], eps: float, dim: str, rows: str = "t@dp") -> tuple[Any, ...]:
    """RMS norms of several [T, n, d], each over all its heads and weighed by its w "n@tp*d". What ranks exchange is the sum of
    squares of each, side by side in a dim that counts them (`dim`), which stand whole on every rank of `rows`."""
    squares = place(apply("square_sum", xs, dim=dim), f"{rows} {dim}")
    return tuple(apply("rms_scale", [x, squares, w.ref()], eps=eps, index=i) for i, (x, w) in enumerate(zip(xs, ws)))


class Rope(Param):
    """Rotary position embedding (Su et al., 2104.09864) in halves, or with `pairs` of neighbours. The table is computed at load
    from `parameters` (rope_type, rope_theta, factors ...), for `positions` rows of `dim` values."""

    def __init__(self, dim: int, positions: int, parameters: dict[str, Any], pairs: bool = False) -> None:
        for key in ("short_factor", "long_factor", "divisors"):
            if key in parameters and len(parameters[key]) != dim // 2:
                raise ConfigError(
                    f"{key} lists {len(parameters[key])} divisors, a rope of {dim} values has {dim // 2} frequencies"
                )
        self.dim, self.positions, self.parameters, self.pairs = dim, positions, parameters, pairs

    def __call__(self, q: Any, k: Any, pos: Any, pairs: bool | None = None) -> tuple[Any, Any]:
        """`pairs`: of this call, where it differs; the table is the same."""
        current().frame.params[self.path] = self
        op = "rope_pairs" if (self.pairs if pairs is None else pairs) else "rope"
        return apply(op, [q, pos, f"@{self.path}"]), apply(op, [k, pos, f"@{self.path}"])


class PagedAttention(Param):
    """Causal attention of this step's tokens over their requests' pages; owns one KV cache, of the full-attention group or,
    with a window, of the group whose pages are given up behind it.

    spec: "n@tp kv@tp:kv d", query heads, KV heads, head width. scale: of the scores. window: positions that a token sees, its
    own the last of them (None: all before it). softcap: c bends a score x to c tanh(x / c).
    The cache's slots lie on `dp` and, of each home group, on `cp`: a rank of cp attends to the positions that it holds, and
    the parts are merged before they go on.
    """

    def __init__(self, spec: str, scale: float, window: int | None = None, softcap: float | None = None) -> None:
        dims = [read_spec(word).dims[0] for word in spec.split()]  # of two tensors, so an axis may recur
        if len(dims) != 3:
            raise SpecError(
                "P001", f"{caller()}: PagedAttention({spec!r}) takes three dims: query heads, KV heads, head width"
            )
        self.n, self.kv, self.d = dims
        self.scale = scale
        self.windowed = window is not None
        self.options: dict[str, Any] = {k: v for k, v in (("window", window), ("softcap", softcap)) if v is not None}

    def __call__(self, q: Any, k: Any, v: Any, b: Any, sinks: Weight | None = None) -> Any:
        """[t, n, d]. `sinks`: of each query head ("n@tp"), a score beside those of the keys whose weight goes to nothing."""
        current().frame.params[self.path] = self
        ck, cv = f"@{self.path}:0", f"@{self.path}:1"
        slot, table = (b.window_slot, b.window_table) if self.windowed else (b.slot, b.table)
        apply("append", [k, v, slot, ck, cv], 0)
        extra = [sinks.ref()] if sinks else []
        y = apply("attend", [q, ck, cv, b.pos, b.row, table, *extra], scale=self.scale, **self.options)
        return place(y, f"t@dp {self.n} {self.d}")


class LatentCache(Param):
    """What attention keeps of a token that all heads share, in the full-attention group: a cache for each dim of the spec, its
    slots on `dp` and, of each home group, on `cp`."""

    def __init__(self, spec: str) -> None:
        self.spec = read_spec(spec)

    def append(self, values: Sequence[Any], b: Any) -> list[str]:
        """Writes this step's values [T, C], one a dim; references of the caches."""
        current().frame.params[self.path] = self
        if len(values) != len(self.spec.dims):
            raise SpecError("P004", f"{caller()}: {len(values)} values for the caches {self.spec}")
        caches = [f"@{self.path}:{i}" for i in range(len(values))]
        apply("append_latent", [*values, b.slot, *caches], 0)
        return caches


class LatentAttention(LatentCache):
    """Causal attention of all heads over one latent and one rotated part a token (MLA). spec: "n@tp kl dr", the heads and
    the widths of both. scale: of the scores. A rank of cp attends to what it holds, and the parts are merged."""

    def __init__(self, spec: str, scale: float) -> None:
        heads, _, widths = spec.partition(" ")
        super().__init__(widths)
        self.heads, self.scale = read_spec(heads), scale
        if len(self.spec.dims) != 2:
            raise SpecError(
                "P001", f"{caller()}: LatentAttention({spec!r}) takes three dims: heads, latent, rotated part"
            )

    def __call__(self, q: Any, rotated_q: Any, latent: Any, rotated: Any, b: Any, picked: Any = None) -> Any:
        """q [T, n, kl], rotated_q [T, n, dr], latent [T, kl], rotated [T, dr] -> [T, n, kl], the heads' mixes of latents.
        `picked` i32[T, K]: the positions that each token attends, -1 for none (LatentIndex); without it all before it."""
        caches = self.append([latent, rotated], b)
        extra = [] if picked is None else [picked]
        y = apply("mla", [q, rotated_q, *caches, b.pos, b.row, b.table, *extra], scale=self.scale)
        return place(y, f"t@dp {self.heads} {self.spec.dims[0]}")


class LatentIndex(LatentCache):
    """Which `k` positions a token attends: those that its index heads score highest (DeepSeek Sparse Attention), whatever
    positive factor the scores have. spec: the width of a key; `dim` names k among the model's dims."""

    def __init__(self, spec: str, k: int, dim: str = "ik") -> None:
        super().__init__(spec)
        self.k, self.dim = k, dim

    def __call__(self, q: Any, weights: Any, key: Any, b: Any) -> Any:
        """q [T, m, di], the heads' weights [T, m], this step's keys [T, di] -> positions i32[T, k], -1 where there are fewer."""
        (keys,) = self.append([key], b)
        best = apply("index_topk", [q, weights, keys, b.pos, b.row, b.table], k=self.k, dim=self.dim)
        return place(best, f"t@dp {self.dim}")


#: the dim of the packed words of an allow-mask
MASK_WORDS = "words"


class SamplingState(Param):
    """Per-request state of the full sampler: counts of output tokens, prompt tokens seen, logit bias, and a packed allow-mask; a
    row a request slot. `vocabulary`: how the columns of the first three lie, as the logits do; a mask is whole on every rank."""

    def __init__(self, vocabulary: str = "v") -> None:
        self.vocabulary = read_spec(vocabulary)


def silu(x: Any) -> Any:
    return apply("silu", [x])


def gelu(x: Any) -> Any:
    """In its tanh form."""
    return apply("gelu", [x])


def softcap(x: Any, cap: float) -> Any:
    """cap * tanh(x / cap)."""
    return apply("softcap", [x], cap=float(cap))


def cat(xs: Sequence[Any], dim: str) -> Any:
    """Rows [T, D_i] side by side; `dim` names the sum of their widths among the model's dims."""
    return apply("cat", list(xs), dim=dim)


def sigmoid(x: Any) -> Any:
    return apply("sigmoid", [x])


def mul_rows(x: Any, y: Any) -> Any:
    """x [T, D] times y [T], a value a row."""
    return apply("mul_rows", [x, y])


@dataclass(frozen=True)
class Routing:
    """How a router picks: the `k` experts of highest softmax or sigmoid `score`, of the `top_groups` best of `groups` equal
    blocks of experts (a block counts the sum of its `group_best` best), and their shares: the scores, with `normalise`
    divided by their sum, then times `scale`."""

    k: int
    normalise: bool = True
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    scale: float = 1.0


def route(logits: Any, how: Routing, bias: Weight | None = None, dim: str = "k") -> tuple[Any, Any]:
    """The experts of each row and their shares: [T, e] -> ids i32[T, k], shares f32[T, k]. `bias` f32[e] is added to the
    scores for the choice alone; `dim` names k among the model's dims."""
    refs = [bias.ref()] if bias else []
    return apply("route", [logits, *refs], 2, dim=dim, bias=bool(refs), **asdict(how))


@dataclass(frozen=True)
class Clamp:
    """The gate of gpt-oss's experts: g sigmoid(alpha g) (u + 1), g cut above `limit` and u to it on both sides."""

    alpha: float
    limit: float


def experts(x: Any, ids: Any, shares: Any, w13: Experts, w2: Experts, clamp: Clamp | None = None) -> Any:
    """Each row through its experts: sum of share * down_e(silu(gate_e(x)) * up_e(x)), or as `clamp` says; w13 holds gate and up,
    w2 down."""
    if (len(w13.segments), len(w2.segments), bool(w13.bias)) != (2, 1, bool(w2.bias)):
        raise SpecError(
            "P004",
            f"{caller()}: experts takes gate and up as two segments and one down, with biases on all or none, not "
            f"{w13.text!r}, {w2.text!r}",
        )
    (both, of_both), (down, of_down) = w13.refs(), w2.refs()
    return apply("experts", [x, ids, shares, *both, *down, *of_both, *of_down], **asdict(clamp) if clamp else {})


def lookup(w: Weight, ids: Any) -> Any:
    """Rows of a table by id: [T] -> [T, h]."""
    return apply("lookup", [ids, w.ref()], dtype=STREAM)


def head(x: Any, w: Weight) -> Any:
    """Logits x @ w^T in float32: [S, h], [v, h] -> [S, v]."""
    inp = tuple(d.name for d in w.spec.dims[1:])
    return apply("linear", [x, w.ref()], in_dims=inp, segments=1, bias=False, dtype="f32")


def select_rows(x: Any, index: Any) -> Any:
    """x[index], index into the rows of this home block."""
    return apply("select_rows", [x, index])


def place(x: Any, spec: str) -> Any:
    """The author's claim inside a leaf that the value must stand so here; whatever that takes is inserted."""
    return apply("place", [x], spec=spec)


def export(name: str, x: Any, spec: str) -> None:
    """Makes a value of the root module's own body a further result of the program, placed as `spec`."""
    current().exports[name] = (x.name, parse_spec(spec))


def temper(z: Any, params: Any) -> Any:
    return apply("temper", [z, params])


def add_gumbel(z: Any, params: Any) -> Any:
    return apply("add_gumbel", [z, params])


def argmax(z: Any) -> Any:
    return apply("argmax", [z])


def full_sample(z: Any, params: Any, state: SamplingState) -> Any:
    return apply("sample", [z, params, *_state_refs(state)], 4)


def _state_refs(state: SamplingState) -> list[str]:
    current().frame.params[state.path] = state
    return [f"@{state.path}:{i}" for i in range(3)]


def mask_logits(z: Any, params: Any, state: SamplingState) -> Any:
    """z, -inf at ids that the allow-mask of a request forbids; of requests that have one."""
    _state_refs(state)
    return apply("mask_logits", [z, params, f"@{state.path}:3"])


def shape_logits(z: Any, params: Any, state: SamplingState) -> Any:
    """(raw, shaped): the logits without NaN, and what a row samples from: biased, penalised, divided by its temperature."""
    return apply("shape_logits", [z, params, *_state_refs(state)], 2)


def row_max(x: Any) -> Any:
    """The maximum over the last dim."""
    return apply("reduce", [x], kind="max")


def threshold(x: Any, params: Any, by: Literal["count", "mass"], *above: Any) -> Any:
    """i32 [s], bits of float32: the k-th largest of x, or where the nucleus of top-p ends; `above`: the maximum of x, and the
    floor of what is in question. See ops/filters.py."""
    found: tuple[Any, ...] = ()
    for i in range(ROUNDS):
        tally = apply("tally", [x, params, *above, *found[:1]], by=by, round=i)
        found = apply("narrow", [place(tally, "s@dp digit"), *(found or (params,))], 3, by=by, round=i)
    return found[0]


def sift(x: Any, top: Any, params: Any, floor: Any, cut: Any) -> Any:
    """x, -inf where top-k, top-p or min-p reject it."""
    return apply("sift", [x, top, params, floor, cut])


def count_token(token: Any, top: Any, params: Any, state: SamplingState) -> None:
    """Notes the token of each row that has penalties in the state of its request."""
    apply("count_token", [token, top, params, _state_refs(state)[0]], 0)


def exp_sum(z: Any, peak: Any) -> Any:
    return apply("exp_sum", [z, peak])


def pick(z: Any, ids: Any) -> Any:
    """z at global ids, a row's one or a row's several."""
    return apply("pick", [z, ids])


def topk(z: Any, k: int, dim: str) -> Any:
    return apply("topk", [z], k=k, dim=dim)


def report_logprobs(chosen: Any, best: Any, ids: Any, peak: Any, mass: Any, top: Any, params: Any) -> Any:
    """(log-probability of the token, ids of the best, theirs), as many as the row asks for."""
    return apply("report_logprobs", [chosen, best, ids, peak, mass, top, params], 3)
