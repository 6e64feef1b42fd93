"""What may come in: the life of the server, the key, the length of a body. One ASGI layer before the routes.

While the server loads, drains or is dead, every request but the probes (/health, /metrics) is refused at once with
503; those inside are counted, so a drain knows when the last one has been answered.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenspeed.runtime.config import ServerConfig
from tokenspeed.runtime.errors import UnavailableError
from tokenspeed.runtime.server.errors import engine_error, error_response

Phase = Literal["loading", "ready", "draining", "dead"]
_PROBES = ("/health", "/metrics")


@dataclass(slots=True)
class Life:
    """Where the server stands. `active` requests are inside and not yet answered to the end."""

    phase: Phase = "loading"
    active: int = 0


class Gate:
    """The layer itself."""

    def __init__(self, app: ASGIApp, *, life: Life, config: ServerConfig) -> None:
        self._app = app
        self._life = life
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            refusal.headers["Connection"] = "close"  # the body may be unread
            await refusal(scope, receive, send)
            return
        self._life.active += 1
        try:
            await self._app(scope, self._bounded(receive), send)
        finally:
            self._life.active -= 1

    def _refusal(self, path: str, headers: Headers) -> Response | None:
        if self._life.phase != "ready":
            return engine_error(UnavailableError(f"the server is {self._life.phase}: try again later"))
        if self._config.api_key and path.startswith(("/v1", "/internal")):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), self._config.api_key.encode()):
                return error_response(401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._config.max_body_bytes:
            return error_response(413, self._too_long(), code="body_too_large")
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` that ends a body of unannounced length at the limit."""
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._config.max_body_bytes:
                raise HTTPException(413, self._too_long())
            return message

        return bounded

    def _too_long(self) -> str:
        return f"the body is longer than {self._config.max_body_bytes} bytes"
