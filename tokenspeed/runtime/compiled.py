"""Which artifact an engine's options were compiled into before, so that a start need not compile to find its name.

Invariant: a key covers all that a compilation reads: this package's files, the options, the checkpoint's files, the
variables of the environment and the kernel settings and tables that they name, the registered kernels, torch's version
and what the machine can do. Where that cannot be told (a model from an author's own file or from another package, kernels
chosen by the code around) there is no key, and the model is compiled.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import torch

from tokenspeed.compiler.artifact import digest
from tokenspeed.kernels.registry import default_registry
from tokenspeed.kernels.select import CONFIG_VARIABLE, TUNED_VARIABLE, is_chosen_by_context
from tokenspeed.kernels.target import target_of
from tokenspeed.kernels.tuned import cached_path
from tokenspeed.models import ARCHITECTURES
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.gguf_metadata import find_embedded_model
from tokenspeed.runtime.sources import file_state, package_digest

FOLDER = "compiled"  # of the artifact cache: a file a key, which holds the artifact's name


def key_of(config: EngineConfig, device: str) -> str | None:
    """The key of what `config` describes on `device` (a target's name, as "cpu"); None where none can be told."""
    foreign = any(not place.startswith("tokenspeed.models.") for place in ARCHITECTURES.values())
    if ".py:" in config.model or is_chosen_by_context() or foreign or entry_points(group="tokenspeed.models"):
        return None
    target = target_of(device)
    tables = [os.environ.get(CONFIG_VARIABLE), os.environ.get(TUNED_VARIABLE), str(cached_path(target.name))]
    kernels = sorted(f"{k.name}:{k.source_hash}:{int(k.priority)}" for k in default_registry())
    named = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("TOKENSPEED_"))
    try:
        files = [*_files(config), *(file_state(Path(t).expanduser()) for t in tables if t)]
    except OSError:
        return None
    options = json.dumps(dataclasses.asdict(config), sort_keys=True, default=str)
    machine = [torch.__version__, target.name, *sorted(target.features)]
    return digest(package_digest(), options, *files, *named, *kernels, *machine)


def recall(cache: Path, key: str) -> Path | None:
    """The artifact of a key, if it is still there."""
    try:
        target = cache / (cache / FOLDER / key).read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return target if (target / "manifest.json").is_file() else None


def remember(cache: Path, key: str, artifact: Path) -> None:
    """From now on `key` stands for `artifact`, a folder of `cache`."""
    note = cache / FOLDER / key
    note.parent.mkdir(parents=True, exist_ok=True)
    staged = note.with_name(f"{key}.{os.getpid()}")
    staged.write_text(artifact.name)
    staged.replace(note)


def _files(config: EngineConfig) -> Iterator[str]:
    """What is to be known of the files that the options name."""
    for name in filter(None, (config.model, config.config)):
        path = find_embedded_model() if name == "smollm2" else Path(name).expanduser()
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        yield from (file_state(p) for p in inside if p.suffix in (".json", ".safetensors", ".gguf"))
