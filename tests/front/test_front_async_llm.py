"""AsyncLLM: one terminal delta a choice however it ends, aborts only where needed, bounds, the core's death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import scripted_core

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import (
    EngineError,
    GenerationError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
    UnavailableError,
)
from tokenspeed.runtime.metrics import Metrics
from tokenspeed.runtime.outputs import OutputDelta
from tokenspeed.runtime.request_stream import RequestStream
from tokenspeed.runtime.sampling_params import SamplingParams
from tokenspeed.runtime.scoring import prompt_logprobs

PROMPT = "one two three"


def make(target: Any = scripted_core.run_core, **options: Any) -> AsyncLLM:
    return AsyncLLM(EngineConfig(**{"model": "smollm2", "core": "inproc", **options}), target=target)


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    llm = make()
    await llm.start()
    yield llm
    await llm.close()


async def deltas_of(stream: RequestStream) -> list[OutputDelta]:
    return [delta async for delta in stream]


def check_terminals(deltas: list[OutputDelta], choices: int) -> None:
    """Exactly one finish reason a choice, on its last delta."""  # vllm#27572
    for index in range(choices):
        reasons = [delta.finish_reason for delta in deltas if delta.index == index]
        assert reasons[-1] is not None and reasons[:-1] == [None] * (len(reasons) - 1)


async def stats(llm: AsyncLLM) -> dict[str, Any]:
    return await llm.control("stats")


@pytest.mark.parametrize("target", [scripted_core.run_core, scripted_core.run_core_bursts])
@pytest.mark.parametrize("n", [1, 2, 5])
async def test_choices_end_once_and_join_to_the_whole(target: Any, n: int) -> None:
    llm = make(target)
    await llm.start()
    params = SamplingParams(max_tokens=7, n=n, logprobs=1)
    deltas = await deltas_of(await llm.submit(PROMPT, params))
    check_terminals(deltas, n)
    output = await (await llm.submit(PROMPT, params)).collect()
    for choice in output.choices:
        mine = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.text for delta in mine) == choice.text == "one two threeone two threeone"
        assert [token for delta in mine for token in delta.token_ids] == choice.token_ids
        assert [entry for delta in mine for entry in delta.logprobs or []] == choice.logprobs
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids) == 7
    assert output.usage.completion_tokens == 7 * n
    assert llm.in_flight == 0 and (await stats(llm))["aborts"] == 0
    await llm.close()


async def test_seeds_of_choices_follow_each_other(llm: AsyncLLM) -> None:
    await (await llm.submit(PROMPT, SamplingParams(max_tokens=1, n=3, seed=41))).collect()
    assert (await stats(llm))["seeds"] == [41, 42, 43]
    await (await llm.submit(PROMPT, SamplingParams(max_tokens=1, n=2, seed=-1))).collect()
    assert (await stats(llm))["seeds"][3:] == [2**64 - 1, 0]  # an int64 as its 64 bits
    await (await llm.submit(PROMPT, SamplingParams(max_tokens=1))).collect()
    await (await llm.submit(PROMPT, SamplingParams(max_tokens=1))).collect()
    drawn = (await stats(llm))["seeds"][5:]
    assert drawn[0] != drawn[1]


async def test_the_engine_s_seed_makes_drawn_seeds_repeat() -> None:
    drawn = []
    for _ in range(2):
        llm = make(seed=5)
        await llm.start()
        await (await llm.submit(PROMPT, SamplingParams(max_tokens=1))).collect()
        drawn.append((await stats(llm))["seeds"])
        await llm.close()
    assert drawn[0] == drawn[1]


async def test_a_stop_string_finishes_the_core_s_request_and_aborts_nothing(llm: AsyncLLM) -> None:
    output = await (await llm.submit("a b stop c", SamplingParams(stop=" stop"))).collect()
    assert (output.text, output.finish_reason, output.choices[0].stop_reason) == ("a b", "stop", " stop")
    assert output.usage.completion_tokens == len(output.token_ids) == 3
    counts = await stats(llm)
    assert (counts["finishes"], counts["aborts"], counts["running"]) == (1, 0, 0)


async def test_tokens_of_the_same_delta_after_a_stop_string_are_dropped() -> None:
    llm = make(scripted_core.run_core_bursts)
    await llm.start()
    output = await (await llm.submit("a b c d e", SamplingParams(stop=" b"))).collect()
    assert output.text == "a" and len(output.token_ids) == 2
    await llm.close()


@pytest.mark.parametrize("target", [scripted_core.run_core, scripted_core.run_core_bursts])
async def test_b14_held_text_keeps_its_logprobs_and_tokens(target: Any) -> None:  # vllm#31135
    llm = make(target)
    await llm.start()
    stream = await llm.submit("a b c d e f", SamplingParams(max_tokens=6, stop=" b c X", logprobs=0))
    deltas = await deltas_of(stream)
    for delta in deltas:
        assert delta.logprobs is not None
        assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
        assert "".join(delta.pieces) == delta.text
    assert "".join(delta.text for delta in deltas) == "a b c d e f"
    await llm.close()


async def test_an_end_of_sequence_id_has_no_text_and_no_stop_reason(llm: AsyncLLM) -> None:
    output = await (await llm.submit("hi<|im_end|>more")).collect()
    assert (output.text, output.finish_reason, output.choices[0].stop_reason) == ("hi", "stop", None)
    assert output.token_ids[-1] == 2
    ignoring = SamplingParams(ignore_eos=True, max_tokens=3)  # vllm#4589
    output = await (await llm.submit("hi<|im_end|>more", ignoring)).collect()
    assert (output.text, output.finish_reason) == ("himore", "length")


async def test_a_stop_token_id_is_the_reason(llm: AsyncLLM) -> None:
    assert llm.tokenizer is not None
    two = llm.tokenizer.encode(" two")[0]
    output = await (await llm.submit(PROMPT, SamplingParams(stop_token_ids=[two]))).collect()
    assert (output.text, output.choices[0].stop_reason) == ("one", two)
    params = SamplingParams(stop_token_ids=[two], include_stop_str_in_output=True)
    output = await (await llm.submit(PROMPT, params)).collect()
    assert output.text == "one two"


async def test_b18_control_tokens_do_not_show(llm: AsyncLLM) -> None:  # TensorRT-LLM#10651
    prompt = "x<|im_start|><file_sep>y<|im_end|>"
    assert (await (await llm.submit(prompt)).collect()).text == "xy"
    shown = SamplingParams(skip_special_tokens=False)
    assert (await (await llm.submit(prompt, shown)).collect()).text == "x<|im_start|><file_sep>y"


async def test_no_detokenizing_gives_ids_alone(llm: AsyncLLM) -> None:
    output = await (await llm.submit(PROMPT, SamplingParams(max_tokens=3, detokenize=False))).collect()
    assert output.text == "" and len(output.token_ids) == 3


async def test_b12_max_tokens_zero_reaches_no_core(llm: AsyncLLM) -> None:  # vllm#6521
    output = await (await llm.submit(PROMPT, SamplingParams(max_tokens=0, n=2))).collect()
    assert [choice.finish_reason for choice in output.choices] == ["length", "length"]
    assert output.usage.completion_tokens == 0 and (await stats(llm))["submits"] == 0


async def test_cached_tokens_are_told(llm: AsyncLLM) -> None:
    first = await (await llm.submit(PROMPT, SamplingParams(max_tokens=2))).collect()
    again = await (await llm.submit(PROMPT, SamplingParams(max_tokens=2))).collect()
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 16)


@pytest.mark.parametrize("prompt", ["", [], [-1], [scripted_core.VOCAB], [True], ["x"], "a\ud800"])
async def test_a_wrong_prompt_is_refused_and_nothing_is_submitted(llm: AsyncLLM, prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        await llm.submit(prompt)
    assert caught.value.param == "prompt"
    assert (await stats(llm))["submits"] == 0


@pytest.mark.parametrize("wrong", [-1, scripted_core.VOCAB, True, 1 << 40, 5.0])
async def test_a_wrong_id_is_found_in_a_long_prompt(llm: AsyncLLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="outside"):
        await llm.submit([*[5] * 3000, wrong])


async def test_b35_a_long_prompt_is_refused_and_the_next_is_served(llm: AsyncLLM) -> None:  # vllm#12600
    with pytest.raises(RequestError, match="holds 512 tokens, but the prompt has 1536") as caught:
        await llm.submit([5] * 1536)
    assert caught.value.code == "context_length_exceeded"
    assert (await (await llm.submit(PROMPT, SamplingParams(max_tokens=1))).collect()).text == "one"


async def test_the_kv_cache_bounds_a_request_too() -> None:
    llm = make(scripted_core.run_core_small_cache)
    await llm.start()
    output = await (await llm.submit([5] * 30)).collect()
    assert output.usage.total_tokens == 40
    with pytest.raises(RequestError, match="holds 40 tokens"):
        await llm.submit([5] * 41)
    await llm.close()


async def test_a_long_text_is_tokenized_alike(llm: AsyncLLM) -> None:
    assert llm.tokenizer is not None
    text = "word " * 2000
    assert await llm.encode(text) == llm.tokenizer.encode(text)


# ---- aborts --------------------------------------------------------------------------------------------------------


async def test_b66_b67_closing_aborts_what_runs_and_only_that(llm: AsyncLLM) -> None:  # sglang#36333, ROCm/ATOM#1589
    stream = await llm.submit([scripted_core.STALL], SamplingParams(n=2))
    stream.close()
    stream.close()
    assert await deltas_of(stream) == [] and llm.in_flight == 0
    counts = await stats(llm)
    assert (counts["aborts"], counts["running"]) == (2, 0)
    for _ in range(20):
        done = await llm.submit(PROMPT, SamplingParams(max_tokens=2))
        await done.collect()
        done.close()
    assert (await stats(llm))["aborts"] == 2


async def test_cancelling_the_consumer_aborts(llm: AsyncLLM) -> None:
    task = asyncio.create_task((await llm.submit([scripted_core.STALL])).collect())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await stats(llm))["aborts"] == 1


async def test_abort_all_ends_each_choice_once(llm: AsyncLLM) -> None:
    streams = [await llm.submit([scripted_core.STALL], SamplingParams(n=2)) for _ in range(3)]
    llm.abort_all()
    llm.abort_all()
    for stream in streams:
        deltas = await deltas_of(stream)
        check_terminals(deltas, 2)
        assert {delta.finish_reason for delta in deltas} == {"abort"}
    assert (await stats(llm))["aborts"] == 6


async def test_b70_an_abort_in_any_state_counts_once(llm: AsyncLLM) -> None:  # vllm#18485, #25067
    held = await llm.submit([scripted_core.STALL])
    running = await llm.submit([scripted_core.SLOW, 5], SamplingParams(max_tokens=400))
    await anext(running)
    done = await llm.submit(PROMPT, SamplingParams(max_tokens=2))
    ended = [delta async for delta in done]
    for stream in (held, running, done):
        stream.abort()
        stream.abort()
    for stream in (held, running):
        assert [delta.finish_reason async for delta in stream if delta.finish_reason] == ["abort"]
    assert [delta async for delta in done] == [] and ended[-1].finish_reason == "length"
    for stream in (held, running, done):
        stream.close()
        stream.abort()
    assert (await stats(llm))["aborts"] == 2 and llm.in_flight == 0


async def test_text_held_at_an_abort_is_given(llm: AsyncLLM) -> None:
    stream = await llm.submit([scripted_core.SLOW, *[5] * 9], SamplingParams(max_tokens=400, stop="\x00never"))
    text = (await anext(stream)).text
    llm.abort_all()
    text += "".join([delta.text async for delta in stream])
    assert llm.tokenizer is not None
    assert text == llm.tokenizer.decode(([scripted_core.SLOW, *[5] * 9] * 40)[: stream.usage.completion_tokens])


async def test_an_error_of_the_core_ends_the_request_alone(llm: AsyncLLM) -> None:
    other = asyncio.create_task((await llm.submit(PROMPT, SamplingParams(max_tokens=50))).collect())
    with pytest.raises(GenerationError, match="scripted failure"):
        await (await llm.submit([scripted_core.FAIL, 5, 6])).collect()
    assert (await other).usage.completion_tokens == 50


async def test_an_unknown_call_is_an_error_with_the_core_s_words(llm: AsyncLLM) -> None:
    with pytest.raises(EngineError, match="no such call: dance"):
        await llm.control("dance")


# ---- bounds --------------------------------------------------------------------------------------------------------


async def test_b64_a_full_queue_refuses_at_once_and_takes_again_later() -> None:  # vllm#2901
    llm = make(max_num_seqs=2, max_queued_requests=3)
    await llm.start()
    streams = [await llm.submit([scripted_core.STALL]) for _ in range(5)]
    for _ in range(3):
        with pytest.raises(QueueFullError) as caught:
            await llm.submit([scripted_core.STALL])
        assert caught.value.retry_after == 1.0
    waiting = asyncio.create_task(llm.submit(PROMPT, SamplingParams(max_tokens=1), wait=True))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    streams[0].close()
    assert (await (await waiting).collect()).text == "one"
    await llm.close()


async def test_queued_tokens_are_bounded() -> None:
    llm = make(max_queued_tokens=10)
    await llm.start()
    stream = await llm.submit([scripted_core.STALL] * 50)  # an idle engine takes any
    with pytest.raises(QueueFullError):
        await llm.submit(PROMPT)
    stream.close()
    for _ in range(5):  # tokens that have begun to be answered no longer count
        await (await llm.submit(PROMPT, SamplingParams(max_tokens=1))).collect()
    await llm.close()


async def test_the_core_says_how_many_run_at_once() -> None:
    llm = make(scripted_core.run_core_for_two, max_num_seqs=256, max_queued_requests=1)
    await llm.start()
    for _ in range(3):
        await llm.submit([scripted_core.STALL])
    with pytest.raises(QueueFullError):
        await llm.submit([scripted_core.STALL])
    await llm.close()


async def test_a_request_of_many_prompts_is_taken_whole_or_not_at_all() -> None:
    llm = make(max_num_seqs=2, max_queued_requests=3)
    await llm.start()
    held = await llm.submit([scripted_core.STALL])
    with pytest.raises(QueueFullError):
        await llm.submit_all([[5]] * 5)
    with pytest.raises(RequestError):
        await llm.submit_all([[5], [-1]])
    assert llm.in_flight == 1 and (await stats(llm))["submits"] == 1
    streams = await llm.submit_all([[5], [6, 7]], SamplingParams(max_tokens=2, n=2))
    outputs = [await stream.collect() for stream in streams]
    assert [[c.token_ids for c in output.choices] for output in outputs] == [[[5, 5]] * 2, [[6, 7]] * 2]
    held.close()
    assert len(await llm.submit_all([[5]] * 128, SamplingParams(max_tokens=1))) == 128  # an idle engine takes it
    await llm.close()


async def test_a_request_that_could_never_be_taken_is_wrong_and_not_early() -> None:
    llm = make(max_num_seqs=2, max_queued_requests=3)
    await llm.start()
    for prompts, n in ((129, 1), (65, 2), (5000, 128)):
        with pytest.raises(RequestError, match=rf"asks for {prompts * n} outputs .* takes at most 128 in one"):
            await llm.submit_all([[5]] * prompts, SamplingParams(n=n), wait=True)
    await llm.close()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        *[({"priority": value}, "priority") for value in (2**31, -(2**31) - 1, 1.5, True, "1", None)],
        *[({"cache_salt": value}, "cache_salt") for value in ("a\ud800", 5, None, b"x")],
    ],
)
async def test_a_wrong_option_of_a_request_is_named(llm: AsyncLLM, options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        await llm.submit(PROMPT, **options)
    assert caught.value.param == param and param in caught.value.message
    assert (await stats(llm))["submits"] == 0


@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1])
async def test_priorities_at_the_edges_are_taken(llm: AsyncLLM, priority: int) -> None:
    stream = await llm.submit(PROMPT, SamplingParams(max_tokens=1), priority=priority, cache_salt="a\U0001f600")
    assert (await stream.collect()).text == "one"


async def test_an_idle_engine_takes_more_choices_than_its_queue() -> None:
    llm = make(max_num_seqs=1, max_queued_requests=1)
    await llm.start()
    output = await (await llm.submit(PROMPT, SamplingParams(n=9, max_tokens=1))).collect()
    assert len(output.choices) == 9
    await llm.close()


# ---- death ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["inproc", "process"])
async def test_the_core_s_death_ends_everything_once(core: str) -> None:
    llm = make(core=core)
    await llm.start()
    streams = [await llm.submit([scripted_core.STALL], SamplingParams(n=2)) for _ in range(3)]
    streams.append(await llm.submit([scripted_core.DIE]))
    for stream in streams:
        deltas = await asyncio.wait_for(deltas_of(stream), 10)
        check_terminals(deltas, len(stream.choices))
        assert deltas[-1].finish_reason == "error" and "scripted death" in (deltas[-1].error or "")
    assert llm.died.is_set() and llm.death_reason == "RuntimeError: scripted death"
    with pytest.raises(UnavailableError, match="scripted death"):
        await llm.submit(PROMPT)
    with pytest.raises(UnavailableError, match="scripted death"):
        await stats(llm)
    await llm.close()


async def test_a_waiting_submit_ends_with_the_core() -> None:
    llm = make(max_num_seqs=1, max_queued_requests=1)
    await llm.start()
    await llm.submit([scripted_core.STALL])
    await llm.submit([scripted_core.STALL])
    waiting = asyncio.create_task(llm.submit(PROMPT, wait=True))
    await asyncio.sleep(0)
    await llm.close()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting, 10)


async def test_before_start_and_after_close_nothing_is_taken() -> None:
    llm = make()
    with pytest.raises(UnavailableError):
        await llm.submit(PROMPT)
    await llm.start()
    stream = await llm.submit([scripted_core.STALL])
    await llm.close()
    await llm.close()
    assert [delta.finish_reason for delta in await deltas_of(stream)] == ["abort"]
    with pytest.raises(UnavailableError):
        await llm.submit(PROMPT)


# ---- without a tokenizer, scoring, metrics ---------------------------------------------------------------------------


async def test_a_model_without_a_tokenizer_takes_ids_only(tmp_path: Any) -> None:
    llm = make(model=str(tmp_path))
    await llm.start()
    output = await (await llm.submit([5, 6], SamplingParams(max_tokens=3))).collect()
    assert (output.token_ids, output.text) == ([5, 6, 5], "")
    for refused in (llm.submit("text"), llm.submit([5], SamplingParams(stop="x"))):
        with pytest.raises(RequestError, match="no tokenizer"):
            await refused
    with pytest.raises(RequestError, match="no chat template"):
        llm.render_chat([{"role": "user", "content": "x"}])
    await llm.close()


async def test_scoring_asks_for_each_token_behind_those_before_it(llm: AsyncLLM) -> None:
    ids = [5, 6, 7, 8]
    entries = await prompt_logprobs(llm, ids, 2)
    assert entries[0] is None
    assert [entry.token_id for entry in entries if entry] == ids[1:]
    assert all(entry is None or len(entry.top_ids) == 2 for entry in entries)
    assert await prompt_logprobs(llm, [5], 2) == [None]


async def test_metrics_count_what_happened() -> None:
    metrics = Metrics("m")
    llm = AsyncLLM(EngineConfig("smollm2", core="inproc"), target=scripted_core.run_core, metrics=metrics)
    await llm.start()
    await (await llm.submit([5, 6, 7], SamplingParams(max_tokens=4, n=2))).collect()
    (await llm.submit([scripted_core.STALL])).close()
    await llm.close()
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in metrics.render().decode().splitlines()
        if not line.startswith("#")
    }
    label = '{model_name="m"}'
    assert values[f"tokenspeed:prompt_tokens_total{label}"] == 4
    assert values[f"tokenspeed:generation_tokens_total{label}"] == 8
    assert values['tokenspeed:request_success_total{finished_reason="length",model_name="m"}'] == 2
    assert values['tokenspeed:request_success_total{finished_reason="abort",model_name="m"}'] == 1
    assert values[f"tokenspeed:time_to_first_token_seconds_count{label}"] == 2
    assert values[f"tokenspeed:inter_token_latency_seconds_count{label}"] == 6
    assert values[f"tokenspeed:num_requests_waiting{label}"] == 0
    assert values[f"tokenspeed:kv_cache_usage_perc{label}"] == 0
    assert values[f"tokenspeed:iteration_tokens_total_count{label}"] == 4


async def test_a_request_ends_when_its_time_is_over() -> None:
    """Its own limit or the engine's, whichever is shorter, with what there is; one that ended before is left alone."""
    llm = make(request_timeout=30)
    await llm.start()
    slow = [scripted_core.SLOW, 5, 6]
    cut = await (await llm.submit(slow, SamplingParams(max_tokens=400, timeout=0.1))).collect()
    assert cut.finish_reason == "abort" and cut.choices[0].stop_reason == "timeout"
    assert 0 < len(cut.token_ids) < 400
    done = await (await llm.submit(PROMPT, SamplingParams(max_tokens=2, timeout=30))).collect()
    assert done.finish_reason == "length" and llm.in_flight == 0
    assert (await llm.control("stats"))["aborts"] == 1
    await llm.close()


async def test_b65_a_request_waits_no_longer_than_it_may() -> None:
    # sglang#17143
    llm = make(queue_timeout=0.05)
    await llm.start()
    with pytest.raises(QueueTimeoutError, match=r"waited 0.05 s") as caught:
        await (await llm.submit([scripted_core.STALL])).collect()
    assert caught.value.retry_after == 1.0 and llm.in_flight == 0
    output = await (await llm.submit([scripted_core.SLOW, 5], SamplingParams(max_tokens=30))).collect()
    assert output.finish_reason == "length"  # one that has begun is not waiting
    await llm.close()
