"""The blocks of an answer, and their news: a parser's pieces as the wires show them.

An answer is a list of blocks (reasoning, text, call), one open at a time, each opened once, grown, and closed once. All
wires write their events from this news and their whole answers from the blocks, so a stream joined IS the whole answer.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from tokenspeed.runtime.parsers import CallArguments, CallBegin, CallEnd, Content, FreeformInput, Piece, Tool


@dataclass(slots=True, eq=False)
class Block:
    """One of them. `text` is what was thought, said, or the arguments (a custom tool's input) of a call."""

    kind: Literal["reasoning", "text", "call"]
    at: int  # its position in the answer
    parts: list[str] = field(default_factory=list)
    name: str = ""  # of a call; index counts calls from 0
    id: str = ""
    index: int = 0
    custom: bool = False
    cut: bool = False  # the output ended within it, for want of tokens or because it was told to

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class Opened:
    """The block may have grown by the time that the news is read: it began empty."""

    block: Block


@dataclass(slots=True)
class Grew:
    block: Block
    text: str


@dataclass(slots=True)
class Closed:
    block: Block


News = Opened | Grew | Closed


class Blocks:
    """The blocks of one choice. Give it the pieces in order with `add`, then `end` once."""

    __slots__ = ("_custom", "_dropped", "_input", "_parallel", "_show_reasoning", "blocks", "open")

    def __init__(self, tools: Iterable[Tool] = (), *, parallel: bool = True, show_reasoning: bool = True) -> None:
        """Without `parallel` all calls but the first are left out."""
        self.blocks: list[Block] = []
        self.open: Block | None = None  # the last one, while more of it may come
        self._input: FreeformInput | None = None  # of a custom tool's call that is open
        self._dropped = False  # the call that is open is left out
        self._custom = {tool.name for tool in tools if tool.kind == "custom"}
        self._parallel = parallel
        self._show_reasoning = show_reasoning

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    @property
    def settled(self) -> int:
        """How many blocks are closed."""
        return len(self.blocks) - (self.open is not None)

    def joined(self, kind: Literal["reasoning", "text"]) -> str:
        """All text of one kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def add(self, pieces: Iterable[Piece]) -> list[News]:
        """What the pieces change."""
        news: list[News] = []
        for piece in pieces:
            if isinstance(piece, Content):
                if piece.text:
                    self._grow(self._of("text", news), piece.text, news)
            elif isinstance(piece, CallBegin):
                self._begin(piece, news)
            elif isinstance(piece, CallEnd):
                self._end_call(news)
            elif isinstance(piece, CallArguments):
                self._arguments(piece.text, news)
            elif self._show_reasoning and piece.text:
                self._grow(self._of("reasoning", news), piece.text, news)
        return news

    def end(self) -> list[News]:
        """The output is over: what is open is closed."""
        news: list[News] = []
        self._close(news)
        return news

    def _begin(self, piece: CallBegin, news: list[News]) -> None:
        self._close(news)
        self._dropped = not self._parallel and piece.index > 0
        if self._dropped:
            return
        call = Block(
            "call", len(self.blocks), name=piece.name, index=len(self.calls), custom=piece.name in self._custom
        )
        call.id = piece.id or f"call_{uuid.uuid4().hex[:24]}"
        self._input = FreeformInput() if call.custom else None
        self._open_new(call, news)

    def _arguments(self, text: str, news: list[News]) -> None:
        if self._dropped or self.open is None or self.open.kind != "call":
            return
        if self._input is not None:
            text = self._input.feed(text)
        if text:
            self._grow(self.open, text, news)

    def _end_call(self, news: list[News]) -> None:
        if self.open is not None and self.open.kind == "call":
            if self._input is not None and (rest := self._input.finish()):
                self._grow(self.open, rest, news)
            self._close(news)
        self._dropped = False

    def _of(self, kind: Literal["reasoning", "text"], news: list[News]) -> Block:
        """The open block of this kind, a new one if it is not open."""
        if self.open is None or self.open.kind != kind:
            self._close(news)
            self._open_new(Block(kind, len(self.blocks)), news)
        assert self.open is not None
        return self.open

    def _open_new(self, block: Block, news: list[News]) -> None:
        self.open = block
        self.blocks.append(block)
        news.append(Opened(block))

    def _grow(self, block: Block, text: str, news: list[News]) -> None:
        block.parts.append(text)
        news.append(Grew(block, text))

    def _close(self, news: list[News]) -> None:
        if self.open is not None:
            news.append(Closed(self.open))
            self.open = None
