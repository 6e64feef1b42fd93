"""Requests of real clients, damaged anywhere: each is answered or refused in its wire's form, and none ends the server.

`python tests/front/test_front_fuzz.py --requests 100000` goes on for longer.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import scripted_core
from serving import AppServer
from test_front_messages import SESSION as CLAUDE
from test_front_responses import SESSION as CODEX
from wires import CHAT, CHAT_TOOLS, MESSAGES, RESPONSES, events

from tokenspeed.runtime.config import ServerConfig
from tokenspeed.runtime.server.protocol import FIELDS

CLINE: dict[str, Any] = {
    "model": "smollm2",
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "reasoning": "I look.", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
            {"id": "b", "type": "custom", "custom": {"name": "patch", "input": "x"}},
        ]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ],
    "tools": [*CHAT_TOOLS, {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}],
    "tool_choice": "auto", "parallel_tool_calls": True, "temperature": 0, "max_tokens": 5, "n": 2, "stop": ["a", "b"],
    "response_format": {"type": "text"}, "stream_options": {"include_usage": True}, "stream": True, "logprobs": True,
    "top_logprobs": 2, "logit_bias": {"5": 1}, "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low",
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    CHAT: CLINE,
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 3, "echo": True, "logprobs": 1, "stream": True, "n": 2},
    MESSAGES: {**CLAUDE, "model": "smollm2", "max_tokens": 5},
    "/v1/messages/count_tokens": {key: CLAUDE[key] for key in ("messages", "system", "tools", "thinking")},
    RESPONSES: {**CODEX, "max_output_tokens": 5},
    "/tokenize": {"messages": CLINE["messages"], "tools": CHAT_TOOLS},
    "/detokenize": {"tokens": [1, 2, 3]},
}
STRANGE: list[Any] = [
    None, True, False, 0, -1, 2**31, 2**63, 1.5, -1e308, "", "x", "\u0000", "\U0001f600", "word " * 2000, [], [[]], [None], ["x"],
    {}, {"type": None}, {"type": "text"}, {"type": "function"}, {"type": "json_schema"}, {"name": 5}, {"": ""}, [{"type": {}}],
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value within a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*at, key)
        yield from places(item, (*at, key))


def damaged(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The body with one to three values replaced, removed, doubled or exchanged."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice((1, 1, 2, 3))):
        known = list(places(body))
        if not known:
            break
        *path, last = draw.choice(known)
        holder: Any = body
        for key in path:
            holder = holder[key]
        how = draw.randrange(5)
        if how == 0:
            del holder[last]
        elif how == 1 and isinstance(holder, list):
            holder.insert(last, copy.deepcopy(holder[last]))
        elif how == 2:
            *other, end = draw.choice(known)
            value: Any = body
            for key in (*other, end):
                value = value[key]
            holder[last] = copy.deepcopy(value)
        elif how == 3 and isinstance(holder, dict):
            holder[draw.choice(sorted(FIELDS))] = copy.deepcopy(draw.choice(STRANGE))
        else:
            holder[last] = copy.deepcopy(draw.choice(STRANGE))
    return body


def check(response: httpx.Response, path: str) -> None:
    """One answer of the path's wire, or one error of its form."""
    assert response.status_code < 500 or response.status_code == 503, response.text
    if response.status_code != 200:
        error = response.json()
        assert isinstance(error["error"]["message"], str) and len(error["error"]["message"]) < 1500
        assert (error.get("type") == "error") == path.startswith(MESSAGES)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert events(response) and ("[DONE]" in response.text) == (path in (CHAT, "/v1/completions"))
    else:
        assert isinstance(response.json(), dict)


def storm(server: AppServer, requests: int, seed: int) -> dict[int, int]:
    """Damaged requests; how often each status was the answer."""
    draw, seen = random.Random(seed), dict[int, int]()
    with httpx.Client(timeout=30) as client:
        for _ in range(requests):
            path = draw.choice(list(BODIES))
            body = damaged(BODIES[path], draw)
            response = client.post(
                server.url + path, content=json.dumps(body), headers={"Content-Type": "application/json"}
            )
            try:
                check(response, path)
            except AssertionError:
                print(path, json.dumps(body))
                raise
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
    return seen


def damaging_server() -> AppServer:
    options = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3", response_store_mib=1)
    return AppServer(scripted_core.run_core, options, max_model_len=1500)


@pytest.mark.parametrize("seed", range(2))
def test_damaged_requests_are_answered_or_refused(seed: int) -> None:
    with damaging_server() as server:
        for path, body in BODIES.items():
            assert server.post(path, body).status_code == 200, path
        seen = storm(server, 250, seed)
        assert seen[200] > 20 and seen[400] > 50 and set(seen) <= {200, 400, 404}
        assert server.core_stats()["running"] == 0 and server.llm.in_flight == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with damaging_server() as server:
        print(storm(server, args.requests, args.seed))
