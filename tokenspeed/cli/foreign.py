"""Flags of vLLM's and SGLang's servers, so that scripts written for them start ours, or are told what does not fit.

A flag of theirs is one of ours by the same name or an alias (runtime/config.py), or stands in this table: it is carried
over, asks for what is so anyway, or is refused with the reason. None is parsed and then forgotten.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime.config import EngineConfig, ServerConfig
from tokenspeed.runtime.options import OptionError, table

Carry = Callable[[argparse.Namespace, str], None]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A row. `harmless`: the values that ask for what is so anyway, None for any; others are refused with `why`."""

    flags: tuple[str, ...]
    why: str
    harmless: tuple[str, ...] | None = ()
    carry: Carry | None = None  # what it becomes, said in `why`
    switch: bool = False  # it takes no value

    @property
    def dest(self) -> str:
        return "foreign" + self.flags[0].replace("-", "_")


def _model(args: argparse.Namespace, value: str) -> None:
    if getattr(args, "model", value) != value:
        raise OptionError(f"--model is {value!r}, but the model is given as {args.model!r} too")
    args.model = value


def _data_parallel(args: argparse.Namespace, value: str) -> None:
    if not value.isdigit() or int(value) < 1:
        raise OptionError(f"--data-parallel-size is {value!r}: expected an integer of at least 1")
    if hasattr(args, "mesh"):
        raise OptionError("--data-parallel-size is shorthand for --mesh dp=N: give one of them, not both")
    ranks = getattr(args, "tensor_parallel_size", "1")
    if hasattr(args, "tensor_parallel_size"):
        delattr(args, "tensor_parallel_size")
    args.mesh = f"tp={ranks},dp={value}"


def _expert_parallel(args: argparse.Namespace, value: str) -> None:
    mesh = getattr(args, "mesh", "") or f"tp={getattr(args, 'tensor_parallel_size', '1')}"
    every = "*".join(part.partition("=")[0] for part in mesh.split(",") if not part.endswith("=1"))
    if every:
        args.axes = ",".join(filter(None, [getattr(args, "axes", ""), f"ep={every}"]))


def _no_prefixes(args: argparse.Namespace, value: str) -> None:
    args.enable_prefix_caching = False


def _origins(args: argparse.Namespace, value: str) -> None:
    try:
        given = json.loads(value) if value.startswith("[") else value
    except ValueError:
        raise OptionError("--allowed-origins must be origins with commas between, or a JSON list of them") from None
    args.allowed_origins = ",".join(map(str, given)) if isinstance(given, list) else given


_KERNELS = "kernels are chosen by the compiler, bucket by bucket (`tokenspeed explain`)"
_COMPILED = "every token bucket is compiled ahead of time and replayed as one graph (--buckets)"
_TEXT = "models here read and write text"
_ALWAYS = "it is always so"
_LOCAL = "models are read from local directories and files, as they are"

TABLE: tuple[Foreign, ...] = (
    Foreign(("--model", "--model-path"), "the model, `tokenspeed serve MODEL`", carry=_model),
    Foreign(("--data-parallel-size", "-dp", "--dp-size", "--dp"), "`--mesh tp=T,dp=N`", carry=_data_parallel),
    Foreign(
        ("--enable-expert-parallel", "--enable-ep-moe"), "`--axes ep=...`, experts over all ranks", carry=_expert_parallel, switch=True
    ),
    Foreign(("--disable-radix-cache",), "`--no-enable-prefix-caching`", carry=_no_prefixes, switch=True),
    Foreign(("--trust-remote-code",), "no code of a checkpoint is ever run, so there is nothing to trust", None, switch=True),
    Foreign(("--enable-auto-tool-choice",), "tools work where the notation is known (--tool-call-parser)", None, switch=True),
    Foreign(("--enable-chunked-prefill",), _ALWAYS + " (--chunked-prefill-size)", None, switch=True),
    Foreign(("--async-scheduling",), _ALWAYS + " (--overlap-depth)", None, switch=True),
    Foreign(("--enable-prompt-tokens-details", "--enable-cache-report"), _ALWAYS, None, switch=True),
    Foreign(("--enable-metrics",), _ALWAYS + " (/metrics)", None, switch=True),
    Foreign(("--disable-log-requests", "--no-enable-log-requests"), "requests are not logged", None, switch=True),
    Foreign(("--scheduling-policy", "--schedule-policy"), "priorities count, among equals the first goes first", ("fcfs", "priority")),
    Foreign(("--attention-backend", "--moe-backend", "--moe-runner-backend", "--sampling-backend"), _KERNELS, ("auto",)),
    Foreign(("--quantization", "-q"), "weights keep the formats of their checkpoint, which it says itself", ("auto", "none")),
    Foreign(("--pipeline-parallel-size", "-pp", "--pp-size"), "layers are not spread over ranks: use -tp or --mesh", ("1",)),
    Foreign(("--decode-context-parallel-size", "-dcp"), "a sequence is not spread over ranks", ("1",)),
    Foreign(("--distributed-executor-backend",), "ranks are processes of one machine", ("mp", "uni")),
    Foreign(("--nnodes",), "ranks are processes of one machine", ("1",)),
    Foreign(("--enforce-eager", "--disable-cuda-graph"), _COMPILED, switch=True),
    Foreign(("--compilation-config", "-O", "--cuda-graph-sizes", "--cuda-graph-max-bs"), _COMPILED),
    Foreign(("--swap-space",), "a request that loses its pages is computed again; --host-kv-gib keeps prefixes in host memory", ("0",)),
    Foreign(("--cpu-offload-gb",), "weights stay on the device", ("0",)),
    Foreign(("--kv-transfer-config", "--disaggregation-mode"), "prefill and decode are not separated; storage is --kv-storage", ("null",)),
    Foreign(("--speculative-config", "--speculative-algorithm"), "there is no speculative decoding"),
    Foreign(("--enable-lora", "--lora-modules", "--lora-paths"), "there are no adapters: merge them into the checkpoint"),
    Foreign(("--limit-mm-per-prompt", "--mm-processor-kwargs"), _TEXT),
    Foreign(("--tokenizer-mode",), "tokenizer.json or GGUF, whichever the model has", ("auto",)),
    Foreign(("--skip-tokenizer-init",), "a model without a tokenizer takes and gives token ids by itself", switch=True),
    Foreign(("--revision", "--download-dir", "--hf-token"), _LOCAL),
    Foreign(("--config-format",), _LOCAL, ("auto", "hf")),
    Foreign(("--hf-overrides", "--json-model-override-args"), _LOCAL + ": change its config.json", ("{}",)),
    Foreign(("--generation-config",), "a request's defaults change nothing (temperature 1); end-of-sequence ids are read", ("vllm",)),
    Foreign(("--override-generation-config",), "a request's defaults change nothing: set fields in the request", ("{}",)),
    Foreign(("--max-logprobs",), "up to 20", ("20",)),
    Foreign(("--logprobs-mode",), "log-probabilities are of the raw logits", ("raw_logprobs",)),
    Foreign(("--guided-decoding-backend", "--grammar-backend"), "grammars are llguidance's", ("auto", "llguidance", "guidance")),
    Foreign(("--tool-parser-plugin", "--reasoning-parser-plugin"), "code is not loaded from files"),
    Foreign(("--chat-template-content-format",), "the form that a template takes is found by probing it", ("auto",)),
    Foreign(("--response-role",), "answers are the assistant's", ("assistant",)),
    Foreign(("--ssl-keyfile", "--ssl-certfile", "--root-path", "--middleware"), "put a proxy in front"),
    Foreign(("--uvicorn-log-level", "--log-level-http"), "one level for all: --log-level"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the table, which --help does not show."""
    for row in TABLE:
        action: dict[str, Any] = {"action": "store_const", "const": ""} if row.switch else {}
        parser.add_argument(*row.flags, dest=row.dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **action)


def apply(args: argparse.Namespace) -> None:
    """Carry over what was given to the flags of ours. Raises OptionError for what is refused."""
    for row in TABLE:
        value = getattr(args, row.dest, None)
        if value is None or row.harmless is None or value.lower() in row.harmless:
            continue
        if row.carry is None:
            allowed = f" (it may be {' or '.join(row.harmless)})" if row.harmless else ""
            raise OptionError(f"{' / '.join(row.flags)} does not work here: {row.why}{allowed}")
        row.carry(args, value)
    if isinstance(origins := getattr(args, "allowed_origins", None), str):
        _origins(args, origins)


def markdown() -> str:
    """The page docs/other-engines.md."""
    lines = [
        "# Flags of other engines",
        "",
        "Generated by `python -m tokenspeed env --foreign > docs/other-engines.md`; a test keeps it fresh. What vLLM's and",
        "SGLang's servers are started with, and what `tokenspeed serve` makes of it. Flags that have the same name and meaning",
        "are in [options.md](options.md) alone.",
        "",
        "| flag | here |",
        "|---|---|",
    ]
    for cls in (EngineConfig, ServerConfig):
        lines += [f"| {_names(row.aliases)} | `{row.flag}` |" for row in table(cls) if row.aliases]
    for row in TABLE:
        if row.carry is not None:
            said = row.why
        elif row.harmless is None:
            said = f"accepted: {row.why}"
        else:
            values = f", unless it is {' or '.join(f'`{value}`' for value in row.harmless)}" if row.harmless else ""
            said = f"refused{values}: {row.why}"
        lines.append(f"| {_names(row.flags)} | {said} |")
    return "\n".join(lines) + "\n"


def _names(flags: tuple[str, ...]) -> str:
    return ", ".join(f"`{flag}`" for flag in flags)
