"""POST /v1/messages: a run's news as Anthropic's events, or its blocks as one message."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.runtime.errors import EngineError, UnavailableError
from tokenspeed.runtime.outputs import OutputDelta
from tokenspeed.runtime.server.blocks import Block, Closed, Grew, Opened
from tokenspeed.runtime.server.errors import anthropic_error, status_of
from tokenspeed.runtime.server.frame import Form, Frame, named_event
from tokenspeed.runtime.server.messages.request import NAMES, CountRequest, MessagesRequest
from tokenspeed.runtime.server.run import Run, begin, prompt
from tokenspeed.runtime.server.served import Served
from tokenspeed.runtime.server.sse import EventStream, until_disconnect
from tokenspeed.runtime.server.turn import renamed
from tokenspeed.runtime.server.whole import CLIENT_GONE, json_response

_PING = named_event({"type": "ping"})


async def messages(served: Served, body: MessagesRequest, request: Request) -> Response:
    """The response. Raises EngineError before anything is sent."""
    served.check_model(body.model)
    turn = body.turn()
    with renamed(NAMES):
        run = await begin(served.llm, served.notation, turn)
    answer = _Answer(served.model, run)
    close = served.track(request, answer.id, [run])
    if body.stream:
        return EventStream(answer, [run.stream], close, ping=_PING)
    done = await until_disconnect(request, run.finish(), close)
    return CLIENT_GONE if done is None else json_response(answer.whole())


async def count_tokens(served: Served, body: CountRequest) -> Response:
    """How many tokens the prompt has. Raises EngineError."""
    served.check_model(body.model)
    _, ids = await prompt(served.llm, served.notation, body.turn())
    return json_response({"input_tokens": len(ids)})


class _Answer:
    """One message, whole or as events."""

    def __init__(self, model: str, run: Run) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._run = run
        (self._choice,) = run.choices
        self._begun = False  # message_start is out
        self._frames: dict[int, Frame] = {}  # of what a block grows by, by its position

    def whole(self) -> dict[str, Any]:
        """The message. Raises UnavailableError for one that the server ended."""
        return {
            **self._message([_block(block) for block in self._choice.blocks.blocks]),
            **self._stop(),
            "usage": self._usage(),
        }

    # ---- message_start to message_stop; a fault ends the stream with an error event instead ----

    async def begin(self) -> bytes:
        return b""  # message_start says how much of the prompt was cached, which the first delta knows

    def news(self, at: int, delta: OutputDelta) -> bytes:
        if (block := self._choice.grow(delta)) is not None:
            return self._grew(block, delta.text)
        news = self._run.accept(delta)
        if self._begun and len(news) == 1 and isinstance(item := news[0], Grew):
            return self._grew(item.block, item.text)
        events: list[bytes] = []
        if not self._begun:
            self._begun = True
            unknown = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details"))
            message = {**self._message([]), **unknown, "usage": self._usage()}
            events.append(named_event({"type": "message_start", "message": message}))
        for item in news:
            if isinstance(item, Grew):
                events.append(self._grew(item.block, item.text))
            else:
                events += [named_event(payload) for payload in _events(item)]
        return b"".join(events)

    def form(self) -> Form | None:
        block = self._choice.open_text
        return Form(self._frame(block), None, self._choice.marks) if block is not None else None

    def passed(self, delta: OutputDelta) -> None:
        self._choice.grow(delta)

    def end(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return named_event(delta) + named_event({"type": "message_stop"})

    def fail(self, fault: EngineError) -> bytes:
        return named_event(anthropic_error(status_of(fault)[0], fault.message))

    def _grew(self, block: Block, text: str) -> bytes:
        return self._frame(block).fill(text)

    def _frame(self, block: Block) -> Frame:
        """Of the events of a block that grows."""
        frame = self._frames.get(block.at)
        if frame is None:
            frame = self._frames[block.at] = Frame(named_event(_grown(Grew(block, Frame.HOLE))))
        return frame

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _stop(self) -> dict[str, Any]:
        """Why it ended."""
        choice, sequence = self._choice, None
        if choice.finish_reason == "abort":
            raise UnavailableError("the server ended this request")
        if choice.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._run.cut else "max_tokens"
        elif isinstance(choice.stop_reason, str):
            reason, sequence = "stop_sequence", choice.stop_reason
        else:
            reason = "tool_use" if choice.blocks.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}

    def _usage(self) -> dict[str, int]:
        """Of the prompt's tokens, those that came from the cache are counted apart."""
        usage = self._run.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _block(block: Block) -> dict[str, Any]:
    """A block of the whole message."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": _signature(block.text)}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(block.text)}


def _grown(news: Grew) -> dict[str, Any]:
    """The event of a block that grew."""
    delta = {
        "text": {"type": "text_delta", "text": news.text},
        "reasoning": {"type": "thinking_delta", "thinking": news.text},
        "call": {"type": "input_json_delta", "partial_json": news.text},
    }[news.block.kind]
    return {"type": "content_block_delta", "index": news.block.at, "delta": delta}


def _events(news: Opened | Closed) -> list[dict[str, Any]]:
    """The events of a block that began or ended."""
    block, index = news.block, {"index": news.block.at}
    if isinstance(news, Opened):
        empty = {
            "text": {"type": "text", "text": ""},
            "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
            "call": {"type": "tool_use", "id": block.id, "name": block.name, "input": {}},
        }[block.kind]
        return [{"type": "content_block_start", **index, "content_block": empty}]
    stop = {"type": "content_block_stop", **index}
    if block.kind != "reasoning":
        return [stop]
    delta = {"type": "signature_delta", "signature": _signature(block.text)}
    return [{"type": "content_block_delta", **index, "delta": delta}, stop]


def _signature(thought: str) -> str:
    """Clients send a thought back only with one. It proves nothing, and nothing here asks it to."""
    return hashlib.sha256(thought.encode()).hexdigest()


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; of those that were cut off what is complete, as clients read a stream."""
    try:
        value = from_json(arguments, allow_partial=True) if arguments else {}
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}
