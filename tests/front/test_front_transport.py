"""Both clients of the engine core behave alike, in life and in death."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import scripted_core

from tokenspeed.runtime import transport, transport_process
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.messages import (
    Abort,
    Control,
    CoreParams,
    Deltas,
    Died,
    Finish,
    Ready,
    Reply,
    Stats,
    Submit,
    ToCore,
    ToFront,
    TokenDelta,
    TokenLogprob,
    packed,
)
from tokenspeed.runtime.transport import CoreClient, InprocClient
from tokenspeed.runtime.transport_process import Codec, ProcessClient

CONFIG = EngineConfig("smollm2")
Make = Callable[[Any], CoreClient]


@pytest.fixture(params=["inproc", "process"])
def make(request: pytest.FixtureRequest) -> Make:
    kind = InprocClient if request.param == "inproc" else ProcessClient
    return lambda target: kind(CONFIG, target)


async def next_deltas(client: CoreClient) -> list[TokenDelta]:
    message = await asyncio.wait_for(client.recv(), 10)
    assert isinstance(message, Deltas)
    return message.deltas


async def test_a_request_and_a_call(make: Make) -> None:
    client = make(scripted_core.run_core)
    ready = await client.start()
    assert ready == Ready(scripted_core.MAX_LEN, scripted_core.VOCAB, 100_000, 256, {"model": "smollm2", "ranks": 1})
    client.send(Submit(7, packed([5, 6]), CoreParams(max_tokens=3, logprobs=1, logit_bias={3: 1.5})))
    deltas = [delta for _ in range(3) for delta in await next_deltas(client)]
    assert [delta.token_ids for delta in deltas] == [[5], [6], [5]]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    assert deltas[0].logprobs == [TokenLogprob(5, -5.0, [5], [-5.0])]
    client.send(Control(3, "stats"))
    reply = await client.recv()
    assert isinstance(reply, Reply) and reply.call_id == 3 and reply.result["submits"] == 1
    await client.close()
    await client.close()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (scripted_core.run_core_refusing, "model.safetensors is missing shard 2 of 3"),
        (scripted_core.run_core_raising, "dtype float7 is unknown"),
    ],
)
async def test_a_failed_start_says_the_core_s_reason(make: Make, target: Any, reason: str) -> None:
    client = make(target)
    with pytest.raises(StartupError) as caught:
        await client.start()
    assert str(caught.value) == reason
    await client.close()


async def test_a_core_that_raises_is_one_died_with_its_reason(make: Make) -> None:
    client = make(scripted_core.run_core)
    await client.start()
    client.send(Submit(1, packed([scripted_core.DIE]), CoreParams(max_tokens=3)))
    assert await asyncio.wait_for(client.recv(), 10) == Died("RuntimeError: scripted death")
    client.send(Abort(1))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(client.recv(), 0.3)
    await client.close()


async def test_a_core_that_returns_unasked_has_died(make: Make) -> None:
    client = make(scripted_core.run_core_exiting)
    await client.start()
    message = await asyncio.wait_for(client.recv(), 10)
    assert isinstance(message, Died) and "the engine core ended" in message.reason
    await client.close()


async def test_messages_before_a_death_arrive(make: Make) -> None:
    client = make(scripted_core.run_core)
    await client.start()
    client.send(Submit(1, packed([5]), CoreParams(max_tokens=100)))
    client.send(Submit(2, packed([5] * 3), CoreParams(max_tokens=100)))
    while (await next_deltas(client))[0].finish_reason is None:
        pass
    client.send(Submit(3, packed([scripted_core.DIE]), CoreParams(max_tokens=3)))
    while not isinstance(message := await asyncio.wait_for(client.recv(), 10), Died):
        assert isinstance(message, Deltas)
    await client.close()


async def test_a_killed_process_names_the_signal() -> None:
    client = ProcessClient(CONFIG, scripted_core.run_core)
    await client.start()
    client.send(Submit(1, packed([scripted_core.KILL]), CoreParams(max_tokens=3)))
    assert await asyncio.wait_for(client.recv(), 10) == Died("the engine core was killed by SIGKILL (out of memory?)")
    client.send(Submit(2, packed([5]), CoreParams(max_tokens=3)))
    await client.close()


async def test_a_deaf_core_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CLOSE_TIMEOUT", 0.3)
    monkeypatch.setattr(transport_process, "CLOSE_TIMEOUT", 0.3)
    client = ProcessClient(CONFIG, scripted_core.run_core_deaf)
    await client.start()
    pid = client.pid
    assert pid is not None
    await client.close()
    assert not alive(pid)
    thread = InprocClient(CONFIG, scripted_core.run_core_deaf)
    await thread.start()
    await asyncio.wait_for(thread.close(), 10)


async def test_close_leaves_no_process_and_no_descriptor_behind() -> None:
    before = set(os.listdir("/proc/self/fd"))
    client = ProcessClient(CONFIG, scripted_core.run_core)
    await client.start()
    pid = client.pid
    assert pid is not None and set(os.listdir("/proc/self/fd")) > before
    await client.close()
    assert not alive(pid) and set(os.listdir("/proc/self/fd")) == before


PARENT = """
import asyncio, os, sys
import scripted_core
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.transport_process import ProcessClient

async def main():
    client = ProcessClient(EngineConfig("smollm2"), scripted_core.run_core_with_worker)
    ready = await client.start()
    print(client.pid, ready.summary["worker"], flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_death_of_the_parent_ends_the_core_and_its_workers() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    """Not gone and not a zombie that nobody reaps."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_local_function_cannot_be_a_core_process() -> None:
    with pytest.raises(ValueError, match="no function of an importable module"):
        ProcessClient(CONFIG, lambda config, inbox, outbox: None)


TO_CORE: list[ToCore] = [
    Submit(
        2**40,
        packed([1, 2]),
        CoreParams(4, 1, [2], 0.5, 3, 0.9, 0.1, 1.1, 0.2, 0.3, {7: -1.0}, [1], 2**64 - 1, 5),
        1,
        "s",
    ),
    Abort(1),
    Finish(2),
    Control(3, "stats", {"x": [1, None, "a"]}),
]
TO_FRONT: list[ToFront] = [
    Deltas(
        [TokenDelta(1, [2], "stop", 2, [TokenLogprob(2, -0.5, [2, 3], [-0.5, -1.0])], 16, "why", 5, 3)], Stats(1, 2)
    ),
    Deltas.of([TokenDelta(2**40, [5]), TokenDelta(7, [1, 2])], Stats()),
    Deltas([], Stats(host={"total": 3}, transfers={"backup": {"pages": 2}}, storage={"hits": 1}, page_bytes=4)),
    Reply(1, {"a": 1.5}, "no"),
    Ready(1, 2, 3, 4, {"ranks": 2}),
    Died("why"),
]


@pytest.mark.parametrize(("message", "union"), [(m, ToCore) for m in TO_CORE] + [(m, ToFront) for m in TO_FRONT])
def test_every_message_survives_the_wire(message: Any, union: Any) -> None:
    codec = Codec(union)
    assert codec.decode(codec.encode(message)) == message


def test_a_message_of_wrong_types_is_refused() -> None:
    data = Codec(ToCore).encode(Abort("one"))  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError):
        Codec(ToCore).decode(data)
