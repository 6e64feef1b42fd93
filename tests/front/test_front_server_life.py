"""The life of a server process: load, serve, drain, die."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import scripted_core
from serving import ServerProcess

TEXT = "/v1/completions"


class Streams:
    """Some open streams in threads; the events of each once they have ended."""

    def __init__(self, server: ServerProcess, count: int, body: dict[str, Any]) -> None:
        self.texts: list[str] = [""] * count
        self.begun = threading.Barrier(count + 1)
        self._threads = [threading.Thread(target=self._read, args=(server, at, body)) for at in range(count)]
        for thread in self._threads:
            thread.start()
        self.begun.wait(20)

    def _read(self, server: ServerProcess, at: int, body: dict[str, Any]) -> None:
        with httpx.stream("POST", server.url + TEXT, json={**body, "stream": True}, timeout=60) as response:
            chunks = response.iter_text()
            self.texts[at] = next(chunks)
            self.begun.wait(20)
            for text in chunks:
                self.texts[at] += text

    def events(self) -> list[list[str]]:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        return [[block.removeprefix("data: ") for block in text.strip().split("\n\n")] for text in self.texts]


def reasons(events: list[str]) -> list[str]:
    """The finish reasons of a stream that ended with [DONE]."""
    assert events[-1] == "[DONE]"
    parts = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return [part["finish_reason"] for part in parts if part["finish_reason"]]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def health(server: ServerProcess) -> tuple[int, str]:
    answer = httpx.get(server.url + "/health")
    return answer.status_code, answer.json()["status"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(number: int) -> None:
    with ServerProcess(core="inproc").wait_ready() as server:
        assert health(server) == (200, "ready")
        server.signal(number)
        assert server.end()[0] == 0


def test_b68_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:  # vllm#24885, #36666
    with ServerProcess().wait_ready() as server:
        streams = Streams(server, 4, {"prompt": [scripted_core.SLOW, 5, 6], "max_tokens": 60})
        server.signal()
        eventually(lambda: health(server) == (503, "draining"))
        refused = httpx.post(server.url + TEXT, json={"prompt": "x"})
        assert refused.status_code == 503 and float(refused.headers["Retry-After"]) > 0
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        for events in streams.events():
            assert reasons(events) == ["length"]
        assert server.end()[0] == 0


def test_a_drain_that_lasts_too_long_aborts_with_a_last_event() -> None:
    with ServerProcess(drain_timeout=0.2).wait_ready() as server:
        streams = Streams(server, 4, {"prompt": [scripted_core.SLOW, 5, 6], "max_tokens": 500})
        server.signal()
        for events in streams.events():
            assert reasons(events) == ["abort"]
        assert server.end()[0] == 0


def test_a_second_signal_ends_the_drain() -> None:
    with ServerProcess(drain_timeout=600.0).wait_ready() as server:
        streams = Streams(server, 2, {"prompt": [scripted_core.SLOW, 5], "max_tokens": 500})
        server.signal()
        eventually(lambda: health(server)[1] == "draining")
        server.signal()
        assert server.end()[0] == 0
        for events in streams.events():
            assert reasons(events) == ["abort"]


@pytest.mark.parametrize("core", ["process", "inproc"])
def test_the_core_s_death_ends_the_server_with_its_reason(core: str) -> None:
    with ServerProcess(core=core).wait_ready() as server:
        streams = Streams(server, 2, {"prompt": [scripted_core.SLOW, 5], "max_tokens": 500})
        answer = httpx.post(server.url + TEXT, json={"prompt": [scripted_core.DIE]})
        assert answer.status_code == 500 and "scripted death" in answer.json()["error"]["message"]
        for events in streams.events():
            assert "scripted death" in json.loads(events[-1])["error"]["message"]
        status, errors = server.end()
        assert status == 1 and "scripted death" in errors


def test_a_killed_core_ends_the_server() -> None:
    with ServerProcess().wait_ready() as server:
        assert httpx.post(server.url + TEXT, json={"prompt": [scripted_core.KILL]}).status_code == 500
        status, errors = server.end()
        assert status == 1 and "SIGKILL" in errors


@pytest.mark.parametrize("core", ["process", "inproc"])
def test_a_model_that_does_not_come_up_is_status_1_with_the_reason(core: str) -> None:
    with ServerProcess("run_core_refusing", core=core) as server:
        status, errors = server.end()
        assert status == 1 and "model.safetensors is missing shard 2 of 3" in errors


def test_while_it_loads_only_the_probes_answer() -> None:
    with ServerProcess("run_core_loading") as server:
        eventually(lambda: answers(server))
        assert health(server) == (503, "loading")
        assert httpx.get(server.url + "/metrics").status_code == 200
        refused = httpx.get(server.url + "/v1/models")
        assert refused.status_code == 503 and "loading" in refused.json()["error"]["message"]
        server.signal()
        assert server.end()[0] == 0


def answers(server: ServerProcess) -> bool:
    try:
        return httpx.get(server.url + "/health").status_code == 503
    except httpx.TransportError:
        return False


def test_an_address_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with ServerProcess(port=taken.getsockname()[1], core="inproc") as server:
            status, errors = server.end()
            assert status == 1 and "cannot listen on 127.0.0.1" in errors
