"""Compiling from the runtime's side: opens the checkpoint, finds the model class, calls the compiler, keeps the artifact.

Imported only where something is compiled; serving an artifact does not come here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenspeed.ir.errors import TokenSpeedError
from tokenspeed.kernels.select import SelectionError
from tokenspeed.kernels.tuned import SettingsError
from tokenspeed.runtime.checkpoint import Checkpoint, context_length, open_checkpoint
from tokenspeed.runtime.compiled import key_of, recall, remember
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.progress import Progress, silent
from tokenspeed.runtime.tokenizer import TOKENIZER_FILES, load_tokenizer


def compile_for(config: EngineConfig, progress: Progress = silent) -> Path:
    """The directory in the artifact cache that holds what the options describe, compiled into it if it is not there.

    Its name covers the program, the kernels' compat key and the checkpoint, and it is written once: another server may
    be reading it. What was compiled before is found without compiling (compiled.py).
    """
    from tokenspeed.compiler.artifact import digest, dump

    cache = Path(config.artifact_cache).expanduser()
    known = key_of(config, device_of(config))
    if known and (target := recall(cache, known)):
        return target
    compiled = compile_options(config, progress)
    m = compiled.manifest
    key = digest(m["semantic_key"], dump(m["compat"]), compiled.files["checkpoint.json"])
    target = cache / key[:24]
    if not (target / "manifest.json").exists():
        staged = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}")
        compiled.write(staged)
        try:
            staged.rename(target)
        except OSError:  # another engine wrote the same artifact meanwhile
            shutil.rmtree(staged)
    if known:
        remember(cache, known, target)
    return target


def write_artifact(config: EngineConfig, compiled: Any, out: str) -> Path:
    """Writes a compiled artifact with the model's tokenizer and chat template: all a server needs but the weights."""
    tokenizer = load_tokenizer(config)
    path = compiled.write(out)
    for name in TOKENIZER_FILES:
        (path / name).unlink(missing_ok=True)
    if tokenizer is not None:
        tokenizer.save(path)
    return path


def compile_options(config: EngineConfig, progress: Progress = silent, calibration: str = "cpu", **passes: Any) -> Any:
    """Compiles what the options describe, in memory. A directory with a configuration and no weights compiles too.

    `passes`: further arguments of `compile_model` (tactics ...).
    """
    from tokenspeed.compiler.api import compile_model, default_buckets

    checkpoint, family = open_model(config)
    context_length(config, checkpoint)  # refused here as it will be where the artifact is served
    device = device_of(config)
    dtype, cache, stored, objective = choose_dtypes(config, checkpoint, device)
    mesh = config.mesh or (f"tp={config.tensor_parallel_size}" if config.tensor_parallel_size > 1 else "")
    return _told_of_author(
        config.model, compile_model, family, checkpoint.config, mesh=mesh, axes=config.axes, dtype=dtype, cache_dtype=cache,
        buckets=config.buckets or default_buckets(config.max_num_batched_tokens), max_rows=config.max_num_seqs,
        stored=stored, checkpoint=checkpoint.note(), progress=progress, calibration=calibration,
        objective=objective, device=device, **passes,
    )  # fmt: skip


def _told_of_author(model: str, compile_: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """compile_(*args, **options); a setting of the kernels that cannot be, and whatever an author's own
    file raises while it is traced, is a StartupError, the latter with its line."""
    try:
        return compile_(*args, **options)
    except (StartupError, TokenSpeedError):
        raise
    except (SelectionError, SettingsError) as e:
        raise StartupError(str(e)) from None
    except Exception as e:
        file = str(Path(model.rpartition(":")[0]).expanduser()) if ".py:" in model else ""
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if file and Path(f.filename) == Path(file)]
        if not lines:
            raise
        raise StartupError(f"{file}:{lines[-1]} cannot be traced: {type(e).__name__}: {e}") from e


def open_model(config: EngineConfig) -> tuple[Checkpoint, Any]:
    """The checkpoint, and the root module class of its family or of `file.py:Class`."""
    from tokenspeed.models import find_family

    if ".py:" in config.model:
        file, _, name = config.model.rpartition(":")
        source = Path(config.config).expanduser()
        folder = source if source.is_dir() else source.parent
        checkpoint = open_checkpoint(str(folder), config.load_format, str(source), config.seed or 0, weights=False)
        return checkpoint, load_class(Path(file).expanduser(), name)
    checkpoint = open_checkpoint(config.model, config.load_format, config.config, config.seed or 0, weights=False)
    names = checkpoint.config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise StartupError(
            f"the configuration of {config.model} has no list `architectures`; it must name the model's class"
        )
    return checkpoint, find_family(names[0])


def load_class(file: Path, name: str) -> Any:
    """A model class from an author's file."""
    if not file.is_file():
        raise StartupError(f"{file} does not exist; give file.py:Class")
    spec = importlib.util.spec_from_file_location(f"tokenspeed_user_{file.stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        raise StartupError(f"{file} cannot be imported: {type(e).__name__}: {e}") from e
    found = getattr(module, name, None)
    from tokenspeed.models.nn import Module

    if not (isinstance(found, type) and issubclass(found, Module)):
        raise StartupError(f"{file} defines no class {name!r} that is a tokenspeed.models.nn.Module")
    return found


def device_of(config: EngineConfig) -> str:
    """The target to compile for: cpu, or cuda:<architecture>. StartupError for a GPU that is asked for and not here."""
    if config.device == "cpu" or ":" in config.device:
        return config.device
    import torch

    if not torch.cuda.is_available():
        if config.device == "auto":
            return "cpu"
        raise StartupError(
            "device=cuda, and this process sees no GPU; use cpu, or cuda:90 to compile for an H100 or H200"
        )
    from tokenspeed.kernels.target import target_of

    return f"cuda:{target_of('cuda').arch}"


def choose_dtypes(
    config: EngineConfig, checkpoint: Checkpoint, device: str
) -> tuple[str, str, Callable[[str], str | None], str]:
    """(stream dtype, KV dtype, formats of stored tensors that are kept, objective of kernel selection).

    `auto` keeps a quantised checkpoint's formats, multiplies them with activations rounded to int8 where that is faster
    (objective latency), and keeps the stream in float32 and the cache in bfloat16; otherwise it follows torch_dtype.
    Experts in MXFP4 and weights in INT4 are kept so beside a stream of torch_dtype. A named dtype dequantises; so does a GPU, to bfloat16.
    """
    probe = checkpoint.stored("model.layers.0.mlp.down_proj.weight") or ""
    quantised = probe.startswith("q")
    silent = "bfloat16" if checkpoint.config.get("quantization_config") else "float32"
    declared = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or silent).removeprefix(
        "torch."
    )
    keep = quantised and config.dtype == "auto" and device == "cpu"
    if config.dtype != "auto":
        dtype = config.dtype
    else:
        dtype = "float32" if keep or (declared == "float32" and not quantised) else "bfloat16"
    auto_cache = "bfloat16" if keep else dtype
    cache = auto_cache if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    experts = config.dtype == "auto" and device == "cpu" and not keep

    def stored(name: str) -> str | None:
        return fmt if (fmt := checkpoint.stored(name)) in ("mxfp4", "int4_32") else None

    kept = checkpoint.stored if keep else stored if experts else (lambda _: None)
    return dtype, cache, kept, "latency" if keep else "default"
