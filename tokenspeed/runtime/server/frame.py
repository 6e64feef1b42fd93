"""Server-sent events as bytes: one at a time, and the form of many that differ in one text."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

_encode = msgspec.json.Encoder().encode


def event(payload: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _encode(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """One event that also bears its type as its name."""
    return b"event: " + payload["type"].encode() + b"\ndata: " + _encode(payload) + b"\n\n"


class Frame:
    """Events that differ in one string, and in a number where they are numbered: the rest is encoded once.

    One is head, the string in JSON, middle, and where it is numbered the number and end.
    """

    HOLE = "\0hole\0"
    __slots__ = ("end", "head", "middle")

    def __init__(self, sample: bytes, *, number: str = "") -> None:
        """`sample`: an event with HOLE for that string. `number`: the field, behind the others, that it does not have yet."""
        self.head, hole, self.middle = sample.rpartition(_encode(self.HOLE))
        assert hole, "the sample has the hole"
        self.end = b""
        if number:
            self.end = b"}\n\n"
            self.middle = self.middle.removesuffix(self.end) + b",%b:" % _encode(number)

    def fill(self, text: str, number: int | None = None) -> bytes:
        if number is None:
            return b"".join((self.head, _encode(text), self.middle))
        return b"".join((self.head, _encode(text), self.middle, b"%d" % number, self.end))


class Form(NamedTuple):
    """How an answer goes on while nothing but text can come next."""

    frame: Frame
    number: int | None  # of the next event, where events are numbered
    marks: bytes | None  # first bytes of what would be no text (OutputParser.marks); None: all that comes is text
