"""`tokenspeed chat`: a conversation in the terminal, with a model loaded here or with a server behind `--url`.

One turn is one streamed request with the whole conversation; Ctrl-C ends a turn, Ctrl-D the conversation.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from tokenspeed.runtime import options
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import EngineError, UnavailableError

Message = dict[str, str]
Ask = Callable[[list[Message]], Iterator[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's flags, and the conversation's own."""
    options.add_arguments(parser, EngineConfig)
    group = parser.add_argument_group("Conversation")
    group.add_argument("--url", metavar="URL", help="talk to this server (http://HOST:PORT/v1) and load no model")
    group.add_argument("--key", metavar="KEY", default="", help="the server's key")
    group.add_argument("--system", metavar="TEXT", default="", help="instructions to begin with")
    group.add_argument("--message", metavar="TEXT", help="ask this one question and end")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    group.add_argument("--max-tokens", type=int, default=512, metavar="INT", help="tokens an answer (default: 512)")


def run(args: argparse.Namespace) -> int:
    """Talk until the end of input; 0, or 1 when the one question of `--message` failed."""
    if args.url:
        given = [
            row.name.upper() if row.positional else row.flag
            for row in options.table(EngineConfig)
            if hasattr(args, row.name)
        ]
        if given:
            raise options.OptionError(f"--url talks to a model that is loaded already: leave {', '.join(given)} out")
        return _talk(args, lambda messages: ask_server(args.url, args.key, messages, _sampling(args)))
    from tokenspeed.runtime.engine import Engine
    from tokenspeed.runtime.logs import configure_logging
    from tokenspeed.runtime.sampling_params import SamplingParams

    config = options.from_args(EngineConfig, args)
    configure_logging(config.log_level)
    with Engine.from_config(config) as engine:
        params = SamplingParams(**_sampling(args))

        def ask(messages: list[Message]) -> Iterator[str]:
            return (delta.text for delta in engine.chat(messages, params, stream=True))

        return _talk(args, ask)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    return {"temperature": args.temperature, "max_tokens": args.max_tokens}


def _talk(args: argparse.Namespace, ask: Ask) -> int:
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    if args.message is not None:
        return _turn(messages, args.message, ask)
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text.strip():
            _turn(messages, text, ask)


def _turn(messages: list[Message], text: str, ask: Ask) -> int:
    """One question; a failed one is taken out of the conversation again."""
    messages.append({"role": "user", "content": text})
    answer = ""
    try:
        for piece in ask(messages):
            answer += piece
            print(piece, end="", flush=True)
    except EngineError as fault:
        print(f"error: {fault.message}", file=sys.stderr)
        messages.pop()
        return 1
    except KeyboardInterrupt:
        pass  # what has been said stands
    print()
    messages.append({"role": "assistant", "content": answer})
    return 0


def ask_server(url: str, key: str, messages: list[Message], sampling: dict[str, Any]) -> Iterator[str]:
    """The pieces of a server's answer. Raises UnavailableError with what the server, or the network, said."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise options.OptionError(f"url is {url!r}: expected http://HOST:PORT/v1")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=600)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    body = json.dumps({"messages": messages, "stream": True, **sampling})
    try:
        connection.request("POST", parts.path.rstrip("/") + "/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise UnavailableError(_reason(response.read(), response.status))
        for line in response:
            if line.startswith(b"data: {"):
                yield _piece(json.loads(line[6:]))
    except OSError as fault:
        raise UnavailableError(f"cannot talk to {url}: {fault}") from None
    finally:
        connection.close()


def _piece(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise UnavailableError(chunk["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _reason(body: bytes, status: int) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"
