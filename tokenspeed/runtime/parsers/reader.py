"""The text of one output as far as it has come, read by a grammar that is written as a generator.

A step of a grammar yields when what comes next could still change its decision, and is resumed with more text or with
`ended` set. Invariant: every decision is a function of the whole text alone, never of how it was cut: a step waits
while the text at hand is a proper beginning of something that it looks for, and every bound counts characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]
Sink = Callable[[str], None]

NAME_LIMIT = 256  # characters of a name, a key or an id
SPACE_LIMIT = 1024  # characters of white space within a notation
_SPACE = re.compile(rf"\s{{0,{SPACE_LIMIT}}}")
_SCALAR = re.compile(r"[-+.\w]*")
_BETWEEN = re.compile(r"[\s,:\w.+-]*")  # what stands between strings and brackets of JSON
_IN_STRING = re.compile(r'[^"\\]*')
_CLOSER = {"{": "}", "[": "]"}
_NEVER = "(?!)"  # a pattern that nothing matches


class Markers:
    """Strings to look for, none the beginning of another. Whichever begins first in the text is found."""

    __slots__ = ("_begun", "_whole", "first_bytes", "texts")

    def __init__(self, *texts: str) -> None:
        self.texts = frozenset(texts)
        self.first_bytes = bytes(sorted({text.encode()[0] for text in texts}))
        self._whole = re.compile("|".join(map(re.escape, texts)) or _NEVER)
        self._begun = re.compile("|".join(map(_prefixes, texts)) or _NEVER)

    def search(self, text: str, at: int, *, ended: bool) -> re.Match[str] | None:
        """The first marker from `at` on, or, unless `ended`, what may become one at the end of the text."""
        return (self._whole if ended else self._begun).search(text, at)


def _prefixes(text: str) -> str:
    """A pattern of `text`, and of each of its beginnings at the end of what is searched."""
    pattern = ""
    for char in reversed(text):
        pattern = f"{re.escape(char)}(?:{pattern}|\\Z)" if pattern else re.escape(char)
    return pattern


@lru_cache(256)
def markers(*texts: str) -> Markers:
    """Of these texts, made once."""
    return Markers(*texts)


class Reader:
    """Text, the place in it, and whether more can come. Text before the place is dropped unless it is kept."""

    __slots__ = ("_kept", "_passing", "at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._kept = -1
        self._passing: tuple[Markers, Sink] | None = None  # what `until` looks for, and whom it gives text

    def passing(self, sink: Sink) -> Markers | None:
        """What is looked for, while all text was read and `sink` is given all that comes before a marker; None otherwise."""
        if self._passing is None or self._passing[1] != sink or self.at < len(self.text) or self._kept >= 0:
            return None
        return self._passing[0]

    def add(self, chunk: str) -> None:
        """More text."""
        base = self.at if self._kept < 0 else self._kept
        self.text = self.text[base:] + chunk
        self.at -= base
        if self._kept > 0:
            self._kept = 0

    def keep(self, before: int = 0) -> None:
        """Keep the text from `before` characters before the place, so that `back` can return to it."""
        self._kept = self.at - before

    def release(self) -> None:
        """What was kept is needed no more."""
        self._kept = -1

    def back(self) -> None:
        """Return to where `keep` was called."""
        self.at, self._kept = self._kept, -1

    def until(self, markers: Markers, sink: Sink) -> Step[str | None]:
        """Give text to `sink` up to the first marker, which is read and returned; None at the end of the output."""
        while True:
            found = markers.search(self.text, self.at, ended=self.ended)
            start = len(self.text) if found is None else found.start()
            if start > self.at:
                sink(self.text[self.at : start])
            self.at = start
            if found is not None and found[0] in markers.texts:
                self.at = found.end()
                return found[0]
            if self.ended:
                return None
            self._passing = markers, sink
            yield
            self._passing = None

    def word(self, markers: Markers, limit: int = NAME_LIMIT) -> Step[tuple[str, str] | None]:
        """(text before the first marker, that marker); None when more than `limit` characters stand before it."""
        while True:
            found = markers.search(self.text, self.at, ended=self.ended)
            start = len(self.text) if found is None else found.start()
            if start - self.at > limit:
                return None
            if found is not None and found[0] in markers.texts:
                text, self.at = self.text[self.at : start], found.end()
                return text, found[0]
            if self.ended:
                return None
            yield

    def space(self) -> Step[None]:
        """Pass over white space, up to SPACE_LIMIT characters."""
        left = SPACE_LIMIT
        while True:
            end = _SPACE.match(self.text, self.at).end()  # pyright: ignore[reportOptionalMemberAccess]
            passed = min(end - self.at, left)
            self.at += passed
            left -= passed
            if self.at < len(self.text) or self.ended or not left:
                return
            yield

    def peek(self) -> Step[str]:
        """The next character, "" at the end of the output."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def literal(self, *options: str) -> Step[str | None]:
        """The first of `options` that comes next, read; None when none does."""
        longest = max(map(len, options))
        while True:
            rest = self.text[self.at : self.at + longest]
            begun = not self.ended and any(len(rest) < len(option) and option.startswith(rest) for option in options)
            if not begun:
                chosen = next((option for option in options if rest.startswith(option)), None)
                self.at += len(chosen or "")
                return chosen
            yield

    def json_string(self, limit: int = NAME_LIMIT) -> Step[str | None]:
        """The raw inside of a JSON string, without escapes, of at most `limit` characters; None for anything else."""
        if (yield from self.literal('"')) is None:
            return None
        found = yield from self.word(_QUOTE, limit)
        return None if found is None or "\\" in found[0] else found[0]

    @property
    def kept(self) -> int:
        """Characters between the place and where `keep` was called."""
        return self.at - self._kept

    def json_value(self, sink: Sink) -> Step[bool]:
        """The raw text of one JSON value to `sink`. False where it breaks off or stops to be JSON.

        Brackets and strings are followed; what stands between them is checked by its characters alone.
        """
        first = yield from self.peek()
        if first not in ('"', "{", "["):
            return (yield from self._json_scalar(sink))
        start, closers, in_string = self.at, [""], False
        while True:
            pattern = _IN_STRING if in_string else _BETWEEN
            at = pattern.match(self.text, self.at).end()  # pyright: ignore[reportOptionalMemberAccess]
            char = self.text[at : at + 1]
            self.at = at
            if not char or (char == "\\" and at + 1 == len(self.text)):
                if self.ended:
                    self.at = len(self.text)
                if self.at > start:
                    sink(self.text[start : self.at])
                if self.ended:
                    return False
                yield
                start = self.at
                continue
            if char == "\\":
                self.at += 2
            elif char == '"':
                self.at += 1
                in_string = not in_string
            elif char in _CLOSER:
                self.at += 1
                closers.append(_CLOSER[char])
            elif char == closers[-1]:
                self.at += 1
                closers.pop()
            else:
                if at > start:
                    sink(self.text[start:at])
                return False
            if len(closers) == 1 and not in_string:
                sink(self.text[start : self.at])
                return True

    def _json_scalar(self, sink: Sink) -> Step[bool]:
        some = False
        while True:
            end = _SCALAR.match(self.text, self.at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if end > self.at:
                some = True
                sink(self.text[self.at : end])
            self.at = end
            if end < len(self.text) or self.ended:
                return some
            yield


_QUOTE = Markers('"')


def ignore(text: str) -> None:
    """A sink for text that means nothing."""
