"""What is asked: conversations of steps. Invariant: a load is a pure function of its parameters and seed, texts included, so two
servers get the same one; what a server answers is part of the conversation that goes on.

Lengths are in tokens; texts are made of common words, so many to a token as the server itself counts (`Texts.per_token`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tokenspeed.runtime.simulate.workload import Traffic, sessions

DATASETS = ("random", "sharegpt", "agentic")
_COMMON = (
    "the of and to in is was for on as with by at from his her it that be are not have this an which or had but one all "
    "were they their has been more when who will would no if there can time out so what up two into than its new some could "
    "them these other then now my over first only any also after our well way even many must before here through back years "
    "where much your between both under such long make world still own see men work life home small end put old great here "
    "hand high year came show every good part place made live where light kind need house picture try again point mother "
    "near build self earth father head stand page country found answer school grow study learn plant cover food sun four "
    "state keep eye never last let thought city tree cross farm hard start might story saw far sea draw left late run"
)
_WORDS = _COMMON.split()


@dataclass(frozen=True)
class Load:
    """How much of it, and its shape. Lengths in tokens."""

    dataset: str = "random"
    prompts: int = 100  # requests, over all conversations
    seed: int = 0
    input_len: int = 1024
    output_len: int = 128
    prefix_len: int = 0  # of a text that all prompts of `random` share
    range_ratio: float = 0.0  # lengths of `random` vary by so much
    length_scale: float = 1.0  # of `agentic`
    human_scale: float = 0.1  # of the times that people take
    tool_scale: float = 1.0  # and tools
    context: int = 32_768  # prompt and output at most
    salt: int = 0  # another one: other words of the same lengths, of which no cache knows


@dataclass(frozen=True)
class Step:
    """One request: what is appended to the conversation, the longest answer, and the pause before it."""

    text: tuple[int, ...]  # seed of the words
    tokens: int
    output: int
    gap: float = 0.0  # seconds after the answer before
    by_user: bool = True
    kept: float = 1.0  # below 1: the conversation was compacted before, to so much of its length


@dataclass
class Conversation:
    """Steps in their order, behind a prefix that may be shared with others."""

    number: int
    steps: list[Step]
    prefix: tuple[int, ...] = ()  # seed of its words
    prefix_tokens: int = 0
    start: float = field(default=0.0)  # seconds from the beginning, where the load is open


def conversations(load: Load) -> list[Conversation]:
    """As many as hold the requests asked for."""
    makers = {"random": _random, "sharegpt": _sharegpt, "agentic": _agentic}
    out: list[Conversation] = []
    left = load.prompts
    for c in makers[load.dataset](load):
        c.steps = c.steps[:left]
        left -= len(c.steps)
        out.append(c)
        if not left:
            break
    return out


def _random(load: Load) -> Iterator[Conversation]:
    """Requests of their own, of lengths within input_len and output_len, more or less by range_ratio."""
    rng = np.random.default_rng((load.seed, 0))

    def about(length: int) -> int:
        low, high = length * (1 - load.range_ratio), length * (1 + load.range_ratio)
        return max(int(rng.integers(int(low), int(high) + 1)), 1)

    for i in range(load.prompts):
        step = Step((load.seed, load.salt & 0xFFFF, 1, i), about(load.input_len), about(load.output_len))
        yield Conversation(i, [step], (load.seed, load.salt & 0xFFFF, 0), load.prefix_len)


def _sharegpt(load: Load) -> Iterator[Conversation]:
    """Chats of people: a few turns, short questions with a long tail, answers of a few hundred tokens."""
    for i in range(load.prompts):
        rng = np.random.default_rng((load.seed, 1, i))
        turns = 1 + min(int(rng.geometric(0.3)) - 1, 9)
        steps = []
        for k in range(turns):
            asked, said = _lognormal(rng, 60, 600), _lognormal(rng, 190, 600)
            gap = 0.0 if k == 0 else load.human_scale * min(_lognormal(rng, 30, 180), 600)
            steps.append(
                Step((load.seed, load.salt & 0xFFFF, 2, i, k), min(int(asked) + 1, 4096), min(int(said) + 1, 1024), gap)
            )
        yield Conversation(i, _fitted(steps, 0, load.context))


def _agentic(load: Load) -> Iterator[Conversation]:
    """Sessions of coding agents, as the simulator has them (runtime/simulate/workload.py)."""
    traffic = Traffic(load.prompts, load.seed, length_scale=load.length_scale, human_scale=load.human_scale)
    for s in sessions(traffic, load.context):
        steps = [
            Step(
                (load.seed, load.salt & 0xFFFF, 3, s.number, k), t.appended, t.output,
                t.gap if t.by_user else t.gap * load.tool_scale, t.by_user, t.kept,
            )
            for k, t in enumerate(s.turns)
        ]  # fmt: skip
        prefix = (load.seed, load.salt & 0xFFFF, 4, s.kind)
        yield Conversation(s.number, _fitted(steps, s.prefix, load.context), prefix, s.prefix)


def _fitted(steps: list[Step], prefix: int, context: int) -> list[Step]:
    """The steps such that no request outgrows the context, with a tenth to spare: the conversation is compacted before one that
    would, and what is longer than the rest is shortened."""
    out: list[Step] = []
    held = 0  # tokens of the conversation behind its prefix
    room = max(int(0.9 * context) - prefix, 8)
    for step in steps:
        step = replace(step, output=min(step.output, room // 4))
        if held and held + step.tokens + step.output > room:
            step = replace(step, kept=min(step.kept, 0.3))
        held = int(held * step.kept)
        step = replace(step, tokens=max(min(step.tokens, room - step.output - held), 1))
        held += step.tokens + step.output
        out.append(step)
    return out


def _lognormal(rng: np.random.Generator, median: float, p90: float) -> float:
    return float(median * math.exp(math.log(p90 / median) / 1.2816 * rng.standard_normal()))


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which conversations begin: gamma gaps (burstiness 1: a Poisson process), all at once where the rate is
    infinite; scaled to the rate asked for, so that runs of few are comparable."""
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng((seed, 9)).gamma(burstiness, 1.0 / (rate * burstiness), count)
    gaps *= count / rate / gaps.sum()
    return np.concatenate([[0.0], np.cumsum(gaps)[:-1]]).tolist()


class Texts:
    """Words to a number of tokens."""

    def __init__(self, per_token: float = 1.0) -> None:
        self.per_token = per_token  # words

    def words(self, seed: tuple[int, ...], tokens: int) -> str:
        """The same words for a seed, always; the first of them where less are wanted."""
        count = max(round(tokens * self.per_token), 1)
        picks = np.random.default_rng(seed).integers(0, len(_WORDS), count)
        return " ".join(_WORDS[i] for i in picks.tolist())
