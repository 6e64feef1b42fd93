"""The short way of plain tokens: from a step's message to the sockets of their streams without Python in between.

Invariant: a lane changes when the bytes of a stream are written and not what they are. It is open while nothing but
text can come next; its stream is told afterwards, and before anything else, what went through it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Lane:
    """Events of the form head "text" middle [number end], to a descriptor that stays open as long as the stream is."""

    fd: int
    head: bytes
    middle: bytes
    end: bytes
    number: int | None
    marks: bytes | None  # first bytes of what would end it within text; None: nothing does
    unsent: Callable[[bytes], None]  # takes what the socket did not


def token_texts(tokenizer: Tokenizer) -> list[bytes | None]:
    """Each token's text as a JSON string without its quotes; None for special tokens and those that are no whole characters."""
    import msgspec

    encode = msgspec.json.Encoder().encode
    texts: list[bytes | None] = []
    for token, raw in enumerate(tokenizer.token_bytes):
        try:
            text = "" if token in tokenizer.special_ids else raw.decode()
        except UnicodeDecodeError:
            text = ""
        texts.append(encode(text)[1:-1] if text else None)
    return texts
