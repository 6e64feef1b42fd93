"""Where a model's thinking begins and ends, by family.

A thought stands at the beginning of an answer. The prompt may have opened it already; then the output only closes
it. What is never closed is a thought to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.runtime.parsers.names import reasoning_parser
from tokenspeed.runtime.parsers.output import Emitter
from tokenspeed.runtime.parsers.reader import Reader, Step, markers


@dataclass(frozen=True, slots=True)
class Thinking:
    """A family's tags. `implied`: it thinks from the start unless the prompt has closed the thought."""

    open: str
    close: str
    implied: bool = False
    ends_at_call: bool = False  # whether a call's mark ends a thought that was not closed

    @property
    def special_tokens(self) -> frozenset[str]:
        """The tags, which the detokenizer must keep where they are special tokens."""
        return frozenset({self.open, self.close})

    def opened_by(self, prompt: str) -> bool:
        """Whether the model is thinking already at the end of a prompt."""
        tail = prompt.rstrip()
        if tail.endswith((self.open, self.close)):
            return tail.endswith(self.open)
        return self.implied and prompt.rfind(self.close) <= prompt.rfind(self.open)

    def read(self, reader: Reader, emitter: Emitter, *, opened: bool, calls: tuple[str, ...]) -> Step[None]:
        """The thought at the beginning of the output, if there is one. `calls`: marks that end it, left unread."""
        reader.keep()
        yield from reader.space()
        tagged = (yield from reader.literal(self.open)) is not None
        if tagged:
            reader.release()
        else:
            reader.back()
        if not tagged and not opened:
            return
        emitter.think()
        mark = yield from reader.until(markers(self.close, *calls), emitter.reasoning)
        if mark in calls:
            reader.at -= len(mark or "")
        if mark is not None:
            emitter.answer()


THINKING: dict[str, Thinking] = {
    "deepseek_r1": Thinking("<think>", "</think>", implied=True, ends_at_call=True),
    "glm45": Thinking("<think>", "</think>", ends_at_call=True),
    "kimi": Thinking("◁think▷", "◁/think▷"),
    "kimi_k2": Thinking("<think>", "</think>", ends_at_call=True),
    "minimax": Thinking("<think>", "</think>", ends_at_call=True),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "qwen3": Thinking("<think>", "</think>", ends_at_call=True),
}


def answer_mark(reasoning: str, prompt: str) -> str:
    """The text that ends what comes before the answer, at the end of this prompt; "" where the answer may begin at once."""
    reasoning = reasoning_parser(reasoning)
    if reasoning == "gpt_oss":
        return "<|channel|>final<|message|>"
    return THINKING[reasoning].close if THINKING[reasoning].opened_by(prompt) else ""
