"""Weights from another process of this machine, as a trainer has them: tensors over a Unix socket, without a checkpoint on disk.

A sender connects, writes one line of JSON `{"bytes": N, "abort": false}`, then N bytes in the form of a .safetensors file, and
reads one line of JSON: `{"seconds": S}` or `{"error": REASON}`. Invariant: weights are replaced when all bytes are here, by the
same writer among the requests as those of a checkpoint; until then, and where anything is wrong, the old ones go on. Senders
take turns; whoever may write to the socket (its owner) may send.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tokenspeed.runtime.errors import EngineError, RequestError, StartupError

if TYPE_CHECKING:
    from torch import Tensor

HEAD = 1024  # bytes that the first line may have
STALL = 60.0  # seconds without a byte after which a sender is given up
PIECE = 1 << 22  # bytes copied at a time
_STORED = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}


class WeightsSocket:
    """The server's end: a thread of its own, from the constructor to `close`."""

    def __init__(self, path: str, update: Callable[[str, bool], dict[str, Any]]) -> None:
        """`update(folder, abort)` takes the weights of a folder that holds model.safetensors; it may raise EngineError.

        StartupError where there can be no socket at `path`.
        """
        self._path, self._update = Path(path).expanduser(), update
        self._listener = _listen(self._path)
        threading.Thread(target=self._serve, name="tokenspeed-weights", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                sender, _ = self._listener.accept()
            except OSError:  # closed
                return
            with sender, contextlib.suppress(OSError):  # one that is gone hears nothing
                sender.settimeout(STALL)
                sender.sendall(json.dumps(self._answer(sender)).encode() + b"\n")

    def _answer(self, sender: socket.socket) -> dict[str, Any]:
        try:
            with sender.makefile("rb") as stream:
                size, abort = _head(stream.readline(HEAD))
                with tempfile.TemporaryDirectory(prefix="tokenspeed-weights-", dir=_room_for(size)) as folder:
                    _copy(stream, Path(folder) / "model.safetensors", size)
                    return self._update(folder, abort)
        except EngineError as fault:
            return {"error": fault.message}
        except OSError as fault:
            return {"error": f"the weights did not arrive: {fault}"}


def send_weights(path: str, tensors: Mapping[str, Tensor], *, abort: bool = False) -> dict[str, Any]:
    """Replaces the weights of a running server (`--weights-socket path`) by these: all tensors of its model by their Hugging
    Face names, float32, bfloat16 or float16, on any device.

    Returns {"seconds": time of the change}, when requests get the new weights. `abort` ends requests in flight at once, else
    they end first. Raises RequestError with the server's reason, and the old weights go on; OSError where nobody listens.
    """
    import torch

    if not tensors:
        raise RequestError("there are no tensors to send")
    head: dict[str, Any] = {}
    size = 0
    for name, t in tensors.items():
        if str(t.dtype) not in _STORED:
            raise RequestError(
                f"{name!r} is of {t.dtype}: weights are sent as {', '.join(_STORED)}".replace("torch.", ""), param=name
            )
        head[name] = {"dtype": _STORED[str(t.dtype)], "shape": list(t.shape), "data_offsets": [size, size + t.nbytes]}
        size += t.nbytes
    header = json.dumps(head).encode()
    header += b" " * (-len(header) % 8)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(Path(path).expanduser()))
        with contextlib.suppress(BrokenPipeError):  # it has read enough to refuse them: why is in its answer
            first = {"bytes": 8 + len(header) + size, "abort": abort}
            server.sendall(json.dumps(first).encode() + b"\n" + len(header).to_bytes(8, "little") + header)
            for t in tensors.values():
                server.sendall(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        with server.makefile("rb") as stream:
            line = stream.readline()
    if not line:
        raise RequestError("the server ended before it took the weights")
    answer = json.loads(line)
    if "error" in answer:
        raise RequestError(answer["error"])
    return answer


def _listen(path: Path) -> socket.socket:
    """A listening socket that only this user may write to; one that a dead server left there is replaced."""
    if path.is_socket() and not _answers(path):
        path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(1)
    except OSError as fault:
        listener.close()
        raise StartupError(
            f"weights_socket={path}: {fault.strerror or fault}; give a path where a socket can be"
        ) from None
    finally:
        os.umask(mask)
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _head(line: bytes) -> tuple[int, bool]:
    """(bytes that follow, whether requests in flight end at once) of a sender's first line."""
    try:
        head = json.loads(line)
        size, abort = head["bytes"], head.get("abort", False)
    except (ValueError, KeyError, TypeError, AttributeError):
        size = abort = None
    if type(size) is not int or size < 9 or type(abort) is not bool:
        raise RequestError(
            'the first line must be {"bytes": N, "abort": true or false}, N those of a .safetensors file'
        )
    return size, abort


def _room_for(size: int) -> str:
    """Where so many bytes may lie for a while: in memory, or where temporary files do."""
    places = [p for p in ("/dev/shm", tempfile.gettempdir()) if os.access(p, os.W_OK)]
    free = {p: shutil.disk_usage(p).free for p in places}
    for place, left in free.items():
        if left > size + size // 16:
            return place
    known = ", ".join(f"{p} has {left}" for p, left in free.items())
    raise RequestError(f"there is no room for {size} bytes of weights ({known}): set TMPDIR to a folder that has")


def _copy(stream: BinaryIO, path: Path, size: int) -> None:
    with path.open("wb") as file:
        left = size
        while left:
            piece = stream.read(min(left, PIECE))
            if not piece:
                raise RequestError(f"the sender left {left} of {size} bytes out")
            file.write(piece)
            left -= len(piece)
