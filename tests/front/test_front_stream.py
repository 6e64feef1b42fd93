"""The way of a token from the core's message to the socket: which goes first, a client that reads late, the bytes themselves."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time

import pytest
import scripted_core
from serving import AppServer
from wires import CHAT, MESSAGES, RESPONSES, request

from tokenspeed.runtime import flight
from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.messages import Control, Deltas, Ready, Stats, TokenDelta
from tokenspeed.runtime.outputs import OutputDelta
from tokenspeed.runtime.pipe import Pipe
from tokenspeed.runtime.transport import Inbox, InprocClient, Outbox

TEXT = "/v1/completions"


def silent_core(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    """Says nothing but that it is there."""
    outbox.put(Ready(1000, 49_152, 100_000, 256))
    while not isinstance(inbox.get(None), Control):
        pass


@pytest.mark.parametrize("packed", [False, True])
async def test_a_first_token_overtakes_those_of_a_long_step(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    monkeypatch.setattr(flight, "BURST", 2)
    llm = AsyncLLM(EngineConfig("smollm2", core="inproc"), target=silent_core)
    await llm.start()
    client = llm._client
    assert isinstance(client, InprocClient)
    order: list[int] = []
    for at in range(7):
        stream = await llm.submit([5])

        def told(delta: OutputDelta, at: int = at) -> None:
            order.append(at)
            if len(order) == 8:  # two of the long step are out
                client._mailbox.deliver(step(7))

        stream.listen(told)

    def step(*ids: int) -> Deltas:
        deltas = [TokenDelta(request_id, [5]) for request_id in ids]
        return Deltas.of(deltas, Stats()) if packed else Deltas(deltas, Stats())

    for done in (6, 13):
        client._mailbox.deliver(step(1, 2, 3, 4, 5, 6))
        while len(order) < done:
            await asyncio.sleep(0)
    assert order == [0, 1, 2, 3, 4, 5, 0, 1, 6, 2, 3, 4, 5]
    await llm.close()


@pytest.mark.parametrize("burst", [1, 3, 100])
async def test_the_tokens_of_a_choice_keep_their_order(monkeypatch: pytest.MonkeyPatch, burst: int) -> None:
    """Whatever the form of the steps is that wait to be delivered: the last one goes last."""
    monkeypatch.setattr(flight, "BURST", burst)
    llm = AsyncLLM(EngineConfig("smollm2", core="inproc"), target=silent_core)
    await llm.start()
    client = llm._client
    assert isinstance(client, InprocClient)
    streams = [await llm.submit([5]) for _ in range(4)]
    told: list[list[int]] = [[] for _ in streams]
    for stream, ids in zip(streams, told, strict=True):
        stream.listen(lambda delta, ids=ids: ids.extend(delta.token_ids))
    for step in range(1, 7):
        deltas = [TokenDelta(at, [step], "length" if step == 6 else None) for at in range(1, 5)]
        for delta in deltas[:step]:
            delta.cached_tokens = 16  # which is not plain
        client._mailbox.deliver(Deltas.of(deltas, Stats()))
    while llm.in_flight:
        await asyncio.sleep(0)
    assert told == [[1, 2, 3, 4, 5, 6]] * 4
    await llm.close()


@pytest.mark.parametrize("wire", [CHAT, MESSAGES, RESPONSES, TEXT])
@pytest.mark.parametrize("direct", [True, False])
def test_a_client_that_reads_late_gets_everything_in_order(wire: str, direct: bool) -> None:
    """More than the socket and the transport hold, so that events wait until the client reads."""
    words = "".join(f" {number}" for number in range(700))
    asked = {"prompt": "x"} if wire == TEXT else request(wire)
    body = json.dumps({**asked, "stream": True, "max_output_tokens" if wire == RESPONSES else "max_tokens": 4000})
    with AppServer(scripted_core.run_player, direct=direct, send_buffer=4096, max_model_len=8192) as server:
        server.play(words)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            head = f"POST {wire} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            client.sendall((head + body).encode())
            while server.core_stats()["running"] or not server.core_stats()["submits"]:
                time.sleep(0.01)
            raw = b""
            while news := client.recv(1 << 16):
                raw += news
    chunks, sent = [], raw.partition(b"\r\n\r\n")[2]
    while sent != b"0\r\n\r\n":
        size, _, rest = sent.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        assert rest[int(size, 16) :].startswith(b"\r\n")
        sent = rest[int(size, 16) + 2 :]
    texts = re.findall(r'"(?:content|text|delta)":"([^"]*)"', b"".join(chunks).decode())
    assert "".join(texts).startswith(words)


async def test_a_pipe_keeps_what_the_socket_has_no_room_for() -> None:
    left, right = (Pipe(end) for end in socket.socketpair())
    messages = [bytes([at]) * size for at, size in enumerate((0, 1, 1 << 20, 5, 3 << 20, 70_000))]
    got: list[bytes] = []
    for message in messages:
        left.send(message)
    assert left.behind
    while len(got) < len(messages):
        got += right.receive()
        left.push()
    assert got == messages and not left.behind and not right.ended
    left.close()
    assert right.receive() == [] and right.ended
    right.send(b"to nobody")
    assert not right.behind
    right.close()
