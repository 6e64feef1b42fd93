"""One rank's executor, on CPU: static buffers, weights, KV cache, and the emitted program of each (variant, bucket).

Invariant: after `start`, a step copies its arrays into static port buffers and replays one graph; the graph writes KV,
communicates and samples. Programs share one arena. The token last sampled for a request slot stays here, so that a step
can be launched before the previous one's tokens have been read back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenspeed.compiler.artifact import Artifact, load_artifact
from tokenspeed.compiler.compat import compat_of
from tokenspeed.compiler.emit import DTYPES, Emitted, Runtime, emit
from tokenspeed.ir.graph import Param, Program
from tokenspeed.ir.ops import Local
from tokenspeed.ir.ops.sampling import PARAM_WORDS, SAMPLING_DIMS
from tokenspeed.ir.types import DTYPE_BYTES
from tokenspeed.kernels import memory
from tokenspeed.kernels.registry import default_registry
from tokenspeed.kernels.target import target_of
from tokenspeed.runtime.checkpoint import Checkpoint
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.kv.tiers import RankTiers
from tokenspeed.runtime.loader import load_weights
from tokenspeed.runtime.packed import PackedFile
from tokenspeed.runtime.progress import Progress

RENDEZVOUS = timedelta(minutes=1)  # all ranks are about to join by then


#: groups of caches that have pages: the dim of their slots -> the ports that name slots to write and pages to read
PAGED = {"slots": ("slot", "table"), "window_slots": ("window_slot", "window_table")}


@dataclass(frozen=True)
class RankConfig:
    """What a rank needs to start; plain data, sent to worker processes."""

    artifact: str
    weights: dict[str, Any]  # the note that opens the checkpoint
    rank: int
    page_size: int
    num_pages: int  # a home group
    max_model_len: int
    threads: int
    snapshots: int = 0  # of recurrent states, a home group
    window_pages: int = 0  # of layers that see a window, a home group
    store: str = ""  # file of the rendezvous; "" for a single rank
    host_pages: int = 0  # of the host tier, a home group; 0: there is none
    storage: str = ""  # address of the store behind it; "": none
    identity: dict[str, Any] = field(default_factory=dict)  # what stored pages depend on, of all ranks


@dataclass
class StateOp:
    """A change to the full sampler's state of one request slot, applied before a step."""

    group: int
    slot: int
    reset: bool = False
    seen: Sequence[int] = ()  # prompt tokens
    counts: dict[int, int] = field(default_factory=dict)  # output tokens
    bias: dict[int, float] | None = None  # replaces the slot's bias
    allowed: Sequence[int] | None = None  # with `bias`: everything else is banned
    mask: np.ndarray | None = None  # int32 words that replace the slot's allow-mask; see the op `mask_logits`


@dataclass
class Step:
    """One step as every rank receives it: the scheduler's arrays, sampling parameters, variant and state changes."""

    bucket: int
    rows: int
    variant: str
    arrays: dict[str, np.ndarray]  # ids, pos, slot, row, last, table, request_slots, load_state, save_state, window_*
    params: np.ndarray  # int32 [dp * rows, words]
    ops: list[StateOp]
    loads: Sequence[int] = ()  # tickets of copies from host pages that the step reads


@dataclass
class StepResult:
    """Of this rank's home group, in row order: token ids i32[rows] and, of the full variant, log-probabilities."""

    tokens: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


def open_artifact(path: str) -> Artifact:
    """Loads an artifact and checks its compat key against this process."""
    a = load_artifact(Path(path))
    wanted = a.manifest["device"]
    if wanted != "cpu" and not torch.cuda.is_available():
        raise StartupError(
            f"{path} was compiled for {wanted} and this process sees no GPU; compile it with --device cpu"
        )
    a.check(compat_of(a.kernels, wanted if wanted == "cpu" else f"cuda:{target_of('cuda').arch}"))
    return a


def default_page(device: str) -> int:
    """Tokens of a page where the options name none: of an artifact for `device` ("cpu" or "cuda:90")."""
    return 16 if device == "cpu" else 64


def table_width(tokens: int, page: int) -> int:
    """Columns of a page table for requests of up to `tokens` tokens: a multiple of 16, so that rows are aligned and kernels do
    not depend on the number."""
    return -(-(tokens // page + 2) // 16) * 16


def cache_ranks(p: Program) -> int:
    """Ranks that share the slots of a home group among them (cp)."""
    home = p.plan.home
    axes = {a for q in p.all_params() if q.kind == "cache" for t in q.types for a in t.dims[0].axes if a not in home}
    return p.plan.mesh.size(tuple(axes))


def cache_bytes(p: Program, slot: str) -> int:
    """Bytes one rank holds a slot of the caches that have `slot` slots: a token of `slots`, a request of `states`."""
    caches = [t for q in p.all_params() if q.kind == "cache" for t in q.types if t.dims[0].name == slot]
    return sum(DTYPE_BYTES[t.dtype] * math.prod(t.local_shape(dict(p.sizes) | {slot: 1}, p.plan)[1:]) for t in caches)


class Executor:
    """See the module; on CPU. Methods are called from one thread at a time."""

    asynchronous = False  # whether `launch` returns before the step has run
    device = torch.device("cpu")

    def __init__(self, config: RankConfig, artifact: Artifact, checkpoint: Checkpoint, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}  # of the start, by phase
        self._clock = time.perf_counter()
        self.config, self.artifact = config, artifact
        self.plan, self.rank = artifact.plan, config.rank
        home = self.plan.home
        self.dp = self.plan.mesh.size(home)
        self.home = self.plan.mesh.index(config.rank, home)
        self.max_t = max(t for t, _ in artifact.buckets)
        self.max_s = max(s for _, s in artifact.buckets)
        self.groups = _groups(self) if config.store else {}
        self.sizes = {
            "slots": config.page_size * config.num_pages * self.dp, "page": config.page_size, **SAMPLING_DIMS,
            "window_slots": config.page_size * config.window_pages * self.dp,
            "l": table_width(config.max_model_len, config.page_size), "r": self.max_s * self.dp,
            # a request's state lies in the slot that the request owns; behind those lie snapshots
            "states": (self.max_s + config.snapshots) * self.dp,
        }  # fmt: skip
        self.params: dict[str, Any] = load_weights(
            artifact.weights, checkpoint, config.rank, lambda d, n: progress("load", d, n), self.device,
            config.max_model_len,
        )  # fmt: skip
        self._loaded: dict[str, Any] = {}  # weights that may replace those
        self.ports = self._ports()
        self.arena = torch.empty(0, dtype=torch.uint8)
        self.programs: dict[tuple[str, int], Emitted] = {}
        # Of the full sampler; but for the masks, for the ids from `first_id` on that this rank holds.
        self.state: list[Tensor] = []
        self.first_id = 0
        self.recurrent: list[Tensor] = []  # caches of state slots
        # caches of pages, all that a page holds on this rank, by the dim of their slots
        self.paged: dict[str, list[Tensor]] = {slots: [] for slots in PAGED}
        self.tiers: RankTiers | None = None  # below the pages
        registry = default_registry()
        self.kernel = lambda key: registry.get(artifact.kernels[key])
        packed = PackedFile(artifact.path, checkpoint, config.rank) if self.device.type == "cpu" else None
        if packed is not None:
            packed.restore(self.params)
        self._phase("load")
        self._prepare(progress)
        if packed is not None:
            packed.keep(self.params)

    def _phase(self, name: str) -> None:
        """Ends a phase of the start."""
        now = time.perf_counter()
        self.seconds[name], self._clock = now - self._clock, now

    def _prepare(self, progress: Progress) -> None:
        """What must exist before the first step: the largest programs, which size the arena for all, and the views."""
        for variant in self.artifact.manifest["variants"]:
            self.program(variant, self.max_t)
        self.views = {name: port.numpy() for name, port in self.ports.items()}
        # A home group's pages are dealt out to its ranks in turn; a rank holds a block of them.
        ranks = cache_ranks(self.artifact.program(*next(iter(self.programs))))
        self.held: dict[str, np.ndarray] = {}
        for slots, count in (("slots", self.config.num_pages), ("window_slots", self.config.window_pages)):
            pages = np.arange(count, dtype=np.int32)
            if ranks > 1:
                self.held[slots] = pages % ranks * (count // ranks) + pages // ranks
        self.last_tokens = np.zeros(self.max_s, dtype=np.int32)

    def _ports(self) -> dict[str, Tensor]:
        width = self.sizes["l"]
        extent = {"t": self.max_t, "s": self.max_s, "l": width, "p": PARAM_WORDS}
        out: dict[str, Tensor] = {}
        for name, port in self.artifact.ports["inputs"].items():
            empty = 0 if name in ("params", "table", "window_table") else -1
            shape = [extent[d] for d in port["dims"]]
            out[name] = torch.full(shape, empty, dtype=DTYPES[port["dtype"]], device=self.device)
        return out

    def program(self, variant: str, bucket: int) -> Emitted:
        """The emitted program, made on first use."""
        key = (variant, bucket)
        if key not in self.programs:
            p = self.artifact.program(variant, bucket)
            for q in p.all_params():
                if q.kind in ("cache", "state"):
                    self._allocate(p, q)
            runtime = Runtime(
                self.rank, self.sizes, self.params, self.ports, self.kernel, self.artifact.kernels.__contains__,
                self.group, self._arena,
            )  # fmt: skip
            self.programs[key] = emit(p, runtime)
        return self.programs[key]

    def _allocate(self, p: Program, q: Param) -> None:
        sizes = dict(p.sizes) | self.sizes
        for k, t in enumerate(q.types):
            name = f"{q.name}:{k}"
            if name not in self.params:
                # not zeroed: no step reads a slot before it was written, nor state before its reset; pages stay unmapped
                self.params[name] = self._empty(*t.local_shape(sizes, self.plan), dtype=DTYPES[t.dtype])
                if q.kind == "state":
                    self.state.append(self.params[name])
                    if k == 0:
                        self.first_id = Local(self.plan, self.rank, sizes, sizes).offset(t.dims[1])
                elif t.dims[0].name == "states":
                    self.recurrent.append(self.params[name])
                elif t.dims[0].name in self.paged:
                    self.paged[t.dims[0].name].append(self.params[name])

    def _arena(self, nbytes: int) -> Tensor:
        if nbytes > self.arena.numel():  # programs emitted earlier keep the arena they were given
            self.arena = self._empty(nbytes, dtype=torch.uint8)
        return self.arena

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        try:
            return memory.empty(*shape, dtype=dtype)
        except (RuntimeError, MemoryError, OSError) as error:
            raise StartupError(
                f"{math.prod(shape) * dtype.itemsize / 2**20:.0f} MiB of memory cannot be had ({error}): "
                "fewer or smaller pages (--num-pages, --page-size) or requests (--max-num-seqs)"
            ) from None

    def group(self, axes: tuple[str, ...]) -> Any:
        if self.plan.mesh.ordered(axes) != axes:
            raise ValueError(
                f"a collective over {axes} is not in mesh order {self.plan.mesh.names}; give the plan's axes in mesh order"
            )
        return self.groups[axes]

    def launch(self, step: Step) -> Callable[[], StepResult]:
        """Starts one step; the call of what it returns waits for its tokens. Steps are waited for in order."""
        result = self.run(step)
        return lambda: result

    def run(self, step: Step) -> StepResult:
        """Executes one step; returns when its tokens are known."""
        program = self.program(step.variant, step.bucket)
        self._await_loads(step)
        self._change_state(step.ops)
        t, s, g = step.bucket, step.rows, self.home
        a = step.arrays
        mine_t, mine_s, into = slice(g * t, (g + 1) * t), slice(g * s, (g + 1) * s), self.views
        ids = a["ids"][mine_t]
        into["ids"][:t] = ids
        waiting = np.flatnonzero(ids < 0)
        into["ids"][waiting] = self.last_tokens[-ids[waiting] - 1]
        for name in ("pos", "row"):
            into[name][:t] = a[name][mine_t]
        last, slots = a["last"][mine_s], a["request_slots"][mine_s]
        for group, (slot_port, table_port) in PAGED.items():
            if table_port not in into:
                continue
            slot, table, page = a[slot_port][mine_t], a[table_port][mine_s], self.config.page_size
            if (held := self.held.get(group)) is not None:
                slot = np.where(slot < 0, slot, held[slot // page] * page + slot % page)
                table = np.where(table < 0, table, held[table])
            into[slot_port][:t] = slot
            into[table_port][:s, : table.shape[1]] = table
        into["last"][:s] = last
        if "state" in into:
            into["state"][:s] = slots
        into["params"][:s] = step.params[mine_s]
        self._load_states(step, mine_s)
        program.replay()
        self._save_states(step, mine_s)
        tokens = program.results[0][:s].clone().numpy()
        sampled = (last >= 0) & (slots >= 0)
        self.last_tokens[slots[sampled]] = tokens[sampled]
        result = StepResult(tokens)
        if step.variant == "full":
            _, lp, ids_, lps = program.results
            result.logprobs, result.top_ids, result.top_logprobs = (
                lp.clone().numpy(),
                ids_.clone().numpy(),
                lps.clone().numpy(),
            )
        return result

    def load(self, checkpoint: Checkpoint) -> None:
        """Reads other weights into host memory, beside those that serve; `adopt` takes them. Raises CheckpointError."""
        self._loaded = load_weights(
            self.artifact.weights, checkpoint, self.config.rank, length=self.config.max_model_len
        )

    def adopt(self, keep: bool) -> None:
        """Takes the weights that were loaded, or forgets them. No step runs meanwhile."""
        if keep:
            self.params.update(self._loaded)
            self.programs.clear()  # they hold the weights in their kernels' own layout
            for variant in self.artifact.manifest["variants"]:
                self.program(variant, self.max_t)
        self._loaded = {}

    def _await_loads(self, step: Step) -> None:
        """What follows reads pages that come from the host tier."""
        if step.loads:
            assert self.tiers is not None
            self.tiers.wait(step.loads)

    def _load_states(self, step: Step, rows: slice) -> None:
        """Brings snapshots of recurrent states into the slots of the requests that go on from them."""
        if self.recurrent:
            self._copy_states(step.arrays["load_state"][rows], step.arrays["request_slots"][rows])

    def _save_states(self, step: Step, rows: slice) -> None:
        """Keeps snapshots of what the step left in its requests' slots."""
        if self.recurrent:
            self._copy_states(step.arrays["request_slots"][rows], step.arrays["save_state"][rows])

    def _copy_states(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies states between slots; a row with -1 on either side has none to copy."""
        for row in np.flatnonzero((sources >= 0) & (targets >= 0)):
            for cache in self.recurrent:
                cache[int(targets[row])].copy_(cache[int(sources[row])])

    def _change_state(self, ops: Sequence[StateOp]) -> None:
        for op in ops:
            if op.group == self.home and self.state:
                self._apply(op)

    def _apply(self, op: StateOp) -> None:
        counts, seen, bias, allow = self.state
        if op.reset:
            counts[op.slot].zero_()
            seen[op.slot].zero_()
            bias[op.slot].zero_()
        if op.mask is not None:
            allow[op.slot].zero_()[: len(op.mask)] = torch.from_numpy(op.mask)
        if op.seen:
            seen[op.slot, self._mine(op.seen)] = 1
        for token, n in op.counts.items():
            counts[op.slot, self._mine([token])] = n
        if op.bias is not None:
            row = bias[op.slot]
            row.fill_(0.0 if op.allowed is None else float("-inf"))
            if op.allowed is not None:
                row[self._mine(op.allowed)] = 0.0
            for token, value in op.bias.items():
                row[self._mine([token])] += value

    def _mine(self, ids: Sequence[int]) -> Tensor:
        """Columns of the sampler's state for those of `ids` that this rank holds."""
        at = torch.tensor(list(ids), dtype=torch.long, device=self.device) - self.first_id
        return at[(at >= 0) & (at < self.state[0].shape[1])]


def make_executor(config: RankConfig, artifact: Artifact, checkpoint: Checkpoint, progress: Progress) -> Executor:
    """The executor of the device that the artifact was compiled for."""
    if artifact.manifest["device"] == "cpu":
        return Executor(config, artifact, checkpoint, progress)
    from tokenspeed.runtime.cuda_executor import CudaExecutor

    return CudaExecutor(config, artifact, checkpoint, progress)


def _groups(e: Executor) -> dict[tuple[str, ...], Any]:
    """Joins the rendezvous and makes one process group a set of mesh axes; all ranks make all groups, in one order."""
    import itertools
    import os

    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mesh = e.plan.mesh
    dist.init_process_group(
        "gloo", init_method=f"file://{e.config.store}", rank=e.rank, world_size=mesh.ranks, timeout=RENDEZVOUS,
    )  # fmt: skip
    out: dict[tuple[str, ...], Any] = {}
    for k in range(1, len(mesh.names) + 1):
        for axes in itertools.combinations(mesh.names, k):
            for ranks in mesh.groups(axes):
                group = dist.new_group(ranks)
                if e.rank in ranks:
                    out[axes] = group
    return out
