"""`tokenspeed serve MODEL`: the HTTP server, with a summary of what was started."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from tokenspeed.cli import foreign
from tokenspeed.runtime import options
from tokenspeed.runtime.config import EngineConfig, ServerConfig

if TYPE_CHECKING:
    from rich.table import Table

    from tokenspeed.runtime.messages import Ready


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of both tables, and those of other engines."""
    options.add_arguments(parser, EngineConfig)
    options.add_arguments(parser, ServerConfig)
    foreign.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 0, or 1 when the engine core died."""
    foreign.apply(args)
    engine = options.from_args(EngineConfig, args)
    server = options.from_args(ServerConfig, args)

    from rich.console import Console

    from tokenspeed.runtime.logs import configure_logging
    from tokenspeed.runtime.server.serve import serve

    configure_logging(engine.log_level)
    console = Console(stderr=True)

    def on_listen(url: str) -> None:
        console.print(f"loading [bold]{engine.model}[/] (listening on {url}, /health is 503 until it is ready)")

    def on_ready(ready: Ready, url: str) -> None:
        console.print(_summary(ready, url))

    return run_loop(serve(engine, server, on_listen=on_listen, on_ready=on_ready))


def run_loop(work: Coroutine[Any, Any, int]) -> int:
    """On uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def _summary(ready: Ready, url: str) -> Table:
    from rich.table import Table

    table = Table(title="TokenSpeed is ready", title_justify="left", show_header=False)
    for name, value in {"URL": f"{url}/v1", **ready.summary}.items():
        table.add_row(str(name), str(value))
    return table
