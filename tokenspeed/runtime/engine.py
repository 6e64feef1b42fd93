"""`Engine`: a model in this program, synchronous or asynchronous, on the same AsyncLLM as the server.

AsyncLLM lives on an event loop in a background thread that the engine owns; every call crosses over once. An engine
is a context manager: leaving it ends the core, and requests that still run end as aborted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from tokenspeed.runtime import options
from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import RequestError, UnavailableError
from tokenspeed.runtime.generate_arguments import with_arguments
from tokenspeed.runtime.messages import Ready
from tokenspeed.runtime.outputs import OutputDelta, RequestOutput
from tokenspeed.runtime.sampling_params import SamplingParams
from tokenspeed.runtime.transport import CoreEntry

T = TypeVar("T")
Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any]


class Engine:
    """`with Engine(model="smollm2") as engine: engine.generate(prompt="Hello")`.

    Options are those of docs/options.md, as keywords. Raises OptionError for a wrong one and StartupError when the
    model does not come up. Methods may be called from any thread, and the async ones from any event loop.
    """

    def __init__(self, model: str, *, target: CoreEntry | None = None, **engine_options: Any) -> None:
        self._open(options.load(EngineConfig, {"model": model, **engine_options}), target)

    @classmethod
    def from_config(cls, config: EngineConfig, *, target: CoreEntry | None = None) -> Engine:
        """An engine of options that are together already."""
        engine = cls.__new__(cls)
        engine._open(config, target)
        return engine

    def _open(self, config: EngineConfig, target: CoreEntry | None) -> None:
        """`target` replaces the engine core's entry (tests)."""
        self.config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="tokenspeed-engine", daemon=True)
        self._thread.start()
        self._closed = False
        self._pid = os.getpid()
        try:
            self._llm: AsyncLLM = self._run(self._start(target))
        except BaseException:
            self._stop_loop()
            raise

    def _main(self) -> None:
        """The background thread: run the loop until it is stopped, then leave no task and no thread behind."""
        loop = self._loop
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    async def _start(self, target: CoreEntry | None) -> AsyncLLM:
        llm = AsyncLLM(self.config, target=target)
        await llm.start()
        return llm

    # ---- generation ------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Params | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        stream: Literal[False] = False,
        **arguments: Any,
    ) -> RequestOutput: ...
    @overload
    def generate(
        self,
        prompt: list[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        input_ids: Sequence[Sequence[int]] | None = None,
        stream: Literal[False] = False,
        **arguments: Any,
    ) -> list[RequestOutput]: ...
    @overload
    def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Params | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        stream: Literal[True],
        **arguments: Any,
    ) -> Iterator[OutputDelta]: ...
    def generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        *,
        input_ids: Any = None,
        stream: bool = False,
        **arguments: Any,
    ) -> Any:
        """Generate for one prompt, or for each of a list of them (then a list of results, in order).

        Give `prompt` (text) or `input_ids` (token ids; an array or tensor of integers is taken too);
        `sampling_params` one for all or one for each, each a SamplingParams or a dict of its fields. With `stream` one
        prompt gives an iterator of OutputDelta; closing the iterator aborts the request. `structured_outputs` says what the
        outputs must look like (docs/structured-output.md). Raises RequestError (a ValueError) for a wrong request,
        GenerationError when the core fails on one.
        """
        prompts, single = _prompts(prompt, input_ids)
        params = with_arguments(_params_for(sampling_params, len(prompts)), arguments)
        if stream:
            if not single:
                raise RequestError("stream takes one prompt: call generate once for each", param="stream")
            return self._stream(prompts[0], params[0])
        outputs = self._run(self._generate_all(prompts, params))
        return outputs[0] if single else outputs

    async def async_generate(
        self, prompt: Any = None, sampling_params: Any = None, *, input_ids: Any = None, **arguments: Any
    ) -> Any:
        """As `generate` without stream, on the caller's event loop. Cancelling it aborts the requests."""
        prompts, single = _prompts(prompt, input_ids)
        params = with_arguments(_params_for(sampling_params, len(prompts)), arguments)
        outputs = await asyncio.wrap_future(self._submit(self._generate_all(prompts, params)))
        return outputs[0] if single else outputs

    async def async_stream(
        self,
        prompt: str | None = None,
        sampling_params: Params | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        **arguments: Any,
    ) -> AsyncIterator[OutputDelta]:
        """The deltas of one request, on the caller's event loop; closing the iterator aborts the request."""
        prompts, single = _prompts(prompt, input_ids)
        if not single:
            raise RequestError("async_stream takes one prompt: call it once for each", param="prompt")
        (params,) = with_arguments(_params_for(sampling_params, 1), arguments)
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[OutputDelta | BaseException | None] = asyncio.Queue()

        def put(item: OutputDelta | BaseException | None) -> None:
            loop.call_soon_threadsafe(deltas.put_nowait, item)

        future = self._submit(self._feed(prompts[0], params, put))
        try:
            while (item := await deltas.get()) is not None:
                yield _checked(item)
        finally:
            future.cancel()

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: Params | None = None,
        *,
        stream: bool = False,
        **template_variables: Any,
    ) -> Any:
        """As `generate` for a conversation [{"role": ..., "content": ...}], rendered by the model's chat template."""
        ids = self._run(self._chat_ids(messages, template_variables))
        return self.generate(input_ids=ids, sampling_params=sampling_params, stream=stream)  # pyright: ignore

    async def _chat_ids(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> list[int]:
        return await self._llm.encode(self._llm.render_chat(messages, **variables), add_special_tokens=False)

    async def _generate_all(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[RequestOutput]:
        """A batch may be larger than the queue: each request waits for room."""

        async def one(prompt: Prompt, choice: SamplingParams) -> RequestOutput:
            stream = await self._llm.submit(prompt, choice, wait=True)
            return await stream.collect()

        tasks = [asyncio.create_task(one(prompt, choice)) for prompt, choice in zip(prompts, params)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # where one failed, the others end too

    async def _feed(self, prompt: Prompt, params: SamplingParams, put: Any) -> None:
        """Pass a request's deltas, or what went wrong, and at last None to `put`."""
        try:
            stream = await self._llm.submit(prompt, params, wait=True)
            try:
                async for delta in stream:
                    put(delta)
            finally:
                stream.close()
            put(None)
        except Exception as fault:
            put(fault)

    def _stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[OutputDelta]:
        deltas: queue.SimpleQueue[OutputDelta | BaseException | None] = queue.SimpleQueue()
        future = self._submit(self._feed(prompt, params, deltas.put))
        try:
            while (item := deltas.get()) is not None:
                yield _checked(item)
        finally:
            future.cancel()

    # ---- the rest --------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's Tokenizer, None where it has none."""
        return self._llm.tokenizer

    @property
    def ready(self) -> Ready:
        """What the core said when it came up: limits, KV capacity, the start-up summary."""
        return self._llm.ready

    def control(self, name: str, **args: Any) -> dict[str, Any]:
        """A call into the engine core: stats, flush_cache."""
        return self._run(self._llm.control(name, **args))

    def update_weights(self, path: str, *, abort: bool = False) -> dict[str, Any]:
        """Replace the weights by those of another checkpoint of the same configuration (see AsyncLLM.update_weights)."""
        return self._run(self._llm.update_weights(path, abort=abort))

    def close(self) -> None:
        """End the core and the background thread. Idempotent."""
        if self._closed or os.getpid() != self._pid:  # a fork leaves it to its owner
            return
        self._run(self._llm.close())
        self._stop_loop()

    def __enter__(self) -> Engine:
        if self._closed:
            raise UnavailableError("the engine is closed: make a new one for each `with`")
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._closed or os.getpid() != self._pid:
            work.close()
            raise UnavailableError(
                "the engine is closed" if self._closed
                else f"the engine lives in process {self._pid}, and this is a fork of it: make one here"
            )  # fmt: skip
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # a Ctrl-C here ends the request there
            raise

    def _stop_loop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _prompts(prompt: Any, input_ids: Any) -> tuple[list[Prompt], bool]:
    """(all prompts, whether one was given and not a list)."""
    if (prompt is None) == (input_ids is None):
        raise RequestError("give either prompt (text) or input_ids (token ids)", param="prompt")
    if input_ids is None:
        if isinstance(prompt, str):
            return [prompt], True
        if not isinstance(prompt, list | tuple) or not all(isinstance(item, str) for item in prompt):
            kind = type(prompt).__name__
            raise RequestError(
                f"prompt must be a string or a list of strings, not this {kind}; token ids go into input_ids",
                param="prompt",
            )
        return list(prompt), False
    rows = _plain(input_ids)
    if isinstance(rows, list) and rows and isinstance(_plain(rows[0]), list):
        return [_token_ids(row) for row in rows], False
    return [_token_ids(rows)], True


def _plain(ids: Any) -> Any:
    """A tuple, array or tensor as the list it stands for; a list and all else as it is."""
    if isinstance(ids, tuple):
        return list(ids)
    return ids.tolist() if hasattr(ids, "tolist") else ids


def _token_ids(ids: Any) -> list[int]:
    """Raises RequestError for what is no list of integers (a bool is none)."""
    ids = _plain(ids)
    if not isinstance(ids, list):
        raise RequestError(
            f"input_ids must be a list of token ids, or a list of such lists, not a {type(ids).__name__}",
            param="input_ids",
        )
    ids = [_plain(item) for item in ids] if set(map(type, ids)) - {int} else ids
    wrong = next((kind for kind in set(map(type, ids)) if kind is not int), None)
    if wrong is not None:
        raise RequestError(f"input_ids holds a {wrong.__name__}: token ids are integers", param="input_ids")
    return ids


def _params_for(given: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for each prompt. Raises RequestError."""
    if not isinstance(given, list | tuple):
        return [SamplingParams.of(given)] * count
    if len(given) != count:
        raise RequestError(
            f"{len(given)} sampling_params for {count} prompts: give one, or one for each", param="sampling_params"
        )
    return [SamplingParams.of(item) for item in given]


def _checked(item: OutputDelta | BaseException) -> OutputDelta:
    if isinstance(item, BaseException):
        raise item
    if item.finish_reason == "error":
        raise item.failure
    return item
