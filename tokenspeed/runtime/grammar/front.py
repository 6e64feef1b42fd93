"""The front's look at a structure before the engine core sees the request. Invariant: what passes compiles in the core too, as
both do the same; what takes too long is refused, and holds up nobody meanwhile.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar.compiler import Grammars
from tokenspeed.runtime.grammar.structure import PARAM, Structure, wrong
from tokenspeed.runtime.tokenizer import Tokenizer

LIMIT = 10.0  # seconds that a grammar may take to compile
AT_ONCE = 2  # grammars; others wait their turn
THREADS = 2 * AT_ONCE  # one that is given up still runs for a while: its work is bounded, not interrupted


class StructureCheck:
    """Compiles structures in threads of its own. Used on one event loop."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenspeed-grammar")

    async def check(self, structure: Structure) -> None:
        """Raises RequestError, naming the structure's field, for one that cannot be followed."""
        try:
            await self._check(structure)
        except RequestError as fault:
            raise RequestError(fault.message, param=structure.param) from None

    async def _check(self, structure: Structure) -> None:
        if self._tokenizer is None:
            raise RequestError("structured output needs the text, but this model has no tokenizer", param=PARAM)
        if self._grammars is not None and self._grammars.knows(structure):
            return
        async with self._turns:
            work = asyncio.get_running_loop().run_in_executor(self._pool, self._compile, self._tokenizer, structure)
            try:
                await asyncio.wait_for(asyncio.shield(work), LIMIT)
            except TimeoutError:
                work.add_done_callback(lambda done: done.exception())  # nobody waits for what it says
                raise wrong(f"the {structure.kind} takes more than {LIMIT:g} s to compile: simplify it") from None

    def _compile(self, tokenizer: Tokenizer, structure: Structure) -> None:
        self._grammars = self._grammars or Grammars(tokenizer)
        self._grammars.compile(structure)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
