"""`tokenspeed bench serve`: load on a running server that speaks OpenAI's HTTP interface, ours or another; flags as vLLM's."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed.runtime.errors import StartupError

if TYPE_CHECKING:
    from tokenspeed.runtime.bench.workload import Load

FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--base-url", {"metavar": "URL", "help": "the server, without /v1; instead of --host and --port"}),
    ("--host", {"default": "127.0.0.1", "help": "(default: %(default)s)"}),
    ("--port", {"type": int, "default": 8000, "help": "(default: %(default)s)"}),
    ("--model", {"help": "its name in requests; none: the first that the server names"}),
    ("--endpoint-type", {"choices": ("chat", "completions"), "default": "chat", "help": "(default: %(default)s)"}),
    ("--api-key", {"help": "(default: the environment's OPENAI_API_KEY)"}),
    ("--dataset-name", {"choices": ("random", "sharegpt", "agentic"), "default": "random",
                        "help": "random lengths; chats as people have them; sessions of coding agents (default: %(default)s)"}),
    ("--num-prompts", {"type": int, "default": 100, "help": "requests in all (default: %(default)s)"}),
    ("--num-warmups", {"type": int, "default": 0, "help": "requests before, which do not count (default: %(default)s)"}),
    ("--request-rate", {"type": float, "default": math.inf,
                        "help": "conversations that begin a second, a Poisson process; inf: all at once (default: inf)"}),
    ("--burstiness", {"type": float, "default": 1.0, "help": "below 1: in bursts; above: evenly (default: 1)"}),
    ("--max-concurrency", {"default": "0", "metavar": "N,...",
                           "help": "requests in flight at most, 0: no limit; several: one run each (default: 0)"}),
    ("--random-input-len", {"type": int, "default": 1024, "help": "tokens (default: %(default)s)"}),
    ("--random-output-len", {"type": int, "default": 128, "help": "tokens (default: %(default)s)"}),
    ("--random-prefix-len", {"type": int, "default": 0, "help": "tokens that all prompts share (default: 0)"}),
    ("--random-range-ratio", {"type": float, "default": 0.0, "help": "lengths vary by so much, 0..1 (default: 0)"}),
    ("--length-scale", {"type": float, "default": 1.0, "help": "of agentic: all lengths times this (default: 1)"}),
    ("--human-scale", {"type": float, "default": 0.1, "help": "times that people take, times this (default: 0.1)"}),
    ("--tool-scale", {"type": float, "default": 1.0, "help": "times that tools take, times this (default: 1)"}),
    ("--max-model-len", {"type": int, "default": 0, "help": "of agentic; 0: what the server says, else 32768"}),
    ("--ignore-eos", {"action": "store_true", "help": "answers are as long as asked for (an extension of servers)"}),
    ("--temperature", {"type": float, "help": "(default: the server's)"}),
    ("--goodput", {"nargs": "+", "default": [], "metavar": "GOAL:VALUE",
                   "help": "count requests that meet ttft:MS tpot:MS e2el:MS (at most) and tps:TOKENS (at least)"}),
    ("--devices", {"type": int, "default": 1, "help": "the server's devices, for figures a device (default: 1)"}),
    ("--seed", {"type": int, "default": 0, "help": "(default: 0)"}),
    ("--save-result", {"action": "store_true", "help": "write all figures as JSON"}),
    ("--result-dir", {"default": ".", "help": "(default: the current)"}),
    ("--result-filename", {"help": "(default: bench-DATASET-TIME.json)"}),
    ("--json", {"action": "store_true", "help": "print the figures as JSON and no table"}),
    ("--plot", {"metavar": "FILE", "help": "write tokens/s a user against tokens/min/device as an SVG"}),
    ("--disable-tqdm", {"action": "store_true", "help": "no progress bar"}),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The one kind of benchmark, and its flags."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    serve = kinds.add_parser("serve", help="load on a running server", description=__doc__)
    for flag, more in FLAGS:
        serve.add_argument(flag, **more)


def run(args: argparse.Namespace) -> int:
    """Benchmark and report: 0, or 1 where requests failed. StartupError for a server that is not there and wrong values."""
    from tokenspeed.runtime.bench.http import HttpError
    from tokenspeed.runtime.bench.plot import pareto
    from tokenspeed.runtime.bench.report import as_table

    goals, levels = _goals(args.goodput), _levels(args.max_concurrency)
    _check(args)
    try:
        model, runs = asyncio.run(_runs(args, goals, levels))
    except (HttpError, ValueError) as fault:
        raise StartupError(str(fault)) from None
    what = {"date": time.strftime("%Y%m%d-%H%M%S"), "model_id": model, "num_prompts": args.num_prompts}
    what |= {"dataset_name": args.dataset_name, "seed": args.seed, "burstiness": args.burstiness}
    what["request_rate"] = args.request_rate if math.isfinite(args.request_rate) else "inf"
    result = json.dumps(what | (runs[0] if len(runs) == 1 else {"runs": runs}), indent=1)
    print(result if args.json else as_table(runs))
    if args.save_result:
        name = args.result_filename or f"bench-{args.dataset_name}-{what['date']}.json"
        _write(Path(args.result_dir) / name, result + "\n")
    if args.plot:
        _write(Path(args.plot), pareto([(f"{model}, {args.dataset_name}", runs)]))
    errors = [error for figures in runs for error in figures.get("errors", ())]
    for error in errors[:3]:
        print(f"failed: {error}", file=sys.stderr)
    return 1 if errors else 0


async def _runs(
    args: argparse.Namespace, goals: dict[str, float], levels: list[int]
) -> tuple[str, list[dict[str, Any]]]:
    """(model, the figures of a run at each level of concurrency)."""
    from tokenspeed.runtime.bench.http import Http
    from tokenspeed.runtime.bench.load import Ask, LoadRun, served_model, words_per_token
    from tokenspeed.runtime.bench.report import figures
    from tokenspeed.runtime.bench.workload import Texts, arrivals, conversations

    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/").removesuffix("/v1")
    http = Http(url, {"Authorization": f"Bearer {key}"} if key else None)
    model, context = (args.model, 0) if args.model and args.max_model_len else await served_model(http)
    model = args.model or model
    extra = {} if args.temperature is None else {"temperature": args.temperature}
    ask = Ask(args.endpoint_type, model, extra, args.ignore_eos)
    texts = Texts(await words_per_token(http, ask))
    out: list[dict[str, Any]] = []
    context = args.max_model_len or context or 32_768
    for salt, level in enumerate(levels):
        talks = conversations(_load(args, context, salt=salt))
        for talk, start in zip(talks, arrivals(len(talks), args.request_rate, args.burstiness, args.seed)):
            talk.start = start
        if args.num_warmups:
            warm = LoadRun(http, ask, texts, level, lambda record: None)
            await warm.run(conversations(_load(args, context, salt=-1 - salt, prompts=args.num_warmups)))
        name = f"concurrency {level}" if level else "no limit"
        with _progress(name, sum(len(t.steps) for t in talks), shown=not args.disable_tqdm) as advance:
            run = LoadRun(http, ask, texts, level, lambda record, advance=advance: advance())
            seconds = await run.run(talks)
        head = {"name": name, "max_concurrency": level, "conversations": len(talks), "words_per_token": texts.per_token}
        out.append(head | figures(run.records, seconds, goals, args.devices))
    await http.close()
    return model, out


def _load(args: argparse.Namespace, context: int, **over: Any) -> Load:
    from tokenspeed.runtime.bench.workload import Load

    given: dict[str, Any] = {
        "dataset": args.dataset_name, "prompts": args.num_prompts, "seed": args.seed, "input_len": args.random_input_len,
        "output_len": args.random_output_len, "prefix_len": args.random_prefix_len, "range_ratio": args.random_range_ratio,
        "length_scale": args.length_scale, "human_scale": args.human_scale,
        "tool_scale": args.tool_scale, "context": context,
    }  # fmt: skip
    return Load(**given | over)


def _progress(name: str, total: int, *, shown: bool) -> AbstractContextManager[Callable[[], None]]:
    """A bar on a terminal, by rich where it is installed."""
    if not (shown and sys.stderr.isatty()):
        return nullcontext(lambda: None)
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return nullcontext(lambda: None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

    class Bar(AbstractContextManager[Callable[[], None]]):
        def __enter__(self) -> Callable[[], None]:
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            task = self._bar.add_task(name, total=total)
            return lambda: self._bar.advance(task)

        def __exit__(self, *exc: object) -> None:
            self._bar.stop()

    return Bar()


def _check(args: argparse.Namespace) -> None:
    """StartupError for values that cannot work."""
    for name in (
        "num_prompts",
        "random_input_len",
        "random_output_len",
        "request_rate",
        "burstiness",
        "length_scale",
        "devices",
    ):
        if not getattr(args, name) > 0:
            raise StartupError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give more than 0")
    for name in ("random_prefix_len", "human_scale", "tool_scale", "num_warmups", "max_model_len", "seed"):
        if not getattr(args, name) >= 0:
            raise StartupError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give 0 or more")
    if not 0 <= args.random_range_ratio <= 1:
        raise StartupError(f"--random-range-ratio is {args.random_range_ratio}: give a share, 0 to 1")


def _goals(given: list[str]) -> dict[str, float]:
    from tokenspeed.runtime.bench.report import GOALS

    out: dict[str, float] = {}
    for part in given:
        name, _, value = part.partition(":")
        try:
            out[name] = float(value)
        except ValueError:
            out[name] = -1.0
        if name not in GOALS or not out[name] > 0:
            raise StartupError(f"--goodput {part}: give GOAL:VALUE with one of the goals {', '.join(GOALS)}")
    return out


def _levels(given: str) -> list[int]:
    try:
        levels = [int(part) for part in given.split(",")]
    except ValueError:
        levels = [-1]
    if min(levels) < 0:
        raise StartupError(
            f"--max-concurrency {given}: give a number of requests, or several as in 1,4,16; 0: no limit"
        )
    return levels


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as fault:
        raise StartupError(f"cannot write {path}: {fault.strerror}") from None
