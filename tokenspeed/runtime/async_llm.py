"""The one path from a prompt to its output: `Engine`, the HTTP server and the chat command all stand on AsyncLLM.

A request is checked completely before anything of it reaches the engine core, so a bad one costs the core nothing;
an accepted one ends with exactly one terminal delta a choice, whatever happens to the core, the client or the
server. All methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import random
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import EngineError, QueueFullError, RequestError, UnavailableError
from tokenspeed.runtime.flight import Flight, Live
from tokenspeed.runtime.lanes import token_texts
from tokenspeed.runtime.messages import (
    Control,
    CoreParams,
    Deltas,
    Died,
    FinishReason,
    Ready,
    Reply,
    Stats,
    Submit,
    ToCore,
    packed,
)
from tokenspeed.runtime.request_stream import Choice, RequestStream
from tokenspeed.runtime.sampling_params import MAX_CHOICES, SEED_MASK, SamplingParams, check_integer, check_text
from tokenspeed.runtime.tokenizer import Tokenizer, load_tokenizer
from tokenspeed.runtime.transport import CoreClient, CoreEntry, InprocClient
from tokenspeed.runtime.weights_socket import WeightsSocket

if TYPE_CHECKING:
    from tokenspeed.runtime.chat_template import ChatTemplate
    from tokenspeed.runtime.grammar import Structure
    from tokenspeed.runtime.grammar.front import StructureCheck
    from tokenspeed.runtime.metrics import Metrics

log = logging.getLogger(__name__)

NUMPY_IDS = 1024  # from so many ids on numpy finds the largest one faster
THREAD_CHARS = 4096  # a prompt of more characters is tokenized in a thread; below, the hand-over costs more


def make_client(config: EngineConfig, target: CoreEntry | None = None) -> CoreClient:
    """The client that `config.core` asks for; `target` replaces the engine core's entry (tests)."""
    target = target or _engine_core()
    if config.core == "inproc":
        return InprocClient(config, target)
    from tokenspeed.runtime.transport_process import ProcessClient

    return ProcessClient(config, target)


def _engine_core() -> CoreEntry:
    from tokenspeed.runtime.core import run_core

    return run_core


def _texts(config: EngineConfig) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The model's tokenizer and template, where it has them."""
    tokenizer = load_tokenizer(config)
    if tokenizer is None:
        return None, None
    from tokenspeed.runtime.chat_template import load_template

    return tokenizer, load_template(config, tokenizer)


class AsyncLLM:
    """A model that answers requests. Use: `await start()`, then `submit` at will, at last `await close()`."""

    def __init__(
        self, config: EngineConfig, *, target: CoreEntry | None = None, metrics: Metrics | None = None
    ) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.template: ChatTemplate | None = None
        self.stats = Stats()
        self.died: asyncio.Event = asyncio.Event()
        self.death_reason = ""
        self._target = target
        self._metrics = metrics
        self._client: CoreClient | None = None
        self._ready: Ready | None = None
        self._pump_task: asyncio.Task[None] | None = None
        self._ids = itertools.count(1)
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._room = asyncio.Event()
        self._flight = Flight(metrics, self._tell, self._room)
        self._writer = asyncio.Lock()  # of one that replaces the weights
        self._weights: WeightsSocket | None = None
        self._open = asyncio.Event()  # requests are taken
        self._open.set()
        self._held = 0  # requests that wait for that
        self._structures: StructureCheck | None = None
        self._seeds = random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        self._capacity = 0  # choices in flight at most; 0: no bound

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Start the core, load the tokenizer meanwhile, wait for both. Raises StartupError, OptionError or OSError."""
        self._client = make_client(self.config, self._target)
        core = asyncio.create_task(self._client.start())
        try:
            await asyncio.sleep(0)  # until the core is on its way
            self.tokenizer, self.template = await asyncio.to_thread(_texts, self.config)
            self._ready = await core
        except BaseException:
            core.cancel()
            await asyncio.gather(core, return_exceptions=True)
            await self._client.close(force=self.config.core == "process")  # a thread can only be waited for
            raise
        if self.config.max_queued_requests:
            self._capacity = self._ready.max_running + self.config.max_queued_requests
        self._pump_task = asyncio.create_task(self._pump(self._client), name="tokenspeed-pump")
        if self.config.weights_socket:
            try:
                self._weights = self._listen_for_weights(asyncio.get_running_loop())
            except BaseException:
                await self.close(force=True)
                raise
        return self._ready

    async def open_lanes(self) -> None:
        """Let plain tokens of streams take the short way to their sockets. Call it once it is started."""
        if self.tokenizer is not None:
            from tokenspeed._lanes import Lanes

            self._flight.lanes = Lanes(await asyncio.to_thread(token_texts, self.tokenizer))

    async def close(self, *, force: bool = False) -> None:
        """Abort what runs, shut the core down (`force`: without waiting for it). Idempotent."""
        self._ready = None  # first, so that an abort cannot make room for one more request
        self.abort_all()
        if self._weights is not None:
            self._weights.close()
        if self._pump_task is not None:
            self._pump_task.cancel()
        if self._structures is not None:
            self._structures.close()
        if self._client is not None:
            await self._client.close(force=force)
        self._fail_calls("the engine is closed")

    @property
    def ready(self) -> Ready:
        """What the core said when it came up. Raises UnavailableError before that, and after its end."""
        if self.died.is_set():
            raise UnavailableError(f"the engine core is gone: {self.death_reason}")
        if self._ready is None:
            raise UnavailableError("the engine is not started, or closed")
        return self._ready

    @property
    def max_len(self) -> int:
        """Tokens that prompt and output of one request may have: the model's limit, or the KV cache's if less."""
        return min(self.ready.max_model_len, self.ready.kv_tokens)

    @property
    def in_flight(self) -> int:
        """Choices that the core is working on or has queued."""
        return len(self._flight.live)

    # ---- requests --------------------------------------------------------------------------------------------------

    async def submit(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> RequestStream:
        """`submit_all` for one prompt."""
        (stream,) = await self.submit_all([prompt], params, **options)
        return stream

    async def submit_all(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        kept: Collection[str] = (),
        wait: bool = False,
    ) -> list[RequestStream]:
        """Accept a request of one or several prompts, all of them or none: a stream of deltas for each.

        A prompt is a text or token ids. A lower `priority` (int32) goes first; `cache_salt` names the domain in which
        prefixes are shared; special tokens of `kept` stay in the text. Raises RequestError for what is wrong with the
        request or too large ever to be taken, UnavailableError when the core is not up, QueueFullError when too much is
        queued, unless `wait` asks to wait for room.
        """
        params = params or SamplingParams()
        ready = self.ready
        check_integer("priority", priority, -(1 << 31), (1 << 31) - 1)
        check_text("cache_salt", cache_salt)
        self._check_choices(len(prompts), params.n)
        eos = self.tokenizer.eos_ids if self.tokenizer else frozenset()
        if not (wait or self._has_room(params.n * len(prompts), 0)):  # told before the work of tokenizing
            raise self._full()
        accepted: list[tuple[list[int], bytes, CoreParams]] = []
        for prompt in prompts:
            ids = await self.encode(prompt, add_special_tokens=add_special_tokens)
            carried = self._check_prompt(ids, params)
            accepted.append((ids, carried, params.resolve(len(ids), self.max_len, eos, ready.vocab_size)))
        if params.structure is not None:
            await self._check_structure(params.structure)
        tokens = params.n * sum(len(ids) for ids, _, _ in accepted)
        await self._unlocked()
        while not self._has_room(params.n * len(prompts), tokens):
            if not wait:
                raise self._full()
            self._room.clear()
            await self._room.wait()
            await self._unlocked()
        client = self._connected()  # it may have died while this waited
        return [self._send(client, *one, params, priority, cache_salt, kept) for one in accepted]

    def _send(
        self,
        client: CoreClient,
        ids: list[int],
        prompt: bytes,
        core_params: CoreParams,
        params: SamplingParams,
        priority: int,
        cache_salt: str,
        kept: Collection[str],
    ) -> RequestStream:
        """One prompt's choices to the core; `prompt` is `ids` packed."""
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        choices = [Choice(index, params, self.tokenizer, kept) for index in range(params.n)]
        stream = RequestStream(ids, choices, self._flight)
        for choice in choices:
            if core_params.max_tokens == 0:
                stream.put(choice.end("length"))
                continue
            request_id = next(self._ids)
            stream.request_ids.append(request_id)
            self._limit(request_id, self._flight.add(request_id, stream, choice), params.timeout)
            choice_params = copy.copy(core_params)
            choice_params.seed = (seed + choice.index) & SEED_MASK
            client.send(Submit(request_id, prompt, choice_params, priority, cache_salt))
        if self._metrics is not None:
            self._metrics.accepted(len(ids), core_params.max_tokens)
        return stream

    def _limit(self, request_id: int, live: Live, timeout: float | None) -> None:
        """Starts the clocks of a request."""
        loop = asyncio.get_running_loop()
        limits = [limit for limit in (timeout, self.config.request_timeout) if limit]
        if limits:
            live.timers.append(loop.call_later(min(limits), self._expire, request_id))
        if self.config.queue_timeout:
            live.timers.append(loop.call_later(self.config.queue_timeout, self._waited, request_id))

    def _expire(self, request_id: int) -> None:
        self._flight.end(request_id, "abort", stop_reason="timeout")

    def _waited(self, request_id: int) -> None:
        if not self._flight.live[request_id].last_token:
            error = f"the request waited {self.config.queue_timeout:g} s for its turn: try again later"
            self._flight.end(request_id, "error", error, waited=True)

    async def encode(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> list[int]:
        """The prompt's token ids (int list); a long text is tokenized in a thread. Raises RequestError."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError(
                f"{self.config.model} has no tokenizer: send token ids, or start with --tokenizer", param="prompt"
            )
        check_text("prompt", prompt)
        if len(prompt) < THREAD_CHARS:
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens=add_special_tokens)

    def render_chat(self, messages: Sequence[dict[str, Any]], /, **variables: Any) -> str:
        """The prompt text of a conversation (see ChatTemplate.render). Raises RequestError."""
        if self.template is None:
            raise RequestError(
                f"{self.config.model} has no chat template: use /v1/completions, or start with --chat-template",
                param="messages",
            )
        return self.template.render(messages, **variables)

    async def control(self, name: str, **args: Any) -> dict[str, Any]:
        """A call into the core (stats, flush_cache). Raises EngineError with the core's reason."""
        client = self._connected()
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        client.send(Control(call_id, name, args))
        return await future

    async def update_weights(
        self, path: str, *, abort: bool = False, patience: float = 60.0, sent: bool = False
    ) -> dict[str, Any]:
        """Replace the model's weights by those of a checkpoint of the same configuration (directory or .gguf; `sent`: a
        directory of tensors alone).

        A writer among the requests, which are readers: those in flight end first (`abort`: at once), for up to `patience`
        seconds; those that come meanwhile wait, and get the new weights. Prefix caches are emptied. Raises RequestError with
        the reason, and the old weights go on; UnavailableError where requests did not end in time.
        """
        async with self._writer:
            self._open.clear()
            try:
                if abort:
                    self.abort_all()
                deadline = time.monotonic() + patience
                while self._flight.live:
                    self._room.clear()
                    if (left := deadline - time.monotonic()) <= 0:
                        raise UnavailableError(
                            f"{self.in_flight} requests did not end within {patience:g} s: try abort"
                        )
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._room.wait(), left)
                return await self.control("update_weights", path=path, sent=sent)
            except EngineError as fault:
                known = isinstance(fault, UnavailableError)
                raise fault if known else RequestError(fault.message, param="path") from None
            finally:
                self._open.set()

    def _listen_for_weights(self, loop: asyncio.AbstractEventLoop) -> WeightsSocket:
        def update(folder: str, abort: bool) -> dict[str, Any]:
            work = self.update_weights(folder, abort=abort, sent=True)
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        return WeightsSocket(self.config.weights_socket, update)

    def abort_all(self, reason: FinishReason = "abort", error: str | None = None) -> None:
        """End every request in flight, each with its terminal delta."""
        for request_id in list(self._flight.live):
            self._flight.end(request_id, reason, error)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _connected(self) -> CoreClient:
        """The client of a core that is up; UnavailableError else."""
        if self.ready and self._client is not None:
            return self._client
        raise UnavailableError("the engine is closed")

    def _check_prompt(self, ids: list[int], params: SamplingParams) -> bytes:
        """The ids packed. A prompt may have hundreds of thousands of them, which no Python loop looks at."""
        if not ids:
            raise RequestError("the prompt is empty: send at least one token", param="prompt")
        vocab = self.ready.vocab_size
        try:
            prompt = packed(ids)
            if len(ids) < NUMPY_IDS:
                outside = min(ids) < 0 or max(ids) >= vocab
            else:
                outside = bool(np.frombuffer(prompt, dtype=np.uint32).max() >= vocab)  # a negative id is a large one so
            outside |= (0 in ids or 1 in ids) and any(isinstance(token, bool) for token in ids)  # True is packed as 1
        except (TypeError, OverflowError):  # not all integers, or none that a token id could be
            outside = True
        if outside:
            raise RequestError(f"the prompt holds a token id outside 0..{vocab - 1}", param="prompt")
        if self.tokenizer is None and params.stops:
            raise RequestError("stop needs the text, but this model has no tokenizer: use stop_token_ids", param="stop")
        return prompt

    async def _check_structure(self, structure: Structure) -> None:
        """RequestError for a structure that cannot be followed. Imported late: few engines get one."""
        if self._structures is None:
            from tokenspeed.runtime.grammar.front import StructureCheck

            self._structures = StructureCheck(self.tokenizer)
        await self._structures.check(structure)

    def _check_choices(self, prompts: int, n: int) -> None:
        """A request of more choices than an idle engine takes can never be accepted: it is wrong, not early."""
        limit = max(self._capacity, MAX_CHOICES)
        if self._capacity and prompts * n > limit:
            raise RequestError(
                f"the request asks for {prompts * n} outputs ({prompts} prompts, n {n}), but this server takes at most "
                f"{limit} in one: send fewer prompts, or start it with a larger max_queued_requests",
                param="prompt",
            )

    def _has_room(self, choices: int, prompt_tokens: int) -> bool:
        """An idle engine takes any request that `_check_choices` lets pass, so none is refused for ever."""
        if self._flight.live and self._capacity and len(self._flight.live) + choices > self._capacity:
            return False
        bound = self.config.max_queued_tokens
        return not (self._flight.waiting_tokens and bound and self._flight.waiting_tokens + prompt_tokens > bound)

    async def _unlocked(self) -> None:
        """Wait while the weights are replaced, as many as may queue."""
        if self._open.is_set():
            return
        if self._capacity and self._held >= self._capacity:
            raise self._full()
        self._held += 1
        try:
            await self._open.wait()
        finally:
            self._held -= 1

    def _full(self) -> QueueFullError:
        return QueueFullError(f"{self.in_flight} requests are in flight already: try again later")

    async def _pump(self, client: CoreClient) -> None:
        """Deliver what the core says until it says that it died.

        Others get the loop in between: a new request need not wait until a step of many is out.
        """
        flight = self._flight
        while True:
            message = client.poll() if flight.pending else await client.recv()
            if isinstance(message, Deltas):
                flight.take(message)
                if self._metrics is not None:
                    self._metrics.step(self.stats, message.stats)
                self.stats = message.stats
            flight.pour(whole=isinstance(message, Reply | Died))
            if isinstance(message, Reply):
                self._reply(message)
            elif isinstance(message, Died):
                self._on_death(message.reason)
                return
            if flight.pending:
                await asyncio.sleep(0)

    def _tell(self, message: ToCore) -> None:
        if self._client is not None and not self.died.is_set():
            self._client.send(message)

    def _reply(self, message: Reply) -> None:
        future = self._calls.pop(message.call_id, None)
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(EngineError(message.error))
        else:
            future.set_result(message.result)

    def _on_death(self, reason: str) -> None:
        log.error("the engine core died: %s", reason)
        self.death_reason = reason
        self.died.set()
        self.abort_all("error", f"the engine core died: {reason}")
        self._fail_calls(f"the engine core died: {reason}")

    def _fail_calls(self, reason: str) -> None:
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(UnavailableError(reason))
