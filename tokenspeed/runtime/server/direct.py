"""The short way to the socket: events that go past the ASGI layers and past uvicorn's coroutine.

Invariant: the bytes on the connection are those that uvicorn's own `send` would have written, in the same order; where
that cannot be (another server, a client that does not read) nothing is written and the caller awaits `send`.
"""

from __future__ import annotations

import os

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tokenspeed.runtime.lanes import Lane
from tokenspeed.runtime.server.frame import Form

_KEY = "tokenspeed.send"  # in a scope: the server's own send


def _head(size: int) -> bytes:
    return b"%x\r\n" % size


_HEADS = [_head(size) for size in range(2048)]  # of the chunks of nearly all events


class Direct:
    """The outermost ASGI layer. It makes the server's `send` known to the responses within: the layers between look at
    how a response begins and not at what follows."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_KEY] = send
        await self._app(scope, receive, send)


class Wire:
    """The body of one response that has begun, in chunks."""

    __slots__ = ("_cycle", "_fd", "send")

    def __init__(self, scope: Scope, send: Send) -> None:
        self.send: Send = scope.get(_KEY, send)
        cycle = getattr(self.send, "__self__", None)
        direct = isinstance(cycle, RequestResponseCycle) and cycle.chunked_encoding
        self._cycle: RequestResponseCycle | None = cycle if direct else None
        self._fd = -1

    def write(self, chunk: bytes) -> bool:
        """Write a chunk now; False where it must be awaited."""
        cycle = self._cycle
        if cycle is None or cycle.flow.write_paused:
            return False
        if not cycle.disconnected:
            size = len(chunk)
            head = _HEADS[size] if size < len(_HEADS) else _head(size)
            cycle.transport.write(b"".join((head, chunk, b"\r\n")))
        return True

    def lane(self, form: Form) -> Lane | None:
        """The way past the transport for events of this form; None while it holds bytes, or where there is no way.

        Close the lane before the next `write`.
        """
        cycle = self._cycle
        if cycle is None or cycle.disconnected or cycle.scope["scheme"] != "http":
            return None
        if cycle.transport.get_write_buffer_size():
            return None
        if self._fd < 0:  # a descriptor of our own: that of the connection may be another's once it is closed
            self._fd = os.dup(cycle.transport.get_extra_info("socket").fileno())
        return Lane(self._fd, form.frame.head, form.frame.middle, form.frame.end, form.number, form.marks, self._unsent)

    def _unsent(self, data: bytes) -> None:
        assert self._cycle is not None
        if not self._cycle.disconnected:
            self._cycle.transport.write(data)

    def close(self) -> None:
        """No more is written. Call it when all lanes are closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
