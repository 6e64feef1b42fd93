"""The ranks of an engine: rank 0 in the core's process, the others as worker processes that get the same steps.

A step travels once, packed in a ring of shared memory; a small message tells each worker where it lies, and the
scheduler's digest travels with it, so that a divergence is an error message and never a hang. Invariant: a slot of the
ring is written again only after the step that used it has returned on every rank.

Where pages have a host tier, orders to it travel on the pipe of the steps, and each rank answers them on a pipe of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch

from tokenspeed import _scheduler
from tokenspeed.ir.errors import TokenSpeedError
from tokenspeed.runtime.checkpoint import checkpoint_of
from tokenspeed.runtime.errors import EngineError
from tokenspeed.runtime.executor import Executor, RankConfig, StateOp, Step, StepResult, make_executor, open_artifact
from tokenspeed.runtime.kv.mesh import MeshTiers, Worker
from tokenspeed.runtime.kv.start import rank_tiers
from tokenspeed.runtime.kv.tiers import Lane
from tokenspeed.runtime.kv.transfers import Order
from tokenspeed.runtime.progress import Progress, silent

SLOTS = 4  # of the ring; more than steps can be in flight
ENDED = "ended with exit code"


class WorkerError(RuntimeError):
    """A worker rank failed; the text is its own."""


#: what a step needs of a plan
ARRAYS = (
    "ids", "pos", "slot", "row", "last", "table", "request_slots", "load_state", "save_state", "window_slot", "window_table",
)  # fmt: skip


def arrays_of(plan: Any) -> dict[str, Any]:
    return {k: getattr(plan, k) for k in ARRAYS}


def set_threads(n: int) -> None:
    """CPU threads of this process's kernels: torch's and our own pool."""
    torch.set_num_threads(n)
    try:
        from tokenspeed import _cpu
    except ImportError:
        return
    _cpu.set_threads(n)


def start_executor(config: RankConfig, progress: Progress, joining: Callable[[], object]) -> Executor:
    """`joining` is called before the rendezvous of the ranks, at which each waits for all others."""
    set_threads(config.threads)
    artifact, checkpoint = open_artifact(config.artifact), checkpoint_of(config.weights)
    joining()
    return make_executor(config, artifact, checkpoint, progress)


class Ranks:
    """Runs steps on all ranks: `publish` sends a step to the workers, `launch` starts it here.

    `overlap`: a launch returns before the step has run, also where the device does not work by itself.
    """

    def __init__(
        self, config: RankConfig, ranks: int, slot_bytes: int, progress: Progress, overlap: bool = False
    ) -> None:
        self.workers: list[tuple[Any, Any]] = []  # (process, our end of its pipe)
        self.answers: list[Any] = []  # a worker each: our end of the pipe on which it answers orders to its tiers
        self.tiers: MeshTiers | None = None
        self.pool: ThreadPoolExecutor | None = None
        self.memory: SharedMemory | None = None
        self.sent = 0
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        if ranks > 1:
            self.folder = tempfile.TemporaryDirectory(prefix="tokenspeed-")
            config = replace(config, store=str(Path(self.folder.name) / "rendezvous"))
            self.memory = SharedMemory(create=True, size=SLOTS * slot_bytes)
            self.slot_bytes = slot_bytes
            self._spawn(config, ranks)
        try:
            self.executor = start_executor(config, progress, self._await_joining)
            self.leaders, homes = self._await_ready()
            if config.host_pages:
                self.tiers = self._mesh_tiers(config, homes)
        except BaseException as e:
            reason = self._worker_reason()
            self.close()
            if reason and not isinstance(e, WorkerError):
                raise WorkerError(reason) from e
            raise
        self.pool = (
            ThreadPoolExecutor(1, thread_name_prefix="tokenspeed-step")
            if overlap and not self.executor.asynchronous
            else None
        )

    def _spawn(self, config: RankConfig, ranks: int) -> None:
        assert self.memory
        context = mp.get_context("spawn")
        for rank in range(1, ranks):
            ours, theirs = context.Pipe()
            answers, answering = context.Pipe(duplex=False)
            p = context.Process(target=worker_main, args=(replace(config, rank=rank), theirs, answering, self.memory.name,
                                self.slot_bytes), name=f"tokenspeed-rank{rank}", daemon=True)  # fmt: skip
            p.start()
            theirs.close()
            answering.close()
            self.workers.append((p, ours))
            self.answers.append(answers)

    def _await_joining(self) -> None:
        """Returns when every worker is about to join the rendezvous: one that dies before is told of, not waited for."""
        for _, conn in self.workers:
            try:
                kind, _ = self._receive(conn)
            except WorkerError as fault:
                if ENDED not in str(fault):
                    raise
                raise WorkerError(
                    f"{fault} before it could take part; what it said stands above. A script that makes an Engine of several "
                    'ranks does so under `if __name__ == "__main__":`, as each rank imports it'
                ) from None
            assert kind == "joining", kind

    def _await_ready(self) -> tuple[dict[int, Connection], list[int]]:
        """Waits for every worker; the connections that bring results of the other home groups, and each worker's own group."""
        leaders: dict[int, Connection] = {}
        homes: list[int] = []
        for _, conn in self.workers:
            kind, value = self._receive(conn)
            assert kind == "ready", kind
            home, leads = value
            homes.append(home)
            if leads and home != self.executor.home:
                leaders[home] = conn
        return leaders, homes

    def _mesh_tiers(self, config: RankConfig, homes: list[int]) -> MeshTiers:
        def sender(conn: Connection) -> Callable[[list[Order]], None]:
            return lambda orders: self._send(conn, pickle.dumps(orders))

        workers = [
            Worker(home, sender(conn), answers)
            for home, (_, conn), answers in zip(homes, self.workers, self.answers, strict=True)
        ]
        return MeshTiers(lambda report: rank_tiers(config, self.executor, report), self.executor.home, workers)

    def _send(self, conn: Connection, message: bytes) -> None:
        try:
            conn.send_bytes(message)
        except OSError:
            raise WorkerError(self._worker_reason() or "a worker rank has gone") from None

    def transferred(self) -> list[tuple[int, int]]:
        """(ticket, pages that arrived) of the transfers that have ended since the last call."""
        assert self.tiers is not None
        try:
            return self.tiers.answered()
        except (EOFError, OSError):
            raise WorkerError(self._worker_reason() or "a worker rank has gone") from None

    def _receive(self, conn: Connection) -> tuple[str, Any]:
        try:
            kind, value = conn.recv()
        except (EOFError, OSError):
            raise WorkerError(self._worker_reason(patience=1) or "a worker rank ended without a word") from None
        if kind == "error":
            raise WorkerError(value)
        return kind, value

    def _worker_reason(self, patience: float = 0) -> str:
        """What a failed worker said, or how it ended, if one has; one may still be about to end for so many seconds."""
        closed = wait_for([p.sentinel for p, _ in self.workers], patience)
        for p, _ in self.workers:
            if p.sentinel in closed:  # its end follows at once
                p.join(1)
        for p, conn in self.workers:
            try:
                while conn.poll(0.2 if not p.is_alive() else 0):
                    kind, value = conn.recv()
                    if kind == "error":
                        return value
            except (EOFError, OSError):
                pass
            if not p.is_alive():
                return f"worker {p.name} {ENDED} {p.exitcode}"
        return ""

    def check(self) -> None:
        """WorkerError when a worker has died."""
        if any(not p.is_alive() for p, _ in self.workers):
            raise WorkerError(self._worker_reason())

    def publish(self, plan: Any, params: Any, variant: str, ops: list[StateOp]) -> Step:
        """Sends one step to the workers; returns rank 0's own."""
        loads = [] if self.tiers is None else plan.loads.tolist()
        step = Step(plan.bucket, plan.rows, variant, arrays_of(plan), params, ops, loads)
        if self.memory is not None:
            slot = self.sent % SLOTS
            self.sent += 1
            start = slot * self.slot_bytes
            plan.pack_into(_slot(self.memory, start, self.slot_bytes))
            message = pickle.dumps((slot, plan.step, plan.digest, variant, params, ops, loads))
            for _, conn in self.workers:
                self._send(conn, message)
        return step

    def update(self, note: Mapping[str, Any]) -> None:
        """Replaces the weights of all ranks by those of a checkpoint's note, or of none: then the first reason is raised. No
        step is in flight."""
        for _, conn in self.workers:
            self._send(conn, pickle.dumps(dict(note)))
        reasons = [_loaded(self.executor, note)] + [self._receive(conn)[1] for _, conn in self.workers]
        reason = next((r for r in reasons if r), "")
        for _, conn in self.workers:
            self._send(conn, pickle.dumps(not reason))
        self.executor.adopt(not reason)
        if reason:
            raise EngineError(reason)

    def launch(self, step: Step) -> Callable[[], list[StepResult]]:
        """Starts a published step on this rank; the call of what it returns waits for the results of all home groups,
        in group order. Steps are waited for in the order of their launch."""
        if self.pool is not None:
            return self.pool.submit(self._results, step, self.executor.run).result
        pending = self._guarded(self.executor.launch, step)
        if self.executor.asynchronous:
            return lambda: self._results(step, lambda _: pending())
        results = self._results(step, lambda _: pending())
        return lambda: results

    def _guarded(self, call: Callable[[Step], Any], step: Step) -> Any:
        try:
            return call(step)
        except Exception as e:
            # A collective fails when a worker's sockets close, a moment before its end can be seen.
            reason = self._worker_reason(patience=1) if self.workers else ""
            if reason:
                raise WorkerError(reason) from e
            raise

    def _results(self, step: Step, run: Callable[[Step], StepResult]) -> list[StepResult]:
        mine, others = self._guarded(run, step), self.leaders
        return [mine if g == self.executor.home else self._receive(others[g])[1] for g in range(self.executor.dp)]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        if self.tiers is not None:
            self.tiers.close()
            self.tiers = None
        for _, conn in self.workers:
            with contextlib.suppress(OSError):
                conn.send_bytes(b"")
        for p, conn in self.workers:
            p.join(5)
            if p.is_alive():
                p.kill()
                p.join(5)
            conn.close()
        for answers in self.answers:
            answers.close()
        self.workers, self.answers = [], []
        _leave_group()
        if self.memory is not None:
            self.memory.close()
            self.memory.unlink()
            self.memory = None
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


def worker_main(config: RankConfig, conn: Connection, answers: Connection, memory_name: str, slot_bytes: int) -> None:
    """A worker rank's process: runs steps until an empty message or the parent's death (its end of the pipe closes)."""
    try:
        _die_with_parent()
        executor = start_executor(config, silent, lambda: conn.send(("joining", None)))
        if config.host_pages:
            _answering(config, executor, answers)
        mesh = executor.plan.mesh
        leads = all(c == 0 for a, c in mesh.coords(config.rank).items() if a not in executor.plan.home)
        conn.send(("ready", (executor.home, leads)))
        options: dict[str, Any] = {"track": False} if sys.version_info >= (3, 13) else {}  # the leader unlinks it
        memory = SharedMemory(memory_name, **options)
        try:
            _serve(executor, conn, memory, slot_bytes, leads and executor.home != 0)
        finally:
            if executor.tiers is not None:
                executor.tiers.close()
            memory.close()
            _leave_group()
    except (EOFError, KeyboardInterrupt):
        return
    except BaseException as e:
        try:
            told = isinstance(e, EngineError | TokenSpeedError)  # such a text names cause and fix by itself
            conn.send(
                ("error", str(e) if told else f"rank {config.rank}: {type(e).__name__}: {e}\n{traceback.format_exc()}")
            )
        except OSError:
            pass
        raise SystemExit(1) from None


def _serve(executor: Executor, conn: Connection, memory: SharedMemory, slot_bytes: int, reports: bool) -> None:
    while message := conn.recv_bytes():
        content = pickle.loads(message)
        if isinstance(content, list):
            assert executor.tiers is not None
            executor.tiers.start(content)
            continue
        if isinstance(content, dict):
            conn.send(("loaded", _loaded(executor, content)))
            executor.adopt(pickle.loads(conn.recv_bytes()))
            continue
        slot, number, digest, variant, params, ops, loads = content
        start = slot * slot_bytes
        plan = _scheduler.Plan.unpack(_slot(memory, start, slot_bytes))
        if (plan.step, plan.digest) != (number, digest):
            raise RuntimeError(
                f"step {number}: the plan in shared memory is that of step {plan.step}; the ranks have diverged"
            )
        result = executor.run(Step(plan.bucket, plan.rows, variant, arrays_of(plan), params, ops, loads))
        if reports:
            conn.send(("result", result))


def _loaded(executor: Executor, note: Mapping[str, Any]) -> str:
    """Has a rank read other weights; "", or why it cannot."""
    try:
        executor.load(checkpoint_of(note))
    except (EngineError, TokenSpeedError, OSError) as fault:
        return str(fault)
    return ""


def _answering(config: RankConfig, executor: Executor, answers: Connection) -> None:
    """Starts a worker's tiers, which answer on its pipe. A thread sends the answers: the pipe is full while the core waits for
    a step, and the step may wait for a copy."""
    sender = Lane("kv-answers", 1)

    def send(ticket: int, pages: int) -> None:
        with contextlib.suppress(OSError):  # the core has gone: nobody waits
            answers.send((ticket, pages, tiers.totals()))

    tiers = rank_tiers(config, executor, lambda ticket, pages: sender.put(lambda: send(ticket, pages)))


def _leave_group() -> None:
    """Ends the rendezvous' threads; left to the interpreter's end, they can take the process down with them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _slot(memory: SharedMemory, start: int, nbytes: int) -> memoryview:
    assert memory.buf is not None
    return memory.buf[start : start + nbytes]


def _die_with_parent() -> None:
    """Linux: the kernel ends this process when its parent goes."""
    import ctypes
    import signal

    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        raise SystemExit(1)
