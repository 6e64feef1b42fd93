"""The executor of a CUDA device: every (variant, bucket) program is one captured graph, from token ids to sampled tokens.

Invariant: a step is what the host writes into one slot of a pinned ring, one graph replay, and an event; the graph reads
the slot, writes KV, samples, keeps each request's last token on the device and puts the tokens into the slot of a second
ring. Nothing is allocated, looked up or compiled between replays, and steps run in the order of their launch.

A program with a kernel that cannot be captured (a reference) runs the same calls one by one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenspeed.compiler.artifact import KERNELS, Artifact
from tokenspeed.ir.ops.sampling import PARAM_WORDS
from tokenspeed.kernels.launch import compiling_ahead, scratch_bytes, with_chunks
from tokenspeed.kernels.shipped import shipped
from tokenspeed.kernels.step.triton import HEADER, begin_step, end_step, slot_words
from tokenspeed.runtime.checkpoint import Checkpoint, DummyCheckpoint
from tokenspeed.runtime.executor import Executor, RankConfig, Step, StepResult
from tokenspeed.runtime.progress import Progress

# Tokens from which a bucket that could be all decodes has a graph of its own for chunks of prompts: a chunk that is read
# token by token reads its context as often.
CHUNK = 16
RING = 4  # slots; more than steps can be in flight


class Gpu:
    """What the executor needs of the device beside its tensors: one stream, events, capture. The current GPU's."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def current(self) -> AbstractContextManager[object]:
        """A context in which work goes to the stream."""
        return torch.cuda.stream(self.stream)

    def event(self) -> Any:
        """Has record() and synchronize(); one that was never recorded is done."""
        return torch.cuda.Event()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeroed host memory that the device reads and writes."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def capture(self, step: Callable[[], None]) -> Callable[[], object]:
        """The replay of a graph of what `step` does; all graphs share one pool of private memory.

        Relaxed: a library may load a kernel meanwhile, which is no work of the stream.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                step()
            finally:
                graph.capture_end()
        return graph.replay


class CudaExecutor(Executor):
    """See the module. One GPU: the current one."""

    asynchronous = True
    gpu_type: type[Any] = Gpu

    def __init__(self, config: RankConfig, artifact: Artifact, checkpoint: Checkpoint, progress: Progress) -> None:
        if artifact.plan.mesh.ranks > 1:
            raise ValueError("collectives on GPUs are not bound yet: compile for one rank, or with --device cpu")
        self.gpu = self.gpu_type()
        self.device = self.gpu.device
        if isinstance(checkpoint, DummyCheckpoint):
            checkpoint.device = self.device.type
        self.replays: dict[tuple[str, int], Callable[[], object]] = {}
        self.chunked: dict[
            tuple[str, int], Callable[[], object]
        ] = {}  # of the buckets `mixed`, for requests of several tokens
        self.mixed = frozenset(t for t, s in artifact.buckets if CHUNK <= t <= s)
        super().__init__(config, artifact, checkpoint, progress)

    def _phase(self, name: str) -> None:
        self.gpu.synchronize()
        super()._phase(name)

    def _prepare(self, progress: Progress) -> None:
        device, int32 = self.device, torch.int32
        slots = self.ports.get("state")  # a request's state lies in the slot that the request owns
        self.ports["request_slots"] = (
            torch.full([self.max_s], -1, dtype=int32, device=device) if slots is None else slots
        )
        self.counter = torch.zeros(1, dtype=int32, device=device)
        self.sampled = torch.zeros(self.max_s, dtype=int32, device=device)
        self.windowed = "window_table" in self.ports
        words = slot_words(self.max_t, self.max_s, self.sizes["l"], self.windowed)
        self.inputs = self.gpu.pinned(RING, -(-words // 32) * 32, dtype=int32)
        self.outputs = self.gpu.pinned(RING, -(-self.max_s // 32) * 32, dtype=int32)
        self.inputs_np, self.outputs_np = self.inputs.numpy(), self.outputs.numpy()
        self.done = [self.gpu.event() for _ in range(RING)]
        self.turn = 0
        keys = [(v, t) for t, _ in reversed(self.artifact.buckets) for v in self.artifact.manifest["variants"]]
        with self.gpu.current():
            self._make({key: self._step(*key) for key in keys}, progress)
        extra = self.programs["full", self.max_t].results[1:] if ("full", self.max_t) in self.programs else []
        self.extras = [[self.gpu.pinned(*r.shape, dtype=r.dtype) for r in extra] for _ in range(RING)]
        self._phase("capture")

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def _step(self, variant: str, bucket: int) -> Callable[[], None]:
        """Emits a program: what a replay does from the ring's inputs to its outputs."""
        program = self.program(variant, bucket)
        rows = dict(self.artifact.buckets)[bucket]

        def step() -> None:
            begin_step(self.inputs, self.counter, self.ports, self.sampled, bucket, rows)
            program.replay()
            end_step(program.results[0][:rows], self.ports, self.sampled, self.outputs, self.counter)

        return step

    def _make(self, steps: Mapping[tuple[str, int], Callable[[], None]], progress: Progress) -> None:
        """The graphs of all programs. Their kernels are compiled side by side before, or taken from the artifact's folder, and
        scratch grows to what each of them needs."""
        if self.device.type == "cuda":
            with shipped(self.artifact.path / KERNELS), compiling_ahead():
                self._walk(steps)
            self._phase("compile")
        with uninterrupted():
            for i, (key, step) in enumerate(steps.items()):
                self.replays[key] = self._capture(*key, step)
                if key[1] in self.mixed:
                    with with_chunks():
                        self.chunked[key] = self._capture(*key, step)
                progress("capture", i + 1, len(steps))

    def _walk(self, steps: Mapping[tuple[str, int], Callable[[], None]]) -> None:
        """Launches what the graphs of all programs are made of."""
        for (variant, bucket), step in steps.items():
            if self._whole(variant, bucket):
                step()
                if bucket in self.mixed:
                    with with_chunks():
                        step()

    def _whole(self, variant: str, bucket: int) -> bool:
        """Whether every call of a program is a kernel of the device; a reference runs on the host and is not captured."""
        return all(spec.solution != "reference" for spec, _, _ in self.program(variant, bucket).calls)

    def _capture(self, variant: str, bucket: int, step: Callable[[], None]) -> Callable[[], object]:
        """Captures a step; one of the largest bucket runs over holes before, so that libraries have started."""
        if not self._whole(variant, bucket):

            def by_hand() -> None:
                with self.device:  # a reference makes its index tensors on the default device
                    step()

            return by_hand
        if bucket == self.max_t:
            rows = dict(self.artifact.buckets)[bucket]
            self._fill(self.turn, bucket, rows, holes(bucket, rows), np.zeros((rows, PARAM_WORDS), np.int32))
            step()
            self.turn = (self.turn + 1) % RING
            self.gpu.synchronize()
        return self.gpu.capture(step)

    def _fill(self, slot: int, t: int, s: int, arrays: dict[str, np.ndarray], params: np.ndarray) -> None:
        """Writes a step's arrays, of this home group, into a slot of the ring."""
        into, at = self.inputs_np[slot], HEADER
        into[0] = arrays["table"].shape[1]
        for name in ("ids", "pos", "slot", "row", *(("window_slot",) if self.windowed else ())):
            into[at : at + t] = arrays[name]
            at += t
        for name in ("last", "request_slots"):
            into[at : at + s] = arrays[name]
            at += s
        into[at : at + s * PARAM_WORDS] = params.reshape(-1)
        at += s * PARAM_WORDS
        for name in ("table", *(("window_table",) if self.windowed else ())):
            table = arrays[name]
            into[at : at + table.size] = table.reshape(-1)
            at += table.size

    def launch(self, step: Step) -> Callable[[], StepResult]:
        slot, t, s, g = self.turn, step.bucket, step.rows, self.home
        self.done[slot].synchronize()  # long past: the ring has more slots than steps in flight
        mine_t, mine_s = slice(g * t, (g + 1) * t), slice(g * s, (g + 1) * s)
        arrays = {name: step.arrays[name][mine_t] for name in ("ids", "pos", "slot", "row")}
        arrays |= {name: step.arrays[name][mine_s] for name in ("last", "request_slots", "table")}
        if self.windowed:
            arrays["window_slot"] = step.arrays["window_slot"][mine_t]
            arrays["window_table"] = step.arrays["window_table"][mine_s]
        self._fill(slot, t, s, arrays, step.params[mine_s])
        with self.gpu.current():
            self._await_loads(step)
            self._change_state(step.ops)
            self._load_states(step, mine_s)
            self._replay(step)()
            self._save_states(step, mine_s)
            more = self._copy_extra(slot, step)
            self.done[slot].record()
        self.turn = (slot + 1) % RING

        def wait() -> StepResult:
            self.done[slot].synchronize()
            tokens = self.outputs_np[slot, :s].copy()
            return StepResult(tokens, *(m.numpy().copy() for m in more))

        return wait

    def _replay(self, step: Step) -> Callable[[], object]:
        """The graph for a step: where a request has several tokens, the one that takes them together."""
        key, row = (step.variant, step.bucket), step.arrays["row"]
        several = step.bucket in self.mixed and bool(((row[1:] == row[:-1]) & (row[1:] >= 0)).any())
        return self.chunked[key] if several else self.replays[key]

    def _copy_extra(self, slot: int, step: Step) -> list[Tensor]:
        """Sends what the full variant gives beside the tokens to the host; where it will lie, valid until the slot's turn."""
        if step.variant != "full":
            return []
        results = self.programs["full", step.bucket].results[1:]
        return [into[: len(r)].copy_(r, non_blocking=True) for into, r in zip(self.extras[slot], results, strict=True)]

    def run(self, step: Step) -> StepResult:
        return self.launch(step)()

    def adopt(self, keep: bool) -> None:
        """Copies the weights that were loaded over the others: captured graphs read them where those were."""
        if keep:
            with self.gpu.current():
                for name, new in self._loaded.items():
                    self.params[name].copy_(new)
            self.gpu.synchronize()
        self._loaded = {}

    def memory(self) -> dict[str, int]:
        """Bytes on the device by use; `allocated` is what the allocator counts, graphs' private pools included."""
        sizes = {id(p): p.nbytes for p in self.params.values() if isinstance(p, Tensor)}
        caches = sum(self.params[n].nbytes for n in self.params if ":" in n)
        return {
            "weights": sum(sizes.values()) - caches, "caches": caches, "arena": self.arena.nbytes,
            "scratch": scratch_bytes(torch.device("cuda", torch.cuda.current_device())),
            "allocated": torch.cuda.memory_allocated(),
        }  # fmt: skip


@contextmanager
def uninterrupted() -> Generator[None]:
    """Without the garbage collector: it would look at all that was compiled, between captures, and may free what it must not."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def holes(tokens: int, rows: int) -> dict[str, np.ndarray]:
    """The arrays of a step in which nothing runs."""
    out = {name: np.full(tokens, -1, np.int32) for name in ("ids", "pos", "slot", "window_slot", "row")}
    out |= {name: np.full(rows, -1, np.int32) for name in ("last", "request_slots")}
    return out | {name: np.zeros((rows, 1), np.int32) for name in ("table", "window_table")}
