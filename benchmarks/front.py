"""What the front process costs, with a core that computes nothing: `python benchmarks/front.py [--json] [--streams N]`.

    first_byte_p50_us   one request at a time: request written to first SSE byte read
    first_byte_p99_us   the same while N other streams get 20 tokens a second each
    token_us            detokenise + parse for calls and reasoning + SSE of one token of one stream, in the server's code alone

Server and client share the machine; the client is in the same process as the load generator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time

import uvicorn

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import EngineConfig, ServerConfig
from tokenspeed.runtime.messages import Abort, Control, Deltas, Finish, Ready, Stats, Submit, TokenDelta
from tokenspeed.runtime.parsers import Tool, make_parser
from tokenspeed.runtime.request_stream import Choice, RequestStream
from tokenspeed.runtime.sampling_params import SamplingParams
from tokenspeed.runtime.server import run
from tokenspeed.runtime.server.app import create_app
from tokenspeed.runtime.server.blocks import Blocks
from tokenspeed.runtime.server.chat.answer import Answer
from tokenspeed.runtime.server.chat.request import ChatRequest
from tokenspeed.runtime.server.gate import Life
from tokenspeed.runtime.server.served import Served
from tokenspeed.runtime.transport import Inbox, Outbox

TICK = 0.05  # seconds between tokens of a stream: 20 a second
WORDS = [1780, 314, 253, 1028, 282, 1123, 30, 198]  # ordinary tokens of the embedded model


def null_core(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    """A first token at once, then one each TICK, all streams in one message as an engine step sends them."""
    outbox.put(Ready(100_000, 49_152, 10_000_000, 256))
    running: dict[int, list[int]] = {}  # id -> [tokens made, tokens wanted]
    next_tick = time.monotonic() + TICK
    while True:
        first = inbox.get(max(0.0, next_tick - time.monotonic()))
        fresh = []
        for message in ([first] if first is not None else []) + inbox.drain():
            if isinstance(message, Submit):
                running[message.request_id] = [0, message.params.max_tokens]
                fresh.append(message.request_id)
            elif isinstance(message, Abort | Finish):
                running.pop(message.request_id, None)
            elif isinstance(message, Control) and message.name == "shutdown":
                return
        due = fresh
        if time.monotonic() >= next_tick:
            next_tick += TICK
            due = list(running)
        deltas = []
        for request in due:
            count = running[request]
            count[0] += 1
            done = count[0] >= count[1]
            deltas.append(TokenDelta(request, [WORDS[count[0] % len(WORDS)]], "length" if done else None))
            if done:
                del running[request]
        if deltas:
            outbox.put(Deltas(deltas, Stats(running=len(running))))


def request_bytes(max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": "Hello there, how are you today?"}]
    body = json.dumps({"messages": messages, "max_tokens": max_tokens, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def read_events(reader: asyncio.StreamReader) -> None:
    """To the end of one response."""
    await reader.readuntil(b"data: [DONE]\n\n")
    await reader.readuntil(b"0\r\n\r\n")


async def client(port: int, streams: int, samples: int) -> dict[str, float]:
    load: list[asyncio.Task[None]] = []

    async def keep_busy() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while True:
            writer.write(request_bytes(200))
            await read_events(reader)

    async def first_bytes() -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        times = []
        for _ in range(samples):
            start = time.perf_counter()
            writer.write(request_bytes(1))
            await reader.readuntil(b"data: ")
            times.append((time.perf_counter() - start) * 1e6)
            await read_events(reader)
            await asyncio.sleep(0.005)
        writer.close()
        return times

    alone = await first_bytes()
    load = [asyncio.create_task(keep_busy()) for _ in range(streams)]
    await asyncio.sleep(2)
    loaded = await first_bytes()
    for task in load:
        task.cancel()
    await asyncio.gather(*load, return_exceptions=True)
    return {
        "first_byte_p50_us": statistics.median(alone),
        "first_byte_p99_us": statistics.quantiles(loaded, n=100)[98],
    }


async def token_cost(llm: AsyncLLM, tokens: int = 20_000) -> float:
    """Microseconds a token from the core's delta to the event's bytes."""
    stream = RequestStream([1], [Choice(0, SamplingParams(), llm.tokenizer)], lambda _: None)
    choice = stream.choices[0]
    body = ChatRequest(messages=[{"role": "user", "content": "x"}])
    parser = make_parser("hermes", "qwen3", tools=[Tool("shell")])
    answer = Answer(
        Served(llm, ServerConfig()), body, run.Run(body.turn(), stream, [run.Choice(0, parser, Blocks())], cut=False)
    )
    deltas = [TokenDelta(1, [WORDS[i % len(WORDS)]]) for i in range(tokens)]
    deltas[-1].finish_reason = "length"
    start = time.perf_counter()
    for delta in deltas:
        out = choice.accept(delta)
        if out is not None:
            stream.put(out)
    async for _ in answer.events():
        pass
    return (time.perf_counter() - start) / tokens * 1e6


async def serve(sock: socket.socket) -> None:
    from front import null_core  # by the name under which the core process finds it

    llm = AsyncLLM(EngineConfig("smollm2", max_num_seqs=4096), target=null_core)
    await llm.start()
    print(json.dumps({"token_us": await token_cost(llm)}), flush=True)
    app = create_app(llm, Life("ready"), ServerConfig())
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    await uvicorn.Server(config).serve([sock])
    await llm.close()


async def measure(streams: int, samples: int) -> dict[str, float]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        command = [sys.executable, __file__, "--serve-on", str(sock.fileno())]
        process = await asyncio.create_subprocess_exec(
            *command, pass_fds=[sock.fileno()], stdout=asyncio.subprocess.PIPE
        )
    assert process.stdout is not None
    figures = json.loads(await process.stdout.readline())
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            break
        except OSError:
            await asyncio.sleep(0.05)
    figures |= await client(port, streams, samples)
    process.terminate()
    await process.wait()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--streams", type=int, default=256, help="streams of the load (default: 256)")
    parser.add_argument("--samples", type=int, default=300, help="requests measured in each state (default: 300)")
    parser.add_argument("--serve-on", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_on is not None:
        import uvloop

        uvloop.run(serve(socket.socket(fileno=args.serve_on)))
        return
    figures = {name: round(value, 1) for name, value in asyncio.run(measure(args.streams, args.samples)).items()}
    if args.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:<18} {value:10.1f}")


if __name__ == "__main__":
    main()
