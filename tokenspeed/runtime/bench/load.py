"""Runs a load: conversations begin when they arrive, each asks its next step when the answer before has come and its pause is
over. Invariant: every step that was begun leaves one record, answered or failed; a conversation ends with its first failure.

With `concurrency` at most so many requests are in flight (a closed loop where all arrive at once); a step that waits for its
turn is not yet sent, and its times count from when it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenspeed.runtime.bench.http import Http, HttpError
from tokenspeed.runtime.bench.workload import Conversation, Step, Texts

Endpoint = Literal["chat", "completions"]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROBE = 400  # words of the request that tells how many tokens a word has


@dataclass
class Record:
    """One request as its client saw it; times in seconds from the load's beginning."""

    conversation: int
    step: int
    by_user: bool
    sent: float
    stamps: list[float] = field(default_factory=list)  # of pieces of output
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)  # prompt tokens found, by tier
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class Ask:
    """How requests are put."""

    endpoint: Endpoint
    model: str
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of the body
    ignore_eos: bool = False


class LoadRun:
    """One run. `done` is told of each record as it ends."""

    def __init__(self, http: Http, ask: Ask, texts: Texts, concurrency: int, done: Callable[[Record], None]) -> None:
        self._http, self._ask, self._texts, self._done = http, ask, texts, done
        self._turn = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
        self._began = 0.0
        self.records: list[Record] = []

    async def run(self, talks: list[Conversation]) -> float:
        """Runs all conversations; the seconds it took."""
        self._began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for talk in talks:
                group.create_task(self._talk(talk))
        return time.perf_counter() - self._began

    async def _talk(self, talk: Conversation) -> None:
        await asyncio.sleep(max(talk.start - self._now(), 0))
        system = self._texts.words(talk.prefix, talk.prefix_tokens) if talk.prefix_tokens else ""
        messages = [{"role": "system", "content": system}] if system else []
        head = len(messages)
        for number, step in enumerate(talk.steps):
            await asyncio.sleep(step.gap)
            if step.kept < 1.0:
                messages[head:] = [self._summary(step, messages[head:])]
            messages.append({"role": "user", "content": self._texts.words(step.text, step.tokens)})
            async with self._turn:
                record = Record(talk.number, number, step.by_user, self._now())
                self.records.append(record)
                await self._one(record, messages, step.output)
            self._done(record)
            if record.error:
                return
            messages.append({"role": "assistant", "content": record.text})

    def _summary(self, step: Step, messages: list[dict[str, str]]) -> dict[str, str]:
        """What a compaction leaves of a conversation: other words, fewer of them."""
        length = sum(len(m["content"].split()) for m in messages) / self._texts.per_token
        return {"role": "user", "content": self._texts.words((*step.text, 1), max(int(step.kept * length), 1))}

    async def _one(self, record: Record, messages: list[dict[str, str]], output: int) -> None:
        try:
            async for event in self._http.events(PATHS[self._ask.endpoint], self._body(messages, output)):
                if error := event.get("error"):
                    record.error = str(error.get("message", error) if isinstance(error, dict) else error)
                self._note(record, event)
        except (HttpError, ValueError) as fault:
            record.error = str(fault)
        record.ended = self._now()
        record.output_tokens = record.output_tokens or len(record.stamps)
        if not record.stamps:  # tokens without text, such as the model's end
            record.stamps.append(record.ended)
        if not record.error and not record.output_tokens:
            record.error = "the answer has neither output nor usage"

    def _note(self, record: Record, event: dict[str, Any]) -> None:
        if usage := event.get("usage"):
            record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage.get("completion_tokens", 0)
            details = usage.get("prompt_tokens_details") or {}
            record.cached = details.get("cached_tokens_details") or {"all": details.get("cached_tokens") or 0}
        for choice in event.get("choices", ()):
            delta = choice if self._ask.endpoint == "completions" else choice.get("delta", {})
            said = delta.get("text") or delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if said or thought or delta.get("tool_calls"):
                record.stamps.append(self._now())
                record.text += said

    def _body(self, messages: list[dict[str, str]], output: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._ask.model, "max_tokens": output, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self._ask.ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": output}
        if self._ask.endpoint == "chat":
            body["messages"] = messages
        else:
            body["prompt"] = "\n\n".join(m["content"] for m in messages)
        return body | self._ask.extra

    def _now(self) -> float:
        return time.perf_counter() - self._began


async def served_model(http: Http) -> tuple[str, int]:
    """(name, longest context or 0) of the first model of a server. Raises HttpError."""
    try:
        card = (await http.json("GET", "/v1/models"))["data"][0]
        return str(card["id"]), int(card.get("max_model_len") or 0)
    except (KeyError, IndexError, TypeError, ValueError):
        raise HttpError("/v1/models names no model: give --model") from None


async def words_per_token(http: Http, ask: Ask) -> float:
    """How many of the words that texts are made of go to a token, as the server counts. Raises HttpError."""
    counts: list[int] = []
    for words in (PROBE // 4, PROBE):
        run = LoadRun(http, ask, Texts(), 0, lambda record: None)
        await run.run([Conversation(0, [Step((0, 5), words, 1)])])
        (record,) = run.records
        if record.error or not record.prompt_tokens:
            raise HttpError(
                record.error or "the server counts no tokens where stream_options.include_usage asks for it"
            )
        counts.append(record.prompt_tokens)
    grown = counts[1] - counts[0]  # without what the chat template adds
    return (PROBE - PROBE // 4) / grown if grown > 0 else 1.0
