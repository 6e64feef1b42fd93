"""What may come in: the life of the server, the keys, the length of a body. One ASGI layer before the routes.

While the server loads, drains or is dead, every request but the probes (/health, /metrics) and the web page is refused at once with
503; those inside are counted, so a drain knows when the last one has been answered. Every request has an id, its own
(X-Request-Id) or a new one, which the response bears and /internal/abort takes.
"""

from __future__ import annotations

import hmac
import re
import uuid
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenspeed.runtime.config import ServerConfig
from tokenspeed.runtime.errors import UnavailableError
from tokenspeed.runtime.server.errors import engine_error, error_response

Phase = Literal["loading", "ready", "draining", "dead"]
MAX_HEADER_BYTES = 32 << 10  # names and values of all headers of a request
_PROBES = ("/health", "/metrics")
_ID = re.compile(r"[\x21-\x7e]{1,128}")


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
        if scope["type"] != "http" or scope["path"] in _PROBES or _is_page(scope):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        send = _with_id(scope, headers, send)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            refusal.headers["Connection"] = "close"  # the body may be unread
            await refusal(scope, receive, send)
            return
        self._life.active += 1
        try:
            await self._app(scope, self._bounded(receive), send)
        finally:
            self._life.active -= 1

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        path: str = scope["path"]
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            return error_response(path, 431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
        if self._life.phase != "ready":
            return engine_error(path, UnavailableError(f"the server is {self._life.phase}: try again later"))
        internal = path.startswith("/internal")
        wanted = self._config.admin_key if internal and self._config.admin_key else self._config.api_key
        guarded = internal or path.startswith("/v1") or path in ("/tokenize", "/detokenize")
        if wanted and guarded and not hmac.compare_digest(_key(headers).encode(), wanted.encode()):
            what = "Authorization: Bearer KEY, or X-Api-Key: KEY"
            return error_response(path, 401, f"a valid key is needed: {what}", code="invalid_api_key")
        if internal and scope["method"] == "POST" and not self._config.admin_key:
            return error_response(path, 403, "control calls need a key of their own: start with --admin-key KEY")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._config.max_body_bytes:
            return error_response(path, 413, self._too_long(), code="body_too_large")
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


def _is_page(scope: Scope) -> bool:
    """Whether a file of the web page is asked for, which shows how the server comes up."""
    return scope["method"] == "GET" and (scope["path"] == "/" or scope["path"].startswith("/page/"))


def _key(headers: Headers) -> str:
    """The key that a request bears, in OpenAI's way or Anthropic's; "" for none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _with_id(scope: Scope, headers: Headers, send: Send) -> Send:
    """`send` that names the request in its response; `scope["state"]["request_id"]` has the name too."""
    given = headers.get("x-request-id", "")
    request_id = given if _ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
    scope.setdefault("state", {})["request_id"] = request_id

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer = MutableHeaders(scope=message)
            answer["X-Request-Id"] = request_id
            if scope["path"].startswith("/v1/messages"):
                answer["Request-Id"] = request_id  # where Anthropic's clients look
        await send(message)

    return named
