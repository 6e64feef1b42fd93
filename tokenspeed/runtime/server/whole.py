"""The parts of a response that is sent whole."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

CLIENT_GONE = Response(status_code=499)  # nobody reads it; the status is for the log

_encode = msgspec.json.Encoder().encode


def json_response(payload: dict[str, Any]) -> Response:
    """A 200 with a JSON body."""
    return Response(_encode(payload), media_type="application/json")
