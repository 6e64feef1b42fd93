"""Ids to text, token by token, with stop strings: ANY grouping of the same ids gives the same text and the same end.

Three facts make that true. Bytes become text through one incremental UTF-8 decoder, so a character split over tokens
appears once, whole, and bytes that can never become a character appear as U+FFFD at once instead of stalling the
stream. A stop string is met at its earliest END in the text, which does not depend on grouping. Text that may still
turn out to be the beginning of a stop string is held back until that is ruled out.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

_UTF8 = codecs.getincrementaldecoder("utf-8")


class StopMatcher:
    """Finds the earliest end of any of some strings in a text fed in pieces (Knuth-Morris-Pratt, O(1) a character)."""

    __slots__ = ("_fallbacks", "_patterns", "_states")

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = sorted(patterns, key=len, reverse=True)  # of two that end together the longer one counts
        self._fallbacks = [_borders(pattern) for pattern in self._patterns]
        self._states = [0] * len(self._patterns)

    @property
    def held(self) -> int:
        """Characters at the end of the text so far that may begin a match."""
        return max(self._states, default=0)

    def feed(self, text: str, ignore: int = 0) -> tuple[int, str] | None:
        """(characters of `text` up to the match's end, the match), or None.

        A match that ends within the first `ignore` characters of `text` does not count.
        """
        states, found = self._states, None
        for at, char in enumerate(text, 1):
            for i, pattern in enumerate(self._patterns):
                state, borders = states[i], self._fallbacks[i]
                while state and pattern[state] != char:
                    state = borders[state - 1]
                state += pattern[state] == char
                if state == len(pattern):
                    if found is None and at > ignore:
                        found = (at, pattern)
                    state = borders[state - 1]
                states[i] = state
            if found:
                return found
        return None


class Detokenizer:
    """The text of one choice. Feed tokens with `push`, take what may be sent with `take`, end with `finish`."""

    __slots__ = (
        "_decoder",
        "_ends",
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "_pending",
        "_pushed",
        "_sent",
        "_skip",
        "_token_bytes",
        "_total",
        "stopped_by",
    )

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        skip: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`token_bytes[id]` are a token's bytes; tokens in `skip` have no text; no stop before `min_tokens` tokens."""
        self._token_bytes = token_bytes
        self._skip = skip
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._decoder = _UTF8("replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._pending = ""  # decoded, not taken
        self._sent = 0  # characters taken
        self._total = 0  # characters decoded that are text of the choice
        self._pushed = 0  # tokens
        self._ends: deque[int] = deque()  # for each token not taken: the length of text that completes its characters
        self.stopped_by: str | None = None

    @property
    def plain(self) -> bool:
        """Whether no stop string is looked for."""
        return self._matcher is None

    def whole(self, token_id: int) -> str | None:
        """The text of a token of whole characters while nothing is held back, now taken: nearly every token, for little.

        None, and nothing has happened, where it is not such a one: `push` it.
        """
        if self._matcher is not None or self._ends or token_id in self._skip or token_id >= len(self._token_bytes):
            return None
        try:
            return self._token_bytes[token_id].decode()
        except UnicodeDecodeError:
            return None

    def push(self, token_id: int, *, silent: bool = False) -> str:
        """Add one token; `silent` ones (a stop token) have no text. Returns the text that it completed.

        An id beyond the table (a padded vocabulary row) has no text. Once `stopped_by` is set, push no more.
        """
        hidden = silent or token_id in self._skip or token_id >= len(self._token_bytes)
        piece = "" if hidden else self._decoder.decode(self._token_bytes[token_id])
        self._pushed += 1
        self._append(piece, may_stop=self._pushed > self._min_tokens)
        incomplete = self.stopped_by is None and bool(self._decoder.getstate()[0])
        self._ends.append(self._total + incomplete)
        return piece

    def take(self) -> tuple[str, int]:
        """(text that is certain and not taken yet, number of tokens whose characters are now all taken)."""
        held = self._matcher.held if self._matcher and self.stopped_by is None else 0
        safe = self._total - held
        text, self._pending = self._pending[: safe - self._sent], self._pending[safe - self._sent :]
        self._sent = safe
        count = 0
        while self._ends and self._ends[0] <= safe:
            self._ends.popleft()
            count += 1
        return text, count

    def finish(self) -> tuple[str, int]:
        """As `take`, for the last time: what was held back is text after all, half a character becomes U+FFFD."""
        if self.stopped_by is None:
            self._append(self._decoder.decode(b"", final=True), may_stop=self._pushed > self._min_tokens)
        self._matcher = None
        count = len(self._ends)
        text, _ = self.take()
        self._ends.clear()
        return text, count

    def _append(self, piece: str, *, may_stop: bool) -> None:
        self._pending += piece
        self._total += len(piece)
        if self._matcher is None or not piece:
            return
        match = self._matcher.feed(piece, ignore=0 if may_stop else len(piece))
        if match is None:
            return
        end, self.stopped_by = match
        cut = len(piece) - end + (0 if self._include_stop else len(self.stopped_by))
        self._total -= cut
        self._pending = self._pending[: len(self._pending) - cut]
        self._ends = deque(min(at, self._total) for at in self._ends)


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    state = 0
    for at in range(1, len(pattern)):
        while state and pattern[state] != pattern[at]:
            state = borders[state - 1]
        state += pattern[state] == pattern[at]
        borders[at] = state
    return borders


def pieces(token_bytes: Sequence[bytes], token_ids: Sequence[int]) -> list[str]:
    """The text that each token completes, U+FFFD for what never became a character; joined they are the whole text."""
    decoder = _UTF8("replace")
    texts = [decoder.decode(token_bytes[token] if token < len(token_bytes) else b"") for token in token_ids]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts
