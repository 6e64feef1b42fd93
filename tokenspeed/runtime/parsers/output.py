"""The parser of one choice: text as it comes in, pieces out, nothing lost.

Invariant: `feed` and `finish` never raise for any text, and the pieces, those of one kind joined, do not depend on
how it was cut into chunks. A grammar reads the text from a `Reader` and says what it is to an `Emitter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tokenspeed.runtime.parsers.pieces import CallArguments, CallBegin, CallEnd, Content, Piece, Reasoning
from tokenspeed.runtime.parsers.reader import Reader, Step

Kind = Literal["", "reasoning", "content", "arguments"]
_WHITE = " \t\n\r\f\v"


class Emitter:
    """Pieces in order. White space around thoughts and calls belongs to the notation and is dropped.

    Line feeds that begin or end a thought or follow it go, as does all white space between content and a call.
    White space that may prove to be such is held back. With `exact`, all text is given as it is.
    """

    __slots__ = ("_exact", "_index", "_kind", "_open", "_parts", "_pieces", "_space", "_strip", "_trims_content")

    def __init__(self, *, trims_content: bool, exact: bool = False) -> None:
        """`trims_content`: calls may follow content."""
        self._exact = exact
        self._trims_content = trims_content
        self._pieces: list[Piece] = []
        self._parts: list[str] = []  # of the piece that is being made
        self._kind: Kind = ""
        self._space: list[str] = []  # white space held back, of text of this kind
        self._strip = ""  # characters that are dropped at the beginning of the text to come
        self._index = -1
        self._open = False

    @property
    def settled(self) -> bool:
        """Whether content has begun and none of it is held back."""
        return self._kind == "content" and not (self._space or self._strip or self._open)

    def reasoning(self, text: str) -> None:
        """Text that was thought."""
        self._text("reasoning", text, True)

    def content(self, text: str) -> None:
        """Text of the answer."""
        self._text("content", text, self._trims_content)

    def think(self) -> None:
        """A thought begins."""
        self._strip = "\n"

    def answer(self) -> None:
        """A thought is over."""
        self._space.clear()
        self._strip = "\n"

    def mark(self) -> None:
        """A mark of the notation was read and dropped."""
        self._space.clear()

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call begins."""
        self._space.clear()
        self._flush()
        self._kind = ""
        self._index += 1
        self._open = True
        self._pieces.append(CallBegin(self._index, name, call_id))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that is open."""
        if text:
            self._kind = "arguments"
            self._parts.append(text)

    def end(self, *, complete: bool = True) -> None:
        """The open call is over; when it is `complete`, one without arguments has an empty object of them."""
        if complete and self._kind != "arguments":
            self.arguments("{}")
        self._flush()
        self._kind = ""
        self._open = False
        self._strip = "" if self._exact else _WHITE
        self._pieces.append(CallEnd(self._index))

    def take(self) -> list[Piece]:
        """The pieces since the last time."""
        self._flush()
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """As `take`, with white space that was held back."""
        if self._open:
            self.end(complete=False)
        self._parts += self._space
        return self.take()

    def _text(self, kind: Kind, text: str, holds: bool) -> None:
        if self._strip:
            text = text.lstrip(self._strip)
            if not text:
                return
            self._strip = ""
        if kind != self._kind:
            self._parts += self._space
            self._space.clear()
            self._flush()
            self._kind = kind
        if holds and not self._exact:
            solid = text.rstrip(_WHITE)
            if not solid:
                self._space.append(text)
                return
            if self._space:
                self._parts += self._space
                self._space.clear()
            if len(solid) < len(text):
                self._space.append(text[len(solid) :])
                text = solid
        self._parts.append(text)

    def _flush(self) -> None:
        if not self._parts:
            return
        text = self._parts[0] if len(self._parts) == 1 else "".join(self._parts)
        self._parts.clear()
        if self._kind == "content":
            self._pieces.append(Content(text))
        elif self._kind == "reasoning":
            self._pieces.append(Reasoning(text))
        else:
            self._pieces.append(CallArguments(self._index, text))


Grammar = Callable[[Reader, Emitter], Step[None]]


class OutputParser:
    """One choice's parser. Give it all text in order with `feed`, then `finish` once."""

    __slots__ = ("_emitter", "_reader", "_steps", "special_tokens")

    def __init__(
        self,
        grammar: Grammar | None = None,
        emitter: Emitter | None = None,
        special_tokens: frozenset[str] = frozenset(),
    ) -> None:
        """Without a grammar all text is content. `special_tokens`: marks that the grammar reads, which the
        detokenizer must keep in the text where they are special tokens of the vocabulary."""
        self.special_tokens = special_tokens
        self._reader = Reader()
        self._emitter = emitter or Emitter(trims_content=False)
        self._steps = grammar(self._reader, self._emitter) if grammar else None
        if self._steps:
            next(self._steps)

    @property
    def marks(self) -> bytes | None:
        """First bytes of the marks that are looked for, while text without one is content as it stands; None while it is not.

        Text without these bytes that does not end in white space need not be fed then.
        """
        if self._steps is None or not self._emitter.settled:
            return None
        found = self._reader.passing(self._emitter.content)
        return None if found is None else found.first_bytes

    def is_content(self, text: str) -> bool:
        """Whether `text` is content as it stands, and need not be fed."""
        if self._steps is None:
            return True
        marks = self.marks
        if marks is None or not text or text[-1] in _WHITE:
            return False
        raw = text.encode()
        return not any(mark in raw for mark in marks)

    @property
    def plain(self) -> bool:
        """Whether all text is content, as it stands."""
        return self._steps is None

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after `text`."""
        if self._steps is None:
            return [Content(text)] if text else []
        self._reader.add(text)
        next(self._steps)
        return self._emitter.take()

    def finish(self) -> list[Piece]:
        """The output is over, complete or cut off: everything that was held back."""
        if self._steps is None:
            return []
        self._reader.ended = True
        for _ in self._steps:
            pass
        return self._emitter.finish()
