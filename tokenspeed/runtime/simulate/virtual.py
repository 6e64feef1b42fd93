"""Sessions served by the real scheduler on a virtual clock. Invariant: nothing here decides what runs, what is evicted or what
moves between tiers; it says when steps and transfers end, and what was asked and answered. Equal inputs give equal outcomes.

Steps run one after the other, as with overlap depth 0 and a host that costs nothing. Each kind of transfer has a lane of its own,
on which transfers follow each other; a step begins when what it loads is there. Storage keeps what was used last, up to its size.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenspeed._scheduler import Config, Plan, Scheduler, page_keys
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.kv.transfers import KINDS
from tokenspeed.runtime.simulate.costs import Machine
from tokenspeed.runtime.simulate.workload import Session, Tokens, Traffic, draw, sessions, sub_agents

TIERS = ("device", "host", "storage")


@dataclass(frozen=True)
class Policy:
    """What is compared: memory of each tier in GiB, and the scheduler's own settings."""

    device_gib: float = 100.0
    host_gib: float = 256.0
    storage_gib: float = 2048.0
    page_size: int = 64
    max_model_len: int = 131_072
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    prefill_chunk: int = 0
    decode_stall_tokens: int = 2048
    ageing_steps: int = 256
    storage_min_pages: int = 4
    write_back_pages: int = 8

    def pages(self, gib: float, kv_bytes: int) -> int:
        return int(gib * 2**30 / (kv_bytes * self.page_size))


@dataclass
class Served:
    """One request, as its client saw it. Times are seconds of the virtual clock."""

    session: int
    by_user: bool
    submitted: float
    prompt: int
    output: int
    ideal: int  # prompt tokens that a cache without end would have had
    alone: float  # seconds it would take then on a machine of its own
    first: float = 0.0
    last: float = 0.0
    cached: dict[str, int] = field(default_factory=dict)  # by tier


@dataclass
class Outcome:
    """What came of one policy."""

    policy: Policy
    served: list[Served]
    gaps: list[float]  # seconds between tokens of a request
    timeline: list[tuple[float, int, int, float, float]]  # time, running, waiting, share of device and host pages held
    seconds: float  # of the virtual clock, from the first request to the last token
    busy: float  # of those, with a step running
    loading: float  # of those, with a step that waits for pages it loads
    stats: dict[str, Any]  # the scheduler's, at the end
    page_bytes: int
    took: float  # seconds of the simulation itself


class Simulation:
    """One policy's run."""

    def __init__(self, traffic: Traffic, machine: Machine, policy: Policy) -> None:
        self.traffic, self.machine, self.policy = traffic, machine, policy
        self.page_bytes = machine.kv_bytes * policy.page_size
        device, host, stored = (
            policy.pages(gib, machine.kv_bytes) for gib in (policy.device_gib, policy.host_gib, policy.storage_gib)
        )
        if device * policy.page_size < policy.max_model_len:
            raise StartupError(
                f"device_gib={policy.device_gib:g} holds {device * policy.page_size} tokens of {machine.kv_bytes} bytes, "
                f"less than max_model_len={policy.max_model_len}"
            )
        if stored and not host:
            raise StartupError("storage_gib needs host_gib: what is stored passes through host pages")
        self.scheduler = Scheduler(
            Config(
                page_size=policy.page_size, num_pages=device, max_requests=policy.max_num_seqs,
                token_buckets=sorted({min(2**i, policy.max_num_batched_tokens) for i in range(20)}),
                max_seq_len=policy.max_model_len, prefill_chunk=policy.prefill_chunk,
                decode_stall_tokens=policy.decode_stall_tokens, ageing_steps=policy.ageing_steps, host_pages=host,
                storage=stored > 0, storage_min_pages=policy.storage_min_pages, write_back_pages=policy.write_back_pages,
            )
        )  # fmt: skip
        self.now = self.busy = self.loading = 0.0
        self.storage = _Storage(stored)
        self.gaps: list[float] = []
        self.served: list[Served] = []
        self.timeline: list[tuple[float, int, int, float, float]] = []
        self._order = itertools.count()  # of events at one time: as they were made
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._lanes = dict.fromkeys(KINDS, 0.0)  # when each is free
        self._arrives: dict[int, float] = {}  # ticket -> when a load_back is done
        self._running: dict[int, _Request] = {}
        self._seen: set[bytes] = set()  # keys of all pages ever computed
        self._stepping = False

    def run(self) -> Outcome:
        began = time.perf_counter()
        for session in sessions(self.traffic, self.policy.max_model_len):
            self._at(session.start, lambda session=session: self._ask(session, 0))
        start = self._events[0][0]
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
            if not self._events or self._events[0][0] > self.now:
                self._plan()
        if self._running:
            raise RuntimeError(f"{len(self._running)} requests were never served: {self.scheduler.snapshot()[:3]}")
        return Outcome(
            self.policy, self.served, self.gaps, self.timeline, self.now - start, self.busy, self.loading, dict(self.scheduler.stats()),
            self.page_bytes, time.perf_counter() - began,
        )  # fmt: skip

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    # ---- clients ----

    def _ask(self, session: Session, index: int) -> None:
        turn, prompt = session.turns[index], session.prompt(index)
        number = len(self.served)
        keys = page_keys(prompt, self.policy.page_size)
        known = next((i for i, key in enumerate(keys) if key not in self._seen), len(keys)) * self.policy.page_size
        ideal = min(known, len(prompt) - 1)
        alone = self.machine.alone(ideal, len(prompt), turn.output, self.policy.max_num_batched_tokens)
        served = Served(session.number, turn.by_user, self.now, len(prompt), turn.output, ideal, alone)
        self.served.append(served)
        self._running[number] = _Request(session, index, prompt, served, draw((4, session.number, index), turn.output))
        self.scheduler.submit(number, prompt, turn.output)
        for agent in sub_agents(self.traffic, session, index, self.now, turn.agents):
            self._at(self.now, lambda agent=agent: self._ask(agent, 0))

    def _answered(self, number: int) -> None:
        request = self._running.pop(number)
        request.served.last = self.now
        whole = np.concatenate([request.prompt, request.output])
        self._seen.update(page_keys(whole, self.policy.page_size))
        session, following = request.session, request.index + 1
        session.said(request.output)
        if following < len(session.turns):
            self._at(self.now + session.turns[following].gap, lambda: self._ask(session, following))

    # ---- the machine ----

    def _plan(self) -> None:
        plan = None
        for _ in range(2):  # what is given up while transfers are told may be the room that a request waits for
            if plan is None and not self._stepping:
                plan = self.scheduler.next_plan()
            for transfer in self.scheduler.transfers():
                self._transfer(transfer)
        if plan is None:
            return
        begins = max([self.now, *(self._arrives.get(ticket, 0.0) for ticket in plan.loads.tolist())])
        took = self.machine.step(_rows(plan))
        self._stepping = True
        self.busy += took
        self.loading += begins - self.now
        self._sample()
        self._at(begins + took, lambda: self._stepped(plan))

    def _stepped(self, plan: Plan) -> None:
        self._stepping = False
        tokens = np.zeros(plan.last.size, np.int32)
        for row, number in enumerate(plan.request_ids.tolist()):
            if number >= 0 and plan.last[row] >= 0:
                request = self._running[number]
                tokens[row] = request.output[request.generated]
        for output in self.scheduler.advance(plan.step, tokens):
            request = self._running[output.request_id]
            request.generated += 1
            if request.generated == 1:
                request.served.first = self.now
                request.served.cached = {tier: getattr(output, f"cached_{tier}") for tier in TIERS}
            else:
                self.gaps.append(self.now - request.last)
            request.last = self.now
            if output.finish_reason is not None:
                self._answered(output.request_id)

    def _transfer(self, transfer: Any) -> None:
        kind, keys = transfer.kind, [key.tobytes() for key in transfer.keys]
        pages = moved = len(keys)
        if kind == "prefetch":
            pages = moved = self.storage.leading(keys)
        elif kind == "backup":
            moved = self.storage.keep(keys)
        done = max(self.now, self._lanes[kind]) + self.machine.transfer(kind, moved, self.page_bytes)
        self._lanes[kind] = done
        ticket = int(transfer.ticket)
        if kind == "load_back":
            self._arrives[ticket] = done

        def arrived() -> None:
            self._arrives.pop(ticket, None)
            self.scheduler.transferred(ticket, pages)

        self._at(done, arrived)

    def _sample(self) -> None:
        if self.timeline and self.now - self.timeline[-1][0] < 1.0:
            return
        s = self.scheduler.stats()
        device = 1 - s["kv_pages_free"] / s["kv_pages_total"]
        host = 1 - s["host_pages_free"] / s["host_pages_total"] if s["host_pages_total"] else 0.0
        self.timeline.append((self.now, s["running"], s["waiting"], device, host))


@dataclass
class _Request:
    session: Session
    index: int
    prompt: Tokens
    served: Served
    output: Tokens
    generated: int = 0
    last: float = 0.0


class _Storage:
    """Keys of stored pages, by last use."""

    def __init__(self, pages: int) -> None:
        self._size = pages
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def leading(self, keys: Sequence[bytes]) -> int:
        for i, key in enumerate(keys):
            if key not in self._keys:
                return i
            self._keys.move_to_end(key)
        return len(keys)

    def keep(self, keys: Sequence[bytes]) -> int:
        """The number of pages that had to be written."""
        new = sum(key not in self._keys for key in keys)
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._size:
            self._keys.popitem(last=False)
        return new


def _rows(plan: Plan) -> list[tuple[int, int]]:
    """(tokens, context they end in) of each request of a plan with one home group."""
    counts = np.bincount(plan.row[: plan.num_tokens[0]], minlength=int(plan.num_rows[0]))
    ends = plan.pos[np.cumsum(counts) - 1] + 1
    return list(zip(counts.tolist(), ends.tolist(), strict=True))
