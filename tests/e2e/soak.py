"""A server under twice the load that it takes, for a while: `python -m tests.e2e.soak [--minutes 30] [--model MODEL]`.

Clients ask on every wire, streamed and whole, with and without a structure or a limit of time; leave in the middle, send what
is wrong, and abort each other. What must hold: no status above 499 but 503, one finish reason an answer, memory that does not
grow, and, when all is quiet again, no request left and every page free or cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.processes import Server
from tests.e2e.tiny import tiny_model

RUNNING, QUEUED = 6, 6  # of the server; there are twice as many clients as both
KEY = "soak"
OPTIONS = (
    "--device", "cpu", "--num-pages", 96, "--max-num-seqs", RUNNING, "--max-queued-requests", QUEUED, "--max-num-batched-tokens", 64,
    "--buckets", "1,4,16,64", "--admin-key", KEY, "--queue-timeout", 5, "--log-level", "error",
)  # fmt: skip
SETTLED = 0.4  # share of the time after which memory may not grow any more
GROWTH = 1.08  # of memory, at most, for noise of the allocators
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"],
          "additionalProperties": False}  # fmt: skip


@dataclass
class Seen:
    """What came back."""

    statuses: Counter[int] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    left: int = 0  # connections that the client closed
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes) of the server's processes


class Client:
    """One of them: asks again and again until the time is over."""

    def __init__(self, http: httpx.AsyncClient, seen: Seen, seed: int) -> None:
        self._http, self._seen, self._r = http, seen, random.Random(seed)

    async def run(self, until: float) -> None:
        acts: list[Callable[[], Any]] = [self._chat] * 6 + [self._text] * 3 + [self._other] * 2 + [self._leave] * 4
        acts += [self._bad] * 3 + [self._abort]
        while time.monotonic() < until:
            try:
                await self._r.choice(acts)()
            except httpx.HTTPError as fault:
                self._seen.wrong.append(f"{type(fault).__name__}: {fault}")
            await asyncio.sleep(self._r.random() * 0.01)

    def _messages(self) -> list[dict[str, str]]:
        shared = "a text that many requests begin with. " * self._r.choice((0, 1, 2))
        return [{"role": "user", "content": shared + "x" * self._r.randint(1, 90)}]

    def _body(self) -> dict[str, Any]:
        r = self._r
        body: dict[str, Any] = {
            "messages": self._messages(),
            "max_tokens": r.randint(1, 60),
            "temperature": r.choice((0, 1)),
        }
        body |= {
            "stream": r.random() < 0.6,
            "n": r.choice((1, 1, 1, 2)),
            "seed": r.randrange(9),
            "priority": r.choice((0, 0, 5)),
        }
        if r.random() < 0.3:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        return body | r.choice(({}, {}, {"timeout": 0.05}, {"stop": ["q"]}, {"logprobs": True, "top_logprobs": 2}))

    async def _ask(self, path: str, body: Any) -> None:
        answer = await self._http.post(path, json=body)
        self._seen.statuses[answer.status_code] += 1
        if answer.status_code == 200:
            self._ended(body, answer)

    def _ended(self, body: dict[str, Any], answer: httpx.Response) -> None:
        """Every choice has one finish reason, unless the stream says that something went wrong."""
        if not body.get("stream"):
            choices = answer.json().get("choices", [])
            reasons = [c["finish_reason"] for c in choices]
        else:
            events = [json.loads(row[6:]) for row in answer.text.splitlines() if row.startswith("data: {")]
            if any("error" in e for e in events):
                self._seen.ends["error event"] += 1
                return
            reasons = [c["finish_reason"] for e in events for c in e.get("choices", ()) if c["finish_reason"]]
        if len(reasons) != body.get("n", 1) and ("messages" in body or "prompt" in body):
            self._seen.wrong.append(f"{len(reasons)} finish reasons for n {body.get('n', 1)}")
        self._seen.ends.update(reasons)

    async def _chat(self) -> None:
        await self._ask("/v1/chat/completions", self._body())

    async def _text(self) -> None:
        body = {"prompt": "y" * self._r.randint(1, 150), "max_tokens": self._r.randint(0, 40), "n": 1, "stream": False}
        await self._ask("/v1/completions", body)

    async def _other(self) -> None:
        path, body = self._r.choice(
            (
                ("/v1/responses", {"input": "hello", "max_output_tokens": 20}),
                ("/v1/messages", {"messages": self._messages(), "max_tokens": 20}),
            )
        )
        answer = await self._http.post(path, json=body)
        self._seen.statuses[answer.status_code] += 1

    async def _leave(self) -> None:
        """Asks for much and goes after a little."""
        body = {**self._body(), "max_tokens": 300, "stream": True, "n": 1}
        body.pop("response_format", None)
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            self._seen.statuses[answer.status_code] += 1
            pieces = self._r.randint(0, 4)
            async for _ in answer.aiter_bytes():
                if (pieces := pieces - 1) < 0:
                    break
        self._seen.left += 1

    async def _bad(self) -> None:
        body = self._body()
        wrong: dict[str, Any] = self._r.choice(
            (
                {"temperature": -1}, {"max_tokens": 100_000}, {"messages": "no"}, {"n": 0}, {"stop": [""]},
                {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}},
                {"structured_outputs": {"regex": "("}}, {"model": "another"}, {"logit_bias": {"999999": 1}},
            )
        )  # fmt: skip
        body.pop("response_format", None)
        answer = await self._http.post("/v1/chat/completions", json=body | wrong)
        self._seen.statuses[answer.status_code] += 1
        if answer.status_code == 200:
            self._seen.wrong.append(f"taken: {wrong}")

    async def _abort(self) -> None:
        """All requests at once, of whoever."""
        call = self._http.post("/internal/abort", json={"abort_all": True}, headers={"Authorization": f"Bearer {KEY}"})
        self._seen.statuses[(await call).status_code] += 1


async def soak(server: Server, seconds: float, seed: int = 0) -> Seen:
    """Load for so long; what was seen, memory included."""
    seen = Seen()
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
        clients = [Client(http, seen, seed * 1000 + i).run(until) for i in range(2 * (RUNNING + QUEUED))]
        watch = asyncio.create_task(_watch(server, seen))
        await asyncio.gather(*clients)
        watch.cancel()
    return seen


async def _watch(server: Server, seen: Seen) -> None:
    began = time.monotonic()
    while True:
        seen.memory.append((time.monotonic() - began, resident(server.process.pid)))
        await asyncio.sleep(0.25)


def resident(pid: int) -> int:
    """Bytes of memory of a process and its children."""
    total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        total += resident(int(child))
    return total


def quiet(server: Server, timeout: float = 20) -> dict[str, Any]:
    """The scheduler's statistics when nothing is left to do; AssertionError if that does not come."""
    deadline = time.monotonic() + timeout
    stats: dict[str, Any] = {}
    while time.monotonic() < deadline:
        answer = httpx.get(f"{server.url}/internal/scheduler", headers={"Authorization": f"Bearer {KEY}"}).json()
        stats = answer["stats"]
        if not answer["requests"] and not stats["running"] and not stats["waiting"]:
            return stats
        time.sleep(0.05)
    raise AssertionError(f"requests are left: {stats}")


def faults(server: Server, seen: Seen) -> list[str]:
    """What did not hold."""
    out = seen.wrong[:10]
    out += [f"{n} answers with status {s}" for s, n in seen.statuses.items() if s >= 500 and s != 503]
    if server.process.poll() is not None:
        return [*out, "the server has ended:\n" + "".join(server.log)]
    stats = quiet(server)
    if stats["kv_pages_free"] + stats["kv_pages_evictable"] != stats["kv_pages_total"]:
        out.append(f"pages are lost: {stats}")
    end = seen.memory[-1][0]
    settled = max((m for t, m in seen.memory if t <= SETTLED * end), default=0)
    last = sorted(m for t, m in seen.memory if t >= 0.9 * end)
    if last[len(last) // 2] > GROWTH * settled:
        out.append(f"memory grew from {settled >> 20} to {last[len(last) // 2] >> 20} MiB")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", default="", help="of its own kind; none: a random one")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or tiny_model(Path(folder) / "model", tokenizer=True)
        with Server(model, *OPTIONS) as server:
            server.ready()
            seen = asyncio.run(soak(server, 60 * args.minutes, args.seed))
            found = faults(server, seen)
            low, high = (f(m for _, m in seen.memory) >> 20 for f in (min, max))
            print(f"statuses {dict(seen.statuses)}, ends {dict(seen.ends)}, left {seen.left}, memory {low}..{high} MiB")
    print("\n".join(found) or "held")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
