"""The engine core as a child process: a socket pair that carries the messages of messages.py as msgpack.

No thread stands between the two: the loop of the front and the loop of the core read and write the socket themselves.
Neither side outlives the other. The child reads its configuration from its standard input and then watches that pipe:
its end means that the parent is gone, and the child's whole process group goes too. The parent watches the child and
turns its end into `Died`. The child starts from a fresh interpreter that imports only the core, so nothing depends on
the parent's `__main__`; it has its own session, so a Ctrl-C in the terminal reaches the front alone, which drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from types import UnionType
from typing import Any, get_args

import msgspec

from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.messages import Control, Died, Ready, ToCore, ToFront
from tokenspeed.runtime.pipe import Pipe
from tokenspeed.runtime.transport import CLOSE_TIMEOUT, SHUTDOWN_CALL, CoreEntry, Mailbox, describe, first_message

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1  # how often the parent looks whether the child lives
_EXIT_SECONDS = 0.01  # the same once the child has closed its end
_LAST_SECONDS = 2.0  # for the child's last messages to leave
_COMMAND = "from tokenspeed.runtime.transport_process import child_main; child_main()"


class Codec:
    """Messages of one direction: a byte for the class, the fields in msgpack."""

    def __init__(self, union: UnionType) -> None:
        kinds: tuple[type, ...] = get_args(union)
        self._heads = {kind: bytes([at]) for at, kind in enumerate(kinds)}
        self._decoders = [msgspec.msgpack.Decoder(kind) for kind in kinds]
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, message: Any) -> bytes:
        return self._heads[type(message)] + self._encode(message)

    def decode(self, data: bytes) -> Any:
        return self._decoders[data[0]].decode(memoryview(data)[1:])


class ProcessClient:
    """The core in a child process (see the module's text). `target` must be a module-level function."""

    def __init__(self, config: EngineConfig, target: CoreEntry) -> None:
        if "<" in target.__qualname__ or target.__module__ == "__main__":
            name = f"{target.__module__}.{target.__qualname__}"
            raise ValueError(f"{name} is no function of an importable module: a core process cannot import it")
        self._config = config
        self._target = (target.__module__, target.__qualname__)
        self._codec_in, self._codec_out = Codec(ToFront), Codec(ToCore)
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._dead = False
        self._died = False  # the child has said so itself

    @property
    def pid(self) -> int | None:
        """The child's process id, None before the start."""
        return self._process.pid if self._process else None

    async def start(self) -> Ready:
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox()
        ours, theirs = socket.socketpair()
        self._pipe = Pipe(ours)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                # safe path: a file of the current directory must not stand in for a module of the same name
                env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(pickle.dumps((self._config, self._target, theirs.fileno())))
                self._process.stdin.flush()  # and stay open: the pipe is the child's sign that this process lives
            except BrokenPipeError:
                log.debug("the core process ended before it read its configuration")
        self._loop.add_reader(self._pipe.fileno(), self._read)
        self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)
        try:
            return await first_message(self._mailbox)
        except BaseException:
            await self.close(force=True)
            raise

    def _read(self) -> None:
        """Pass on what the child has sent."""
        for data in self._pipe.receive():
            message: ToFront = self._codec_in.decode(data)
            self._died |= isinstance(message, Died)
            self._mailbox.deliver(message)
        if self._pipe.ended:
            self._loop.remove_reader(self._pipe.fileno())
            self._timer.cancel()
            self._look()

    def _look(self) -> None:
        """Whether the child lives; if not, what it sent is read to the end and its end told."""
        assert self._process is not None
        if self._dead:
            return
        if self._process.poll() is None:
            again = _EXIT_SECONDS if self._pipe.ended else _LOOK_SECONDS
            self._timer = self._loop.call_later(again, self._look)
            return
        self._dead = True
        if not self._pipe.ended:
            self._read()
        self._kill_group()
        if not (self._died or self._closing):
            self._mailbox.deliver(Died(_exit_reason(self._process.returncode)))

    def _kill_group(self) -> None:
        """Worker ranks that the core left behind."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def send(self, message: ToCore) -> None:
        if self._closing or self._dead:
            return
        behind = self._pipe.behind
        self._pipe.send(self._codec_out.encode(message))
        if self._pipe.behind and not behind:
            self._loop.add_writer(self._pipe.fileno(), self._push)

    def _push(self) -> None:
        self._pipe.push()
        if not self._pipe.behind:
            self._loop.remove_writer(self._pipe.fileno())

    async def recv(self) -> ToFront:
        return await self._mailbox.get()

    def poll(self) -> ToFront | None:
        return self._mailbox.poll()

    async def close(self, *, force: bool = False) -> None:
        if self._process is None or self._closing:
            return
        self.send(Control(SHUTDOWN_CALL, "shutdown"))
        self._closing = True
        await asyncio.to_thread(self._end, force)
        self._timer.cancel()
        self._kill_group()
        self._loop.remove_reader(self._pipe.fileno())
        self._loop.remove_writer(self._pipe.fileno())
        self._pipe.close()

    def _end(self, force: bool) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.wait(0 if force else CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            if not force:
                log.warning("the engine core did not end within %g s: killed", CLOSE_TIMEOUT)
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # a configuration that the child never read
            self._process.stdin.close()


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"the engine core ended with exit status {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"the engine core was killed by {signal.Signals(-code).name}{hint}"


# ---- in the child --------------------------------------------------------------------------------------------------


class _PipeInbox:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._codec = Codec(ToCore)
        self._messages: deque[bytes] = deque()

    def get(self, timeout: float | None) -> ToCore | None:
        self._pipe.flush(0)
        if not self._messages and self._pipe.wait(timeout):
            self._messages += self._pipe.receive()
            if self._pipe.ended:
                raise EOFError("the front is gone")
        return self._codec.decode(self._messages.popleft()) if self._messages else None

    def drain(self) -> list[ToCore]:
        self._pipe.push()
        self._messages += self._pipe.receive()
        found = [self._codec.decode(data) for data in self._messages]
        self._messages.clear()
        return found


class _PipeOutbox:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._codec = Codec(ToFront)

    def put(self, message: ToFront) -> None:
        self._pipe.send(self._codec.encode(message))


def child_main() -> None:
    """The child's main program; exits 0 after a shutdown and 1 after a fault, which is sent as `Died`."""
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the core must not read the pipe as its standard input
    config, (module, name), descriptor = pickle.load(os.fdopen(lifeline, "rb", closefd=False))
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    from tokenspeed.runtime.logs import configure_logging

    configure_logging(config.log_level)
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)  # the ranks' workers must not hold it open
    pipe = Pipe(sock)
    outbox = _PipeOutbox(pipe)
    try:
        target: CoreEntry = getattr(importlib.import_module(module), name)
        target(config, _PipeInbox(pipe), outbox)
        status = 0
    except BaseException as fault:
        log.debug("engine core failed", exc_info=True)
        outbox.put(Died(describe(fault)))
        status = 1
    pipe.flush(_LAST_SECONDS)
    sys.exit(status)


def _die_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing more is ever written: this returns when the parent has closed its end, or died
    time.sleep(0.05)  # after an orderly shutdown the interpreter is on its way out by itself
    os.killpg(0, signal.SIGKILL)
