"""The wire between the front process and the engine core: two clients, one behaviour.

The core is `run_core(config, inbox, outbox)`; it must put `Ready` or `Died` first, ends on `Control("shutdown")`, and
whatever ends it otherwise reaches the front as exactly one `Died`, last. Here is the interface, and the client that
runs the core as a thread of this process; transport_process.py runs it as a child process.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.messages import Control, Died, Ready, ToCore, ToFront

log = logging.getLogger(__name__)

SHUTDOWN_CALL = -1  # the call id of the shutdown that `close` sends; the front's own calls count from 0
CLOSE_TIMEOUT = 10.0  # seconds that a core may take to end after a shutdown


class Inbox(Protocol):
    """The core's end of front -> core. Used by one thread."""

    def get(self, timeout: float | None) -> ToCore | None:
        """The next message; None when `timeout` seconds (None: for ever) pass without one."""
        ...

    def drain(self) -> list[ToCore]:
        """All messages that are here now, without waiting."""
        ...


class Outbox(Protocol):
    """The core's end of core -> front. Used by one thread; never blocks."""

    def put(self, message: ToFront) -> None: ...


CoreEntry = Callable[[EngineConfig, Inbox, Outbox], None]


class CoreClient(Protocol):
    """The front's end. All methods are called on one event loop."""

    async def start(self) -> Ready:
        """Start the core and wait until it can take requests. Raises StartupError with the core's own reason."""
        ...

    def send(self, message: ToCore) -> None:
        """Hand a message to the core; never blocks. After the core's death it is dropped."""
        ...

    async def recv(self) -> ToFront:
        """The next message; `Died` once, as the last one, when the core is gone."""
        ...

    def poll(self) -> ToFront | None:
        """The next message if it is here."""
        ...

    async def close(self, *, force: bool = False) -> None:
        """Shut the core down and wait for it; by force after a time-out, or at once. Idempotent."""
        ...


class Mailbox:
    """Messages for the loop, in order, also from a foreign thread: one wake-up for however many arrived since the last."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: deque[ToFront] = deque()
        self._arrived = asyncio.Event()
        self._foreign: deque[ToFront] = deque()
        self._lock = threading.Lock()

    def put(self, message: ToFront) -> None:
        """From any thread. Messages after the loop has closed are dropped: nobody is left to read them."""
        with self._lock:
            self._foreign.append(message)
            if len(self._foreign) > 1:
                return
        try:
            self._loop.call_soon_threadsafe(self._collect)
        except RuntimeError:
            log.debug("dropped %s: the event loop is closed", type(message).__name__)

    def _collect(self) -> None:
        with self._lock:
            found, self._foreign = self._foreign, deque()
        self._messages += found
        self._arrived.set()

    def deliver(self, message: ToFront) -> None:
        """On the loop."""
        self._messages.append(message)
        self._arrived.set()

    def poll(self) -> ToFront | None:
        """On the loop: the oldest message that is here."""
        return self._messages.popleft() if self._messages else None

    async def get(self) -> ToFront:
        """On the loop: the oldest message."""
        while not self._messages:
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()


async def first_message(mailbox: Mailbox) -> Ready:
    """The core's `Ready`; StartupError when it sent anything else."""
    message = await mailbox.get()
    if isinstance(message, Ready):
        return message
    if isinstance(message, Died):
        raise StartupError(message.reason)
    raise StartupError(f"the engine core began with {type(message).__name__} and not with Ready or Died")


def describe(fault: BaseException) -> str:
    """A fault as the reason of a `Died`: its text, and its type where the text does not name the cause by itself."""
    text, kind = str(fault), type(fault)
    speaks = kind.__module__.startswith("tokenspeed.") or isinstance(fault, ValueError | OSError)
    return text if text and speaks else f"{kind.__name__}: {text}"


class _ThreadInbox:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
        self.put = self._queue.put

    def get(self, timeout: float | None) -> ToCore | None:
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None

    def drain(self) -> list[ToCore]:
        messages: list[ToCore] = []
        while True:
            try:
                messages.append(self._queue.get_nowait())
            except queue.Empty:
                return messages


class InprocClient:
    """The core as a daemon thread of this process; messages are passed as the objects they are."""

    def __init__(self, config: EngineConfig, target: CoreEntry) -> None:
        self._config = config
        self._target = target
        self._inbox = _ThreadInbox()
        self._thread: threading.Thread | None = None
        self._closing = False

    async def start(self) -> Ready:
        self._mailbox = Mailbox()
        self._thread = threading.Thread(target=self._main, name="tokenspeed-core", daemon=True)
        self._thread.start()
        return await first_message(self._mailbox)

    def _main(self) -> None:
        reason = "the engine core ended without being asked to"
        try:
            self._target(self._config, self._inbox, self._mailbox)
        except BaseException as fault:
            log.debug("engine core failed", exc_info=True)
            reason = describe(fault)
        if not self._closing:
            self._mailbox.put(Died(reason))

    def send(self, message: ToCore) -> None:
        self._inbox.put(message)

    async def recv(self) -> ToFront:
        return await self._mailbox.get()

    def poll(self) -> ToFront | None:
        return self._mailbox.poll()

    async def close(self, *, force: bool = False) -> None:
        if self._thread is None or self._closing:
            return
        self._closing = True
        self.send(Control(SHUTDOWN_CALL, "shutdown"))
        timeout = 0.0 if force else CLOSE_TIMEOUT
        await asyncio.to_thread(self._thread.join, timeout)
        if self._thread.is_alive():
            log.warning("the engine core did not end within %g s; its thread is left behind", timeout)
