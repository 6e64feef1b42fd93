"""The messages between the front process and the engine core: one dataclass a message, one direction each.

Standard library only, so the core imports on a machine without msgspec; the transport to a process encodes these same
dataclasses with msgspec, the in-process transport passes the objects. A request ends with exactly one
`TokenDelta` whose `finish_reason` is set.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenspeed.runtime.grammar import Structure

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class CoreParams:
    """What the engine core needs of a request's sampling parameters, validated and resolved by the front.

    `stop_token_ids` holds the end-of-sequence ids too unless the request ignores them; stop STRINGS are the front's.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    seed: int = 0  # 64 bits, unsigned; the front draws one where the request names none
    logprobs: int = -1  # -1: none; 0..20: the sampled token's and so many of the best
    structure: Structure | None = None  # what the output must look like


# ---- front -> core -------------------------------------------------------------------------------------------------


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as Submit carries them. OverflowError for one outside int32."""
    return array("i", ids).tobytes()


@dataclass(slots=True)
class Submit:
    request_id: int
    prompt: bytes  # token ids, int32 in the machine's order: a list of a long prompt takes milliseconds to take apart
    params: CoreParams
    priority: int = 0
    cache_salt: str = ""

    @property
    def prompt_ids(self) -> list[int]:
        return array("i", self.prompt).tolist()


@dataclass(slots=True)
class Abort:
    request_id: int


@dataclass(slots=True)
class Finish:
    """The front found a stop string: end the request as if it had met a stop token (no terminal delta follows)."""

    request_id: int


@dataclass(slots=True)
class Control:
    """A call into the core: `name` one of stats, scheduler, kv_events, flush_cache, update_weights, shutdown. Answered by one `Reply`."""

    call_id: int
    name: str
    args: dict[str, Any] = field(default_factory=dict)


ToCore = Submit | Abort | Finish | Control

# ---- core -> front -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TokenLogprob:
    """Log-probabilities (natural log, of the raw logits' softmax) of one sampled token and of the best alternatives."""

    token_id: int
    logprob: float
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class TokenDelta:
    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the id that ended it, when a stop id did; that id is the last of token_ids
    logprobs: list[TokenLogprob] | None = None  # one per token id, where asked for
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache; set on the first delta
    error: str | None = None
    cached_host: int = 0  # of the cached tokens, those whose pages were in host memory
    cached_storage: int = 0  # and in storage


@dataclass(slots=True)
class Stats:
    """A snapshot taken after a step; counters are totals since start."""

    running: int = 0
    waiting: int = 0
    kv_pages_total: int = 0
    kv_pages_free: int = 0
    kv_pages_cached: int = 0
    window_pages: dict[str, int] = field(
        default_factory=dict
    )  # of windowed layers: held, cached, free; none without them
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    retractions: int = 0
    steps: int = 0
    step_tokens: int = 0
    queue_age_steps: int = 0  # steps since the request at the head of the queue came
    decode_skips: int = 0  # tokens that a step left out for want of a page
    decode_stall_tokens: int = 0  # the most prompt tokens in a step that also decoded
    plan_seconds: float = 0.0
    hit_tokens: dict[str, int] = field(default_factory=dict)  # by tier: device, host, storage
    host: dict[str, int] = field(default_factory=dict)  # pages of the host tier (total, free, cached); none without it
    page_bytes: int = 0  # of one page, over all ranks of a home group
    transfers: dict[str, dict[str, int]] = field(default_factory=dict)  # by kind: in_flight, pages, missing_pages
    storage: dict[str, int] = field(default_factory=dict)  # what the store did, over all ranks


@dataclass(slots=True)
class Deltas:
    """What a step brought: at most one delta a request, the usual ones (`plain`) in a form that costs nothing to decode."""

    deltas: list[TokenDelta]
    stats: Stats
    plain: bytes = (
        b""  # further deltas of one token and no more: pairs of request id and token, int64 in the machine's order
    )

    @classmethod
    def of(cls, deltas: Sequence[TokenDelta], stats: Stats) -> Deltas:
        """With what is plain among them as `plain`."""
        rest: list[TokenDelta] = []
        plain = array("q")
        for d in deltas:
            if d.finish_reason is None and d.logprobs is None and len(d.token_ids) == 1 and not d.cached_tokens:
                plain.append(d.request_id)
                plain.append(d.token_ids[0])
            else:
                rest.append(d)
        return cls(rest, stats, plain.tobytes())


PLAIN_BYTES = 16  # of one delta in `Deltas.plain`


def unplain(plain: bytes) -> Iterator[TokenDelta]:
    """The deltas that `plain` of Deltas holds."""
    numbers = iter(array("q", plain))
    return (TokenDelta(request, [next(numbers)]) for request in numbers)


@dataclass(slots=True)
class Reply:
    call_id: int
    result: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(slots=True)
class Ready:
    """Sent once, when the core can take requests. `summary` feeds the start-up table."""

    max_model_len: int
    vocab_size: int
    kv_tokens: int
    max_running: int  # requests that run at once, over all data-parallel groups
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Died:
    reason: str


ToFront = Deltas | Reply | Ready | Died
