"""The real server and the real command as processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]


def tokenspeed(*arguments: object, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m tokenspeed ...` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tokenspeed", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, env=environment(**environ), cwd=cwd,
    )  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """This process's, with the repository importable and lines that are not wrapped."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "500", **more}


class Server:
    """`tokenspeed serve MODEL --port 0 ...` as a process; standard error is collected in `log`."""

    def __init__(self, *arguments: object, **environ: str) -> None:
        self.log: list[str] = []
        self.url = ""
        self._listening, self._ended = threading.Event(), threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokenspeed", "serve", *map(str, arguments), "--port", "0"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(**environ),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if not self.url and (found := re.search(r"listening on (http://[\w.]+:\d+)", line)):
                self.url = found[1]
                self._listening.set()
        self._ended.set()
        self._listening.set()

    def ready(self, timeout: float = 90) -> Server:
        """Waits until it can take requests."""
        deadline = time.monotonic() + timeout
        assert self._listening.wait(timeout), "the server does not listen"
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return self
            time.sleep(0.02)
        raise AssertionError("the server did not come up:\n" + "".join(self.log))

    def end(self, timeout: float = 90) -> tuple[int, str]:
        """(exit status, standard error) once it has ended by itself."""
        status = self.process.wait(timeout)
        self._ended.wait(10)
        return status, "".join(self.log)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **more)

    def metric(self, name: str) -> float:
        """The value of a Prometheus sample, labels ignored."""
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(name) and line[len(name)] in "{ ":
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def finished(self) -> dict[str, int]:
        """Requests that have ended, by reason."""
        text = httpx.get(f"{self.url}/metrics").text
        rows = re.findall(r'request_success_total\{.*finished_reason="(\w+)".*\} (\S+)', text)
        return {reason: int(float(count)) for reason, count in rows}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
