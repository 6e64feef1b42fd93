"""The server's life: listen, load, serve, drain, end. One coroutine, `serve`, whose result is the exit status.

It listens before the model is loaded (/health says so), so a port in use is an error of the first second. The first
SIGTERM or SIGINT drains: new requests are refused, those in flight may finish until `drain_timeout`, then they are
aborted with a proper last event. The second ends at once. The death of the engine core ends the server with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import EngineConfig, ServerConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.messages import Ready
from tokenspeed.runtime.metrics import Metrics
from tokenspeed.runtime.server.app import create_app
from tokenspeed.runtime.server.direct import Direct
from tokenspeed.runtime.server.gate import Life
from tokenspeed.runtime.server.served import model_names
from tokenspeed.runtime.transport import CoreEntry

log = logging.getLogger(__name__)

FLUSH_SECONDS = 5  # for the last events to reach the clients
_TICK = 0.02  # seconds between looks at a drain


class _Listener(uvicorn.Server):
    """Uvicorn without its own signal handling: the life of the server is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    target: CoreEntry | None = None,
    on_listen: Callable[[str], None] = lambda url: None,
    on_ready: Callable[[Ready, str], None] = lambda ready, url: None,
) -> int:
    """Serve until a signal or the core's death; the process's exit status.

    `on_listen` gets the URL before the model is loaded, `on_ready` what the core said and the URL. Raises StartupError
    when the address is taken or the model does not come up.
    """
    life, metrics = Life(), Metrics(model_names(engine, server)[0])
    llm = AsyncLLM(engine, target=target, metrics=metrics)
    app = create_app(llm, life, server, metrics)
    with _listen(server) as sock:
        port = sock.getsockname()[1]
        url = f"http://{f'[{server.host}]' if ':' in server.host else server.host}:{port}"
        listener = _Listener(
            uvicorn.Config(
                Direct(app),
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                proxy_headers=False,  # nothing here asks who the client is
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        signals = _Signals(asyncio.get_running_loop())
        http = asyncio.create_task(listener.serve([sock]))
        on_listen(url)
        try:
            return await _live(llm, life, server, signals, lambda ready: on_ready(ready, url))
        finally:
            signals.close()
            listener.should_exit = True
            listener.force_exit = signals.count > 1
            await http
            await llm.close(force=signals.count > 1)


async def _live(
    llm: AsyncLLM, life: Life, server: ServerConfig, signals: _Signals, on_ready: Callable[[Ready], None]
) -> int:
    loading = asyncio.create_task(llm.start())
    await _first(loading, signals.first)
    if not loading.done():
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        return 0
    ready = loading.result()
    await llm.open_lanes()
    gc.collect()
    gc.freeze()  # what was built stays: a collection between two answers need not look at it
    gc.set_threshold(*gc.get_threshold()[:2], 100)  # a whole one, of tens of milliseconds, comes a tenth as often
    life.phase = "ready"
    on_ready(ready)
    await _first(llm.died, signals.first)
    if llm.died.is_set():
        life.phase = "dead"
        log.error("the server ends: the engine core died: %s", llm.death_reason)
        return 1
    life.phase = "draining"
    log.info("draining: %d requests in flight, at most %g s", llm.in_flight, server.drain_timeout)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + server.drain_timeout
    while life.active and loop.time() < deadline and signals.count < 2 and not llm.died.is_set():
        await asyncio.sleep(_TICK)
    if llm.in_flight:
        log.warning("aborting %d requests that did not finish in time", llm.in_flight)
        llm.abort_all()
    return 1 if llm.died.is_set() else 0


class _Signals:
    """SIGTERM and SIGINT, counted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.count = 0
        self.first = asyncio.Event()
        self._loop = loop
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        self.count += 1
        self.first.set()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)


async def _first(*what: asyncio.Task[Ready] | asyncio.Event) -> None:
    """Wait until one of these tasks is done or events is set."""
    waits = [item if isinstance(item, asyncio.Task) else asyncio.create_task(item.wait()) for item in what]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for item, wait in zip(what, waits):
        if item is not wait:
            wait.cancel()


def _listen(server: ServerConfig) -> socket.socket:
    """A bound and listening socket. Raises StartupError that names the address."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # What is accepted inherits it: a first event must not wait until the client has acknowledged the headers (40 ms).
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((server.host, server.port))
        sock.listen(2048)
    except OSError as fault:
        sock.close()
        raise StartupError(f"cannot listen on {server.host}:{server.port}: {fault.strerror}") from None
    return sock
