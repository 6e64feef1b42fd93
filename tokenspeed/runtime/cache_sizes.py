"""How many pages, window pages, state snapshots and host pages a home group gets. Invariant: on every rank all caches together
stay within the share of memory that the options give them, and what one request needs to run at all fits, or a StartupError says
what is short and which option mends it.

Layers that see a window have pages of their own. A running request holds as many of them as it can see, so their number follows
from how many requests run at once; an eighth of the number of pages comes on top, for the ends of prefixes that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenspeed._scheduler import window_pages_for
from tokenspeed.compiler.artifact import Artifact
from tokenspeed.ir.graph import Program
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.executor import cache_bytes, cache_ranks

CPU_FRACTION, GPU_FRACTION = 0.3, 0.92  # of the free memory, where memory_fraction is 0
KEPT = 8  # pages for each window page that is there for prefixes, not for requests that run


@dataclass(frozen=True)
class CacheSizes:
    """Of a home group; `*_bytes`: that one rank holds."""

    pages: int
    pages_bytes: int
    window: int  # positions that windowed layers see; 0: there are none
    window_pages: int
    window_bytes: int
    states: bool  # whether the model has recurrent states
    snapshots: int
    states_bytes: int  # of requests and snapshots
    host_pages: int
    host_bytes: int


@dataclass(frozen=True)
class _Room:
    """Memory for caches on one rank: bytes free on the machine, and the share of them that caches may take."""

    free: float
    budget: float
    share: str  # in words


@dataclass(frozen=True)
class _Needs:
    """What a model's caches take on one rank: bytes a token of the layers that see everything, and of those that see a window; bytes
    of a request's states; and how many ranks share a home group's pages."""

    token: float
    near: float
    state: int
    window: int
    shared: int

    @classmethod
    def of(cls, artifact: Artifact, program: Program) -> _Needs:
        shared = cache_ranks(program)
        token, near = (cache_bytes(program, slots) / shared for slots in ("slots", "window_slots"))
        window = max((g["window"] for g in artifact.ports["cache_groups"] if g["kind"] == "sliding_window"), default=0)
        return cls(token, near, cache_bytes(program, "states"), window, shared)


def cache_sizes(config: EngineConfig, artifact: Artifact, length: int) -> CacheSizes:
    """For requests of up to `length` tokens. StartupError where there is no room."""
    buckets, ranks, page = artifact.buckets, int(artifact.manifest["ranks"]), config.page_size
    tokens, rows = max(t for t, _ in buckets), max(s for _, s in buckets)
    needs = _Needs.of(artifact, artifact.program(artifact.manifest["variants"][0], buckets[0][0]))
    shared = needs.shared
    if config.num_pages % shared:
        raise StartupError(
            f"num_pages={config.num_pages} does not divide over the {shared} ranks that share a group's pages: give a multiple"
        )
    room = _room(config, ranks, 0 if artifact.manifest["device"] == "cpu" else _gpu_bytes(artifact, rows))
    _check_states(room, needs.state, rows, config.num_pages)
    snapshots = _snapshots(config, room, needs.state, rows)
    states = needs.state * (rows + snapshots)

    def running(requests: int) -> int:
        """Window pages that so many requests need at once."""
        return window_pages_for(
            requests=requests, window=needs.window, page_size=page, budget=tokens,
            max_in_flight=config.overlap_depth + 1, max_seq_len=length,
        )  # fmt: skip

    pages, window_pages = config.num_pages, running(rows) if needs.window else 0
    if not pages:
        left, near = room.budget - states, needs.near * page
        if near * window_pages > left / 2:  # fewer run at once than there are rows
            window_pages = max(int(left / 2 // near), running(1))
        useful = rows * (-(-length // page) + 1)
        pages = _pages(needs, page, room, left, states, window_pages, useful)
    pages += -pages % shared
    if needs.window and config.enable_prefix_caching:
        window_pages += -(-pages // KEPT)
    window_pages += -window_pages % shared
    host_pages = _host_pages(config, ranks, needs)
    return CacheSizes(
        pages, round(pages * page * needs.token), needs.window, window_pages, round(window_pages * page * needs.near),
        needs.state > 0, snapshots, states, host_pages, round(host_pages * page * (needs.token + needs.near)),
    )  # fmt: skip


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


def _pages(
    needs: _Needs, page: int, room: _Room, left: float, states: int, window_pages: int, useful: int
) -> int:  # fmt: skip
    """Pages a home group: what `left` bytes hold on every rank beside the window pages of running requests, each with its part of
    those that are kept; at most the `useful` ones."""
    each, near = page * (needs.token + needs.near / KEPT), page * needs.near * window_pages
    pages = int((left - near) // each)
    if pages < 2:
        beside = f", of which states take {states / 2**20:.0f} MiB" if states else ""
        beside += f", of which {window_pages} pages of windowed layers take {near / 2**20:.0f} MiB" if near else ""
        raise StartupError(
            f"no room for a KV cache: {room.share}{beside}, one page of {page} tokens takes {each / 2**20:.1f} MiB"
        )
    return min(pages, useful)


def _host_pages(config: EngineConfig, ranks: int, needs: _Needs) -> int:
    """Pages of the host tier a home group: every rank keeps its part of each. StartupError where there cannot be one."""
    if not config.host_kv_gib:
        return 0
    if needs.state:
        raise StartupError(
            "host_kv_gib: the states of recurrent layers do not travel to host memory; leave it out for this model"
        )
    if needs.shared > 1:
        raise StartupError(
            f"host_kv_gib: {needs.shared} ranks share the pages of a group here; leave it out, or use a mesh without cp"
        )
    room, page = config.host_kv_gib * 2**30, (needs.token + needs.near) * config.page_size * ranks
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
