"""The engine core's side: requests that wait for their grammar, and the masks of those that run. Invariant: the core's loop
never compiles; a request is handed back once, with a matcher or with what is wrong with its structure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tokenspeed.runtime.errors import EngineError
from tokenspeed.runtime.grammar.compiler import Grammars
from tokenspeed.runtime.grammar.matcher import Matcher, fill_all
from tokenspeed.runtime.messages import Submit
from tokenspeed.runtime.tokenizer import Tokenizer


class CoreGrammars:
    """Used by the core's thread; the work is done in one other."""

    def __init__(self, tokenizer: Callable[[], Tokenizer | None]) -> None:
        """`tokenizer` loads the model's; it is called when the first structure comes."""
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None
        self._executor: Any = None  # of masks
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenspeed-grammar")
        self._waiting: dict[int, tuple[Submit, Future[Matcher]]] = {}

    @property
    def waiting(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._waiting)

    def begin(self, m: Submit) -> None:
        """Takes a request with a structure; `ready` gives it back."""
        self._waiting[m.request_id] = (m, self._pool.submit(self._make, m))

    def drop(self, request_id: int) -> None:
        """The request has ended meanwhile."""
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            waiting[1].cancel()

    def ready(self) -> list[tuple[Submit, Matcher | str]]:
        """Requests that wait no longer, each with its matcher or what went wrong."""
        done = [(m, work) for m, work in self._waiting.values() if work.done()]
        for m, _ in done:
            del self._waiting[m.request_id]
        return [(m, _outcome(work)) for m, work in done]

    def consume(self, drawn: Sequence[tuple[Matcher, int]]) -> None:
        """Moves matchers on by one token each, and works out what may come next."""
        for matcher, token in drawn:
            matcher.consume(token)
        fill_all(self._executor, [matcher for matcher, _ in drawn])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, m: Submit) -> Matcher:
        structure = m.params.structure
        assert structure is not None
        if self._grammars is None:
            tokenizer = self._tokenizer()
            if tokenizer is None:
                raise EngineError("the model has no tokenizer")
            grammars = Grammars(tokenizer)
            import llguidance

            self._executor = llguidance.LLExecutor()
            self._grammars = grammars
        return self._grammars.matcher(structure, m.params.stop_token_ids)


def _outcome(work: Future[Matcher]) -> Matcher | str:
    try:
        return work.result()
    except Exception as fault:  # whatever is wrong with one structure ends its request alone
        return f"the structure cannot be followed: {fault}"
