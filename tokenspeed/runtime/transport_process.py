"""The engine core as a child process: ZMQ PUSH/PULL over ipc:// in a private directory, msgpack of messages.py.

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
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import UnionType
from typing import Any, get_args

import msgspec
import zmq

from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.messages import Control, Died, Ready, ToCore, ToFront
from tokenspeed.runtime.transport import CLOSE_TIMEOUT, SHUTDOWN_CALL, CoreEntry, Mailbox, describe, first_message

log = logging.getLogger(__name__)

_POLL_MS = 100  # how often the parent looks whether the child lives
_LAST_MS = 50  # how long a dead child's last message may still be on its way
_COMMAND = "from tokenspeed.runtime.transport_process import child_main; child_main()"


class Codec:
    """Messages of one direction as two frames: the class name, the fields in msgpack."""

    def __init__(self, union: UnionType) -> None:
        self._decoders = {cls.__name__.encode(): msgspec.msgpack.Decoder(cls) for cls in get_args(union)}
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, message: Any) -> list[bytes]:
        return [type(message).__name__.encode(), self._encode(message)]

    def decode(self, frames: list[bytes]) -> Any:
        name, payload = frames
        return self._decoders[name].decode(payload)


def _sender(context: zmq.Context[Any], address: str) -> zmq.Socket[Any]:
    """A socket whose sends never block: no high-water mark, and it connects, so it queues before its peer is up."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)  # milliseconds
    socket.connect(address)
    return socket


def _receiver(context: zmq.Context[Any], address: str) -> zmq.Socket[Any]:
    """A socket that never makes its peer wait."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


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
        self._dead = False  # set by the reader thread

    @property
    def pid(self) -> int | None:
        """The child's process id, None before the start."""
        return self._process.pid if self._process else None

    async def start(self) -> Ready:
        self._mailbox = Mailbox()
        self._directory = tempfile.mkdtemp(prefix="tokenspeed-")  # mode 0700: no other user reaches the sockets
        self._context = zmq.Context(io_threads=1)
        addresses = (f"ipc://{self._directory}/core", f"ipc://{self._directory}/front")
        self._push = _sender(self._context, addresses[0])
        self._pull = _receiver(self._context, addresses[1])
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND],
            stdin=subprocess.PIPE,
            # safe path: a file of the current directory must not stand in for a module of the same name
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pickle.dumps((self._config, self._target, addresses)))
            self._process.stdin.flush()  # and stay open: the pipe is the child's sign that this process lives
        except BrokenPipeError:
            log.debug("the core process ended before it read its configuration")
        self._reader = threading.Thread(target=self._read, name="tokenspeed-core-reader", daemon=True)
        self._reader.start()
        try:
            return await first_message(self._mailbox)
        except BaseException:
            await self.close(force=True)
            raise

    def _read(self) -> None:
        """Reader thread: pass messages on until the child has ended and nothing it sent is left."""
        assert self._process is not None
        died = False
        while True:
            alive = self._process.poll() is None
            while self._pull.poll(_POLL_MS if alive else _LAST_MS):
                message: ToFront = self._codec_in.decode(self._pull.recv_multipart())
                self._mailbox.put(message)
                died |= isinstance(message, Died)
            if not alive:
                self._dead = True
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # worker ranks that the core left behind
        if not died and not self._closing:
            self._mailbox.put(Died(_exit_reason(self._process.returncode)))

    def send(self, message: ToCore) -> None:
        if not (self._closing or self._dead):
            self._push.send_multipart(self._codec_out.encode(message), zmq.NOBLOCK)

    async def recv(self) -> ToFront:
        return await self._mailbox.get()

    async def close(self, *, force: bool = False) -> None:
        if self._process is None or self._closing:
            return
        self.send(Control(SHUTDOWN_CALL, "shutdown"))
        self._closing = True
        await asyncio.to_thread(self._end, force)

    def _end(self, force: bool) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.wait(0 if force else CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            if not force:
                log.warning("the engine core did not end within %g s: killed", CLOSE_TIMEOUT)
            self._process.kill()  # and the reader kills its group
            self._process.wait()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):  # a configuration that the child never read
            self._process.stdin.close()
        self._push.close(0)
        self._pull.close(0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"the engine core ended with exit status {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"the engine core was killed by {signal.Signals(-code).name}{hint}"


# ---- in the child --------------------------------------------------------------------------------------------------


class _SocketInbox:
    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._codec = Codec(ToCore)

    def get(self, timeout: float | None) -> ToCore | None:
        if not self._socket.poll(None if timeout is None else max(0, round(timeout * 1000))):
            return None
        return self._codec.decode(self._socket.recv_multipart())

    def drain(self) -> list[ToCore]:
        messages: list[ToCore] = []
        while True:
            try:
                messages.append(self._codec.decode(self._socket.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                return messages


class _SocketOutbox:
    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._codec = Codec(ToFront)

    def put(self, message: ToFront) -> None:
        self._socket.send_multipart(self._codec.encode(message), zmq.NOBLOCK)


def child_main() -> None:
    """The child's main program; exits 0 after a shutdown and 1 after a fault, which is sent as `Died`."""
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the core must not read the pipe as its standard input
    config, (module, name), addresses = pickle.load(os.fdopen(lifeline, "rb", closefd=False))
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    from tokenspeed.runtime.logs import configure_logging

    configure_logging(config.log_level)
    context = zmq.Context(io_threads=1)
    pull, push = _receiver(context, addresses[0]), _sender(context, addresses[1])
    outbox = _SocketOutbox(push)
    try:
        target: CoreEntry = getattr(importlib.import_module(module), name)
        target(config, _SocketInbox(pull), outbox)
        status = 0
    except BaseException as fault:
        log.debug("engine core failed", exc_info=True)
        outbox.put(Died(describe(fault)))
        status = 1
    pull.close(0)
    push.close(linger=2000)  # milliseconds for the last message to leave
    context.term()
    sys.exit(status)


def _die_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing more is ever written: this returns when the parent has closed its end, or died
    time.sleep(0.05)  # after an orderly shutdown the interpreter is on its way out by itself
    os.killpg(0, signal.SIGKILL)
