"""The channels of gpt-oss (harmony): messages with a header that says who speaks to whom, and a body.

`<|start|>assistant<|channel|>analysis<|message|>...<|end|>`: analysis is thought, a message to a tool is a call, all
else is content. The prompt ends within the first header. No control token ever is content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenspeed.runtime.parsers.output import Emitter
from tokenspeed.runtime.parsers.pieces import Tool
from tokenspeed.runtime.parsers.reader import Reader, Step, markers

_BODY = "<|message|>"
_HEADER = ("<|start|>", "<|channel|>", "<|constrain|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_ALL = markers(_BODY, *_HEADER, *_ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([^\s<]+)")
_ROLES = ("assistant", "user", "system", "developer", "tool")
_HEADER_LIMIT = 1024  # characters


class Harmony:
    """Reads a whole answer. Without tools a message to one is content."""

    opens: tuple[str, ...] = ()
    special_tokens = frozenset({_BODY, *_HEADER, *_ENDS})

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._calls = any(True for _ in tools)

    def read(self, reader: Reader, emitter: Emitter) -> Step[None]:
        """Messages to the end of the output."""
        mark: str | None = None
        if begun := (yield from reader.literal(*_HEADER, _BODY, " to=", "to=", "assistant")):
            reader.at -= len(begun)
            mark = "<|start|>"
        while True:
            if mark in _HEADER or mark == _BODY:
                mark = yield from self._message(reader, emitter, mark)
            else:
                mark = yield from reader.until(_ALL, emitter.content)
            if mark is None:
                return

    def _message(self, reader: Reader, emitter: Emitter, mark: str) -> Step[str | None]:
        """The rest of a header, of which `mark` was read, its message, and the mark behind that."""
        header = mark
        while mark in _HEADER:
            found = yield from reader.word(_ALL, _HEADER_LIMIT)
            if found is None:
                if len(reader.text) - reader.at <= _HEADER_LIMIT:  # cut off
                    reader.at = len(reader.text)
                return (yield from reader.until(_ALL, emitter.content))
            header += found[0] + found[1]
            mark = found[1]
        if mark != _BODY:
            return mark
        channel, to = _CHANNEL.search(header), _TO.search(header)
        name = to[1].removeprefix("functions.") if to else ""
        if self._calls and name and name not in _ROLES:
            return (yield from _call(reader, emitter, name))
        thought = channel is not None and channel[1] == "analysis"
        return (yield from reader.until(_ALL, emitter.reasoning if thought else emitter.content))


def _call(reader: Reader, emitter: Emitter, name: str) -> Step[str | None]:
    """A body that is arguments: one JSON object, or text as it is; and the mark behind it."""
    emitter.begin(name)
    yield from reader.space()
    strays: list[str] = []
    sink = emitter.arguments
    if (yield from reader.peek()) == "{" and (yield from reader.json_value(emitter.arguments)):
        sink = strays.append
    mark = yield from reader.until(_ALL, sink)
    emitter.end(complete=mark is not None)
    if stray := "".join(strays).strip():
        emitter.content(stray)
    return mark
