"""Every error in the form of the wire that it answers: OpenAI's {"error": {message, type, param, code}} or Anthropic's.

No text that the client sent comes back in one; numbers may, so that a limit and what exceeds it stand side by side.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tokenspeed.runtime.errors import (
    EngineError,
    GenerationError,
    ModelNotFound,
    NotFound,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
    UnavailableError,
)
from tokenspeed.runtime.server.body import BodyError
from tokenspeed.runtime.server.protocol import FIELDS

log = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC = {413: "request_too_large", 503: "overloaded_error"}  # what Anthropic names otherwise; 5xx: api_error
_STATUS: dict[type[EngineError], tuple[int, str | None]] = {
    RequestError: (400, None),
    ModelNotFound: (404, "model_not_found"),
    NotFound: (404, "not_found"),
    QueueFullError: (429, "rate_limit_exceeded"),
    UnavailableError: (503, "service_unavailable"),
    GenerationError: (500, "generation_failed"),
    QueueTimeoutError: (503, "queue_timeout"),
}

_BODY = {
    "type": "object",
    "required": ["message", "type"],
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    },
}
_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": _BODY}}
_EVENT = {  # each of a stream's
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "description": "JSON, or [DONE]"}},
}
RESPONSES: dict[int | str, dict[str, Any]] = {  # of a route, for /openapi.json
    status: {"description": text, "content": {"application/json": {"schema": _SCHEMA}}}
    for status, text in (("4XX", "The request is refused"), ("5XX", "The server cannot, or did not, answer it"))
}
STREAMED = RESPONSES | {  # of one that answers in events where `stream` is true
    200: {
        "description": "The answer, whole or as server-sent events",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": _EVENT},
        },
    }
}


def error_object(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error, also as an event in the middle of a stream."""
    fallback = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": _TYPES.get(status, fallback), "param": param, "code": code}}


def anthropic_error(status: int, message: str, *, code: str | None = None) -> dict[str, Any]:
    """The same in Anthropic's form. Clients tell a conversation that is too long by the first words of the message."""
    kind = _ANTHROPIC.get(status, "api_error" if status >= 500 else _TYPES.get(status, "invalid_request_error"))
    if code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(
    path: str,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after: float | None = None,
) -> Response:
    """An error as a response to a request for `path`; `retry_after` is in seconds."""
    headers = {} if retry_after is None else {"Retry-After": f"{retry_after:g}"}
    if path.startswith("/v1/messages"):
        body = anthropic_error(status, message, code=code)
    else:
        body = error_object(status, message, param=param, code=code)
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def status_of(fault: EngineError) -> tuple[int, str | None]:
    """(HTTP status, code) of a refused or failed request."""
    status, code = _STATUS.get(type(fault), (500, None))
    return status, (fault.code or code) if isinstance(fault, RequestError) else code


def engine_error(path: str, fault: EngineError) -> Response:
    """A refused or failed request."""
    status, code = status_of(fault)
    param = fault.param if isinstance(fault, RequestError) else None
    return error_response(path, status, fault.message, param=param, code=code, retry_after=fault.retry_after)


def response_to(path: str, fault: EngineError | HTTPException | RequestValidationError) -> Response:
    """What a request that raised this is answered."""
    if isinstance(fault, EngineError):
        return engine_error(path, fault)
    if isinstance(fault, BodyError):
        return error_response(path, 400, str(fault.detail), param=fault.param, code="invalid_body")
    if isinstance(fault, HTTPException):
        return error_response(path, fault.status_code, str(fault.detail))
    first = fault.errors()[0]
    # A location holds the arms of unions and the keys of what was sent too: only fields and positions are named.
    where = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, int) or part in FIELDS)
    if not where:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        return error_response(path, 400, message, code="invalid_body")
    return error_response(path, 400, f"{where}: {first['msg']}", param=where)


def install(app: FastAPI) -> None:
    """Answer every exception of the app in this form."""

    async def told(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, EngineError | HTTPException | RequestValidationError)
        return response_to(request.url.path, fault)

    for kind in (EngineError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, told)

    @app.exception_handler(Exception)
    async def _(request: Request, fault: Exception) -> Response:
        log.error("fault in %s", request.url.path, exc_info=fault)
        return error_response(request.url.path, 500, "internal error; the server's log has the details")
