"""Responses that are kept: bounded by bytes, the least recently used one goes first.

What is kept of a response is itself and all items that lead to it, so a conversation goes on when those before it are gone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.runtime.errors import NotFound
from tokenspeed.runtime.server.responses.items import Item

_size = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Stored:
    """A response, its own input, and all items before it: those of the responses that it goes on from."""

    response: dict[str, Any]
    input: list[Item]
    history: list[Item]
    bytes: int = 0

    @property
    def items(self) -> list[Item]:
        """The conversation up to and with this response."""
        return [*self.history, *self.input, *self.response["output"]]


class Store:
    """The responses by id."""

    def __init__(self, limit: int) -> None:
        """`limit` in bytes of JSON text; what is larger by itself is not kept."""
        self._limit = limit
        self._held = 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def put(self, stored: Stored) -> None:
        """Keep a response, in place of an earlier form of it."""
        name: str = stored.response["id"]
        self._drop(name)
        stored.bytes = len(_size([stored.response, stored.input, stored.history]))
        if stored.bytes > self._limit:
            return
        self._stored[name] = stored
        self._held += stored.bytes
        while self._held > self._limit:
            self._drop(next(iter(self._stored)))

    def get(self, name: str, param: str | None = None) -> Stored:
        """Raises NotFound, which names the field `param`."""
        if name not in self._stored:
            raise NotFound("no such response here: it was not stored, or room was needed for others", param=param)
        self._stored.move_to_end(name)
        return self._stored[name]

    def delete(self, name: str) -> None:
        """Raises NotFound."""
        self.get(name)
        self._drop(name)

    def _drop(self, name: str) -> None:
        if (old := self._stored.pop(name, None)) is not None:
            self._held -= old.bytes
