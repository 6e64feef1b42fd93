"""From structures to grammars. Invariant: a grammar that came out has given its first masks within the limits, so a structure
that no engine could follow is refused here, with the reason, and not in the middle of an output.

llguidance is imported late: without it (extra `grammar`) each structure is refused and nothing else is. Methods may be called
from any thread; the work leaves the interpreter free for others.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar.matcher import Grammar, Matcher, brief
from tokenspeed.runtime.grammar.structure import PARAM, Structure, wrong
from tokenspeed.runtime.tokenizer import Tokenizer

KEPT = 256  # grammars
MISSING = "structured output needs the package llguidance: pip install 'tokenspeed[grammar]'"
#: of llguidance: work in bounds whatever the grammar says. Lexer fuel is about 14,000 a millisecond, items 20,000.
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000, "max_grammar_size": 500_000,
          "verbose_errors": False}  # fmt: skip


class _Wrapper:
    """What LLTokenizer asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], end: int) -> None:
        self._tokenizer = tokenizer
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class TokenTable:
    """A tokenizer as llguidance sees it: the bytes of every id, and one id more that stands for the end of the output."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        self._bytes = tokenizer.token_bytes
        end = len(self._bytes)

        special = sorted({*tokenizer.special_ids, *tokenizer.eos_ids, end})
        wrapper = _Wrapper(tokenizer, [*self._bytes, b"<end>"], special, end)
        self.engine = llguidance.LLTokenizer(wrapper, slices=llguidance.LLTokenizer.json_slices())  # pyright: ignore
        self.words = -(-(end + 1) // 32)
        self.end_bits = self.bits([end])

    def bits(self, ids: Sequence[int]) -> np.ndarray:
        """A mask (int32 words) of these ids."""
        bits = np.zeros(self.words * 32, dtype=np.uint8)
        bits[[i for i in ids if i < len(bits)]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def text(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def tokenize(self, text: bytes) -> list[int]:
        return self.engine.tokenize_bytes(text) if text else []


class Grammars:
    """The grammars of one tokenizer, the last ones kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises RequestError where llguidance is not installed."""
        try:
            import llguidance
        except ImportError:
            raise RequestError(MISSING, param=PARAM) from None
        self.table = TokenTable(tokenizer)
        self._limits = llguidance.LLParserLimits(**LIMITS)  # pyright: ignore
        self._kept: OrderedDict[Structure, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, structure: Structure) -> Grammar:
        """The structure's grammar; RequestError, with the engine's reason, for one that it does not take."""
        key = replace(structure, after="")
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        made = self._compile(key)
        with self._lock:
            self._kept[key] = made
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made

    def knows(self, structure: Structure) -> bool:
        """Whether the structure compiled of late."""
        return replace(structure, after="") in self._kept

    def matcher(self, structure: Structure, ends: Sequence[int]) -> Matcher:
        """A request's matcher; `ends`: ids that end its output."""
        return Matcher(self.compile(structure), structure.after, ends)

    def _compile(self, s: Structure) -> Grammar:
        import llguidance

        from tokenspeed.runtime.grammar.source import grammar_of

        try:
            text = grammar_of(s)
        except ValueError as fault:
            raise fault if isinstance(fault, RequestError) else wrong(f"the {s.kind} is not taken: {fault}") from None
        pristine = llguidance.LLMatcher(self.table.engine, text, log_level=0, limits=self._limits)
        first = self._mask(s, pristine)
        probe = pristine.deep_copy()
        allowed = np.flatnonzero(np.unpackbits((first & ~self.table.end_bits).view(np.uint8), bitorder="little"))
        if len(allowed):  # the size of what lies behind a first token shows only there
            probe.consume_token(int(allowed[0]))
            self._mask(s, probe)
        elif not pristine.is_accepting():
            raise wrong(f"the {s.kind} admits no output that this model's tokens can spell")
        return Grammar(pristine, first, self.table)

    def _mask(self, s: Structure, matcher: Any) -> np.ndarray:
        words = np.zeros(self.table.words, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise wrong(f"the {s.kind} is not taken: {brief(matcher.get_error())}")
        return words
