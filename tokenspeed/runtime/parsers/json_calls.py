"""Notations whose calls are JSON: hermes, llama3_json, mistral, deepseek_v3 and v31, kimi_k2.

Arguments go out as the model writes them, character for character; no bracket is ever added. A call begins when its
name is certain; what looked like a call and is none is content, unchanged. Names that no tool has are passed on, since
the client's answer lets the model correct itself; only a notation without marks (llama3_json) goes by the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenspeed.runtime.parsers.notation import Marked, attempt, begin
from tokenspeed.runtime.parsers.output import Emitter
from tokenspeed.runtime.parsers.pieces import Tool
from tokenspeed.runtime.parsers.reader import Reader, Step, ignore, markers
from tokenspeed.runtime.parsers.strings import StringText

_ARGUMENTS = ("arguments", "parameters")
_HEADER = ("id", "name", "type")
_KIMI_ID = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)
HEADER_LIMIT = 1 << 14  # characters of an object before its name is certain and its arguments begin


def hermes(tools: Iterable[Tool]) -> Marked:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen 2.5 and 3 and Nous write it."""
    return Marked(_objects, starts=("<tool_call>",), closes=("</tool_call>",))


def mistral(tools: Iterable[Tool]) -> Marked:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` or `[TOOL_CALLS]name[ARGS]{...}`, the latter repeated."""
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    return Marked(_mistral_call, starts=marks[:1], others=marks[1:])


def deepseek(tools: Iterable[Tool]) -> Marked:
    """Of DeepSeek V3 (`function` SEP name, then a fenced block) and V3.1 (name SEP arguments)."""
    begin_, end, sep = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    sections = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    return Marked(
        _deepseek_call,
        starts=(begin_,),
        closes=(end,),
        drops=sections,
        others=(sep,),
    )


def kimi_k2(tools: Iterable[Tool]) -> Marked:
    """Sections of `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""
    marks = ("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>")
    sections = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    return Marked(
        _kimi_call,
        starts=marks[:1],
        closes=marks[1:2],
        drops=sections,
        others=marks[2:],
    )


class Llama3:
    """The whole answer is `{"name": ..., "parameters": {...}}`, or some of them with `;` between.

    Text that only looks so (another object, a name that no tool has) is content. `<|python_tag|>` may come before.
    """

    opens = ("<|python_tag|>",)
    special_tokens = frozenset(opens)

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._names = frozenset(tool.name for tool in tools)

    def read(self, reader: Reader, emitter: Emitter) -> Step[None]:
        """Content and calls, to the end of the output."""
        marker: str | None = ""
        while marker is not None:
            yield from attempt(reader, emitter, marker, self._calls)
            marker = yield from reader.until(_PYTHON_TAG, emitter.content)

    def _calls(self, reader: Reader, emitter: Emitter, marker: str) -> Step[bool]:
        yield from reader.space()
        if not marker:
            yield from reader.literal("<|python_tag|>")
        begun = False
        while (yield from json_call(reader, emitter, self._names)):
            begun = True
            reader.keep()
            yield from reader.space()
            yield from reader.literal(";")
            yield from reader.space()
        if begun:
            reader.back()
        return begun


_PYTHON_TAG = markers("<|python_tag|>")


def json_call(reader: Reader, emitter: Emitter, names: frozenset[str] | None = None) -> Step[bool]:
    """One object with a name and arguments, in any order; false, at any place, when there is none.

    `names`: those that make it a call; None: every name does.
    """
    name: str | None = None
    call_id: str | None = None
    held: list[str] = []
    if (yield from reader.literal("{")) is None:
        return False
    while reader.kept < HEADER_LIMIT:
        yield from reader.space()
        key = yield from reader.json_string()
        if key is None or not (yield from _colon(reader)):
            return False
        if key in _ARGUMENTS and name is not None:
            begin(reader, emitter, name, call_id)
            yield from _arguments(reader, emitter)
            yield from _rest(reader)
            return True
        if key in _ARGUMENTS and not held:
            if not (yield from _bounded(reader, reader.json_value(held.append))):
                return False
        elif key in _HEADER:
            value = yield from reader.json_string()
            if value is None or (key == "name" and (not value or (names is not None and value not in names))):
                return False
            name, call_id = (value if key == "name" else name), (value if key == "id" else call_id)
        else:
            return False
        yield from reader.space()
        after = yield from reader.literal(",", "}")
        if after == "}" and name is not None:
            begin(reader, emitter, name, call_id)
            emitter.arguments(_text("".join(held)))
            emitter.end()
            return True
        if after != ",":
            return False
    return False


def _bounded(reader: Reader, step: Step[bool]) -> Step[bool]:
    """`step`, given up when more than HEADER_LIMIT characters are kept."""
    while reader.kept <= HEADER_LIMIT:
        try:
            next(step)
        except StopIteration as done:
            return done.value and reader.kept <= HEADER_LIMIT
        yield
    return False


def _colon(reader: Reader) -> Step[bool]:
    yield from reader.space()
    colon = yield from reader.literal(":")
    yield from reader.space()
    return colon is not None


def _arguments(reader: Reader, emitter: Emitter) -> Step[None]:
    """The arguments of the call that is open, and its end. Of a string, as some models write it, its text.

    They are an object, so that of a null, or where no JSON begins, an empty one.
    """
    first = yield from reader.peek()
    complete = True
    if first == '"':
        text = StringText()
        complete = yield from reader.json_value(lambda raw: emitter.arguments(text.feed(raw)))
        emitter.arguments(text.finish())
    elif first in ("{", "["):
        complete = yield from reader.json_value(emitter.arguments)
    elif first != "n" or not (yield from reader.literal("null")):
        complete = not reader.ended
    emitter.end(complete=complete)


def _text(raw: str) -> str:
    """The arguments that a whole JSON value is, as `_arguments` has them; "" stands for none."""
    if raw.startswith('"'):
        text = StringText()
        return text.feed(raw) + text.finish()
    return "" if raw == "null" else raw


def _rest(reader: Reader) -> Step[None]:
    """What an object holds after its arguments, which means nothing, and its closing bracket."""
    while True:
        yield from reader.space()
        if (yield from reader.literal(",", "}")) != ",":
            return
        yield from reader.space()
        if (yield from reader.json_string()) is None or not (yield from _colon(reader)):
            return
        if not (yield from reader.json_value(ignore)):
            return


def _objects(reader: Reader, emitter: Emitter, marker: str) -> Step[bool]:
    """One object after another."""
    yield from reader.space()
    begun = goes_on = yield from json_call(reader, emitter)
    while goes_on:
        yield from reader.space()
        goes_on = (yield from reader.peek()) == "{" and (yield from attempt(reader, emitter, "", _object))
    return begun


def _object(reader: Reader, emitter: Emitter, marker: str) -> Step[bool]:
    yield from reader.space()
    return (yield from json_call(reader, emitter))


def _mistral_call(reader: Reader, emitter: Emitter, marker: str) -> Step[bool]:
    yield from reader.space()
    if (yield from reader.literal("[")) is None:
        return (yield from _named_call(reader, emitter))
    begun = goes_on = yield from _object(reader, emitter, marker)
    while goes_on:
        yield from reader.space()
        goes_on = (yield from reader.literal(",", "]")) == "," and (yield from attempt(reader, emitter, "", _object))
    return begun


_NAME_ENDS = markers("[ARGS]", "[CALL_ID]", "{")


def _named_call(reader: Reader, emitter: Emitter) -> Step[bool]:
    """`name[ARGS]{...}`, or `name[CALL_ID]id[ARGS]{...}`, or `name{...}`."""
    found = yield from reader.word(_NAME_ENDS)
    if found is None or not (name := found[0].strip()):
        return False
    call_id: str | None = None
    if found[1] == "[CALL_ID]":
        found = yield from reader.word(markers("[ARGS]"))
        if found is None:
            return False
        call_id = found[0].strip()
    if found[1] == "{":
        reader.at -= 1
    begin(reader, emitter, name, call_id)
    yield from reader.space()
    yield from _arguments(reader, emitter)
    return True


def _deepseek_call(reader: Reader, emitter: Emitter, marker: str) -> Step[bool]:
    found = yield from reader.word(markers("<｜tool▁sep｜>"))
    if found is None:
        return False
    name = found[0].strip()
    yield from reader.space()
    if name == "function" and (yield from reader.peek()) != "{":
        found = yield from reader.word(markers("\n", "<｜tool▁call▁end｜>"))
        if found is None or not (name := found[0].strip()):
            return False
        if found[1] != "\n":
            reader.at -= len(found[1])
    if not name:
        return False
    begin(reader, emitter, name)
    yield from reader.space()
    yield from reader.literal("```json", "```")
    yield from reader.space()
    yield from _arguments(reader, emitter)
    yield from reader.space()
    yield from reader.literal("```")
    return True


def _kimi_call(reader: Reader, emitter: Emitter, marker: str) -> Step[bool]:
    found = yield from reader.word(markers("<|tool_call_argument_begin|>"))
    if found is None:
        return False
    call_id = found[0].strip()
    name = _KIMI_ID.fullmatch(call_id)
    if name is None or not name[1]:
        return False
    begin(reader, emitter, name[1], call_id)
    yield from reader.space()
    yield from _arguments(reader, emitter)
    return True
