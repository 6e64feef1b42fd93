"""Servers for tests: the app on a port of this process, or the whole `serve` as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import scripted_core
import uvicorn

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import EngineConfig, ServerConfig
from tokenspeed.runtime.metrics import Metrics
from tokenspeed.runtime.server.app import create_app
from tokenspeed.runtime.server.direct import Direct
from tokenspeed.runtime.server.gate import Life
from tokenspeed.runtime.transport import CoreEntry

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class AppServer:
    """The app under uvicorn in a thread; `llm` lives on that thread's loop."""

    def __init__(
        self,
        target: CoreEntry = scripted_core.run_core,
        server: ServerConfig | None = None,
        *,
        direct: bool = True,
        send_buffer: int = 0,
        **options: Any,
    ) -> None:
        """`direct`: events take the short way to the socket. `send_buffer` of the connections, in bytes."""
        self._config = EngineConfig(**{"model": "smollm2", "core": "inproc", **options})
        self._server_config = server or ServerConfig()
        self._target = target
        self._direct, self._send_buffer = direct, send_buffer
        self._started = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self) -> None:
        try:
            metrics, self.life = Metrics("smollm2"), Life()
            self.llm = AsyncLLM(self._config, target=self._target, metrics=metrics)
            await self.llm.start()
            if self._direct:
                await self.llm.open_lanes()
            self.life.phase = "ready"
            app = create_app(self.llm, self.life, self._server_config, metrics)
            sock = socket.create_server(("127.0.0.1", 0))
            if self._send_buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
            config = uvicorn.Config(Direct(app) if self._direct else app, log_config=None, lifespan="off")
            self._uvicorn = uvicorn.Server(config)
            self.loop = asyncio.get_running_loop()
            task = asyncio.create_task(self._uvicorn.serve([sock]))
            while not self._uvicorn.started:
                await asyncio.sleep(0.005)
            self.port: int = sock.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            self._started.set()
            await task
            await self.llm.close()
        except BaseException as fault:
            self._fault = fault
            self._started.set()
            raise

    def __enter__(self) -> AppServer:
        self._thread.start()
        assert self._started.wait(30)
        if self._fault is not None:
            raise self._fault
        return self

    def __exit__(self, *exc: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def core_stats(self) -> dict[str, Any]:
        """The scripted core's counts."""
        return asyncio.run_coroutine_threadsafe(self.llm.control("stats"), self.loop).result(10)

    def play(self, text: str, *, ends: bool = True, times: int = 1) -> None:
        """The next requests (to a player) are answered with this text; one that does not end fails at its end."""
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode(text, add_special_tokens=False)
        scripted_core.PLAYS.extend([[*ids, *([min(tokenizer.eos_ids)] if ends else [])]] * times)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **kwargs)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, [DONE] checked and taken off."""
        text = self.post(path, {**body, "stream": True}).raise_for_status().text
        blocks = [block for block in text.split("\n\n") if block]
        assert blocks[-1] == "data: [DONE]"
        assert all(block.startswith("data: {") for block in blocks[:-1])
        return [json.loads(block[6:]) for block in blocks[:-1]]


class ServerProcess:
    """`serve` with a scripted core in a process; `target` names a function of scripted_core."""

    def __init__(self, target: str = "run_core", **options: Any) -> None:
        arguments = json.dumps({"target": target, **options})
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "serve_main.py"), arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"},
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def wait_ready(self) -> ServerProcess:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + "/health").status_code == 200:
                    return self
            time.sleep(0.02)
        raise AssertionError("the server did not come up")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self, timeout: float = 20) -> tuple[int, str]:
        """(exit status, standard error) once it has ended by itself."""
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def lines(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of an open stream as they come."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])
