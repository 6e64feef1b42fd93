"""A server whose engine core computes nothing: `python -m benchmarks.null_model` prints its address and serves.

Each request gets its first token at once and one more every TICK, all of them in one message as an engine's step sends them.
"""

from __future__ import annotations

import sys
import time

from tokenspeed.runtime.config import EngineConfig, ServerConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.messages import Abort, Control, Deltas, Finish, Ready, Stats, Submit, TokenDelta
from tokenspeed.runtime.transport import Inbox, Outbox

TICK = 0.05  # seconds between tokens of a stream: 20 a second
WORDS = [1780, 314, 253, 1028, 282, 1123, 30, 198]  # ordinary tokens of the embedded model


def null_core(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    """An engine core's entry."""
    outbox.put(Ready(100_000, 49_152, 10_000_000, 1024))
    running: dict[int, list[int]] = {}  # id -> [tokens made, tokens wanted]
    next_tick = time.monotonic() + TICK
    while True:
        first = inbox.get(max(0.0, next_tick - time.monotonic()))
        due: list[int] = []
        for message in ([first] if first is not None else []) + inbox.drain():
            if isinstance(message, Submit):
                running[message.request_id] = [0, message.params.max_tokens]
                due.append(message.request_id)
            elif isinstance(message, Abort | Finish):
                running.pop(message.request_id, None)
            elif isinstance(message, Control) and message.name == "shutdown":
                return
        if time.monotonic() >= next_tick:
            next_tick += TICK
            due = list(running)
        deltas = [_delta(request, running) for request in due if request in running]
        if deltas:
            outbox.put(Deltas.of(deltas, Stats(running=len(running))))


def _delta(request: int, running: dict[int, list[int]]) -> TokenDelta:
    count = running[request]
    count[0] += 1
    done = count[0] >= count[1]
    if done:
        del running[request]
    return TokenDelta(request, [WORDS[count[0] % len(WORDS)]], "length" if done else None)


def main() -> int:
    """Serves until SIGTERM."""
    from tokenspeed.cli.serve import run_loop
    from tokenspeed.runtime.server.serve import serve

    engine, server = EngineConfig(model="smollm2"), ServerConfig(port=0)
    try:
        return run_loop(serve(engine, server, target=null_core, on_listen=lambda url: print(url, flush=True)))
    except StartupError as fault:
        print(fault, file=sys.stderr)
        return 1


if __name__ == "__main__":  # through the package, so that a core process can import the entry
    from benchmarks.null_model import main as run

    sys.exit(run())
