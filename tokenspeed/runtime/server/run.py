"""A turn on its way: rendered, submitted, and its output as news of blocks, choice by choice.

The one path from a `Turn` to an answer. Give a `Run` the deltas of its stream for what is new, or `finish` it for the whole;
both leave the same choices behind. It ends with one finish reason a choice; a fault of the core is a GenerationError.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar import Structure
from tokenspeed.runtime.messages import FinishReason, TokenLogprob
from tokenspeed.runtime.outputs import OutputDelta, Usage
from tokenspeed.runtime.parsers import OutputParser, Piece, Reasoning, answer_mark, call_grammar, make_parser
from tokenspeed.runtime.request_stream import RequestStream
from tokenspeed.runtime.server.blocks import Block, Blocks, News
from tokenspeed.runtime.server.turn import Turn


@dataclass(frozen=True, slots=True)
class Notation:
    """How the model writes calls and reasoning: names of parsers, None where it has no notation for them."""

    tool: str | None = None
    reasoning: str | None = None


class Choice:
    """One choice: its blocks, its tokens, and what ended it."""

    __slots__ = (
        "_parser", "_thinking", "blocks", "finish_reason", "index", "logprobs", "reasoning_tokens", "stop_reason", "token_ids",
    )  # fmt: skip

    def __init__(self, index: int, parser: OutputParser, blocks: Blocks) -> None:
        self.index = index
        self.blocks = blocks
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.reasoning_tokens = 0
        self._parser = parser
        self._thinking = False

    def accept(self, delta: OutputDelta) -> list[News]:
        """The news of one delta; the last one closes what is open."""
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        news = self._add(self._parser.feed(delta.text) if delta.text else [])
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            settled = self.blocks.settled
            news += [*self._add(self._parser.finish()), *self.blocks.end()]
            if self.blocks.settled > settled and delta.finish_reason != "stop":
                self.blocks.blocks[-1].cut = True
        if self._thinking:
            self.reasoning_tokens += len(delta.token_ids)
        return news

    @property
    def open_text(self) -> Block | None:
        """The open text, if nothing but more of it can come before the end or a mark: so it is with nearly every token of an answer."""
        block = self.blocks.open
        if block is None or block.kind != "text":
            return None
        return block if self._parser.plain or self._parser.marks is not None else None

    @property
    def marks(self) -> bytes | None:
        """First bytes of the marks that the open text can go on to; None: there are none."""
        return self._parser.marks

    def grow(self, delta: OutputDelta) -> Block | None:
        """The open text, if all that the delta does is to grow it by its text.

        None, and nothing has happened, where it may do more: `accept` it.
        """
        block = self.open_text
        if block is None or delta.logprobs is not None or delta.finish_reason is not None or not delta.text:
            return None
        if not delta.written and not self._parser.is_content(delta.text):
            return None
        self._thinking = False
        self.token_ids += delta.token_ids
        block.parts.append(delta.text)
        return block

    def _add(self, pieces: list[Piece]) -> list[News]:
        if pieces:
            self._thinking = Reasoning in map(type, pieces)
        return self.blocks.add(pieces)


class Run:
    """See the module. `close` it in any case; what is unfinished is aborted."""

    def __init__(self, turn: Turn, stream: RequestStream, choices: list[Choice], *, cut: bool) -> None:
        self.turn = turn
        self.choices = choices
        self.cut = cut  # max_tokens was cut to the room in the context
        self.stream = stream

    @property
    def usage(self) -> Usage:
        """The counts so far; final once the iteration has ended."""
        thought = sum(choice.reasoning_tokens for choice in self.choices)
        return dataclasses.replace(self.stream.usage, reasoning_tokens=thought)

    def accept(self, delta: OutputDelta) -> list[News]:
        """The news of a delta of the stream, of the choice that its `index` names. Raises GenerationError."""
        news = self.choices[delta.index].accept(delta)
        if delta.finish_reason == "error":
            raise delta.failure
        return news

    async def finish(self) -> Run:
        """Run to the end. Raises GenerationError."""
        await self.stream.each(self.accept)
        return self

    def close(self) -> None:
        self.stream.close()

    def abort(self) -> None:
        """End what is unfinished with the finish reason `abort`, which the reader of the run gets to see."""
        self.stream.abort()


async def begin(llm: AsyncLLM, notation: Notation, turn: Turn) -> Run:
    """Submit a turn. Raises EngineError before anything of it reaches the core."""
    tools = turn.offered
    if tools and not notation.tool:
        raise RequestError(
            "this model's notation of tool calls is not known: start with --tool-call-parser, or leave tools out",
            param="tools",
        )
    text, ids = await prompt(llm, notation, turn)
    parsers = [
        make_parser(notation.tool, notation.reasoning, tools=tools, prompt=text, forced=turn.choice.forced)
        for _ in range(turn.params.n)
    ]
    params, structure = turn.params, _structure(llm, notation, turn, text)
    if structure is not params.structure:
        params = dataclasses.replace(params, structure=structure)
    room, wanted = llm.max_len - len(ids), turn.params.max_tokens
    cut = turn.fit and wanted is not None and wanted > room >= 1
    if cut:
        params = dataclasses.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    stream = await llm.submit(
        ids,
        params,
        priority=turn.priority,
        cache_salt=turn.cache_salt,
        kept=parsers[0].special_tokens,
    )
    choices = [
        Choice(index, parser, Blocks(tools, parallel=turn.parallel, show_reasoning=turn.show_reasoning))
        for index, parser in enumerate(parsers)
    ]
    return Run(turn, stream, choices, cut=cut)


def _structure(llm: AsyncLLM, notation: Notation, turn: Turn, prompt: str) -> Structure | None:
    """What the output must look like: forced calls in the model's notation, what was asked for, or either of the two.

    A structure constrains the answer, not the thought before it.
    """
    if turn.choice.forced or (turn.offered and turn.params.structure is not None):
        assert notation.tool is not None, "tools are offered, so there is a notation"
        return call_grammar(
            notation.tool,
            turn.tools,
            turn.choice.name or None,
            turn.parallel,
            reasoning=notation.reasoning,
            prompt=prompt,
            special_tokens=llm.tokenizer.special_by_text if llm.tokenizer else None,
            answer=turn.params.structure,
        )
    if turn.params.structure is None or notation.reasoning is None:
        return turn.params.structure
    return dataclasses.replace(turn.params.structure, after=answer_mark(notation.reasoning, prompt))


async def prompt(llm: AsyncLLM, notation: Notation, turn: Turn) -> tuple[str, list[int]]:
    """The rendered prompt and its tokens; the template writes the special ones itself. Raises RequestError."""
    text = llm.render_chat(turn.messages, **{**turn.template_variables(), "tool_notation": notation.tool})
    return text, await llm.encode(text, add_special_tokens=False)
