"""Notations whose calls are tags around bare values: qwen3_coder, glm45, minimax_m2, deepseek_v32.

A value has the type that the tool's schema gives its parameter, and goes out as JSON: a string while it comes, any
other once it is whole. A call that ends between its tags is closed to valid JSON, and what stood beside its parameters
follows it as content; one that the output's end cuts off within a value stays open, so that nobody runs half of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenspeed.runtime.parsers.notation import Marked, begin
from tokenspeed.runtime.parsers.output import Emitter
from tokenspeed.runtime.parsers.pieces import Tool
from tokenspeed.runtime.parsers.reader import Reader, Step, markers
from tokenspeed.runtime.parsers.strings import escape
from tokenspeed.runtime.parsers.values import ANY, STRING, property_types, to_json

Types = dict[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a call, in the order in which they come. "" is a tag that the family does not write."""

    block: str  # around one call or more
    name: str
    name_end: str
    key: str
    key_ends: dict[str, frozenset[str] | None]  # with the types that it says the value has; None: the schema's
    value: str
    value_ends: tuple[str, ...]  # the first is the tag, others begin what follows where that was left out
    call_end: str
    block_end: str
    lines: bool = False  # one line feed at each end of a value belongs to the tags


class TaggedCall:
    """Reads one call of `tools`."""

    def __init__(self, tags: Tags, tools: Iterable[Tool]) -> None:
        self._tags = tags
        self._schemas = {tool.name: tool.parameters for tool in tools}
        ends = {tags.call_end, tags.block_end} - {""}
        self._begins = {tags.name, tags.block} - {""}
        self._name_ends = markers(*sorted({tags.name_end, tags.key, *ends}))
        self._between = markers(*sorted({tags.key, *ends, *self._begins}))
        self._key_ends = markers(*tags.key_ends)
        self._value_ends = markers(*tags.value_ends, *("\n" + end for end in tags.value_ends if tags.lines))

    def __call__(self, reader: Reader, emitter: Emitter, marker: str) -> Step[bool]:
        """One call after the mark that begins it; false when no name is there."""
        tags = self._tags
        if marker == tags.block and tags.name:
            yield from reader.space()
            if (yield from reader.literal(tags.name)) is None:
                return False
        found = yield from reader.word(self._name_ends)
        name = found[0].strip() if found else ""
        if found is None or len(name.split()) != 1 or "<" in name:
            return False
        if found[1] != tags.name_end:
            reader.at -= len(found[1])
        begin(reader, emitter, name)
        emitter.arguments("{")
        strays: list[str] = []
        if (yield from self._parameters(reader, emitter, property_types(self._schemas.get(name, {})), strays)):
            emitter.arguments("}")
        emitter.end()
        if stray := "".join(strays).strip():
            emitter.content(stray)
        return True

    def _parameters(self, reader: Reader, emitter: Emitter, declared: Types, strays: list[str]) -> Step[bool]:
        """Parameters to the call's end; false when the output ends within a value."""
        tags, comma = self._tags, ""
        while (mark := (yield from reader.until(self._between, strays.append))) == tags.key:
            found = yield from reader.word(self._key_ends)
            if found is None:
                strays.append(tags.key)
                continue
            if tags.value:
                yield from reader.space()
                if (yield from reader.literal(tags.value)) is None:
                    strays.append(tags.key + found[0] + found[1])
                    continue
            key = found[0].strip()
            emitter.arguments(f'{comma}"{escape(key)}": ')
            comma = ", "
            if not (yield from self._value(reader, emitter, tags.key_ends[found[1]] or declared.get(key, STRING))):
                return False
        if mark in self._begins:  # the next call; this one was not ended
            reader.at -= len(mark)
        return True

    def _value(self, reader: Reader, emitter: Emitter, allowed: frozenset[str]) -> Step[bool]:
        """One value to its end tag; false when the output ends first."""
        ends, parts = self._tags.value_ends, list[str]()
        if self._tags.lines:
            yield from reader.literal("\n")
        if allowed <= STRING:
            emitter.arguments('"')
            end = yield from reader.until(self._value_ends, lambda text: emitter.arguments(escape(text)))
            if end is not None:
                emitter.arguments('"')
        else:
            end = yield from reader.until(self._value_ends, parts.append)
            emitter.arguments("".join(parts) if end is None else to_json("".join(parts), allowed))
        if end is not None and end.removeprefix("\n") != ends[0]:
            reader.at -= len(end)
        return end is not None


def qwen3_coder(tools: Iterable[Tool]) -> Marked:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, each on its own lines."""
    tags = Tags(
        block="<tool_call>",
        name="<function=",
        name_end=">",
        key="<parameter=",
        key_ends={">": None},
        value="",
        value_ends=("</parameter>", "<parameter=", "</function>"),
        call_end="</function>",
        block_end="</tool_call>",
        lines=True,
    )
    return Marked(TaggedCall(tags, tools), starts=("<tool_call>", "<function="), closes=("</tool_call>",))


def glm45(tools: Iterable[Tool]) -> Marked:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, lines between or not (GLM 4.7)."""
    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    tags = Tags(
        block=marks[0],
        name="",
        name_end="\n",
        key=marks[2],
        key_ends={marks[3]: None},
        value=marks[4],
        value_ends=marks[5:],
        call_end=marks[1],
        block_end="",
    )
    return Marked(TaggedCall(tags, tools), starts=marks[:1], others=marks[1:])


def minimax_m2(tools: Iterable[Tool]) -> Marked:
    """`<invoke name="..."><parameter name="key">value</parameter></invoke>` within `<minimax:tool_call>`."""
    blocks = ("<minimax:tool_call>", "</minimax:tool_call>")
    return _invoke(tools, blocks, "", {'">': None})


def deepseek_v32(tools: Iterable[Tool]) -> Marked:
    """As minimax_m2, its tags marked with DSML, a parameter saying itself whether it is a string."""
    blocks = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    return _invoke(tools, blocks, "｜DSML｜", {'" string="true">': STRING, '" string="false">': ANY, '">': None})


def _invoke(
    tools: Iterable[Tool], blocks: tuple[str, str], mark: str, key_ends: dict[str, frozenset[str] | None]
) -> Marked:
    tags = Tags(
        block="",
        name=f'<{mark}invoke name="',
        name_end='">',
        key=f'<{mark}parameter name="',
        key_ends=key_ends,
        value="",
        value_ends=(f"</{mark}parameter>",),
        call_end=f"</{mark}invoke>",
        block_end="",
    )
    return Marked(TaggedCall(tags, tools), starts=(tags.name,), drops=blocks, others=(mark,) if mark else ())
