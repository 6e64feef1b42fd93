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
from tokenspeed.runtime.checkpoint import Checkpoint, CheckpointError, checkpoint_of, context_length
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.executor import RankConfig, cache_bytes, cache_ranks, default_page, open_artifact
from tokenspeed.runtime.kv.identity import weights_digest
from tokenspeed.runtime.kv.store import parse_address
from tokenspeed.runtime.progress import bar
from tokenspeed.runtime.ranks import Ranks, WorkerError
from tokenspeed.runtime.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)
CPU_FRACTION, GPU_FRACTION = 0.3, 0.92  # of the free memory, where memory_fraction is 0


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
    max_rows = max(s for _, s in buckets)
    program = artifact.program(m["variants"][0], buckets[0][0])
    token_bytes, state_bytes = cache_bytes(program, "slots"), cache_bytes(program, "states")
    taken = 0 if m["device"] == "cpu" else _gpu_bytes(artifact, max_rows)
    room, useful = _room(config, ranks, taken), max_rows * (-(-length // config.page_size) + 1)
    _check_states(room, state_bytes, max_rows, config.num_pages)
    snapshots = _snapshots(config, room, state_bytes, max_rows)
    states = state_bytes * (max_rows + snapshots)
    shared = cache_ranks(program)
    if config.num_pages % shared:
        raise StartupError(
            f"num_pages={config.num_pages} does not divide over the {shared} ranks that share a group's pages: give a multiple"
        )
    pages = config.num_pages or _pages(config, token_bytes / shared, room, states, useful)
    pages += -pages % shared
    host_pages = _host_pages(config, ranks, token_bytes, state_bytes, shared)
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
            prefix_cache=config.enable_prefix_caching and (snapshots > 0 or not state_bytes), state_snapshots=snapshots,
            max_in_flight=config.overlap_depth + 1, host_pages=host_pages, storage=bool(config.kv_storage),
        )
    )  # fmt: skip
    threads = config.threads or max(len(os.sched_getaffinity(0)) // ranks, 1)
    arithmetic = artifact.weights.arithmetic(m["dtype"])
    identity = {"program": m["semantic_key"], "dtype": arithmetic, "max_model_len": length}
    if config.kv_storage:
        identity["weights"] = weights_digest(checkpoint)
    rank = RankConfig(
        str(path), weights, 0, config.page_size, pages, length, threads, snapshots,
        host_pages=host_pages, storage=config.kv_storage, identity=identity,
    )  # fmt: skip
    top_t = max(t for t, _ in buckets)
    slot_bytes = 4096 + 4 * dp * (4 * top_t + max_rows * (-(-length // config.page_size) + 16))
    try:
        started = Ranks(rank, ranks, slot_bytes, bar(), config.overlap_depth > 0)
    except WorkerError as e:
        raise StartupError(str(e)) from None
    vocab = int(m["logical"]["v"])
    summary = {
        "model": m["model"], "artifact": m["semantic_key"][:12], "plan": m["plan"], "ranks": ranks,
        "dtype": arithmetic,
        "kv cache": f"{pages * dp * config.page_size} tokens, {pages} pages of {config.page_size} a group, {m['cache_dtype']}, "
                    f"{token_bytes * pages * config.page_size / shared / 2**20:.0f} MiB a rank",
        "buckets": f"{len(buckets)} up to {top_t} tokens", "threads a rank": threads, "max length": length,
        **({"states": f"{max_rows} requests and {snapshots} snapshots a group, {states / 2**20:.0f} MiB a rank"}
           if state_bytes else {}),
        **({"host tier": f"{host_pages} pages a group, {token_bytes * host_pages * config.page_size / 2**20:.0f} MiB a rank"}
           if host_pages else {}),
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


@dataclass(frozen=True)
class _Room:
    """Memory for caches on one rank: bytes free on the machine, and the share of them that caches may take."""

    free: float
    budget: float
    share: str  # in words


def _room(config: EngineConfig, ranks: int, taken: int) -> _Room:
    """What `memory_fraction` of the free memory gives every rank. On a GPU the fraction is of its free memory, and what
    weights and buffers take (`taken` bytes) comes off it."""
    if taken:
        import torch

        free, fraction = torch.cuda.mem_get_info()[0], config.memory_fraction or GPU_FRACTION
    else:
        free, fraction = free_memory(), config.memory_fraction or CPU_FRACTION
    budget = max(free * fraction / ranks - taken, 0)
    share = f"{fraction:.0%} of {free / 2**20:.0f} MiB free memory is {budget / 2**20:.0f} MiB a rank"
    return _Room(max(free / ranks - taken, 0), budget, share)


def _check_states(room: _Room, each: int, rows: int, pages: int) -> None:
    """StartupError where the states of all requests that may run at once do not fit: into the share of caches, or where the
    number of `pages` is given into all that is free."""
    limit = room.free if pages else room.budget
    if each * rows > limit:
        raise StartupError(
            f"no room for the states of {rows} requests at once: {each / 2**20:.1f} MiB each are {each * rows / 2**20:.0f} MiB, "
            f"and {room.share}: set max_num_seqs to {max(int(limit * (1 if pages else 0.5) // each), 1)} or less"
        )


def _snapshots(config: EngineConfig, room: _Room, each: int, rows: int) -> int:
    """Snapshots of recurrent states a home group, which let prefixes be shared: a quarter of what the states of requests leave
    of the caches' share, and at most four a request."""
    if not each or not config.enable_prefix_caching:
        return 0
    return min(4 * rows, int(max(room.budget - each * rows, 0) / 4 // each))


def _pages(config: EngineConfig, token_bytes: float, room: _Room, states: int, useful: int) -> int:
    """Pages a home group: what the share of caches holds on every rank beside `states` bytes, at most the `useful` ones."""
    pages = int((room.budget - states) // (token_bytes * config.page_size))
    if pages < 2:
        beside = f", of which states take {states / 2**20:.0f} MiB" if states else ""
        raise StartupError(
            f"no room for a KV cache: {room.share}{beside}, one page of {config.page_size} tokens takes "
            f"{token_bytes * config.page_size / 2**20:.1f} MiB"
        )
    return min(pages, useful)


def _host_pages(config: EngineConfig, ranks: int, token_bytes: int, state_bytes: int, shared: int) -> int:
    """Pages of the host tier a home group: every rank keeps its part of each. StartupError where there cannot be one."""
    if not config.host_kv_gib:
        return 0
    if state_bytes:
        raise StartupError(
            "host_kv_gib: the states of recurrent layers do not travel to host memory; leave it out for this model"
        )
    if shared > 1:
        raise StartupError(
            f"host_kv_gib: {shared} ranks share the pages of a group here; leave it out, or use a mesh without cp"
        )
    room, page = config.host_kv_gib * 2**30, token_bytes * config.page_size * ranks
    if room < page:
        raise StartupError(
            f"host_kv_gib={config.host_kv_gib} is less than one page, which takes {page / 2**30:.6f} GiB on {ranks} ranks"
        )
    if room > (free := free_memory()):
        raise StartupError(f"host_kv_gib={config.host_kv_gib}: {free / 2**30:.1f} GiB of memory are free")
    return int(room // page)


def _gpu_bytes(artifact: Artifact, max_rows: int) -> int:
    """Bytes of a GPU that are not for KV pages: weights and arena as compiled, the full sampler's state, and a GiB of room
    for kernel scratch and graphs."""
    planned = artifact.ports["memory"]
    state = 9 * max_rows * artifact.manifest["sizes"]["v"] if "full" in artifact.manifest["variants"] else 0
    return planned["weight_bytes"] + max(planned["arena_bytes"].values()) + state + (1 << 30)


def free_memory() -> int:
    """Bytes a process may still take: what the system has available, within the control group's limit."""
    available = 0
    with open("/proc/meminfo") as f:
        for line in f:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, max(int(limit) - used, 0))
    except (OSError, ValueError):
        pass
    return available


__all__ = ["Built", "CheckpointError", "build_engine", "find_artifact"]
