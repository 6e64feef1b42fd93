"""Sessions of coding agents, drawn from the statistics of recorded ones (Claude Code and Codex: TraceLab, arXiv 2606.30560).

Invariant: a session is a pure function of the seed and its number, so every policy gets the same traffic. The distributions:
a prefix of 15-25k tokens (system prompt and tools) that all sessions of an agent kind share; a first context of lognormal
length (median 80k, p90 120k); steps lognormal (median 15, p90 135); of what a step appends 90 % is lognormal (median 875) and
10 % is 10k and more; outputs lognormal (median 214, p90 1.7k); tools take lognormal times (median 0.3 s, p90 13.6 s) and in
4 % of cases more than a minute; a person answers after lognormal times (median 86 s, p90 21 min), 8.8 steps apart; 12 % of
sessions are compacted once to 20-40 % of their length, and any session is when it outgrows the model; one user's request in
ten starts 2-4 sub-agents, short sessions of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
VOCABULARY = 150_000
Z90 = 1.2816  # of the normal distribution
KINDS = 2  # of agents


@dataclass(frozen=True)
class Traffic:
    """How much of it. `length_scale` multiplies all token counts, `human_scale` the times that people take."""

    sessions: int = 30
    seed: int = 0
    arrivals_per_minute: float = 3.0
    max_steps: int = 40
    length_scale: float = 1.0
    human_scale: float = 0.1


@dataclass
class Turn:
    """One step of a session: what is appended to the conversation before it, and how long it took to come."""

    gap: float  # seconds since the answer before
    appended: int  # tokens
    output: int  # tokens to generate
    by_user: bool
    kept: float = 1.0  # below 1: the conversation was compacted before, to so much of its length
    agents: int = 0  # sub-agents that begin with it


@dataclass
class Session:
    """A conversation: `prompt(i)` once the turns before i have been answered (`said`)."""

    number: int
    kind: int
    start: float  # seconds
    turns: list[Turn]
    prefix: int  # tokens shared by all sessions of the kind
    limit: int  # tokens of the longest prompt
    _tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int32))

    def prompt(self, index: int) -> Tokens:
        """The tokens of turn `index`; called in order. Past the limit it is compacted by itself."""
        turn = self.turns[index]
        if not index:
            self._tokens = draw((1, self.kind), self.prefix)
        appended = draw((2, self.number, index), turn.appended)
        room = self.limit - turn.output - len(appended)
        if turn.kept < 1.0 or len(self._tokens) > room:
            keep = max(int(len(self._tokens) * min(turn.kept, 0.4)) - self.prefix, 0)
            keep = min(keep, max(room - self.prefix, 0))
            self._tokens = np.concatenate([self._tokens[: self.prefix], draw((3, self.number, index), keep)])
        self._tokens = np.concatenate([self._tokens, appended])[: self.limit - turn.output]
        return self._tokens

    def said(self, tokens: Tokens) -> None:
        """The answer to the last prompt."""
        self._tokens = np.concatenate([self._tokens, tokens])


def sessions(traffic: Traffic, limit: int) -> list[Session]:
    """All sessions by their start, sub-agents not among them. `limit`: tokens of prompt and output at most."""
    rng = np.random.default_rng((traffic.seed, 0))
    starts = np.cumsum(rng.exponential(60.0 / traffic.arrivals_per_minute, traffic.sessions))
    return [_session(traffic, limit, i, float(at)) for i, at in enumerate(starts)]


def sub_agents(traffic: Traffic, parent: Session, turn: int, at: float, count: int) -> Iterator[Session]:
    """Short sessions of the parent's kind that begin at a time."""
    for i in range(count):
        number = (parent.number + 1) * 1_000_000 + turn * 10 + i
        yield _session(traffic, parent.limit, number, at, kind=parent.kind, steps=4)


def _session(
    traffic: Traffic, limit: int, number: int, start: float, kind: int | None = None, steps: int | None = None
) -> Session:
    rng = np.random.default_rng((traffic.seed, 1, number))
    scale = traffic.length_scale
    kind = int(rng.integers(KINDS)) if kind is None else kind
    alone = steps is None
    count = min(int(_lognormal(rng, 15, 135)) + 1, traffic.max_steps) if steps is None else steps
    prefix = max(int(scale * np.random.default_rng((traffic.seed, 2, kind)).integers(15_000, 25_001)), 1)
    compacted = int(rng.integers(1, count)) if count > 1 and rng.random() < 0.12 else 0
    turns: list[Turn] = []
    for i in range(count):
        by_user = i == 0 or (alone and rng.random() < 1 / 8.8)
        first = _lognormal(rng, 80_000, 120_000) if alone else _lognormal(rng, 4_000, 12_000)
        appended = max(first - prefix / scale, 500) if i == 0 else _appended(rng)
        turns.append(
            Turn(
                gap=0.0 if i == 0 else _human(rng) * traffic.human_scale if by_user else _tool(rng),
                appended=max(int(scale * appended), 1),
                output=max(int(scale * min(_lognormal(rng, 214, 1_700), 8_000)), 1),
                by_user=by_user,
                kept=float(rng.uniform(0.2, 0.4)) if i == compacted and i else 1.0,
                agents=int(rng.integers(2, 5)) if by_user and alone and rng.random() < 0.1 else 0,
            )
        )
    return Session(number, kind, start, turns, min(prefix, limit // 2), limit)


def _lognormal(rng: np.random.Generator, median: float, p90: float) -> float:
    return float(median * math.exp(math.log(p90 / median) / Z90 * rng.standard_normal()))


def _appended(rng: np.random.Generator) -> float:
    return _lognormal(rng, 875, 2_400) if rng.random() < 0.9 else 10_000 + float(rng.exponential(15_000))


def _tool(rng: np.random.Generator) -> float:
    return 60 + float(rng.exponential(90)) if rng.random() < 0.04 else min(_lognormal(rng, 0.3, 13.6), 60.0)


def _human(rng: np.random.Generator) -> float:
    return min(_lognormal(rng, 86, 1_260), 14 * 3600.0)


def draw(seed: tuple[int, ...], count: int) -> Tokens:
    """Tokens that are the same wherever they are drawn with a seed."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)
