"""A run as OpenAI's response object and its events, in the order that OpenAI documents.

Every item has one id, the same in all events and in the whole; every event bears its own type and the next
sequence_number; the last one is response.completed, .incomplete or .failed, whatever happens.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from tokenspeed.runtime.errors import EngineError, UnavailableError
from tokenspeed.runtime.outputs import OutputDelta, Usage
from tokenspeed.runtime.server.blocks import Block, Closed, Grew, News, Opened
from tokenspeed.runtime.server.errors import status_of
from tokenspeed.runtime.server.frame import Form, Frame, named_event
from tokenspeed.runtime.server.responses.items import seal
from tokenspeed.runtime.server.responses.request import ResponsesRequest
from tokenspeed.runtime.server.run import Run

Event = dict[str, Any]


class Answer:
    """One response. `response` is the object as it stands, whole once the run is over (`settle`, or the events' end).

    `outcome` is the run, or why there is none: to be set before the first event.
    """

    outcome: Run | EngineError

    def __init__(self, model: str, body: ResponsesRequest) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.response = _response(self.id, model, body)
        self._body = body
        self._items: dict[int, str] = {}  # a block's position: its item's id
        self._numbers = 0
        self._frames: dict[int, Frame] = {}  # of what a block grows by, by its position

    # ---- whole -----------------------------------------------------------------------------------------------------

    def settle(self, run: Run) -> str:
        """The run is over; the type of the terminal event."""
        (choice,) = run.choices
        if choice.finish_reason == "abort":
            cancelled = self.response["status"] == "cancelled"
            self.refuse(UnavailableError("the request was ended before its answer was complete"))
            if cancelled:  # as was asked for
                self.response |= {"status": "cancelled", "error": None}
            return "response.failed"
        cut = choice.finish_reason == "length"
        self._close("incomplete" if cut else "completed")
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        return f"response.{self.response['status']}"

    def refuse(self, fault: EngineError) -> str:
        """The request was refused or failed; the type of the terminal event. Clients parse when to try again."""
        message, (status, code) = fault.message, status_of(fault)
        if fault.retry_after is not None:
            message += f". Please try again in {fault.retry_after:g}s."
        self._close("failed")
        self.response["error"] = {"code": code if code and status < 500 else "server_error", "message": message}
        return "response.failed"

    def _close(self, status: str) -> None:
        if isinstance(run := self.outcome, Run):
            self.response["output"] = [self._item(block) for block in run.choices[0].blocks.blocks]
            self.response["usage"] = _usage(run.usage)
        self.response |= {"status": status, "completed_at": int(time.time()) if status == "completed" else None}

    # ---- events ----------------------------------------------------------------------------------------------------

    async def begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event({"type": kind, "response": self.response}) for kind in kinds)

    def news(self, at: int, delta: OutputDelta) -> bytes:
        assert isinstance(self.outcome, Run), "a delta comes of a run"
        if (block := self.outcome.choices[0].grow(delta)) is not None:
            return self._grew(block, delta.text)
        news = self.outcome.accept(delta)
        if len(news) == 1 and isinstance(item := news[0], Grew):
            return self._grew(item.block, item.text)
        events: list[bytes] = []
        for item in news:
            if isinstance(item, Grew):
                events.append(self._grew(item.block, item.text))
            else:
                events += [self._event(payload) for payload in self._news(item)]
        return b"".join(events)

    def form(self) -> Form | None:
        if not isinstance(self.outcome, Run):
            return None
        choice = self.outcome.choices[0]
        block = choice.open_text
        return Form(self._frame(block), self._numbers, choice.marks) if block is not None else None

    def passed(self, delta: OutputDelta) -> None:
        assert isinstance(self.outcome, Run), "a delta comes of a run"
        self.outcome.choices[0].grow(delta)
        self._numbers += delta.written

    def end(self) -> bytes:
        if isinstance(self.outcome, EngineError):
            raise self.outcome
        return self._event({"type": self.settle(self.outcome), "response": self.response})

    def fail(self, fault: EngineError) -> bytes:
        return self._event({"type": self.refuse(fault), "response": self.response})

    def _event(self, payload: Event) -> bytes:
        payload["sequence_number"] = self._numbers
        self._numbers += 1
        return named_event(payload)

    def _grew(self, block: Block, text: str) -> bytes:
        """The event of a block that grew, numbered as `_event` does."""
        number = self._numbers
        self._numbers += 1
        return self._frame(block).fill(text, number)

    def _frame(self, block: Block) -> Frame:
        """Of the events of a block that grows."""
        frame = self._frames.get(block.at)
        if frame is None:
            (sample,) = self._news(Grew(block, Frame.HOLE))
            frame = self._frames[block.at] = Frame(named_event(sample), number="sequence_number")
        return frame

    def _news(self, news: News) -> Iterator[Event]:
        """The events of one item of news."""
        block, at = news.block, {"output_index": news.block.at}
        place = {**at, "item_id": self._id(block)}
        if isinstance(news, Opened):
            yield {"type": "response.output_item.added", **at, "item": self._item(block, begun=True)}
            if block.kind != "call":
                yield {
                    "type": self._part_event(block, "added"),
                    **place,
                    **self._part_place(block),
                    **self._part(block, ""),
                }
        elif isinstance(news, Grew):
            more = {"logprobs": []} if block.kind == "text" else {}
            yield {
                "type": self._text_event(block, "delta"),
                **place,
                **self._part_place(block),
                "delta": news.text,
                **more,
            }
        elif isinstance(news, Closed):
            yield from self._closed(block, place)

    def _closed(self, block: Block, place: Event) -> Iterator[Event]:
        inner = self._part_place(block)
        done: Event = {"type": self._text_event(block, "done"), **place, **inner}
        if block.kind == "call":
            yield (
                {**done, "input": block.text} if block.custom else {**done, "arguments": block.text, "name": block.name}
            )
        else:
            yield {**done, "text": block.text, **({"logprobs": []} if block.kind == "text" else {})}
            yield {"type": self._part_event(block, "done"), **place, **inner, **self._part(block, block.text)}
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": self._item(block)}

    def _text_event(self, block: Block, end: str) -> str:
        if block.kind == "call":
            return f"response.{'custom_tool_call_input' if block.custom else 'function_call_arguments'}.{end}"
        if block.kind == "text":
            return f"response.output_text.{end}"
        return f"response.reasoning_{'summary_text' if self._body.summarised else 'text'}.{end}"

    def _part_event(self, block: Block, end: str) -> str:
        summary = block.kind == "reasoning" and self._body.summarised
        return f"response.{'reasoning_summary_part' if summary else 'content_part'}.{end}"

    def _part_place(self, block: Block) -> Event:
        if block.kind == "call":
            return {}
        return {"summary_index" if block.kind == "reasoning" and self._body.summarised else "content_index": 0}

    # ---- items -----------------------------------------------------------------------------------------------------

    def _id(self, block: Block) -> str:
        if block.at not in self._items:
            kinds = {"text": "msg", "reasoning": "rs", "call": "ctc" if block.custom else "fc"}
            self._items[block.at] = f"{kinds[block.kind]}_{uuid.uuid4().hex}"
        return self._items[block.at]

    def _part(self, block: Block, text: str) -> Event:
        """The one part of a message or of reasoning."""
        if block.kind == "text":
            return {"part": {"type": "output_text", "text": text, "annotations": [], "logprobs": []}}
        return {"part": {"type": "summary_text" if self._body.summarised else "reasoning_text", "text": text}}

    def _item(self, block: Block, *, begun: bool = False) -> Event:
        """The output item as it is done, or as it has `begun`: empty."""
        text = "" if begun else block.text
        status = "in_progress" if begun else "incomplete" if block.cut else "completed"
        head = {"id": self._id(block), "status": status}
        if block.kind == "call":
            namespace, name = self._body.namespace_of(block.name)
            head |= {"call_id": block.id, "name": name, **({"namespace": namespace} if namespace else {})}
            if block.custom:
                return {**head, "type": "custom_tool_call", "input": text}
            return {**head, "type": "function_call", "arguments": text}
        content = [] if begun else [self._part(block, text)["part"]]
        if block.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": content}
        places = {"summary": [], "content": []} | {"summary" if self._body.summarised else "content": content}
        item = {**head, "type": "reasoning", **places}
        return {**item, "encrypted_content": seal(text)} if self._body.sealed and not begun else item


def _response(response_id: str, model: str, body: ResponsesRequest) -> dict[str, Any]:
    """The object as it is when the request has been taken."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
