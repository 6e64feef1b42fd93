"""Sampling parameters as the program reads them: one row of packed words a request, and the changes to per-slot state.

Invariant: a step uses the full sampler exactly when one of its rows needs more than greedy or temperature sampling; a
request's state (counts, seen tokens, bias) is rebuilt whenever it gets a new slot, so retraction cannot change a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenspeed.ir.ops.filters import words_of
from tokenspeed.ir.ops.sampling import PARAM_WORDS, Flag, Word
from tokenspeed.runtime.executor import StateOp
from tokenspeed.runtime.grammar.matcher import Matcher
from tokenspeed.runtime.messages import CoreParams, Submit

_FULL = Flag.PENALTIES | Flag.BIAS | Flag.LOGPROBS | Flag.FILTERS | Flag.MASK
GREEDY_BELOW = 1e-5  # temperatures below are greedy: float32 logits over them would overflow


@dataclass
class _Request:
    params: CoreParams
    prompt: np.ndarray  # int32
    words: np.ndarray  # int32 [PARAM_WORDS], position and slot still 0
    counts: dict[int, int] = field(default_factory=dict)  # output tokens, where penalties need them
    banned: bool = False  # stop ids are banned until min_tokens
    matcher: Matcher | None = None  # of a request with a structure


class SamplingTable:
    """Rows of the requests that run."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.words = words_of(vocab_size)  # of a mask
        self.requests: dict[int, _Request] = {}
        self.structured = 0  # of them, those with a matcher

    def add(self, m: Submit, matcher: Matcher | None = None) -> None:
        prompt = np.frombuffer(m.prompt, dtype=np.int32)
        self.requests[m.request_id] = _Request(m.params, prompt, pack_params(m.params), matcher=matcher)
        self.structured += matcher is not None

    def drop(self, request_id: int) -> None:
        r = self.requests.pop(request_id, None)
        self.structured -= r is not None and r.matcher is not None

    def matcher(self, request_id: int) -> Matcher | None:
        r = self.requests.get(request_id)
        return None if r is None else r.matcher

    def awaits(self, plan: Any) -> bool:
        """Whether a row's mask hangs on a token that is still out: the matcher has seen fewer than the row's position says."""
        if not self.structured:
            return False
        for i in np.flatnonzero((plan.request_ids >= 0) & (plan.out_pos >= 0)).tolist():
            r = self.requests.get(int(plan.request_ids[i]))
            if r is not None and r.matcher is not None and r.matcher.tokens < plan.out_pos[i] - len(r.prompt):
                return True
        return False

    def output(self, request_id: int, token: int) -> int:
        """Notes a sampled token; returns how many alternatives' log-probabilities are wanted (-1: none at all)."""
        r = self.requests.get(request_id)
        if r is None:
            return -1
        if r.words[Word.FLAGS] & Flag.PENALTIES:
            r.counts[token] = r.counts.get(token, 0) + 1
        return r.params.logprobs

    def rows(self, plan: Any) -> tuple[np.ndarray, str, list[StateOp]]:
        """Packed parameters int32 [dp * rows, words], the variant, and the state changes of a plan."""
        ids, slots, positions = plan.request_ids, plan.request_slots, plan.out_pos
        out = np.zeros((len(ids), PARAM_WORDS), dtype=np.int32)
        out[:, Word.FLAGS] = int(Flag.GREEDY)
        ops: list[StateOp] = []
        flags = 0
        for i in np.flatnonzero(ids >= 0).tolist():
            r = self.requests.get(int(ids[i]))
            if r is None:
                continue  # aborted between plan and launch: its row is a hole that nobody reads
            # A chunk that does not end its prompt samples nothing: its row is a hole that counts no token.
            if positions[i] >= 0:
                out[i] = r.words
                out[i, Word.SLOT], out[i, Word.POSITION] = slots[i], positions[i]
                if r.matcher is not None and r.matcher.words is not None:
                    out[i, Word.FLAGS] |= int(Flag.MASK)
                    ops.append(StateOp(i // plan.rows, int(slots[i]), mask=r.matcher.words[: self.words]))
                flags |= int(out[i, Word.FLAGS])
            if r.words[Word.FLAGS] & (Flag.PENALTIES | Flag.BIAS):
                ops += self._state(r, i // plan.rows, int(slots[i]), bool(plan.new_rows[i]), int(positions[i]))
        return out, "full" if flags & _FULL else "gumbel", ops

    def _state(self, r: _Request, group: int, slot: int, fresh: bool, position: int) -> list[StateOp]:
        p = r.params
        ban = p.min_tokens > 0 and position >= 0 and position - len(r.prompt) < p.min_tokens
        if not fresh and ban == r.banned:
            return []
        r.banned = ban
        op = StateOp(group, slot, reset=fresh)
        if fresh and r.words[Word.FLAGS] & Flag.PENALTIES:
            op.seen, op.counts = r.prompt.tolist(), dict(r.counts)
        if r.words[Word.FLAGS] & Flag.BIAS:
            op.bias = {t: v for t, v in p.logit_bias.items() if t < self.vocab_size}
            op.allowed = p.allowed_token_ids
            if ban:
                op.bias.update((t, float("-inf")) for t in p.stop_token_ids if t < self.vocab_size)
        return [op]


def pack_params(p: CoreParams) -> np.ndarray:
    """The 16 words of one request."""
    greedy = p.temperature < GREEDY_BELOW
    flags = Flag.VALID
    if greedy:
        flags |= Flag.GREEDY
    if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0):
        flags |= Flag.PENALTIES
    if p.logit_bias or p.allowed_token_ids is not None or (p.min_tokens > 0 and p.stop_token_ids):
        flags |= Flag.BIAS
    if p.logprobs >= 0:
        flags |= Flag.LOGPROBS
    if not greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0):
        flags |= Flag.FILTERS
    words = np.zeros(PARAM_WORDS, dtype=np.int32)
    floats = words.view(np.float32)
    words[Word.FLAGS] = int(flags)
    words[Word.SEED_LO], words[Word.SEED_HI] = np.array([p.seed & (2**64 - 1)], dtype=np.uint64).view(np.int32)
    words[Word.TOP_K], words[Word.LOGPROBS] = min(p.top_k, 2**31 - 1), max(p.logprobs, 0)
    floats[Word.TEMPERATURE], floats[Word.TOP_P], floats[Word.MIN_P] = (
        max(p.temperature, GREEDY_BELOW),
        p.top_p,
        p.min_p,
    )
    floats[Word.REPETITION], floats[Word.PRESENCE], floats[Word.FREQUENCY] = (
        p.repetition_penalty,
        p.presence_penalty,
        p.frequency_penalty,
    )
    return words
