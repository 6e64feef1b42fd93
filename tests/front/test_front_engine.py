"""Engine: the public face of the front, synchronous and asynchronous, over both kinds of core."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scripted_core
import torch

import tokenspeed
from tokenspeed import Engine, SamplingParams
from tokenspeed.runtime.errors import GenerationError, RequestError, StartupError, UnavailableError
from tokenspeed.runtime.options import OptionError

SHORT = SamplingParams(max_tokens=3)


def make(target: Any = scripted_core.run_core, **options: Any) -> Engine:
    return Engine(**{"model": "smollm2", "core": "inproc", "target": target, **options})


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make() as engine:
        yield engine


@pytest.mark.parametrize("core", ["inproc", "process"])
def test_generate(core: str) -> None:
    with make(core=core, dtype="float32", max_model_len=64) as engine:
        output = engine.generate(prompt="one two", sampling_params=SamplingParams(max_tokens=3, logprobs=1))
        assert output.text == "one twoone" and output.finish_reason == "length"
        assert output.token_ids == [*output.prompt_token_ids, output.prompt_token_ids[0]]
        assert output.logprobs is not None and len(output.logprobs) == 3
        assert (output.usage.prompt_tokens, output.usage.total_tokens) == (2, 5)
        assert engine.ready.max_model_len == 64
    engine.close()


def test_lists_come_back_in_order(engine: Engine) -> None:
    texts = [f"{letter} x" for letter in "abcdef"]
    outputs = engine.generate(texts, SamplingParams(max_tokens=2))
    assert [output.text for output in outputs] == texts
    params = [SamplingParams(max_tokens=length) for length in (1, 2, 3)]
    assert [len(o.token_ids) for o in engine.generate(input_ids=[[5, 6]] * 3, sampling_params=params)] == [1, 2, 3]
    assert engine.generate([]) == []


def test_ids_in_one_prompt_or_many(engine: Engine) -> None:
    assert engine.generate(input_ids=[5, 6], sampling_params=SHORT).token_ids == [5, 6, 5]
    (only,) = engine.generate(input_ids=[[5, 6]], sampling_params=SHORT)
    assert only.token_ids == [5, 6, 5]


def test_ids_and_parameters_of_other_types_that_mean_the_same(engine: Engine) -> None:
    for ids in ((5, 6), np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), torch.tensor(6)]):
        assert engine.generate(input_ids=ids, sampling_params={"max_tokens": 3}).token_ids == [5, 6, 5]
    for rows in (np.array([[5, 6]] * 2), [torch.tensor([5, 6]), (5, 6)]):
        outputs = engine.generate(input_ids=rows, sampling_params=[SHORT, {"max_tokens": 1}])
        assert [output.token_ids for output in outputs] == [[5, 6, 5], [5]]


def test_a_field_that_was_assigned_later_is_checked_too(engine: Engine) -> None:
    params = SamplingParams(max_tokens=2)
    params.temperature = float("nan")
    with pytest.raises(RequestError, match="temperature must be a number"):
        engine.generate("x", params)


@pytest.mark.parametrize("messages", [5, "x", [5], {"role": "user"}, [{"role": ["user"], "content": "x"}]])
def test_a_conversation_of_another_form_is_a_request_error(engine: Engine, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine.chat(messages, SHORT)
    assert (caught.value.param or "").startswith("messages")


def test_a_batch_larger_than_the_queue_waits() -> None:
    with make(max_num_seqs=2, max_queued_requests=1) as engine:
        assert len(engine.generate(input_ids=[[5, 6]] * 40, sampling_params=SHORT)) == 40


def test_stream_joins_to_the_whole(engine: Engine) -> None:
    params = SamplingParams(max_tokens=9, stop=" four")
    deltas = list(engine.generate("one two three four", params, stream=True))
    assert "".join(delta.text for delta in deltas) == engine.generate("one two three four", params).text
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]


def test_leaving_a_stream_aborts(engine: Engine) -> None:
    before = engine.control("stats")
    stream = engine.generate(
        input_ids=[scripted_core.SLOW], sampling_params=SamplingParams(max_tokens=400), stream=True
    )
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    for _ in range(200):
        after = engine.control("stats")
        if after["aborts"] > before["aborts"]:
            break
    assert (after["aborts"] - before["aborts"], after["running"]) == (1, 0)


async def test_async_generate_and_stream(engine: Engine) -> None:
    one, many = await asyncio.gather(
        engine.async_generate("one two", SHORT), engine.async_generate(["a x", "b x"], SamplingParams(max_tokens=2))
    )
    assert one.text == "one twoone" and [output.text for output in many] == ["a x", "b x"]
    deltas = [delta async for delta in engine.async_stream("one two", SHORT)]
    assert "".join(delta.text for delta in deltas) == one.text


async def test_cancelling_async_generate_aborts(engine: Engine) -> None:
    before = engine.control("stats")["aborts"]
    task = asyncio.create_task(engine.async_generate(input_ids=[scripted_core.STALL]))
    while engine.control("stats")["running"] == 0:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while (stats := engine.control("stats"))["running"]:
        await asyncio.sleep(0.01)
    assert stats["aborts"] == before + 1


def test_chat_renders_the_template(engine: Engine) -> None:
    output = engine.chat([{"role": "user", "content": "hi"}], SHORT)
    assert engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    streamed = list(engine.chat([{"role": "user", "content": "hi"}], SHORT, stream=True))
    assert "".join(delta.text for delta in streamed) == output.text


def test_threads_may_share_an_engine(engine: Engine) -> None:
    texts: dict[int, str] = {}

    def work(number: int) -> None:
        texts[number] = engine.generate(f"{number} x", SamplingParams(max_tokens=2)).text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: f"{number} x" for number in range(8)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "give either prompt"),
        ({"prompt": "x", "input_ids": [1]}, "give either prompt"),
        ({"prompt": ["x", 1]}, "token ids go into input_ids"),
        ({"prompt": ["x"], "stream": True}, "stream takes one prompt"),
        ({"prompt": ["x"], "sampling_params": [SHORT, SHORT]}, "2 sampling_params for 1 prompts"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"input_ids": [5] * 600}, "holds 512 tokens"),
        ({"prompt": 5}, "prompt must be a string or a list of strings, not this int"),
        ({"prompt": {"a": "b"}}, "not this dict"),
        ({"prompt": "a\ud800"}, "prompt is not valid Unicode"),
        *[
            ({"input_ids": ids}, "token ids are integers")
            for ids in ([1.5], [[1], [1.5]], [True], ["1"], [None], [1, [2]])
        ],
        *[
            ({"input_ids": ids}, "input_ids must be a list of token ids")
            for ids in (5, "12", {1: 2}, [[1], "2"], [[1], 2])
        ],
        ({"input_ids": np.array([1.0, 2.0])}, "holds a float"),
        ({"input_ids": [2**70]}, "outside 0..49151"),
        *[({"prompt": "x", "sampling_params": given}, "must be a SamplingParams or a dict") for given in (5, "x", [7])],
        ({"prompt": "x", "sampling_params": {"temprature": 1}}, "did you mean temperature?"),
        ({"prompt": "x", "sampling_params": {"temperature": "hot"}}, "temperature must be a number"),
        ({"prompt": "x", "sampling_params": {"logit_bias": [5]}}, "logit_bias must map token ids"),
        ({"prompt": "x", "sampling_params": {"stop": "a\ud800"}}, "stop is not valid Unicode"),
    ],
)
def test_a_wrong_call_is_a_value_error(engine: Engine, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        engine.generate(**arguments)
    assert isinstance(caught.value, RequestError)
    assert engine.generate("x", SHORT).finish_reason == "length"


def test_one_bad_prompt_of_a_list_ends_the_others(engine: Engine) -> None:
    with pytest.raises(RequestError):
        engine.generate(input_ids=[[scripted_core.STALL], [-1]])
    for _ in range(200):
        if engine.control("stats")["running"] == 0:
            return
    raise AssertionError("the other prompt still runs")


def test_a_failure_of_the_core_is_raised(engine: Engine) -> None:
    for stream in (False, True):
        with pytest.raises(GenerationError, match="scripted failure"):
            list(engine.generate(input_ids=[scripted_core.FAIL, 5], stream=stream))  # type: ignore[call-overload]


def test_the_core_s_death_is_raised() -> None:
    with make(core="process") as engine:
        with pytest.raises(GenerationError, match="SIGKILL"):
            engine.generate(input_ids=[scripted_core.KILL])
        with pytest.raises(UnavailableError, match="SIGKILL"):
            engine.generate("x")


@pytest.mark.parametrize("core", ["inproc", "process"])
def test_a_failed_start_says_why_and_leaves_nothing(core: str) -> None:
    before = threading.active_count()
    with pytest.raises(StartupError, match="missing shard 2 of 3"):
        make(scripted_core.run_core_refusing, core=core)
    assert threading.active_count() == before


def test_wrong_options() -> None:
    with pytest.raises(OptionError, match="dtype is 'int3'"):
        make(dtype="int3")
    with pytest.raises(OptionError, match="host is no option of EngineConfig"):
        make(host="0.0.0.0")


@pytest.mark.parametrize("core", ["inproc", "process"])
def test_b69_an_engine_closed_under_two_iterators_ends_both(core: str) -> None:
    """transformers#40479: a shutdown that hangs, or loses what another request has made."""
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    with make(core=core) as engine:
        streams = [
            engine.generate(input_ids=[scripted_core.SLOW, n], sampling_params=long, stream=True) for n in (5, 6)
        ]
        got = [[next(stream)] for stream in streams]
        engine.close()
        for deltas, stream in zip(got, streams):
            deltas += stream
    for n, deltas in zip((5, 6), got):
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert 0 < len(tokens) < 400 and tokens == ([scripted_core.SLOW, n] * 200)[: len(tokens)]
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["abort"]


def test_use_after_close() -> None:
    engine = make()
    engine.close()
    engine.close()
    with pytest.raises(UnavailableError, match="closed"):
        engine.generate("x")
    with pytest.raises(UnavailableError, match="closed: make a new one"), engine:
        raise AssertionError("the block of a closed engine must not begin")


SCRIPT = """
import scripted_core
from tokenspeed import Engine, SamplingParams
engine = Engine("smollm2", target=scripted_core.run_core)
print(engine.generate("one two", SamplingParams(max_tokens=2)).text)
"""


def test_a_script_without_a_main_guard_and_without_close_ends() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, env=environment()
    )
    assert (result.returncode, result.stdout) == (0, "one two\n")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_import_is_light() -> None:
    code = "import sys, tokenspeed; print(sorted(m for m in sys.modules if m.startswith('tokenspeed') or m == 'torch'))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert result.stdout == "['tokenspeed']\n"
    code = "import sys, tokenspeed; tokenspeed.Engine, tokenspeed.SamplingParams; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert result.stdout == "False\n"


BARE = """
import sys
for name in ("msgspec", "gguf", "fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "rich"):
    sys.modules[name] = None
import scripted_core
from tokenspeed import Engine, SamplingParams
with Engine("smollm2", core="inproc", target=scripted_core.run_core) as engine:
    print(engine.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=2)).text)
"""


def test_an_engine_needs_none_of_the_serving_packages() -> None:
    result = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, env=environment())
    assert result.stdout == "system\n", result.stderr


def test_public_names() -> None:
    assert {"Engine", "SamplingParams", "RequestOutput"} <= set(dir(tokenspeed))
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = tokenspeed.Motor  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, ["x"]) for name in ("image_data", "audio_data", "video_data", "token_ids_logprob")],
        *[(name, "x") for name in ("custom_logit_processor", "bootstrap_host", "lora_path", "structured_outputs")],
        *[(name, 0) for name in ("bootstrap_port", "bootstrap_room", "top_logprobs_num")],
        *[(name, True) for name in ("return_hidden_states", "return_logprob", "sampling_parms")],
    ],
)
def test_what_generate_does_not_take_is_refused_by_name(engine: Engine, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        engine.generate(prompt="one", sampling_params=SHORT, **{name: value})
    assert caught.value.param == name


def test_arguments_that_ask_for_nothing_are_taken(engine: Engine) -> None:
    nothing = {"image_data": None, "return_hidden_states": False, "token_ids_logprob": [], "structured_outputs": {}}
    assert engine.generate(prompt="one", sampling_params=SHORT, **nothing).finish_reason == "length"
