"""The routes. The app holds no state of its own: an AsyncLLM, the Life of the server, the names it goes by."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.telemetry import TelemetryConfig
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import ServerConfig
from tokenspeed.runtime.metrics import Metrics
from tokenspeed.runtime.server import control, errors, page
from tokenspeed.runtime.server.body import BodyRoute, Handler
from tokenspeed.runtime.server.chat.answer import chat_completions
from tokenspeed.runtime.server.chat.request import ChatRequest
from tokenspeed.runtime.server.completions import completions
from tokenspeed.runtime.server.gate import Gate, Life
from tokenspeed.runtime.server.messages.answer import count_tokens, messages
from tokenspeed.runtime.server.messages.request import CountRequest, MessagesRequest
from tokenspeed.runtime.server.protocol import CompletionRequest
from tokenspeed.runtime.server.responses import routes as responses
from tokenspeed.runtime.server.served import Served
from tokenspeed.runtime.server.shortcut import Shortcut
from tokenspeed.runtime.server.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from tokenspeed.runtime.server.whole import json_response


def create_app(llm: AsyncLLM, life: Life, config: ServerConfig, metrics: Metrics | None = None) -> FastAPI:
    """The ASGI app. The caller starts and closes `llm` and moves `life` along."""
    nothing: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}  # it is looked for at each request
    app = FastAPI(title="TokenSpeed", strict_content_type=False, telemetry=nothing)
    app.router.route_class = BodyRoute
    handlers: dict[str, Handler] = {}
    app.add_middleware(Shortcut, handlers=handlers)
    app.add_middleware(Gate, life=life, config=config)
    if origins := [origin.strip() for origin in config.allowed_origins.split(",") if origin.strip()]:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )  # outside of the gate: a browser asks first, without a key
    errors.install(app)
    served = Served(llm, config)

    @app.post("/v1/chat/completions", responses=errors.STREAMED)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await chat_completions(served, body, request)

    @app.post("/v1/completions", responses=errors.STREAMED)
    async def text(body: CompletionRequest, request: Request) -> Response:
        return await completions(served, body, request)

    @app.post("/v1/messages", responses=errors.STREAMED)
    async def message(body: MessagesRequest, request: Request) -> Response:
        return await messages(served, body, request)

    @app.post("/v1/messages/count_tokens", responses=errors.RESPONSES)
    async def count(body: CountRequest) -> Response:
        return await count_tokens(served, body)

    responses.install(app, served)

    @app.post("/tokenize", responses=errors.RESPONSES)
    async def to_tokens(body: TokenizeRequest) -> Response:
        return await tokenize(served, body)

    @app.post("/detokenize", responses=errors.RESPONSES)
    async def to_text(body: DetokenizeRequest) -> Response:
        return detokenize(served, body)

    @app.head("/", include_in_schema=False)
    async def alive() -> Response:
        return Response()  # Claude Code asks before it begins

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(served.model_list())

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

    control.install(app, served)
    page.install(app)

    if metrics is not None:

        @app.get("/metrics", response_class=PlainTextResponse)
        async def scrape() -> Response:
            return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for route in app.routes:
        if isinstance(route, BodyRoute) and route.handler is not None:
            handlers[route.path] = route.handler
    return app
