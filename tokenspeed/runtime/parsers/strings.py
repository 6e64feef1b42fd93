"""JSON strings piece by piece: text to escapes, escapes to text, and the input of a freeform tool.

Invariant: the joined results are those of the joined input, however it is cut.
"""

from __future__ import annotations

import json
import re

from tokenspeed.runtime.parsers.reader import Reader, Step

_COMPLETE = re.compile(r"(?:[^\\]++|\\u(?:[0-9a-fA-F]{4}|(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F]))|\\[^u])*+", re.DOTALL)
_TOKEN = re.compile(r'\\u([0-9a-fA-F]{4})|\\([^u])|"', re.DOTALL)
_CHARS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_LONE = re.compile("[\ud800-\udfff]")


def escape(text: str) -> str:
    """`text` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class StringText:
    """The text of one JSON string, which is fed with its quotes. Half of a surrogate pair is U+FFFD."""

    __slots__ = ("_half", "_held")

    def __init__(self) -> None:
        self._held = ""  # an escape that is not complete
        self._half = ""  # the first half of a pair

    def feed(self, raw: str) -> str:
        """The text that `raw` completes."""
        raw = self._held + raw
        if "\\" not in raw and not self._half:
            return raw.replace('"', "")
        cut = _COMPLETE.match(raw).end()  # pyright: ignore[reportOptionalMemberAccess]
        self._held = raw[cut:]
        text = self._half + _TOKEN.sub(_char, raw[:cut])
        self._half = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        text = text[: len(text) - len(self._half)]
        return _LONE.sub("\ufffd", _PAIR.sub(_joined, text))

    def finish(self) -> str:
        """What a cut-off string leaves."""
        return ("\ufffd" if self._half else "") + self._held


def _char(token: re.Match[str]) -> str:
    if token[1]:
        return chr(int(token[1], 16))
    return _CHARS.get(token[2], token[2]) if token[2] else ""


def _joined(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


class FreeformInput:
    """The arguments of a freeform (custom) tool, `{"input": "..."}`, to the text that the tool takes.

    Arguments of another form are that text themselves: the model wrote what it meant.
    """

    __slots__ = ("_out", "_reader", "_steps", "_text")

    def __init__(self) -> None:
        self._reader = Reader()
        self._text = StringText()
        self._out: list[str] = []
        self._steps = self._read()
        next(self._steps)

    def feed(self, arguments: str) -> str:
        """The input's text that more of the arguments completes."""
        self._reader.add(arguments)
        next(self._steps)
        return self._take()

    def finish(self) -> str:
        """The arguments are over, complete or cut off."""
        self._reader.ended = True
        for _ in self._steps:
            pass
        return self._take()

    def _take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def _read(self) -> Step[None]:
        reader = self._reader
        reader.keep()
        if (yield from self._opens()):
            reader.release()
            yield from reader.json_value(lambda raw: self._out.append(self._text.feed(raw)))
            self._out.append(self._text.finish())
            while not reader.ended:  # the closing bracket
                reader.at = len(reader.text)
                yield
            return
        reader.back()
        while True:
            self._out.append(reader.text[reader.at :])
            reader.at = len(reader.text)
            if reader.ended:
                return
            yield

    def _opens(self) -> Step[bool]:
        reader = self._reader
        yield from reader.space()
        if (yield from reader.literal("{")) is None:
            return False
        yield from reader.space()
        if (yield from reader.json_string()) != "input":
            return False
        yield from reader.space()
        if (yield from reader.literal(":")) is None:
            return False
        yield from reader.space()
        return (yield from reader.peek()) == '"'
