"""From options to a running engine: find or compile the artifact, size the KV cache, start ranks and scheduler.

Invariant: an artifact directory is served as it is, without the models and the compiler's passes being imported; options
that it fixes (mesh, dtype, buckets) may be repeated but not contradicted.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed import _scheduler
from tokenspeed.compiler.artifact import Artifact, is_artifact
from tokenspeed.runtime.cache_sizes import cache_sizes
from tokenspeed.runtime.checkpoint import Checkpoint, CheckpointError, checkpoint_of, context_length
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.executor import RankConfig, default_page, open_artifact
from tokenspeed.runtime.kv.identity import weights_digest
from tokenspeed.runtime.kv.store import parse_address
from tokenspeed.runtime.progress import bar
from tokenspeed.runtime.ranks import Ranks, WorkerError
from tokenspeed.runtime.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


@dataclass
class Built:
    """An engine that can run steps."""

    scheduler: Any
    ranks: Ranks
    artifact: Artifact
    max_model_len: int
    vocab_size: int
    kv_tokens: int  # what one request may hold: the pages of one home group
    summary: dict[str, Any]
    tokenizer: Callable[[], Tokenizer | None]  # loads it: only structured output needs it here
    kv_events: int = 0  # kept for routers
    stored: bool = False  # pages outlive the engine


def build_engine(config: EngineConfig) -> Built:
    """StartupError, CheckpointError, or a TokenSpeedError of the compiler, when the engine cannot be had."""
    began = time.perf_counter()
    path = find_artifact(config)
    phases = {"artifact": time.perf_counter() - began}
    artifact = open_artifact(str(path))
    if is_artifact(config.model):
        _agree(config, artifact)
    if "drafted" in artifact.ports["rows"]:
        raise StartupError(
            f"{path} drafts tokens behind the rows of another model, which an engine does not run: serve that model instead"
        )
    weights = artifact.checkpoint()
    checkpoint = checkpoint_of(weights)
    check_config(artifact, checkpoint)
    m = artifact.manifest
    if not config.page_size:
        config = dataclasses.replace(config, page_size=default_page(m["device"]))
    ranks = int(m["ranks"])
    length = context_length(config, checkpoint)
    buckets = artifact.buckets
    dp = artifact.plan.mesh.size(artifact.plan.home)
    top_t, max_rows = max(t for t, _ in buckets), max(s for _, s in buckets)
    size = cache_sizes(config, artifact, length)
    pages, host_pages = size.pages, size.host_pages
    if 0 < host_pages <= pages:
        log.warning(
            "host_kv_gib=%g holds %d pages, no more than the device's %d: copies of what runs take much of it; more is "
            "found where it is clearly larger", config.host_kv_gib, host_pages, pages,
        )  # fmt: skip
    scheduler = _scheduler.Scheduler(
        _scheduler.Config(
            page_size=config.page_size, num_pages=pages, max_requests=max_rows, token_buckets=[t for t, _ in buckets],
            max_seq_len=length, dp=dp, prefill_chunk=config.prefill_chunk,
            decode_stall_tokens=config.decode_stall_tokens, kv_events=config.kv_events,
            prefix_cache=config.enable_prefix_caching and (size.snapshots > 0 or not size.states),
            state_snapshots=size.snapshots, window=size.window, window_pages=size.window_pages,
            max_in_flight=config.overlap_depth + 1, host_pages=host_pages, storage=bool(config.kv_storage),
        )
    )  # fmt: skip
    threads = config.threads or max(len(os.sched_getaffinity(0)) // ranks, 1)
    arithmetic = artifact.weights.arithmetic(m["dtype"])
    identity = {"program": m["semantic_key"], "dtype": arithmetic, "max_model_len": length}
    if config.kv_storage:
        identity["weights"] = weights_digest(checkpoint)
    rank = RankConfig(
        str(path), weights, 0, config.page_size, pages, length, threads, size.snapshots, size.window_pages,
        host_pages=host_pages, storage=config.kv_storage, identity=identity,
    )  # fmt: skip
    tables = 2 if size.window else 1
    slot_bytes = 4096 + 4 * dp * ((3 + tables) * top_t + max_rows * (tables * -(-length // config.page_size) + 16))
    try:
        started = Ranks(rank, ranks, slot_bytes, bar(), config.overlap_depth > 0)
    except WorkerError as e:
        raise StartupError(str(e)) from None
    vocab = int(m["logical"]["v"])
    summary = {
        "model": m["model"], "artifact": m["semantic_key"][:12], "plan": m["plan"], "ranks": ranks,
        "dtype": arithmetic,
        "kv cache": f"{pages * dp * config.page_size} tokens, {pages} pages of {config.page_size} a group, {m['cache_dtype']}, "
                    f"{size.pages_bytes / 2**20:.0f} MiB a rank",
        "buckets": f"{len(buckets)} up to {top_t} tokens", "threads a rank": threads, "max length": length,
        **({"windows": f"{size.window_pages} pages a group for layers that see {size.window} tokens, "
                       f"{size.window_bytes / 2**20:.0f} MiB a rank"} if size.window else {}),
        **({"states": f"{max_rows} requests and {size.snapshots} snapshots a group, {size.states_bytes / 2**20:.0f} MiB a rank"}
           if size.states else {}),
        **({"host tier": f"{host_pages} pages a group, {size.host_bytes / 2**20:.0f} MiB a rank"} if host_pages else {}),
        **({"kv storage": parse_address(config.kv_storage).shown} if config.kv_storage else {}),
        "started": ", ".join(f"{k} {v:.1f} s" for k, v in (phases | started.executor.seconds).items()),
        "arena": f"{started.executor.arena.numel() / 2**20:.1f} MiB",
    }  # fmt: skip
    return Built(
        scheduler, started, artifact, length, vocab, pages * config.page_size, summary, lambda: load_tokenizer(config),
        config.kv_events, bool(config.kv_storage),
    )  # fmt: skip


def check_config(artifact: Artifact, checkpoint: Checkpoint) -> None:
    """StartupError where an artifact was compiled for another configuration than a checkpoint has."""
    for field in artifact.manifest["config"]:
        have, want = checkpoint.config.get(field), artifact.manifest["config"][field]
        if have != want:
            raise StartupError(
                f"{artifact.path} was compiled for {field}={want!r}, the checkpoint's configuration says {have!r}; compile it again"
            )


def find_artifact(config: EngineConfig) -> Path:
    """The artifact to serve: the model itself if it is one, else compiled (or found compiled) in the artifact cache."""
    if is_artifact(config.model):
        return Path(config.model).expanduser()
    from tokenspeed.runtime.compiling import compile_for

    return compile_for(config, bar())


def _agree(config: EngineConfig, artifact: Artifact) -> None:
    """StartupError for an option that says otherwise than the artifact; its default says nothing."""
    m, defaults = artifact.manifest, EngineConfig(config.model)
    tokens, rows = [t for t, _ in artifact.buckets], [s for _, s in artifact.buckets]
    fixed = {
        "dtype": "auto" if artifact.weights.quantised else m["dtype"], "kv_cache_dtype": m["cache_dtype"],
        "buckets": tokens, "max_num_batched_tokens": tokens[-1], "max_num_seqs": rows[-1],
    }  # fmt: skip
    for name, have in fixed.items():
        given = getattr(config, name)
        if given not in (getattr(defaults, name), have):
            raise StartupError(
                f"{config.model} was compiled with {name}={have}; it cannot be served with {name}={given}: compile it again"
            )
    for name in ("mesh", "axes", "tensor_parallel_size", "config", "load_format"):
        if (given := getattr(config, name)) != getattr(defaults, name):
            raise StartupError(f"{config.model} was compiled for {m['plan']}; {name}={given} is chosen at compile time")


__all__ = ["Built", "CheckpointError", "build_engine", "find_artifact"]
