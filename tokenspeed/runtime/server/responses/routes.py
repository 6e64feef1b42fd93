"""POST /v1/responses, and what can be asked about a response that is kept."""

from __future__ import annotations

import uuid
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from tokenspeed.runtime.errors import EngineError, GenerationError, QueueFullError, RequestError, UnavailableError
from tokenspeed.runtime.server.errors import RESPONSES, STREAMED
from tokenspeed.runtime.server.responses.answer import Answer
from tokenspeed.runtime.server.responses.items import Item
from tokenspeed.runtime.server.responses.request import NAMES, ResponsesRequest
from tokenspeed.runtime.server.responses.store import Store, Stored
from tokenspeed.runtime.server.run import Run, begin
from tokenspeed.runtime.server.served import Served
from tokenspeed.runtime.server.sse import EventStream, until_disconnect
from tokenspeed.runtime.server.turn import renamed
from tokenspeed.runtime.server.whole import CLIENT_GONE, json_response


async def responses(served: Served, store: Store, body: ResponsesRequest, request: Request) -> Response:
    """The response. Raises EngineError before anything is sent.

    Codex CLI compacts a conversation, or waits, by what a failed stream says: so there a prompt beyond the context
    and a full queue are events.
    """
    served.check_model(body.model)
    history = store.get(body.previous_response_id, "previous_response_id").items if body.previous_response_id else []
    answer = Answer(served.model, body)
    kept = Stored(answer.response, _identified(body.items), history) if body.store is not False else None
    turn = body.turn(history)
    try:
        with renamed(NAMES):
            run = answer.outcome = await begin(served.llm, served.notation, turn)
    except EngineError as fault:
        if body.stream and _told_in_stream(fault):
            answer.outcome = fault
            return EventStream(answer, [], lambda: None)
        raise
    stop = served.track(request, answer.id, [run])

    def keep() -> None:
        if kept is not None:
            store.put(kept)

    def close() -> None:
        stop()
        if answer.response["status"] == "in_progress":  # the client is gone
            answer.response["status"] = "cancelled"
        keep()

    keep()
    if body.stream:
        return EventStream(answer, [run.stream], close)
    done = await until_disconnect(request, _whole(answer, run), close)
    return CLIENT_GONE if done is None else json_response(answer.response)


async def _whole(answer: Answer, run: Run) -> Answer:
    try:
        await run.finish()
    except GenerationError as fault:
        answer.refuse(fault)
        raise
    answer.settle(run)
    if answer.response["status"] == "failed":
        raise UnavailableError("the server ended this request: send it again")
    return answer


def _told_in_stream(fault: EngineError) -> bool:
    code = fault.code if isinstance(fault, RequestError) else None
    return isinstance(fault, QueueFullError) or code == "context_length_exceeded"


def _identified(items: list[Item]) -> list[Item]:
    """Items as they are listed: each with an id and a type."""
    return [{"id": f"item_{uuid.uuid4().hex}", "type": "message", **item} for item in items]


def install(app: FastAPI, served: Served) -> None:
    """The routes."""
    store = Store(served.config.response_store_mib << 20)

    @app.post("/v1/responses", responses=STREAMED)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        return await responses(served, store, body, request)

    @app.get("/v1/responses/{response_id}", responses=STREAMED)
    async def retrieve(response_id: str) -> Response:
        return json_response(store.get(response_id).response)

    @app.delete("/v1/responses/{response_id}", responses=RESPONSES)
    async def delete(response_id: str) -> Response:
        store.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{response_id}/cancel", responses=RESPONSES)
    async def cancel(response_id: str) -> Response:
        stored = store.get(response_id)
        if stored.response["status"] == "in_progress":
            stored.response["status"] = "cancelled"  # first: the abort writes the last event
            served.abort(response_id)
        return json_response(stored.response)

    @app.get("/v1/responses/{response_id}/input_items", responses=RESPONSES)
    async def input_items(
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        stored = store.get(response_id)
        items = [*stored.history, *stored.input]
        if order == "desc":
            items.reverse()
        ids = [item.get("id") for item in items]
        if after is not None and after not in ids:
            raise RequestError("after names no item of this response", param="after")
        first = 0 if after is None else ids.index(after) + 1
        page = items[first : first + limit]
        ends = (
            {"first_id": page[0].get("id"), "last_id": page[-1].get("id")}
            if page
            else {"first_id": None, "last_id": None}
        )
        return json_response({"object": "list", "data": page, **ends, "has_more": first + limit < len(items)})
