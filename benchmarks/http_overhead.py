"""What the server itself costs, with a core that computes nothing: `python -m benchmarks.http_overhead [--json]`.

    first_byte_p50_us   one request at a time: written to the first byte of its first event
    first_byte_p99_us   requests at random times, 5 a second, while --streams others get 20 tokens a second each
    token_cpu_us        CPU of the server process (not the core's) for each token that it sent meanwhile, the work of
                        requests included: a stream is one of 400 tokens, and ends and begins at its own time
    client_cpu          the share of one core that the load generator took (http_load.cpp, compiled here)

Each wire format in turn (--wire),
with --tools in requests that offer a tool, as agents' do. Server, core and load generator share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOKENS = 400  # of a stream, then the next one begins on its connection
TEXT = "Hello there, how are you today?"
MESSAGES = [{"role": "user", "content": TEXT}]
WIRES: dict[str, tuple[str, dict[str, Any], str]] = {  # path, body, the field of the most tokens
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens"),
    "completions": ("/v1/completions", {"prompt": TEXT}, "max_tokens"),
    "responses": ("/v1/responses", {"model": "smollm2", "input": TEXT, "store": False}, "max_output_tokens"),
    "messages": ("/v1/messages", {"model": "smollm2", "messages": MESSAGES}, "max_tokens"),
}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
FUNCTION = {"name": "shell", "description": "Run a command.", "parameters": SCHEMA}
TOOLS: dict[str, dict[str, Any]] = {  # by wire
    "chat": {"type": "function", "function": FUNCTION},
    "responses": {"type": "function", **FUNCTION},
    "messages": {"name": "shell", "description": "Run a command.", "input_schema": SCHEMA},
}


def cpu_seconds(pid: int) -> float:
    """What a process has used, of its own threads and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server() -> Iterator[tuple[int, int]]:
    """(process id, port) of a server with the null model."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.null_model"], stdout=subprocess.PIPE, text=True, cwd=HERE.parent
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit("the server did not start; what it said stands above")
        while not _ready(url):
            time.sleep(0.1)
        yield process.pid, int(url.rpartition(":")[2].rstrip("/"))
    finally:
        process.terminate()
        process.wait(30)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health") as answer:
            return answer.status == 200
    except urllib.error.HTTPError:
        return False


def load(
    tool: Path, pid: int, port: int, wire: str, streams: int, rate: float, seconds: float, *, tools: bool
) -> dict[str, float]:
    """One run of the load generator and the server's CPU meanwhile."""
    path, body, field = WIRES[wire]
    if tools:
        body = {**body, "tools": [TOOLS[wire]]}
    bodies = []
    for name, tokens in (("stream", "@@@@@"), ("probe", 2)):
        bodies.append(tool.parent / f"{name}.json")
        bodies[-1].write_text(json.dumps({**body, "stream": True, field: tokens}).replace('"@@@@@"', "@@@@@"))
    given = [tool, port, path, *bodies, streams, TOKENS, rate, 3 if streams else 0.5, seconds]
    generator = subprocess.Popen([str(g) for g in given], stdout=subprocess.PIPE, text=True)
    assert generator.stdout is not None
    if generator.stdout.readline() != "begin\n":
        raise SystemExit("the load generator failed; what it said stands above")
    before = cpu_seconds(pid)
    found = json.loads(generator.stdout.read())
    used = cpu_seconds(pid) - before
    if found["faults"]:
        raise SystemExit(f"{wire}: {found['faults']} responses were refused or cut")
    first = sorted(found["first_byte_us"])
    return {
        "p50_us": round(statistics.median(first), 1),
        "p99_us": round(statistics.quantiles(first, n=100)[98], 1),
        "probes": len(first),
        "tokens": found["events"],
        "token_cpu_us": round(used / found["events"] * 1e6, 2),
        "server_cpu": round(used / found["wall_seconds"], 3),
        "client_cpu": round(found["cpu_seconds"] / found["wall_seconds"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", action="append", choices=WIRES, help="a wire format (repeatable; default: chat)")
    parser.add_argument("--tools", action="store_true", help="each request offers a tool")
    parser.add_argument("--streams", type=int, default=256, help="streams beside which further requests come (256)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the loaded run of each format (30)")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    args = parser.parse_args()
    if args.tools and not TOOLS.keys() >= set(args.wire or []):
        parser.error("completions take no tools: leave out --tools or --wire completions")
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tool = Path(folder) / "http_load"
        subprocess.run(["g++", "-O2", "-std=c++20", "-o", tool, HERE / "http_load.cpp"], check=True)
        for wire in args.wire or ["chat"]:
            with server() as (pid, port):
                alone = load(tool, pid, port, wire, 0, 0, 5, tools=args.tools)
                loaded = load(tool, pid, port, wire, args.streams, 5, args.seconds, tools=args.tools)
            rows[wire] = {
                "first_byte_p50_us": alone["p50_us"], "first_byte_p99_us": loaded["p99_us"],
                "token_cpu_us": loaded["token_cpu_us"], "client_cpu": loaded["client_cpu"],
                "server_cpu": loaded["server_cpu"], "tokens": loaded["tokens"], "probes": loaded["probes"],
            }  # fmt: skip
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    for wire, row in rows.items():
        print(f"{wire:12} " + "  ".join(f"{name} {value:g}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
