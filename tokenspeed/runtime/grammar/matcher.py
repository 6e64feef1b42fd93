"""One request's progress through its structure. Invariant: `words` is what the next token may be, None while the output is
free; the model's end is allowed exactly where the structure may end, and `done` is set where it must.

A fault of the grammar engine is an `error` of this request and never an exception.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np


class Matcher:
    """Of one choice. `consume` each of its tokens, then `fill` (or `fill_all` of several) before the next is drawn."""

    __slots__ = ("_after", "_ends", "_grammar", "_matcher", "_seen", "done", "error", "tokens", "words")

    def __init__(self, grammar: Grammar, after: str = "", ends: Sequence[int] = ()) -> None:
        """`after`: text that ends the free part before the structure; `ends`: ids that end the output."""
        self._grammar, self._matcher = grammar, grammar.pristine.deep_copy()
        self._after, self._seen = after.encode(), b""
        self._ends = grammar.bits(ends)
        self.tokens = 0  # consumed
        self.done = False
        self.error = ""
        self.words: np.ndarray | None = None if after else self._allowed(grammar.first)

    @property
    def free(self) -> bool:
        """Whether the structure has not begun."""
        return bool(self._after)

    def consume(self, token: int) -> None:
        """Takes the token that was drawn. Of several matchers it may run in threads."""
        self.tokens += 1
        if self._after:
            self._look(token)
        elif not self._matcher.consume_token(token):
            self._fail()
        if not self._after and not self.error and self._matcher.is_stopped():
            self.done, self.words = True, None

    def _look(self, token: int) -> None:
        """Looks for the end of the free part; what stands behind it in the same token is the structure's first text."""
        held = self._seen + self._grammar.text(token)
        at = held.find(self._after)
        if at < 0:
            self._seen = held[-len(self._after) + 1 :] if len(self._after) > 1 else b""
            return
        rest = held[at + len(self._after) :].lstrip()
        self._after = self._seen = b""
        for piece in self._grammar.tokenize(rest):
            if not self._matcher.consume_token(piece):
                return self._fail()

    def fill(self) -> None:
        """Works out `words` for the next token."""
        fill_all(None, [self])

    def _filled(self, words: np.ndarray) -> None:
        if self._matcher.is_error():
            return self._fail()
        self.words = self._allowed(words)
        if not self.words.any():  # nothing may follow: the engine's own end was all there was
            self.done, self.words = True, None

    def _allowed(self, words: np.ndarray) -> np.ndarray:
        words = words & ~self._grammar.end_bits
        return words | self._ends if self._matcher.is_accepting() else words

    def _fail(self) -> None:
        self.error = f"the output cannot be held to its structure: {brief(self._matcher.get_error())}"
        self.words = None


class Grammar:
    """A compiled structure: what matchers of it share."""

    def __init__(self, pristine: Any, first: np.ndarray, table: Any) -> None:
        """`pristine`: an llguidance matcher that has consumed nothing; `first` its mask; `table` a TokenTable."""
        self.pristine, self.first = pristine, first
        self.end_bits = table.end_bits
        self.bits, self.text, self.tokenize = table.bits, table.text, table.tokenize


def fill_all(executor: Any, matchers: Sequence[Matcher]) -> None:
    """Works out the next masks of matchers that go on, side by side where there is an executor."""
    waiting = [m for m in matchers if not (m.free or m.done or m.error)]
    if not waiting:
        return
    words = np.zeros((len(waiting), len(waiting[0]._grammar.first)), dtype=np.int32)
    if executor is not None and len(waiting) > 1:
        pairs = [(m._matcher, i) for i, m in enumerate(waiting)]
        executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, words.shape[1] * 4, len(waiting))
    else:
        for i, m in enumerate(waiting):
            m._matcher.unsafe_compute_mask_ptr(words[i].ctypes.data, words.shape[1] * 4)
    for m, row in zip(waiting, words):
        m._filled(row)


def brief(message: str) -> str:
    """The first lines of a grammar engine's message, without its state."""
    return " ".join(re.split("<state>|<non-verbose/>", message)[0].split())[:300]
