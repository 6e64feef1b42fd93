"""The parser of one choice: text as it comes in, pieces out, nothing lost.

Invariant: `feed` and `finish` never raise for any text, and the pieces do not depend on how it was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.runtime.parsers.pieces import Content, Piece


class OutputParser:
    """One choice's parser. Give it all text in order with `feed`, then `finish` once."""

    __slots__ = ()

    @property
    def keep_special(self) -> bool:
        """Whether the detokenizer must keep special tokens in the text, for the parser to read and remove."""
        return False

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        """The pieces that are certain after `text`. `token_ids`, the tokens behind it, may be left out."""
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        """The output is over, complete or cut off: everything that was held back."""
        return []
