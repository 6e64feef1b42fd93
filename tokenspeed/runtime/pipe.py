"""One end of a stream socket that carries messages, each as its length (uint32, the machine's order) and its bytes.

Invariant: nothing here waits but `flush`, and messages arrive whole and in order. What the socket has no room for is kept
here and goes first the next time; once the peer is gone, it goes nowhere.
"""

from __future__ import annotations

import select
import socket
import struct

_LENGTH = struct.Struct("=I")
_READ = 1 << 20  # bytes of one read


class Pipe:
    """See the module. Used by one thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unsent = bytearray()
        self._unread = bytearray()
        self.ended = False  # the peer is gone, and all that it sent has been received

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def behind(self) -> bool:
        """Whether messages wait for room in the socket."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message, now or by a later `push`."""
        self._unsent += _LENGTH.pack(len(message))
        self._unsent += message
        self.push()

    def push(self) -> None:
        """Send of what waits as much as there is room for."""
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # the peer is gone
            self._unsent.clear()

    def flush(self, seconds: float) -> None:
        """Send what waits, for at most so long between two signs of the peer's reading."""
        while self._unsent and self.wait(seconds, writable=True):
            self.push()

    def wait(self, seconds: float | None, *, writable: bool = False) -> bool:
        """Wait until something can be received, or with `writable` sent instead; whether it can."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT if writable else select.POLLIN)
        return bool(poll.poll(None if seconds is None else max(0.0, seconds * 1000)))

    def receive(self) -> list[bytes]:
        """The messages that are here."""
        try:
            while not self.ended:
                news = self._sock.recv(_READ)
                self._unread += news
                self.ended = not news
                if len(news) < _READ:
                    break
        except BlockingIOError:
            pass
        except OSError:  # reset by a peer that died
            self.ended = True
        messages: list[bytes] = []
        at, have = 0, len(self._unread)
        while have - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread, at)
            if have - at - _LENGTH.size < length:
                break
            at += _LENGTH.size + length
            messages.append(bytes(self._unread[at - length : at]))
        del self._unread[:at]
        return messages

    def close(self) -> None:
        self._sock.close()
