"""POST /v1/chat/completions: a run's news as chunks, or its choices as one answer."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.runtime.errors import EngineError
from tokenspeed.runtime.outputs import OutputDelta
from tokenspeed.runtime.server.blocks import Block, Grew, News, Opened
from tokenspeed.runtime.server.chat.request import ChatRequest
from tokenspeed.runtime.server.errors import error_object
from tokenspeed.runtime.server.frame import Form, Frame, event
from tokenspeed.runtime.server.render import chat_logprobs, usage_object
from tokenspeed.runtime.server.run import Choice, Run, begin
from tokenspeed.runtime.server.served import Served
from tokenspeed.runtime.server.sse import DONE, EventStream, until_disconnect
from tokenspeed.runtime.server.whole import CLIENT_GONE, json_response


async def chat_completions(served: Served, body: ChatRequest, request: Request) -> Response:
    """The response. Raises EngineError before anything is sent."""
    served.check_model(body.model)
    run = await begin(served.llm, served.notation, body.turn())
    answer = Answer(served, body, run)
    close = served.track(request, answer.id, [run])
    if body.stream:
        return EventStream(answer, [run.stream], close)
    done = await until_disconnect(request, run.finish(), close)
    return CLIENT_GONE if done is None else json_response(answer.whole())


class Answer:
    """The id and the options that all parts of one answer share."""

    def __init__(self, served: Served, body: ChatRequest, run: Run) -> None:
        self._tokenizer = served.llm.tokenizer
        self._body = body
        self._run = run
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._bare = not (body.logprobs or body.return_token_ids or body.continuous_usage)
        self._begun = set[int]()  # choices whose first chunk is out
        self._frames: dict[int, Frame] = {}  # of chunks that only add text, by choice
        self._head = {"id": self.id, "created": int(time.time()), "model": served.model}

    def whole(self) -> dict[str, Any]:
        """chat.completion."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in self._run.choices],
            "usage": usage_object([self._run.usage]),
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        out = {
            "index": choice.index,
            "message": self._message(choice),
            "logprobs": None if choice.logprobs is None else chat_logprobs(self._tokenizer, choice.logprobs),
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }
        return {**out, "token_ids": choice.token_ids} if self._body.return_token_ids else out

    def _message(self, choice: Choice) -> dict[str, Any]:
        text, thought, calls = choice.blocks.joined("text"), choice.blocks.joined("reasoning"), choice.blocks.calls
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if not text and (thought or calls):
            message["content"] = None
        if thought:
            message["reasoning_content"] = message["reasoning"] = thought
        if calls:
            message["tool_calls"] = [_call(block, block.text) for block in calls]
        return message

    def _finish_reason(self, choice: Choice) -> str | None:
        """A call that the client named is a plain stop to OpenAI, any other one is tool_calls."""
        called = choice.finish_reason == "stop" and choice.blocks.calls and self._run.turn.choice.mode != "named"
        return "tool_calls" if called else choice.finish_reason

    # ---- chat.completion.chunk events, the last one [DONE]; a fault ends the stream with an error event instead ----

    async def begin(self) -> bytes:
        return b""

    def news(self, at: int, delta: OutputDelta) -> bytes:
        index, body = delta.index, self._body
        if self._bare and self._run.choices[index].grow(delta) is not None:
            return self._frame(index).fill(delta.text)
        news = self._run.accept(delta)
        if self._bare and delta.finish_reason is None and (text := _only_text(news)) is not None:
            return self._frame(index).fill(text)
        chunks: list[bytes] = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(self._chunk(OutputDelta(index), {"role": "assistant", "content": ""}))
        parts = [part for item in news if (part := _delta(item))]
        chunks += [self._chunk(OutputDelta(index), part) for part in parts[:-1]]
        if parts or delta.finish_reason or body.logprobs or body.return_token_ids:
            chunks.append(self._chunk(delta, parts[-1] if parts else {}))
        return b"".join(chunks)

    def form(self) -> Form | None:
        choice = self._run.choices[0]
        return Form(self._frame(0), None, choice.marks) if self._bare and choice.open_text else None

    def passed(self, delta: OutputDelta) -> None:
        self._run.choices[0].grow(delta)

    def end(self) -> bytes:
        if not self._body.include_usage:
            return DONE
        tail = {**self._head, "object": "chat.completion.chunk", "choices": []}
        return event({**tail, "usage": usage_object([self._run.usage])}) + DONE

    def fail(self, fault: EngineError) -> bytes:
        return event(error_object(500, fault.message))

    def _frame(self, index: int) -> Frame:
        if index not in self._frames:
            self._frames[index] = Frame(self._chunk(OutputDelta(index), {"content": Frame.HOLE}))
        return self._frames[index]

    def _chunk(self, delta: OutputDelta, news: dict[str, Any]) -> bytes:
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": news,
            "logprobs": None if delta.logprobs is None else chat_logprobs(self._tokenizer, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason:
            choice["finish_reason"] = self._finish_reason(self._run.choices[delta.index])
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._body.include_usage:
            chunk["usage"] = usage_object([self._run.usage]) if self._body.continuous_usage else None
        return event(chunk)


def _call(block: Block, text: str) -> dict[str, Any]:
    """A call with its arguments, or a custom tool's with its input."""
    if block.custom:
        return {"id": block.id, "type": "custom", "custom": {"name": block.name, "input": text}}
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": text}}


def _only_text(news: list[News]) -> str | None:
    """The text by which an open text block grew, if nothing else is new: so it is for nearly every token."""
    if len(news) == 1 and isinstance(item := news[0], Grew) and item.block.kind == "text":
        return item.text
    return None


def _delta(news: News) -> dict[str, Any] | None:
    """What an item of news is in a chunk; None for what chunks do not tell."""
    block = news.block
    if isinstance(news, Opened):
        return {"tool_calls": [{"index": block.index, **_call(block, "")}]} if block.kind == "call" else None
    if not isinstance(news, Grew):
        return None
    if block.kind == "text":
        return {"content": news.text}
    if block.kind == "reasoning":
        return {"reasoning_content": news.text, "reasoning": news.text}
    piece = {"custom": {"input": news.text}} if block.custom else {"function": {"arguments": news.text}}
    return {"tool_calls": [{"index": block.index, **piece}]}
