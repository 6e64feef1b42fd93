"""The requests that the core is working on, and the way of their tokens from its messages to their streams.

Invariant: every choice that was added ends with exactly one terminal delta, by the core's word or by `end`, and nothing is
delivered behind that. A step's tokens go out a few at a time (`pour`); a choice's own keep their order, and first
tokens go before those of choices that have had one.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenspeed.runtime.lanes import Lane
from tokenspeed.runtime.messages import PLAIN_BYTES, Abort, Deltas, Finish, FinishReason, ToCore, TokenDelta, unplain
from tokenspeed.runtime.request_stream import Choice, RequestStream

if TYPE_CHECKING:
    from tokenspeed._lanes import Lanes
    from tokenspeed.runtime.metrics import Metrics

BURST = 32  # tokens that are delivered before the loop may turn to something else


@dataclass(slots=True)
class Live:
    """One choice that the core is working on."""

    stream: RequestStream
    choice: Choice
    prompt_tokens: int
    submitted: float = field(default_factory=time.monotonic)  # seconds
    last_token: float = 0.0  # same clock; 0: none yet. With a lane it stands there
    lane: Lane | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class Flight:
    """See the module. `tell` sends to the core; `room` is set whenever a choice has ended."""

    def __init__(self, metrics: Metrics | None, tell: Callable[[ToCore], None], room: asyncio.Event) -> None:
        self.live: dict[int, Live] = {}
        self.waiting_tokens = 0  # prompt tokens of choices without a first token
        self.lanes: Lanes | None = None
        self._metrics, self._tell, self._room = metrics, tell, room
        self._fresh: set[int] = set()  # choices without a first token
        self._first: deque[TokenDelta] = deque()
        self._later: deque[list[TokenDelta] | bytes] = (
            deque()
        )  # of at most BURST deltas each, in the order in which they came

    def add(self, request_id: int, stream: RequestStream, choice: Choice) -> Live:
        """A choice that goes to the core now."""
        self.live[request_id] = live = Live(stream, choice, len(stream.prompt_ids))
        self._fresh.add(request_id)
        self.waiting_tokens += live.prompt_tokens
        return live

    # ---- from the core to the streams ------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether there is something to pour."""
        return bool(self._first or self._later)

    def take(self, message: Deltas) -> None:
        """What a step has brought."""
        plain = message.plain
        if self._fresh and plain:
            pairs = array("q", plain)
            if not self._fresh.isdisjoint(pairs[::2]):
                both = list(zip(pairs[::2], pairs[1::2], strict=True))
                self._first.extend(TokenDelta(request, [token]) for request, token in both if request in self._fresh)
                known = (number for pair in both if pair[0] not in self._fresh for number in pair)
                plain = array("q", known).tobytes()
        others = message.deltas
        if self._fresh:
            self._first.extend(delta for delta in others if delta.request_id in self._fresh)
            others = [delta for delta in others if delta.request_id not in self._fresh]
        self._later.extend(others[at : at + BURST] for at in range(0, len(others), BURST))
        self._later.extend(plain[at : at + BURST * PLAIN_BYTES] for at in range(0, len(plain), BURST * PLAIN_BYTES))

    def pour(self, *, whole: bool = False) -> None:
        """Deliver some of what was taken, or the `whole` of it."""
        now = time.monotonic()
        while self.pending:
            for delta in self._group(now):
                self._deliver(delta, now)
            if not whole:
                return

    def _group(self, now: float) -> Iterator[TokenDelta]:
        """The next few deltas but those that lanes take."""
        group: list[TokenDelta] | bytes
        if self._first:
            group = [self._first.popleft() for _ in range(min(BURST, len(self._first)))]
        else:
            group = self._later.popleft()
        if self.lanes is None:
            yield from unplain(group) if isinstance(group, bytes) else group
            return
        taken = (
            self.lanes.step_plain(group, now, TokenDelta) if isinstance(group, bytes) else self.lanes.step(group, now)
        )
        rest, gaps, unsent = taken
        if self._metrics is not None:
            self._metrics.gaps(gaps)
        for request_id, data in unsent:
            if (lane := self.live[request_id].lane) is not None:
                lane.unsent(data)
        for request_id, _ in unsent:
            self._settle(request_id)
        yield from rest

    def _deliver(self, delta: TokenDelta, now: float) -> None:
        live = self.live.get(delta.request_id)
        if live is None:
            return  # the front has ended it already
        if live.lane is not None:
            self._settle(delta.request_id)
        tokens = len(delta.token_ids)
        if live.last_token:
            if self._metrics is not None and tokens:
                self._metrics.tokens(tokens, now - live.last_token)
        else:
            self._begun(live, delta, now)
        live.last_token = now
        out = live.choice.accept(delta)
        if live.choice.finished:
            if delta.finish_reason is None:  # a stop string, which the core knows nothing of
                self._tell(Finish(delta.request_id))
            self._retire(delta.request_id, out.finish_reason if out else None)
        if out is not None:
            live.stream.put(out)

    def _begun(self, live: Live, delta: TokenDelta, now: float) -> None:
        """The first delta of a choice."""
        self._fresh.discard(delta.request_id)
        self.waiting_tokens -= live.prompt_tokens
        if not live.choice.index:
            live.stream.cached = (delta.cached_tokens, delta.cached_host, delta.cached_storage)
        if self._metrics is not None and delta.token_ids:
            self._metrics.tokens(len(delta.token_ids), now - live.submitted, first=True)

    # ---- ends ------------------------------------------------------------------------------------------------------

    def end(self, request_id: int, reason: FinishReason, error: str | None = None, **why: Any) -> None:
        """The front ends a choice: terminal delta to its stream, abort to the core."""
        live = self.live[request_id]
        self._settle(request_id)
        self._retire(request_id, reason)
        self._tell(Abort(request_id))
        live.stream.put(live.choice.end(reason, error, **why))

    def _retire(self, request_id: int, reason: FinishReason | None) -> None:
        live = self.live.pop(request_id)
        self._fresh.discard(request_id)
        for timer in live.timers:
            timer.cancel()
        if not live.last_token:
            self.waiting_tokens -= live.prompt_tokens
        self._room.set()
        if self._metrics is not None:
            self._metrics.finished(reason or "abort", live.choice.num_tokens, time.monotonic() - live.submitted)

    # ---- what streams ask for --------------------------------------------------------------------------------------

    def end_stream(self, stream: RequestStream) -> None:
        for request_id in stream.request_ids:
            if request_id in self.live:
                self.end(request_id, "abort")

    @property
    def forwards(self) -> bool:
        return self.lanes is not None

    def forward(self, stream: RequestStream, lane: Lane) -> None:
        (request_id,) = stream.request_ids
        live = self.live.get(request_id)
        if self.lanes is None or live is None or live.lane is not None or live.choice.holds:
            return
        live.lane = lane
        form = {"head": lane.head, "middle": lane.middle, "end": lane.end}
        self.lanes.open(request_id, fd=lane.fd, **form, number=lane.number, last=live.last_token, marks=lane.marks)

    def settle(self, stream: RequestStream) -> None:
        for request_id in stream.request_ids:
            if request_id in self.live:
                self._settle(request_id)

    def _settle(self, request_id: int) -> None:
        """The lane of a choice ends, and its stream is told what has gone through it."""
        live = self.live[request_id]
        if live.lane is None:
            return
        assert self.lanes is not None
        live.lane = None
        tokens, events, live.last_token = self.lanes.close(request_id)
        if tokens:
            live.stream.put(live.choice.passed(tokens, events))
