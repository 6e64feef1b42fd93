"""The newcomer's demo: compile the embedded model, serve it, ask one question through the OpenAI client, stop everything.

Prints the answer as it streams, the compiled program's summary, and one line `decode: N tok/s`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from openai import OpenAI

ARTIFACT = Path(__file__).parent.parent / "artifacts" / "smollm2"
QUESTION = "Explain in three sentences what a compiler does."


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_ready(port: int, server: subprocess.Popen[bytes], limit: float = 300.0) -> None:
    """Returns when /health answers 200; ends the demo with the server's status when it dies instead."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode} before it was ready; its messages are above")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"the server was not ready within {limit:.0f} s")


def ask(port: int) -> float:
    """Streams one answer to the screen; returns decoded tokens a second, the first token's wait left out."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=128, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    first = last = 0.0
    tokens = 0
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            last = time.perf_counter()
            first = first or last
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    print()
    return (tokens - 1) / (last - first)


def main() -> None:
    """See the module."""
    tokenspeed = [sys.executable, "-m", "tokenspeed"]
    summary = subprocess.run(
        [*tokenspeed, "compile", "smollm2", "-o", str(ARTIFACT)], check=True, capture_output=True, text=True
    ).stdout
    port = free_port()
    server = subprocess.Popen(
        [*tokenspeed, "serve", str(ARTIFACT), "--port", str(port), "--served-model-name", "smollm2"], env=os.environ
    )
    try:
        wait_ready(port, server)
        print(f"\n> {QUESTION}\n")
        speed = ask(port)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    print(f"\n{summary}")
    print(f"decode: {speed:.1f} tok/s")


if __name__ == "__main__":
    main()
