"""A notation of calls among content: which marks begin a call, which end one, which mean nothing by themselves.

Invariant: text is either content, in order and unchanged, or a part of a call. A call is tried at each opening mark;
what proves to be none is content from that mark on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tokenspeed.runtime.parsers.output import Emitter
from tokenspeed.runtime.parsers.reader import Reader, Step, markers

Call = Callable[[Reader, Emitter, str], Step[bool]]  # the opening mark, read; false when no call begins there


class Notation(Protocol):
    """How a family writes calls. `opens` are the marks that also end reasoning, where they may."""

    @property
    def opens(self) -> tuple[str, ...]: ...

    @property
    def special_tokens(self) -> frozenset[str]: ...

    def read(self, reader: Reader, emitter: Emitter) -> Step[None]:
        """Content and calls, to the end of the output."""
        ...


@dataclass(frozen=True, slots=True)
class Marked:
    """Each of `starts` begins a call that `call` reads, each of `closes` after a call is dropped, `drops` anywhere."""

    call: Call
    starts: tuple[str, ...]
    closes: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # marks within a call

    @property
    def opens(self) -> tuple[str, ...]:
        return (*self.starts, *self.drops)

    @property
    def special_tokens(self) -> frozenset[str]:
        """All marks: which of them are special tokens is the vocabulary's to say."""
        return frozenset({*self.starts, *self.closes, *self.drops, *self.others})

    def read(self, reader: Reader, emitter: Emitter) -> Step[None]:
        """Content and calls, to the end of the output."""
        outside = markers(*self.starts, *self.drops)
        inside = markers(*self.starts, *self.drops, *self.closes)
        within = False
        while (marker := (yield from reader.until(inside if within else outside, emitter.content))) is not None:
            if marker in self.starts:
                within = (yield from attempt(reader, emitter, marker, self.call)) or within
            else:
                within = within and marker not in self.closes
                emitter.mark()


def attempt(reader: Reader, emitter: Emitter, marker: str, call: Call) -> Step[bool]:
    """Whether a call follows `marker`, which was read. If none does, the marker is content and reading goes on there.

    `call` releases the text that was kept (see `begin`) when a call is certain.
    """
    reader.keep()
    if (yield from call(reader, emitter, marker)):
        return True
    reader.back()
    if marker:
        emitter.content(marker)
    return False


def begin(reader: Reader, emitter: Emitter, name: str, call_id: str | None = None) -> None:
    """A call is certain: nothing before it is content any more."""
    reader.release()
    emitter.begin(name, call_id)
