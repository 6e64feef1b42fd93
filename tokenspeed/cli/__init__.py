"""The command line: one table of commands, each a module that is imported only when it runs.

A command's module has `add_arguments(parser)` and `run(args) -> int`, the exit status. `tokenspeed --help` imports
none of them, so it answers in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple


class Command(NamedTuple):
    """A row of the table."""

    module: str
    help: str


COMMANDS = {
    "compile": Command("tokenspeed.cli.compile", "compile a model for a deployment plan into an artifact"),
    "explain": Command("tokenspeed.cli.explain", "show every collective of an artifact and why it is there"),
    "calibrate": Command("tokenspeed.cli.calibrate", "measure this machine for the compiler's cost model"),
    "kernels": Command("tokenspeed.cli.kernels", "list the kernels, say which one a request gets, verify them"),
    "serve": Command("tokenspeed.cli.serve", "serve a model over OpenAI's HTTP interface"),
    "chat": Command("tokenspeed.cli.chat", "talk to a model, here or behind a URL"),
    "bench": Command("tokenspeed.cli.bench", "load on a running server, and what its users feel"),
    "simulate": Command("tokenspeed.cli.simulate", "try a scheduling policy on agents' traffic, without a model"),
    "env": Command("tokenspeed.cli.env", "print versions, devices and settings, for a bug report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status. A wrong option or a model that does not come up is 2 or 1, with the reason."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="tokenspeed", description="A compiler-centric LLM inference engine for coding agents."
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = argv[0] if argv else None
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.help)
        if name == chosen:
            import_module(command.module).add_arguments(sub)
    args = parser.parse_args(argv)
    if args.version:
        from tokenspeed import __version__

        print(__version__)
        return 0
    if args.command is None:
        parser.print_help()
        return 0
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    from tokenspeed.ir.errors import TokenSpeedError
    from tokenspeed.runtime.errors import StartupError
    from tokenspeed.runtime.options import OptionError

    try:
        return import_module(COMMANDS[args.command].module).run(args)
    except OptionError as fault:
        print(f"tokenspeed {args.command}: {fault}", file=sys.stderr)
        return 2
    except (StartupError, TokenSpeedError) as fault:
        print(f"tokenspeed {args.command}: {fault}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
