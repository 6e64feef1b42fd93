"""The control plane (C++, scheduler_cpp/): what runs next, and who owns each KV page."""

from collections.abc import Sequence
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

Int32Array = NDArray[np.int32]

PAGE_KEY_VERSION: int

class QueueFull(RuntimeError):
    """The bounded queue cannot take the request now; trying again later can succeed."""

class Stats(TypedDict):
    running: int
    waiting: int
    leaving: int  # ended or retracted, held by a step or a transfer in flight
    in_flight: int  # plans out
    kv_pages_total: int
    kv_pages_free: int
    kv_pages_cached: int  # in the prefix tree
    kv_pages_evictable: int  # of those, used by nobody
    window_pages_total: int  # of the window group
    window_pages_free: int
    window_pages_idle: int  # cached, and used by nobody
    queued_tokens: int  # prompt tokens of requests never admitted
    prefix_query_tokens: int  # totals since construction from here on
    prefix_hit_tokens: int
    retractions: int
    evicted_pages: int
    steps: int
    step_tokens: int
    hit_tokens_device: int  # prefix_hit_tokens by the tier that had them
    hit_tokens_host: int
    hit_tokens_storage: int
    host_pages_total: int
    host_pages_free: int
    host_pages_cached: int  # in the host's prefix tree
    host_pages_pinned: int  # in use by requests or transfers
    host_evicted_pages: int
    queue_age_steps: int  # plans made since the request at the head of the queue came
    decode_skips: int  # decode tokens that a plan left out for want of a page
    decode_stall_tokens: int  # the most prefill tokens in a plan that also decoded
    plan_seconds: float  # in next_plan, since construction
    plan_seconds_max: float
    write_back_in_flight: int  # tickets
    load_back_in_flight: int
    prefetch_in_flight: int
    backup_in_flight: int
    write_back_pages: int  # that arrived
    load_back_pages: int
    prefetch_pages: int
    backup_pages: int
    write_back_missing_pages: int  # that did not
    load_back_missing_pages: int
    prefetch_missing_pages: int
    backup_missing_pages: int

class RequestInfo(TypedDict):
    id: int
    state: str
    computed_tokens: int
    total_tokens: int
    output_tokens: int
    pages: int
    window_pages: int  # that it can still see
    group: int  # -1: not admitted yet
    in_flight: int
    host_pages: int  # of its path, pinned on the host
    transfers: int  # in flight for it
    age_steps: int  # plans made since it came

class Config:
    """Sizes and policy. ValueError names a field that cannot work."""

    def __init__(
        self,
        *,
        page_size: int,
        num_pages: int,
        max_requests: int,
        token_buckets: Sequence[int],
        max_seq_len: int,
        dp: int = 1,
        prefill_chunk: int = 0,
        prefix_cache: bool = True,
        max_queued_requests: int = 0,
        max_queued_tokens: int = 0,
        max_in_flight: int = 1,
        decode_stall_tokens: int = 0,
        ageing_steps: int = 256,
        state_snapshots: int = 0,
        window: int = 0,
        window_pages: int = 0,
        host_pages: int = 0,
        storage: bool = False,
        storage_min_pages: int = 1,
        write_back_pages: int = 8,
        hash_bits: int = 128,
        kv_events: int = 0,
    ) -> None: ...
    @property
    def page_size(self) -> int:
        """Tokens a page."""
    @property
    def num_pages(self) -> int:
        """Pages a home group."""
    @property
    def max_requests(self) -> int:
        """Request slots, and rows at most, a home group."""
    @property
    def token_buckets(self) -> list[int]:
        """Token rows a home group, ascending; the largest is the budget of a step."""
    @property
    def max_seq_len(self) -> int:
        """Prompt + output at most, in tokens."""
    @property
    def dp(self) -> int:
        """Home groups."""
    @property
    def prefill_chunk(self) -> int:
        """Prefill tokens of one request in one step; 0: the budget."""
    @property
    def prefix_cache(self) -> bool: ...
    @property
    def max_queued_requests(self) -> int:
        """Requests that may wait for their first admission; 0: unbounded."""
    @property
    def max_queued_tokens(self) -> int:
        """Their prompt tokens; 0: unbounded. An empty queue takes any one request."""
    @property
    def max_in_flight(self) -> int:
        """Plans handed out and not returned: 1, or 2 to overlap."""
    @property
    def decode_stall_tokens(self) -> int:
        """Prefill tokens in a step that also decodes; 0: the budget."""
    @property
    def ageing_steps(self) -> int:
        """Waiting so many steps weighs as much as one priority class."""
    @property
    def state_snapshots(self) -> int:
        """Copies of recurrent states a home group; with any, a prefix is shared only up to a page that has one."""
    @property
    def window(self) -> int:
        """Positions that windowed layers see, their own among them; 0: no such layers."""
    @property
    def window_pages(self) -> int:
        """Pages of theirs a home group; they bound what runs at once (see `window_pages_for`)."""
    @property
    def host_pages(self) -> int:
        """Host pages a home group; 0: no host tier. Needs prefix_cache, and no state_snapshots."""
    @property
    def storage(self) -> bool:
        """Whether a store exists behind the host pages."""
    @property
    def storage_min_pages(self) -> int:
        """Fewer missing pages of a prompt than this are not asked of the store."""
    @property
    def write_back_pages(self) -> int:
        """A running request's computed pages go to the host in runs of at least so many."""
    @property
    def hash_bits(self) -> int:
        """Of a page's key; 128, or below 64 to test that collisions share nothing."""
    @property
    def kv_events(self) -> int:
        """Events kept until they are read; 0: none."""

class Output:
    """One sampled token."""

    @property
    def request_id(self) -> int: ...
    @property
    def token(self) -> int: ...
    @property
    def finish_reason(self) -> Literal["stop", "length"] | None: ...
    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache at the first admission: the sum of the next three."""
    @property
    def cached_device(self) -> int: ...
    @property
    def cached_host(self) -> int: ...
    @property
    def cached_storage(self) -> int: ...
    @property
    def num_output(self) -> int:
        """Tokens sampled so far, this one included."""

class Transfer:
    """Pages to copy between tiers: element i of one end to element i of the other, in order. Arrays are read-only views
    that keep it alive."""

    @property
    def ticket(self) -> int:
        """Names it in `Scheduler.transferred` and `Plan.loads`; never given twice."""
    @property
    def kind(self) -> Literal["write_back", "load_back", "prefetch", "backup"]:
        """Device to host, host to device, storage to host, host to storage."""
    @property
    def group(self) -> int:
        """Home group."""
    @property
    def request_id(self) -> int:
        """-1: of no request."""
    @property
    def device(self) -> Int32Array:
        """[n] device pages; empty for prefetch and backup."""
    @property
    def window(self) -> Int32Array:
        """As `device`: the window pages beside them, -1 where that part is not copied; empty where there is no window."""
    @property
    def host(self) -> Int32Array:
        """[n] host pages, which keep what all layers hold of a page."""
    @property
    def keys(self) -> NDArray[np.uint8]:
        """[n, 16] page keys, as `page_keys` gives them."""

class KvEvent:
    """A page came to a prefix cache, or left it."""

    @property
    def number(self) -> int:
        """Ascending from 0. A gap: events that nobody read in time were forgotten; a "cleared" follows it."""
    @property
    def kind(self) -> Literal["stored", "removed", "cleared"]: ...
    @property
    def tier(self) -> Literal["device", "host", "all"]: ...
    @property
    def group(self) -> int:
        """Home group; -1: all."""
    @property
    def key(self) -> bytes:
        """16 bytes, as `page_keys` gives them; zero for "cleared"."""
    @property
    def parent(self) -> bytes:
        """Key of the page before it, for "stored"; zero: the page starts a prompt."""

class Plan:
    """One step's work. Arrays are read-only views that keep the plan alive.

    `t` = bucket token rows and `s` = rows request rows a home group; row indices count within the home group. The
    tokens of a request row are adjacent and in order; valid rows come first.
    """

    @property
    def step(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def bucket(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def digest(self) -> int:
        """64 bits over the header and all arrays."""
    @property
    def loads(self) -> NDArray[np.int64]:
        """[k] tickets of the load-backs whose pages this step reads; no earlier plan reads them."""
    @property
    def ids(self) -> Int32Array:
        """[dp*t] token id; -(request slot + 1): the token last sampled for that slot; 0: hole."""
    @property
    def pos(self) -> Int32Array:
        """[dp*t] position in the sequence; -1: hole."""
    @property
    def slot(self) -> Int32Array:
        """[dp*t] KV slot, page * page_size + offset; -1: hole."""
    @property
    def window_slot(self) -> Int32Array:
        """[dp*t] as `slot`, of windowed layers; empty where there is no window."""
    @property
    def row(self) -> Int32Array:
        """[dp*t] request row; -1: hole."""
    @property
    def last(self) -> Int32Array:
        """[dp*s] token row whose output samples the next token; -1: none."""
    @property
    def table(self) -> Int32Array:
        """[dp*s, width] page ids; -1: none."""
    @property
    def window_table(self) -> Int32Array:
        """[dp*s, width] as `table`, of windowed layers; [0, width] where there is no window. Columns before those that a row's
        tokens see name any page."""
    @property
    def request_ids(self) -> NDArray[np.int64]:
        """[dp*s] -1: hole."""
    @property
    def request_slots(self) -> Int32Array:
        """[dp*s] slot of the request's sampling state, stable while it runs; -1: hole."""
    @property
    def num_tokens(self) -> Int32Array:
        """[dp] valid token rows."""
    @property
    def num_rows(self) -> Int32Array:
        """[dp] valid request rows."""
    @property
    def new_rows(self) -> NDArray[np.uint8]:
        """[dp*s] 1: admitted with this plan, so the slot's sampling state must be reset."""
    @property
    def out_pos(self) -> Int32Array:
        """[dp*s] position of the token that is sampled; -1: none."""
    @property
    def load_state(self) -> Int32Array:
        """[dp * s] state slot to copy into the request's before the step; -1: none."""
    @property
    def save_state(self) -> Int32Array:
        """[dp * s] state slot to copy the request's into behind the step; -1: none."""
    @property
    def packed_size(self) -> int:
        """Bytes of the packed form."""
    def pack(self) -> bytes: ...
    def pack_into(self, buffer: Buffer | np.ndarray) -> int:
        """Writes the packed form to a writable contiguous buffer; the bytes written. ValueError: too small."""
    @staticmethod
    def unpack(buffer: Buffer | np.ndarray) -> Plan:
        """A copy of a packed plan; trailing bytes are allowed. ValueError: not a plan, truncated, or changed."""

class Scheduler:
    """Decides what runs next and owns every KV page. Deterministic: the same calls give the same plans."""

    def __init__(self, config: Config) -> None: ...
    @property
    def config(self) -> Config: ...
    def submit(
        self,
        request_id: int,
        tokens: Int32Array,
        max_new_tokens: int,
        *,
        min_new_tokens: int = 0,
        stop_token_ids: Sequence[int] = ...,
        priority: int = 0,
        cache_salt: bytes = b"",
        bootstrap: bool = False,
    ) -> None:
        """Queues a request. Of two priorities the lower goes first. `bootstrap`: it is not served before `bootstrapped`.

        ValueError: empty prompt, id in use, longer than max_seq_len, or more pages than the pool has. QueueFull: the
        bounded queue is full. Nothing has changed then.
        """
    def abort(self, request_id: int) -> bool:
        """Ends a request and gives back all it holds, at once or when the step in flight returns.

        True if this call ended it; False for ids that are unknown or have ended.
        """
    def finish(self, request_id: int) -> bool:
        """Ends a request as a stop token does: its full pages stay cached. Returns as `abort` does."""
    def retract(self, request_id: int) -> bool:
        """Sends a running request back to wait; it recomputes what no tier keeps. False if it does not run."""
    def bootstrapped(self, request_id: int) -> bool:
        """The handshake with the peer is done. False if the request does not wait for one."""
    def bootstrap_failed(self, request_id: int) -> bool:
        """The handshake with the peer failed: the request ends. False if it does not wait for one."""
    def transfers(self) -> list[Transfer]:
        """What is to be started now, each handed out once, in the order in which it must be enqueued: to be called after
        each `next_plan` and before its step is launched, and whenever nothing runs."""
    def transferred(self, ticket: int, pages: int) -> bool:
        """The first `pages` of a transfer's pages arrived; the others are given up.

        False, nothing changed: the ticket is unknown, or was answered before. ValueError: more pages than it has.
        """
    def next_plan(self) -> Plan | None:
        """The next step; None when nothing can run now or max_in_flight plans are out."""
    def advance(self, step: int, tokens: Int32Array) -> list[Output]:
        """The oldest step in flight returned `tokens` [dp*s]; entries whose `last` is -1 are not read.

        ValueError, nothing changed: another step, the wrong length, or a negative token.
        """
    def fail(self, step: int) -> None:
        """The oldest step in flight failed: its requests wait again, without what the step would have given."""
    def cached_prefix(self, tokens: Int32Array, cache_salt: bytes = b"") -> int:
        """Tokens of a prompt that the device's or the host's cache would supply, in the best home group. Changes nothing."""
    def kv_events(self) -> list[KvEvent]:
        """What came to and left the prefix caches since the last call; needs `Config.kv_events`."""
    def stats(self) -> Stats: ...
    def check(self) -> None:
        """RuntimeError naming the first broken invariant. O(pages + tokens)."""
    def snapshot(self) -> list[RequestInfo]:
        """Every live request, in the order of service."""
    def flush_cache(self, tier: Literal["all", "device", "host"] = "all") -> int:
        """Evicts every cached page of the tier that nobody uses; the number of pages."""

def states_markdown() -> str:
    """The documentation page of the event x state table."""

def window_pages_for(
    *, requests: int, window: int, page_size: int, budget: int, max_in_flight: int, max_seq_len: int
) -> int:
    """Window pages that so many running requests hold at most, whatever steps of `budget` tokens are in flight."""

def page_keys(tokens: Int32Array, page_size: int, cache_salt: bytes = b"") -> list[bytes]:
    """The 16-byte keys of the full pages of `tokens`, for routers and storage tiers."""
