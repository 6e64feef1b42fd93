"""One request as its consumer sees it: deltas over all of its choices, told as they come or iterated.

Each choice is one request of the engine core and yields exactly one delta with a `finish_reason`, however it ends:
stop id, stop string, length, abort, an error of the core. After that nothing of it is yielded and nothing that the
core still says about it counts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from tokenspeed.runtime.detokenizer import Detokenizer
from tokenspeed.runtime.lanes import Lane
from tokenspeed.runtime.messages import FinishReason, TokenDelta, TokenLogprob
from tokenspeed.runtime.outputs import Completion, OutputDelta, RequestOutput, Usage
from tokenspeed.runtime.sampling_params import SamplingParams
from tokenspeed.runtime.tokenizer import Tokenizer


class Choice:
    """Turns the core's deltas of one choice into output deltas."""

    __slots__ = ("_detokenizer", "_held", "_include_stop", "_logprobs", "_tokenizer", "finished", "index", "num_tokens")

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer | None, kept: Collection[str] = ()
    ) -> None:
        """`kept`: special tokens that stay in the text, whatever `params` says."""
        self.index = index
        self.finished = False
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._include_stop = params.include_stop_str_in_output
        self._logprobs = params.logprobs is not None
        self._held: deque[tuple[int, str, TokenLogprob | None]] = deque()  # tokens whose text is held back
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            specials = tokenizer.special_by_text if kept and params.skip_special_tokens else {}
            hidden = tokenizer.special_ids - {specials[text] for text in kept if text in specials}
            self._detokenizer = Detokenizer(
                tokenizer.token_bytes,
                hidden if params.skip_special_tokens else frozenset(),
                params.stops,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    def accept(self, delta: TokenDelta) -> OutputDelta | None:
        """The output of a core delta; None while everything is held back. A stop string sets its finish reason."""
        ids = delta.token_ids
        if delta.finish_reason is None and len(ids) == 1 and self._detokenizer is not None and not self._logprobs:
            text = self._detokenizer.whole(ids[0])
            if text is not None:
                self.num_tokens += 1
                return OutputDelta(self.index, text, ids, [text])
        out = OutputDelta(self.index, finish_reason=delta.finish_reason, error=delta.error)
        last = len(ids) - 1
        for at, token in enumerate(ids):
            silent = at == last and delta.stop_token_id is not None and not self._include_stop
            piece = self._detokenizer.push(token, silent=silent) if self._detokenizer else ""
            self._held.append((token, piece, delta.logprobs[at] if delta.logprobs else None))
            self.num_tokens += 1
            if self._detokenizer and self._detokenizer.stopped_by is not None:
                out.finish_reason, out.stop_reason, out.error = "stop", self._detokenizer.stopped_by, None
                break
        if out.stop_reason is None and delta.stop_token_id is not None:
            is_eos = self._tokenizer is not None and delta.stop_token_id in self._tokenizer.eos_ids
            out.stop_reason = None if is_eos else delta.stop_token_id
        return self._emit(out)

    @property
    def plain(self) -> bool:
        """Whether each token of whole characters goes out as it comes, with its text and no more."""
        return self._detokenizer is not None and self._detokenizer.plain and not self._logprobs

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def passed(self, token_ids: list[int], events: int) -> OutputDelta:
        """Tokens that a lane has written, while nothing was held."""
        assert self._detokenizer is not None and not self._held
        pieces = [self._detokenizer.whole(token) or "" for token in token_ids]
        self.num_tokens += len(token_ids)
        return OutputDelta(self.index, "".join(pieces), token_ids, pieces, written=events)

    def end(
        self, reason: FinishReason, error: str | None = None, *, stop_reason: str | None = None, waited: bool = False
    ) -> OutputDelta:
        """The last delta of a choice that the front ends itself."""
        out = OutputDelta(self.index, finish_reason=reason, error=error, stop_reason=stop_reason, waited=waited)
        out = self._emit(out)
        assert out is not None
        return out

    def _emit(self, out: OutputDelta) -> OutputDelta | None:
        self.finished = out.finish_reason is not None
        count = len(self._held)
        if self._detokenizer:
            out.text, count = self._detokenizer.finish() if self.finished else self._detokenizer.take()
        if not (count or out.text or self.finished):
            return None
        if self._logprobs:
            out.logprobs = []
        for _ in range(count):
            token, piece, logprob = self._held.popleft()
            out.token_ids.append(token)
            out.pieces.append(piece)
            if out.logprobs is not None and logprob is not None:
                out.logprobs.append(logprob)
        return out


class Owner(Protocol):
    """The engine's side of a stream."""

    def end_stream(self, stream: RequestStream) -> None:
        """Abort what is not finished."""
        ...

    def forward(self, stream: RequestStream, lane: Lane) -> None: ...
    def settle(self, stream: RequestStream) -> None: ...

    @property
    def forwards(self) -> bool:
        """Whether there are lanes."""
        ...


class RequestStream:
    """Iterate it for deltas, have them told to a listener, or `collect` it for the result; each delta is had once.

    `close` it in any case (an unfinished one is aborted).
    """

    def __init__(
        self,
        prompt_ids: list[int],
        choices: list[Choice],
        owner: Owner,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.choices = choices
        self.request_ids: list[int] = []  # of the choices that went to the core
        # Prompt tokens from the prefix cache; of those from host memory, from storage.
        self.cached: tuple[int, int, int] = (0, 0, 0)
        self._owner = owner
        self._deltas: deque[OutputDelta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[OutputDelta], None] | None = None
        self._open = len(choices)  # choices whose last delta is not yet yielded
        self._closed = False

    @property
    def usage(self) -> Usage:
        """The counts so far; final once the iteration has ended."""
        return Usage(len(self.prompt_ids), sum(choice.num_tokens for choice in self.choices), *self.cached)

    @property
    def ended(self) -> bool:
        """Whether the last delta has been had."""
        return not self._open

    def put(self, delta: OutputDelta) -> None:
        """The engine's side: one more delta."""
        if self._closed:
            return
        if self._listener is not None:
            if delta.finish_reason is not None:
                self._open -= 1
            self._listener(delta)
            return
        self._deltas.append(delta)
        self._wake()

    def listen(self, listener: Callable[[OutputDelta], None]) -> None:
        """From now on tell `listener` each delta as it comes, within the engine's own call: it must not raise."""
        self._listener = listener
        waiting, self._deltas = self._deltas, deque()
        for delta in waiting:
            self.put(delta)

    async def each(self, take: Callable[[OutputDelta], object]) -> None:
        """Give each delta to `take` as it comes, until the last one or `close`. What `take` raises is raised here."""
        if self._closed or not self._open:
            return
        done = self._waiter = asyncio.get_running_loop().create_future()

        def listener(delta: OutputDelta) -> None:
            if done.done():
                return
            try:
                take(delta)
            except Exception as fault:
                if not done.done():
                    done.set_exception(fault)
            if not self._open:
                self._wake()

        self.listen(listener)
        await done

    @property
    def forwardable(self) -> bool:
        """Whether its tokens may take a lane."""
        return self._owner.forwards and len(self.choices) == 1 and self.choices[0].plain

    def forward(self, lane: Lane) -> None:
        """From now on plain tokens take the lane, as long as they can; the listener is told of them later (`written`)."""
        if not self._closed:
            self._owner.forward(self, lane)

    def settle(self) -> None:
        """Tell the listener what has gone through the lane, which ends."""
        self._owner.settle(self)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._deltas:
            if self._open == 0 or self._closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delta = self._deltas.popleft()
        if delta.finish_reason is not None:
            self._open -= 1
        return delta

    def close(self) -> None:
        """Abort what is not finished and forget the rest. Idempotent; safe from the iterating task's `finally`."""
        if self._closed:
            return
        self._closed = True
        self._deltas.clear()
        self._wake()
        self._owner.end_stream(self)

    def abort(self) -> None:
        """End what is not finished with the finish reason `abort`, which the iteration still yields."""
        if not self._closed:
            self._owner.end_stream(self)

    async def collect(self) -> RequestOutput:
        """All choices, finished. Raises GenerationError where the core failed on one; closes the stream."""
        completions = [Completion(choice.index) for choice in self.choices]

        def take(delta: OutputDelta) -> None:
            if delta.finish_reason == "error":
                raise delta.failure
            completions[delta.index].add(delta)

        try:
            await self.each(take)
        finally:
            self.close()
        return RequestOutput(self.prompt_ids, completions, self.usage)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
