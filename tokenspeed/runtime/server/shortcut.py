"""The way in for requests with bodies: from the gate to their route by the path alone.

Invariant: what a route answers is the same with and without it; FastAPI's own way to it, of middlewares, matching and
exit stacks, costs more than reading the body. Whatever is not found here goes that way.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed.runtime.errors import EngineError
from tokenspeed.runtime.server.body import Handler
from tokenspeed.runtime.server.errors import response_to


class Shortcut:
    """The innermost ASGI layer. `handlers`: of POST requests, by path."""

    def __init__(self, app: ASGIApp, *, handlers: Mapping[str, Handler]) -> None:
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = scope["type"] == "http" and scope["method"] == "POST"
        handle = self._handlers.get(scope["path"]) if found else None
        if handle is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handle(Request(scope, receive, send))
        except (EngineError, HTTPException, RequestValidationError) as fault:
            response = response_to(scope["path"], fault)
        await response(scope, receive, send)
