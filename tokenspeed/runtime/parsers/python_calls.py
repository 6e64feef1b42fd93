"""Calls as Python writes them, `[name(key=value, ...), ...]`: Llama 4 and others (pythonic).

The notation has no marks, so an answer is calls only when it begins with a bracket and the name of a tool. A value
goes out as JSON once it is whole; what is no Python literal goes out as a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenspeed.runtime.parsers.notation import attempt, begin
from tokenspeed.runtime.parsers.output import Emitter
from tokenspeed.runtime.parsers.pieces import Tool
from tokenspeed.runtime.parsers.reader import Reader, Sink, Step, markers
from tokenspeed.runtime.parsers.strings import escape
from tokenspeed.runtime.parsers.values import python_json

_KEY = re.compile(r"\s*\w+\s*")
_EQUALS = markers("=")
_PARENTHESIS = markers("(")
_TAGS = markers("<|python_start|>", "<|python_end|>")
_OUTSIDE = re.compile(r"""[^"'()\[\]{},]*""")
_INSIDE = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}


class Pythonic:
    """Reads an answer that is calls of `tools`, or content."""

    opens = ("<|python_start|>",)
    special_tokens = frozenset({"<|python_start|>", "<|python_end|>"})

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._names = frozenset(tool.name for tool in tools)

    def read(self, reader: Reader, emitter: Emitter) -> Step[None]:
        """Content and calls, to the end of the output."""
        marker: str | None = ""
        while marker is not None:
            if marker != "<|python_end|>":
                yield from attempt(reader, emitter, marker, self._calls)
            marker = yield from reader.until(_TAGS, emitter.content)

    def _calls(self, reader: Reader, emitter: Emitter, marker: str) -> Step[bool]:
        yield from reader.space()
        if not marker:
            yield from reader.literal("<|python_start|>")
            yield from reader.space()
        if (yield from reader.literal("[")) is None or not (yield from self._call(reader, emitter, "")):
            return False
        while True:
            yield from reader.space()
            if (yield from reader.literal(",", "]")) != ",":
                return True
            if not (yield from attempt(reader, emitter, "", self._call)):
                return True

    def _call(self, reader: Reader, emitter: Emitter, marker: str) -> Step[bool]:
        found = yield from reader.word(_PARENTHESIS)
        if found is None or (name := found[0].strip()) not in self._names:
            return False
        begin(reader, emitter, name)
        emitter.arguments("{")
        if (yield from _keywords(reader, emitter)):
            emitter.arguments("}")
        emitter.end()
        return True


def _keywords(reader: Reader, emitter: Emitter) -> Step[bool]:
    """`key=value, ...` and the closing parenthesis, or what is no such thing; false when a value is cut off."""
    comma = ""
    while True:
        yield from reader.space()
        mark = yield from reader.literal(")", ",")
        if mark == ")":
            return True
        if mark == ",":
            continue
        found = yield from reader.word(_EQUALS)
        if found is None:
            return True
        if not _KEY.fullmatch(found[0]):
            reader.at -= len(found[0]) + 1
            return True
        emitter.arguments(f'{comma}"{escape(found[0].strip())}": ')
        comma = ", "
        parts: list[str] = []
        if not (yield from _value(reader, parts.append)):
            emitter.arguments("".join(parts))
            return False
        emitter.arguments(python_json("".join(parts).strip()))


def _value(reader: Reader, sink: Sink) -> Step[bool]:
    """The text of one value to the comma or bracket behind it; false when the output ends first."""
    depth = 0
    while True:
        end = _OUTSIDE.match(reader.text, reader.at).end()  # pyright: ignore[reportOptionalMemberAccess]
        sink(reader.text[reader.at : end])
        reader.at = end
        char = yield from reader.peek()
        if not char:
            return False
        if char in _INSIDE:
            quote = (yield from reader.literal(char * 3, char)) or char
            sink(quote)
            if not (yield from _string(reader, quote, sink)):
                return False
        elif _OUTSIDE.match(char).end() == 0:  # pyright: ignore[reportOptionalMemberAccess]
            if depth == 0 and char in ",)]}":
                return True
            depth += (char in "([{") - (char in ")]}")
            sink(char)
            reader.at += 1


def _string(reader: Reader, quote: str, sink: Sink) -> Step[bool]:
    """The inside of a string and the quote that closes it."""
    while True:
        end = _INSIDE[quote[0]].match(reader.text, reader.at).end()  # pyright: ignore[reportOptionalMemberAccess]
        sink(reader.text[reader.at : end])
        reader.at = end
        char = yield from reader.peek()
        if not char:
            return False
        if (yield from reader.literal(quote)):
            sink(quote)
            return True
        sink(char)
        reader.at += 1
        if char == "\\":
            sink((yield from reader.peek()))
            reader.at = min(reader.at + 1, len(reader.text))
