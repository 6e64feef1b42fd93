"""What generation gives back: deltas while it runs, one result when it is done.

A choice is a sequence of `OutputDelta`s of which exactly the last has a `finish_reason`; joining them gives the
`Completion`. `token_ids`, `pieces` and `logprobs` of a delta are parallel and belong to its text: a token is in the
delta that completes its characters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed.runtime.errors import GenerationError, QueueTimeoutError
from tokenspeed.runtime.messages import FinishReason, TokenLogprob

__all__ = ["Completion", "FinishReason", "OutputDelta", "RequestOutput", "TokenLogprob", "Usage"]


@dataclass(slots=True)
class OutputDelta:
    """News of one choice. `stop_reason` is the stop string or stop token id that ended it, None for end of sequence; "timeout"
    of one that was aborted because its time was over."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # text that each token added; "" while a character is incomplete
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None  # with finish_reason "error"
    waited: bool = False  # with an error: the request waited too long for its turn
    written: int = 0  # events of it that a lane has written already; 0: it is yet to be told

    @property
    def failure(self) -> GenerationError:
        """The error of a delta with finish_reason "error"."""
        kind = QueueTimeoutError if self.waited else GenerationError
        return kind(self.error or "the engine core failed on this request")


@dataclass(slots=True)
class Usage:
    """Token counts of a request; completion tokens are summed over its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    cached_host: int = 0  # of those, found in host memory
    cached_storage: int = 0  # and in storage
    reasoning_tokens: int = 0  # of the completion tokens, those that were thought

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def cached_device(self) -> int:
        return self.cached_tokens - self.cached_host - self.cached_storage


@dataclass(slots=True)
class Completion:
    """One finished choice."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: OutputDelta) -> None:
        """Append a delta of this choice."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.pieces += delta.pieces
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """The result of one request: its choices (n of them) and counts; text, token_ids ... are the first choice's."""

    prompt_token_ids: list[int]
    choices: list[Completion]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason
