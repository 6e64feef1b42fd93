"""A small HTTP/1.1 client for streams: asyncio and the standard library, so that the load costs the machine little.

Invariant: an answer is read to its end or its connection is closed; a connection is used again only after such an end.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LINE = 1 << 24  # bytes of a line, such as the head of a chunk or an event


class HttpError(Exception):
    """The server could not be reached, did not speak HTTP, or answered with an error status."""


class Http:
    """One server. `headers` go with every request."""

    def __init__(self, base_url: str, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url} is no http:// or https:// URL")
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._headers = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*"} | (headers or {})
        self._idle: list[_Connection] = []

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of a whole answer. Raises HttpError."""
        return json.loads(b"".join([part async for part in self.parts(method, path, body)]))

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The JSON of each `data:` line of a stream, until `[DONE]` or its end. Raises HttpError."""
        held = b""
        async for part in self.parts("POST", path, body):
            *lines, held = (held + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield json.loads(data)

    async def parts(self, method: str, path: str, body: Any) -> AsyncIterator[bytes]:
        """The body of an answer as it comes. Raises HttpError with the server's own words for a status that is no success."""
        try:
            connection, status, headers = await self._ask(method, path, body)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as fault:
            raise HttpError(f"{self._host}:{self._port}: {fault or type(fault).__name__}") from None
        reader, writer = connection
        whole = False
        try:
            parts = _body(reader, headers)
            if status >= 400:
                text = b"".join([part async for part in parts])
                whole = True
                raise HttpError(f"{status}: {text.decode(errors='replace')[:300]}")
            async for part in parts:
                yield part
            whole = True
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as fault:
            raise HttpError(f"the answer broke off: {fault or type(fault).__name__}") from None
        finally:
            if whole and headers.get("connection", "").lower() != "close" and _bounded(headers):
                self._idle.append(connection)
            else:
                writer.close()

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _ask(self, method: str, path: str, body: Any) -> tuple[_Connection, int, dict[str, str]]:
        """Sends a request; (connection, status, headers by lower-case name). A kept connection that has died is replaced."""
        content = b"" if body is None else json.dumps(body).encode()
        head = {**self._headers, "Content-Length": str(len(content))}
        if content:
            head["Content-Type"] = "application/json"
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        message = f"{method} {self._path}{path} HTTP/1.1\r\n{lines}\r\n".encode() + content
        while True:
            kept = bool(self._idle)
            reader, writer = self._idle.pop() if kept else await self._connect()
            try:
                writer.write(message)
                await writer.drain()
                status = await reader.readline()
                if not status:
                    raise EOFError("the server closed the connection")
                headers: dict[str, str] = {}
                while (line := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode("latin-1").partition(":")
                    headers[name.strip().lower()] = value.strip()
                version, _, rest = status.partition(b" ")
                if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
                    raise ValueError("the answer is no HTTP/1.1")
                return (reader, writer), int(rest[:3]), headers
            except (OSError, EOFError):
                writer.close()
                if not kept:
                    raise
            except BaseException:
                writer.close()
                raise

    async def _connect(self) -> _Connection:
        return await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=LINE)


def _bounded(headers: dict[str, str]) -> bool:
    return "content-length" in headers or headers.get("transfer-encoding", "").lower() == "chunked"


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        while await reader.readline() not in (b"\r\n", b""):
            pass  # trailers
    elif "content-length" in headers:
        left = int(headers["content-length"])
        while left:
            part = await reader.read(min(left, 1 << 16))
            if not part:
                raise EOFError("the body is shorter than announced")
            left -= len(part)
            yield part
    else:
        while part := await reader.read(1 << 16):
            yield part
