"""The web page at `/`: the live engine and a chat, static files that ask the server's public routes and nobody else.

What a model writes is shown as text; the content policy admits no script but these files.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

FILES = {"style.css": "text/css", "live.js": "text/javascript", "chat.js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def install(app: FastAPI) -> None:
    """The routes."""

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return _file("index.html", "text/html")

    @app.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return _file(name, FILES[name]) if name in FILES else Response("no such file", 404)


def _file(name: str, kind: str) -> Response:
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return Response(_read(name), media_type=f"{kind}; charset=utf-8", headers=headers)


@cache
def _read(name: str) -> bytes:
    return (Path(__file__).parent / name).read_bytes()
