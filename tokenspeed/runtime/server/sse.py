"""Answers that end with the client: a server-sent event stream, and a wait for a whole result.

Both watch the connection while they work, so a client that goes away is noticed at once and not at the next token;
its requests are closed, which aborts them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed.runtime.outputs import OutputDelta
from tokenspeed.runtime.request_stream import RequestStream

log = logging.getLogger(__name__)
T = TypeVar("T")

PING_SECONDS = 15.0  # of silence after which a ping keeps proxies and clients from giving up
PING = b": ping\n\n"  # a comment, which clients skip
DONE = b"data: [DONE]\n\n"
_DIRECT = "tokenspeed.send"  # in a scope: the server's own send
_encode = msgspec.json.Encoder().encode


def event(payload: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _encode(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """One event that also bears its type as its name."""
    return b"event: " + payload["type"].encode() + b"\ndata: " + _encode(payload) + b"\n\n"


class Frame:
    """Events that differ in one string: the rest is encoded once."""

    HOLE = "\0hole\0"
    __slots__ = ("_head", "_tail")

    def __init__(self, sample: bytes) -> None:
        """`sample`: an event with HOLE for that string."""
        self._head, hole, self._tail = sample.rpartition(_encode(self.HOLE))
        assert hole, "the sample has the hole"

    def fill(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail


async def merge(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, OutputDelta]]:
    """(position of the stream, delta) as they come; ends when all have ended."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    merged: asyncio.Queue[tuple[int, OutputDelta] | None] = asyncio.Queue()

    async def forward(at: int) -> None:
        async for delta in streams[at]:
            merged.put_nowait((at, delta))
        merged.put_nowait(None)

    tasks = [asyncio.create_task(forward(at)) for at in range(len(streams))]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await merged.get()
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


class Direct:
    """The outermost ASGI layer. Events go past the layers between here and an EventStream, which look at how a response
    begins and not at what follows: six calls an event less."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_DIRECT] = send
        await self._app(scope, receive, send)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events`; `close` is called once, at the end or as soon as the client is gone, and must end the events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], *, ping: bytes = PING) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._close = close
        self._ping = ping
        self._sent = 0.0  # time.monotonic() of the last event, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_disconnected(receive))
        watcher.add_done_callback(lambda _: self._close())
        tasks = [watcher]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._sent = time.monotonic()
            send = scope.get(_DIRECT, send)
            tasks.append(asyncio.create_task(self._fill_silence(send)))
            async for chunk in self._events:
                self._sent = time.monotonic()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if not watcher.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fill_silence(self, send: Send) -> None:
        while True:
            silence = time.monotonic() - self._sent
            if silence >= PING_SECONDS:
                self._sent = time.monotonic()
                await send({"type": "http.response.body", "body": self._ping, "more_body": True})
            else:
                await asyncio.sleep(PING_SECONDS - silence)


async def until_disconnect(request: Request, work: Awaitable[T], close: Callable[[], None]) -> T | None:
    """The result of `work`; None when the client went away first. `close` is called in any case."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            log.info("%s: the client closed the connection before its answer", request.url.path)
            return None
        return task.result()
    finally:
        close()
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
