"""POST /v1/completions: texts or token ids in, one choice for each prompt and each of n; echo and log-probabilities.

Choice numbers run over the prompts: prompt p's choice i is p * n + i.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.errors import EngineError
from tokenspeed.runtime.messages import TokenLogprob
from tokenspeed.runtime.outputs import Completion, OutputDelta
from tokenspeed.runtime.request_stream import RequestStream
from tokenspeed.runtime.sampling_params import SamplingParams
from tokenspeed.runtime.scoring import prompt_logprobs
from tokenspeed.runtime.server.errors import error_object
from tokenspeed.runtime.server.frame import Form, Frame, event
from tokenspeed.runtime.server.protocol import CompletionRequest
from tokenspeed.runtime.server.render import completion_logprobs, token_name, token_pieces, usage_object
from tokenspeed.runtime.server.served import Served
from tokenspeed.runtime.server.sse import DONE, EventStream, until_disconnect
from tokenspeed.runtime.server.whole import CLIENT_GONE, json_response


@dataclass(slots=True)
class _Echo:
    """A prompt as it is given back in front of its choices; empty where echo is off."""

    text: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)


async def completions(served: Served, body: CompletionRequest, request: Request) -> Response:
    """The response. Raises EngineError before anything is sent."""
    served.check_model(body.model)
    body.check_fields()
    llm, model = served.llm, served.model
    params = body.sampling()
    streams = await llm.submit_all(
        body.prompts(), params, priority=body.priority or 0, cache_salt=body.cache_salt or ""
    )
    answer = _Answer(llm, model, body, params, streams)
    close = served.track(request, answer.id, streams)
    if body.stream:
        return EventStream(answer, streams, close)
    whole = await until_disconnect(request, answer.whole(), close)
    return CLIENT_GONE if whole is None else json_response(whole)


class _Answer:
    """One answer over all prompts, whole or as events."""

    def __init__(
        self, llm: AsyncLLM, model: str, body: CompletionRequest, params: SamplingParams, streams: list[RequestStream]
    ) -> None:
        self._llm = llm
        self._body = body
        self._params = params
        self._prompts = body.prompts()
        self._streams = streams
        self._bare = body.logprobs is None and not (body.return_token_ids or body.continuous_usage)
        self._sent: dict[
            int, int
        ] = {}  # choice -> characters of its pieces so far, for the offsets of log-probabilities
        self._frames: dict[int, Frame] = {}  # of events that only add text, by choice
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        """text_completion."""
        choices: list[dict[str, Any]] = []
        outputs = [await stream.collect() for stream in self._streams]
        for at, output in enumerate(outputs):
            echo = await self._echo(at)
            for done in output.choices:
                choices.append(self._choice(len(choices), done, echo, 0))
        return {**self._head, "choices": choices, "usage": usage_object([output.usage for output in outputs])}

    # ---- text_completion events, the last one [DONE]; a fault ends the stream with an error event instead ----

    async def begin(self) -> bytes:
        if not self._body.echo:
            return b""
        events: list[bytes] = []
        count = self._params.n
        for at in range(len(self._streams)):
            echo = await self._echo(at)
            for index in range(at * count, (at + 1) * count):
                self._sent[index] = len(echo.text)
                events.append(self._event(self._choice(index, Completion(), echo, 0)))
        return b"".join(events)

    def news(self, at: int, delta: OutputDelta) -> bytes:
        if delta.finish_reason == "error":
            raise delta.failure
        body, index = self._body, at * self._params.n + delta.index
        if self._bare and delta.finish_reason is None:
            return self._frame(index).fill(delta.text) if delta.text else b""
        if not (delta.text or delta.finish_reason or delta.logprobs or body.return_token_ids):
            return b""
        offset = self._sent.get(index, 0)
        if body.logprobs is not None:
            self._sent[index] = offset + sum(map(len, token_pieces(self._llm.tokenizer, delta)))
        return self._event(self._choice(index, delta, _Echo(), offset))

    def form(self) -> Form | None:
        return Form(self._frame(0), None, None) if self._bare else None

    def passed(self, delta: OutputDelta) -> None:
        pass

    def end(self) -> bytes:
        if not self._body.include_usage:
            return DONE
        usage = usage_object([stream.usage for stream in self._streams])
        return event({**self._head, "choices": [], "usage": usage}) + DONE

    def fail(self, fault: EngineError) -> bytes:
        return event(error_object(500, fault.message))

    def _frame(self, index: int) -> Frame:
        if index not in self._frames:
            self._frames[index] = Frame(self._event(self._choice(index, Completion(text=Frame.HOLE), _Echo(), 0)))
        return self._frames[index]

    def _event(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self._body.include_usage:
            usages = [stream.usage for stream in self._streams]
            chunk["usage"] = usage_object(usages) if self._body.continuous_usage else None
        return event(chunk)

    def _choice(self, index: int, part: Completion | OutputDelta, echo: _Echo, offset: int) -> dict[str, Any]:
        """A choice, or a part of one, behind its echo. `offset`: characters of the choice before both."""
        logprobs = None
        if self._body.logprobs is not None:
            tokenizer = self._llm.tokenizer
            pieces = [*echo.pieces, *token_pieces(tokenizer, part)]
            logprobs = completion_logprobs(tokenizer, pieces, [*echo.logprobs, *(part.logprobs or [])], offset)
        choice = {
            "index": index,
            "text": echo.text + part.text,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        return {**choice, "token_ids": part.token_ids} if self._body.return_token_ids else choice

    async def _echo(self, at: int) -> _Echo:
        """A prompt's text, and its log-probabilities where they are asked for."""
        if not self._body.echo:
            return _Echo()
        tokenizer, ids, sent = self._llm.tokenizer, self._streams[at].prompt_ids, self._prompts[at]
        if tokenizer is None:
            pieces = [token_name(None, token) for token in ids]
        else:
            pieces = tokenizer.pieces(ids)
            if isinstance(sent, str) and ids[0] == tokenizer.bos_id and not sent.startswith(pieces[0]):
                pieces[0] = ""  # not a part of the text that was sent
        if self._body.logprobs is None:
            return _Echo("".join(pieces))
        entries = await prompt_logprobs(self._llm, ids, self._body.logprobs, self._body.cache_salt or "")
        return _Echo("".join(pieces), pieces, entries)
