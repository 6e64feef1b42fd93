"""The routes. The app holds no state of its own: an AsyncLLM, the Life of the server, the names it goes by."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import ServerConfig
from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.metrics import Metrics
from tokenspeed.runtime.server import errors
from tokenspeed.runtime.server.body import BodyRoute
from tokenspeed.runtime.server.chat import chat_completions
from tokenspeed.runtime.server.chat_request import ChatRequest
from tokenspeed.runtime.server.completions import completions
from tokenspeed.runtime.server.gate import Gate, Life
from tokenspeed.runtime.server.protocol import CompletionRequest
from tokenspeed.runtime.server.served import Served
from tokenspeed.runtime.server.whole import json_response


def create_app(llm: AsyncLLM, life: Life, config: ServerConfig, metrics: Metrics | None = None) -> FastAPI:
    """The ASGI app. The caller starts and closes `llm` and moves `life` along."""
    app = FastAPI(title="TokenSpeed", strict_content_type=False)
    app.router.route_class = BodyRoute
    app.add_middleware(Gate, life=life, config=config)
    errors.install(app)
    served = Served(llm, config)

    @app.post("/v1/chat/completions", responses=errors.RESPONSES)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await chat_completions(served, body, request)

    @app.post("/v1/completions", responses=errors.RESPONSES)
    async def text(body: CompletionRequest, request: Request) -> Response:
        return await completions(served, body, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [served.model_object(name) for name in served.names]})

    @app.get("/v1/models/{model_id:path}", responses=errors.RESPONSES)
    async def model(model_id: str) -> Response:
        served.check_model(model_id)
        return json_response(served.model_object(model_id))

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        response = json_response({"status": life.phase})
        response.status_code = 200 if life.phase == "ready" else 503
        return response

    @app.get("/internal/scheduler", responses=errors.RESPONSES)
    async def scheduler() -> Response:
        return json_response(await llm.control("scheduler"))

    @app.get("/internal/kv_events", responses=errors.RESPONSES)
    async def kv_events(since: Annotated[int, Query(ge=0, lt=2**63)] = 0) -> Response:
        if not llm.config.kv_events:
            raise RequestError("no events are kept: start with --kv-events N")
        return json_response(await llm.control("kv_events", since=since))

    if metrics is not None:

        @app.get("/metrics")
        async def scrape() -> Response:
            return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app
