"""/internal: what the engine does, and calls that change it. The gate asks for the key."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query
from starlette.responses import Response

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.server.errors import RESPONSES
from tokenspeed.runtime.server.protocol import Body
from tokenspeed.runtime.server.served import Served
from tokenspeed.runtime.server.whole import json_response


class AbortRequest(Body):
    """POST /internal/abort: a request by its X-Request-Id or its answer's id, or all."""

    request_id: str | None = None
    abort_all: bool | None = None


class UpdateWeightsRequest(Body):
    """POST /internal/update_weights: other weights of the same configuration."""

    path: str
    abort: bool | None = None  # what is in flight ends at once


def install(app: FastAPI, served: Served) -> None:
    """The routes."""
    llm = served.llm

    @app.get("/internal/scheduler", responses=RESPONSES)
    async def scheduler() -> Response:
        return json_response(await llm.control("scheduler"))

    @app.get("/internal/kv_events", responses=RESPONSES)
    async def kv_events(since: Annotated[int, Query(ge=0, lt=2**63)] = 0) -> Response:
        if not llm.config.kv_events:
            raise RequestError("no events are kept: start with --kv-events N")
        return json_response(await llm.control("kv_events", since=since))

    @app.post("/internal/abort", responses=RESPONSES)
    async def abort(body: AbortRequest) -> Response:
        if bool(body.request_id) == bool(body.abort_all):
            raise RequestError("send either a request_id or abort_all: true", param="request_id")
        return json_response({"aborted": served.abort(body.request_id)})

    @app.post("/internal/flush_cache", responses=RESPONSES)
    async def flush_cache() -> Response:
        return json_response(await llm.control("flush_cache"))

    @app.post("/internal/update_weights", responses=RESPONSES)
    async def update_weights(body: UpdateWeightsRequest) -> Response:
        return json_response(await llm.update_weights(body.path, abort=bool(body.abort)))
