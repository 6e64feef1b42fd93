"""Answers that end with the client: a server-sent event stream, and a wait for a whole result.

Both watch the connection while they work, so a client that goes away is noticed at once and not at the next token;
its requests are closed, which aborts them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenspeed.runtime.errors import EngineError
from tokenspeed.runtime.outputs import OutputDelta
from tokenspeed.runtime.request_stream import RequestStream
from tokenspeed.runtime.server.direct import Wire
from tokenspeed.runtime.server.frame import Form

log = logging.getLogger(__name__)
T = TypeVar("T")

PING_SECONDS = 15.0  # of silence after which a ping keeps proxies and clients from giving up
PING = b": ping\n\n"  # a comment, which clients skip
DONE = b"data: [DONE]\n\n"


class Events(Protocol):
    """How a wire writes one answer: the bytes of whole events, none where there is nothing to tell.

    `begin` is called first, then `news` for each delta (`at`: its stream), then `end`; `fail` stands for the rest where one
    of them raises an EngineError. `form` says how the only choice goes on while nothing but text can
    come next; `passed` is told a delta whose events were written so.
    """

    async def begin(self) -> bytes: ...
    def news(self, at: int, delta: OutputDelta) -> bytes: ...
    def form(self) -> Form | None: ...
    def passed(self, delta: OutputDelta) -> None: ...
    def end(self) -> bytes: ...
    def fail(self, fault: EngineError) -> bytes: ...


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what `events` makes of the streams' deltas, in the engine's own call wherever the client keeps up.

    `close` is called once, at the end or as soon as the client is gone, and must close the streams.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: Events, streams: Sequence[RequestStream], close: Callable[[], None], *, ping: bytes = PING
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._streams = streams
        self._close = close
        self._ping = ping
        self._sent = 0.0  # time.monotonic() of the last event, seconds
        self._wire: Wire | None = None
        self._queue: list[bytes] = []  # what could not be written at once
        self._queued = True  # whether events go through the queue: until it is empty, so that they keep their order
        self._forwards = False  # whether events may take a lane
        self._over = False
        self._fault: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_disconnected(receive))
        watcher.add_done_callback(self._gone)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._sent = time.monotonic()
            self._wire = Wire(scope, send)
            self._fill_silence()
            await self._begin()
            await self._drain(self._wire)
            if self._fault is not None:
                raise self._fault
            if not watcher.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if self._timer is not None:
                self._timer.cancel()
            watcher.cancel()
            await asyncio.wait([watcher])
            if self._wire is not None:
                self._wire.close()

    async def _begin(self) -> None:
        try:
            self._send(await self._events.begin())
            if not self._streams:
                self._send(self._events.end())
                self._over = True
        except EngineError as fault:
            self._send(self._events.fail(fault))
            self._over = True
        if not self._over:
            self._forwards = len(self._streams) == 1 and self._streams[0].forwardable
            for at, stream in enumerate(self._streams):
                stream.listen(functools.partial(self._take, at))

    def _take(self, at: int, delta: OutputDelta) -> None:
        """A delta has come. In the engine's call, so nothing may escape."""
        if self._over:
            return
        if delta.written:
            self._sent = time.monotonic()
            self._events.passed(delta)
            return
        chunk, last = b"", False
        try:
            chunk = self._events.news(at, delta)
            if delta.finish_reason is not None and all(stream.ended for stream in self._streams):
                last = True
                chunk += self._events.end()
        except EngineError as fault:
            last = True
            chunk += self._events.fail(fault)
        except Exception as fault:
            last = True
            self._fault = fault
        self._send(chunk)
        if last:
            self._end()
        elif self._forwards and not self._queued:
            try:
                self._forward()
            except OSError:  # no descriptor is left for a lane: it goes as well without
                self._forwards = False

    def _forward(self) -> None:
        """What follows takes a lane, if it can."""
        form = self._events.form()
        if form is None or self._wire is None:
            return
        if (lane := self._wire.lane(form)) is not None:
            self._streams[0].forward(lane)

    def _send(self, chunk: bytes) -> None:
        if not chunk:
            return
        self._sent = time.monotonic()
        if self._queued or self._wire is None or not self._wire.write(chunk):
            self._queued = True
            self._queue.append(chunk)
            self._wake()

    async def _drain(self, wire: Wire) -> None:
        """Send what is queued, until the end."""
        while True:
            while self._queue:
                chunk = b"".join(self._queue)
                self._queue.clear()
                await wire.send({"type": "http.response.body", "body": chunk, "more_body": True})
            if self._over:
                return
            self._queued = False
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _gone(self, watcher: asyncio.Task[None]) -> None:
        self._close()
        self._end()

    def _end(self) -> None:
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fill_silence(self) -> None:
        if self._forwards:
            self._streams[0].settle()
        silence = time.monotonic() - self._sent
        if silence >= PING_SECONDS:
            self._send(self._ping)
            silence = 0.0
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS - silence, self._fill_silence)


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
