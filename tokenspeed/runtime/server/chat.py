"""POST /v1/chat/completions: the same deltas as one answer or as a stream of chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.outputs import Completion, OutputDelta, RequestOutput
from tokenspeed.runtime.request_stream import RequestStream
from tokenspeed.runtime.server.errors import error_object
from tokenspeed.runtime.server.protocol import ChatRequest
from tokenspeed.runtime.server.render import chat_logprobs, usage_object
from tokenspeed.runtime.server.sse import DONE, EventStream, event, until_disconnect
from tokenspeed.runtime.server.whole import CLIENT_GONE, json_response


async def chat_completions(llm: AsyncLLM, model: str, body: ChatRequest, request: Request) -> Response:
    """The response. Raises EngineError before anything is sent."""
    body.check_fields()
    params = body.sampling()
    text = llm.render_chat(body.messages, **body.template_variables())
    stream = await llm.submit(
        text,
        params,
        add_special_tokens=False,  # the template writes them itself
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    answer = _Answer(llm, model, body)
    if body.stream:
        return EventStream(answer.events(stream), stream.close)
    output = await until_disconnect(request, stream.collect(), stream.close)
    return CLIENT_GONE if output is None else json_response(answer.whole(output))


class _Answer:
    """The id and the options that all parts of one answer share."""

    def __init__(self, llm: AsyncLLM, model: str, body: ChatRequest) -> None:
        self._tokenizer = llm.tokenizer
        self._body = body
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """chat.completion."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in output.choices],
            "usage": usage_object([output.usage]),
        }

    def _choice(self, choice: Completion) -> dict[str, Any]:
        out = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if choice.logprobs is None else chat_logprobs(self._tokenizer, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return {**out, "token_ids": choice.token_ids} if self._body.return_token_ids else out

    async def events(self, stream: RequestStream) -> AsyncIterator[bytes]:
        """chat.completion.chunk events, the last one [DONE]; a fault ends the stream with an error event."""
        body, begun = self._body, set[int]()
        async for delta in stream:
            if delta.index not in begun:
                begun.add(delta.index)
                yield self._chunk(OutputDelta(delta.index), {"role": "assistant", "content": ""}, stream)
            if delta.finish_reason == "error":
                yield event(error_object(500, delta.error or "the engine core failed on this request"))
                return
            if delta.text or delta.finish_reason or body.logprobs or body.return_token_ids:
                yield self._chunk(delta, {"content": delta.text} if delta.text else {}, stream)
        if body.include_usage:
            tail = {**self._head, "object": "chat.completion.chunk", "choices": []}
            yield event({**tail, "usage": usage_object([stream.usage])})
        yield DONE

    def _chunk(self, delta: OutputDelta, news: dict[str, Any], stream: RequestStream) -> bytes:
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": news,
            "logprobs": None if delta.logprobs is None else chat_logprobs(self._tokenizer, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason:
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._body.include_usage:
            chunk["usage"] = usage_object([stream.usage]) if self._body.continuous_usage else None
        return event(chunk)
