"""A null-device executor that proves plans right: what a request samples depends on nothing but its own tokens.

It keeps one record a KV slot (the token, and a hash of the whole prefix up to it) and for every planned row reads the
complete context through the block table, as attention would. A page shared wrongly, freed too early, read before it
was written, or left stale is a wrong record, and fails at once. Where no prefix is shared, or only one that has a snapshot
of the state behind it, it keeps a recurrent state a request slot as well: a segment of tokens starts at position 0 or goes on
exactly from what its slot holds. Of a config with a window there is a second record, of window pages: of it a row reads what
its first token sees, and the columns before that may name any page. The sampled token is a function of the prefix hash, so
outputs must equal `reference` under any chunking, sharing, retraction, overlap or page size.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.scheduler.mover import WINDOW, Mover, Page
from tokenspeed._scheduler import Config, Output, Plan, Scheduler

VOCABULARY = 6  # small, so that sequences meet again and pages are shared


def chain(previous: int, token: int) -> int:
    """The prefix hash after one more token."""
    x = (previous ^ (token + 1)) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 29)


def root(salt: bytes) -> int:
    return int.from_bytes(salt, "little") + 1


def sample(prefix: int) -> int:
    return (prefix >> 13) % VOCABULARY


@dataclass
class Spec:
    """A request as submitted."""

    id: int
    prompt: list[int]
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    salt: bytes = b""

    def reference(self) -> tuple[list[int], str]:
        """The tokens and the finish reason that any correct schedule gives."""
        prefix = root(self.salt)
        for token in self.prompt:
            prefix = chain(prefix, token)
        output: list[int] = []
        while True:
            token = sample(prefix)
            output.append(token)
            if token in self.stop_token_ids and len(output) >= self.min_new_tokens:
                return output, "stop"
            if len(output) == self.max_new_tokens:
                return output, "length"
            prefix = chain(prefix, token)


@dataclass
class Flight:
    plan: Plan
    tokens: np.ndarray  # int32 [dp * s]
    written: list[list[int]]  # a home group: the KV slots that the step wrote
    requests: set[int]
    states: list[tuple[int, int]] = field(default_factory=list)  # home group, request slot
    pages: list[set[int]] = field(default_factory=list)  # a home group: what the step reads or writes
    broken: bool = False  # a load that the step reads did not come


class Executor:
    """Runs plans in order against records of KV; `poison` is what a failed step leaves behind."""

    def __init__(self, config: Config, salts: dict[int, bytes]) -> None:
        self.config = config
        self.salts = salts
        self.kv: list[dict[int, tuple[int, int] | None]] = [{} for _ in range(config.dp)]
        self.sampled: list[dict[int, int]] = [{} for _ in range(config.dp)]
        self.recurrent = not config.prefix_cache or config.state_snapshots > 0
        self.states: list[dict[int, tuple[int, int]]] = [{} for _ in range(config.dp)]  # tokens seen, their hash

    def run(self, plan: Plan, unread: list[set[int]]) -> Flight:
        """`unread`: a home group's pages that are being filled and that this plan does not name."""
        config, t, s = self.config, plan.bucket, plan.rows
        assert plan.bucket in config.token_buckets
        assert s == min(t, config.max_requests)
        assert plan.table.shape == (config.dp * s, plan.width)
        if plan.bucket != config.token_buckets[0]:  # the smallest bucket that holds the fullest group
            smaller = config.token_buckets[config.token_buckets.index(plan.bucket) - 1]
            assert plan.num_tokens.max() > smaller
        flight = Flight(plan, np.zeros(config.dp * s, np.int32), [], set())
        for g in range(config.dp):
            self._run_group(g, plan, flight)
            assert not flight.pages[g] & unread[g], "the plan does not name a load that it reads"
        return flight

    def skip(self, plan: Plan) -> Flight:
        """A step that must fail: it reads what did not come, or follows one that does."""
        empty = [[] for _ in range(self.config.dp)]
        return Flight(
            plan, np.zeros(plan.last.size, np.int32), empty, pages=[set() for _ in empty], requests=set(), broken=True
        )

    def _run_group(self, g: int, plan: Plan, flight: Flight) -> None:
        t, s, page = plan.bucket, plan.rows, self.config.page_size
        tokens, rows = int(plan.num_tokens[g]), int(plan.num_rows[g])
        window = self.config.window
        windowed = ("window_slot",) if window else ()
        block = {name: getattr(plan, name)[g * t : (g + 1) * t] for name in ("ids", "pos", "slot", "row", *windowed)}
        names = ["last", "request_ids", "request_slots", "out_pos", "new_rows", "table", "load_state", "save_state"]
        names += ["window_table"] if window else []
        by_row = {name: getattr(plan, name)[g * s : (g + 1) * s] for name in names}
        assert plan.window_table.shape == (plan.table.shape[0] if window else 0, plan.width)
        for name, hole in (("ids", 0), ("pos", -1), ("slot", -1), ("row", -1), *((n, -1) for n in windowed)):
            assert (block[name][tokens:] == hole).all(), name
        holes = {"new_rows": 0} | dict.fromkeys(
            ("last", "request_ids", "request_slots", "out_pos", "load_state", "save_state"), -1
        )
        for name, hole in holes.items():
            assert (by_row[name][rows:] == hole).all(), name
        assert (by_row["table"][rows:] == -1).all()
        assert not window or (by_row["window_table"][rows:] == -1).all()
        assert len(set(by_row["request_slots"][:rows].tolist())) == rows
        assert block["row"][:tokens].tolist() == sorted(block["row"][:tokens].tolist())

        states, slots = (
            self.states[g],
            range(self.config.max_requests, self.config.max_requests + self.config.state_snapshots),
        )
        for i in range(rows):  # copies before the step, all of them, then the step, then the copies behind it
            if (load := int(by_row["load_state"][i])) >= 0:
                assert by_row["new_rows"][i] and load in slots
                states[int(by_row["request_slots"][i])] = states[load]
        staged: dict[int, tuple[int, int]] = {}
        pages: set[int] = set()
        sampled: dict[int, int] = {}
        for i in range(rows):
            request, slot_index = int(by_row["request_ids"][i]), int(by_row["request_slots"][i])
            assert request not in flight.requests
            flight.requests.add(request)
            if by_row["new_rows"][i]:
                self.sampled[g].pop(slot_index, None)
            table = by_row["table"][i].tolist()
            filled = len([cell for cell in table if cell >= 0])
            assert all(cell >= 0 for cell in table[:filled]) and all(cell == -1 for cell in table[filled:])
            assert len(set(table[:filled])) == filled
            pages |= set(table[:filled])
            mine = [j for j in range(tokens) if block["row"][j] == i]
            first = int(block["pos"][mine[0]])
            prefix = root(self.salts[request])
            seen = max(first - window + 1, 0)
            if window:
                near = [WINDOW + cell for cell in by_row["window_table"][i].tolist() if cell >= 0]
                assert len(near) == -(-(first + len(mine)) // page)
                assert max(near) < WINDOW + self.config.window_pages
                pages |= set(near[seen // page :])
                assert len(set(near[seen // page :])) == len(near) - seen // page
            for p in range(first):  # the context, as attention reads it
                record = self.kv[g].get(table[p // page] * page + p % page)
                assert record is not None, f"request {request} reads position {p}, which nobody wrote"
                prefix = chain(prefix, record[0])
                assert record[1] == prefix, f"request {request} reads another prefix's KV at position {p}"
                if window and p >= seen:
                    other = self.kv[g].get(near[p // page] * page + p % page)
                    assert other == record, f"request {request} reads {other} at position {p} of its window"
            if first and self.recurrent:
                held = states.get(slot_index)
                assert held == (first, prefix), f"request {request} goes on at {first} from the state {held}"
            for offset, j in enumerate(mine):
                p = first + offset
                assert block["pos"][j] == p
                slot = int(block["slot"][j])
                assert slot == table[p // page] * page + p % page
                token = int(block["ids"][j])
                if token < 0:
                    assert -token - 1 == slot_index
                    token = self.sampled[g][slot_index]
                prefix = chain(prefix, token)
                slots_of_token = [slot]
                if window:
                    slots_of_token.append(int(block["window_slot"][j]) + WINDOW * page)
                    assert slots_of_token[1] == near[p // page] * page + p % page
                for slot in slots_of_token:
                    assert slot not in staged, "two rows write one KV slot"
                    staged[slot] = (token, prefix)
            states[slot_index] = (first + len(mine), prefix)
            flight.states.append((g, slot_index))
            last, position = int(by_row["last"][i]), int(by_row["out_pos"][i])
            if last < 0:
                assert position == -1
                continue
            assert last == mine[-1] and position == int(block["pos"][last]) + 1
            flight.tokens[g * s + i] = sampled[slot_index] = sample(prefix)
        saved = [int(by_row["save_state"][i]) for i in range(rows) if by_row["save_state"][i] >= 0]
        assert len(set(saved)) == len(saved) and all(s in slots for s in saved)
        for i in range(rows):
            if (save := int(by_row["save_state"][i])) >= 0:
                states[save] = states[int(by_row["request_slots"][i])]
                assert states[save][0] % page == 0
                flight.states.append((g, save))
        self.kv[g].update(staged)
        self.sampled[g].update(sampled)
        flight.written.append(list(staged))
        flight.pages.append(pages)

    def poison(self, flight: Flight, later: Flight | None) -> None:
        """The KV that a failed step wrote is gone, and so is what a later step computed for the same requests."""
        for g, slots in enumerate(flight.written):
            self.kv[g].update(dict.fromkeys(slots))
        for g, slot in flight.states:
            self.states[g].pop(slot, None)
        if later is None:
            return
        page, plan = self.config.page_size, later.plan
        for g in range(self.config.dp):
            rows = plan.request_ids[g * plan.rows : (g + 1) * plan.rows].tolist()
            for j in range(g * plan.bucket, g * plan.bucket + int(plan.num_tokens[g])):
                if rows[int(plan.row[j])] in flight.requests:
                    self.kv[g][int(plan.slot[j])] = None
                    if self.config.window:
                        self.kv[g][int(plan.window_slot[j]) + WINDOW * page] = None
        assert page > 0


@dataclass
class Engine:
    """Scheduler, executor and the record of what came out; checks the invariants after every call."""

    config: Config
    scheduler: Scheduler = field(init=False)
    specs: dict[int, Spec] = field(default_factory=dict)
    outputs: dict[int, list[Output]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)  # by abort or finish
    flights: deque[Flight] = field(default_factory=deque)
    order: list[int] = field(default_factory=list)  # of finishing
    storage: dict[bytes, Page] = field(default_factory=dict)
    break_loads: bool = False  # of the plans made from here on
    patient: bool = False  # transfers end only where the test says so

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.salts: dict[int, bytes] = {}
        self.executor = Executor(self.config, self.salts)
        self.mover = Mover(self.scheduler, self.executor, self.storage)

    def submit(self, spec: Spec) -> None:
        self.scheduler.submit(
            spec.id,
            np.array(spec.prompt, np.int32),
            spec.max_new_tokens,
            min_new_tokens=spec.min_new_tokens,
            stop_token_ids=list(spec.stop_token_ids),
            priority=spec.priority,
            cache_salt=spec.salt,
        )
        self.specs[spec.id] = spec
        self.salts[spec.id] = spec.salt
        self.outputs[spec.id] = []
        self.scheduler.check()

    def add(self, id: int, prompt: list[int], max_new_tokens: int, **rest: Any) -> Spec:
        spec = Spec(id, prompt, max_new_tokens, **rest)
        self.submit(spec)
        return spec

    def plan(self) -> Plan | None:
        plan = self.scheduler.next_plan()
        self.scheduler.check()
        self.mover.start(list(self.flights))
        self.scheduler.check()
        if plan is not None:
            assert not {int(r) for r in plan.request_ids} & (self.ended | self.finished.keys())
            after_broken = any(flight.broken for flight in self.flights)
            if self.mover.read(plan, self.break_loads or after_broken) or after_broken:
                self.flights.append(self.executor.skip(plan))
            else:
                unread = [self.mover.unread(g) for g in range(self.config.dp)]
                self.flights.append(self.executor.run(plan, unread))
        return plan

    def moving(self) -> int:
        """Transfers that are out, or about to be."""
        stats = self.scheduler.stats()
        moving = stats["write_back_in_flight"] + stats["load_back_in_flight"]
        moving += stats["prefetch_in_flight"] + stats["backup_in_flight"]
        assert moving >= len(self.mover.out)
        return moving

    def settle(self) -> None:
        """Ends every transfer that is out and that no step in flight has found broken."""
        for ticket in list(self.mover.out):
            if ticket not in self.mover.broken:
                self.mover.finish(ticket)

    def advance(self) -> list[Output]:
        if self.flights[0].broken:
            self.fail()
            return []
        flight = self.flights.popleft()
        outputs = self.scheduler.advance(flight.plan.step, flight.tokens)
        self.scheduler.check()
        for output in outputs:
            self._record(output)
        return outputs

    def _record(self, output: Output) -> None:
        id = output.request_id
        assert id not in self.finished and id not in self.ended, "output after the end"
        expected, reason = self.specs[id].reference()
        self.outputs[id].append(output)
        count = len(self.outputs[id])
        assert output.num_output == count
        assert output.token == expected[count - 1], "the token depends on the schedule"
        assert output.finish_reason == (reason if count == len(expected) else None)
        assert output.cached_tokens == self.outputs[id][0].cached_tokens
        assert output.cached_tokens == output.cached_device + output.cached_host + output.cached_storage
        if output.finish_reason is not None:
            self.finished[id] = output.finish_reason
            self.order.append(id)

    def fail(self) -> None:
        flight = self.flights.popleft()
        self.executor.poison(flight, self.flights[0] if self.flights else None)
        self.scheduler.fail(flight.plan.step)
        self.scheduler.check()
        for ticket in flight.plan.loads.tolist():
            if ticket in self.mover.broken:
                self.mover.finish(ticket)

    def end(self, id: int, how: str) -> bool:
        """`how`: abort or finish."""
        live = id in self.specs and id not in self.finished and id not in self.ended
        assert getattr(self.scheduler, how)(id) is live
        assert getattr(self.scheduler, how)(id) is False, "idempotent"
        self.scheduler.check()
        if live:
            self.ended.add(id)
        return live

    def step(self) -> Plan | None:
        """One turn of the loop at full depth: plan if possible, then take the oldest step back."""
        plan = self.plan()
        if self.flights and (plan is None or len(self.flights) == self.config.max_in_flight):
            self.advance()
        if not self.patient:
            self.settle()
        return plan

    def drain(self, limit: int = 10_000) -> int:
        """Runs until nothing is left; the number of turns. Everything must have ended and all pages be back."""
        idle = 0
        for turn in range(limit):
            if not self.flights and not self.moving() and not self.scheduler.snapshot():
                self.assert_empty()
                return turn
            nothing, last = not self.flights and not self.moving(), self.mover.last
            plan = self.step()
            self.settle()
            # A turn may pass in which only copies are given up; two say that nothing ever comes.
            idle = idle + 1 if nothing and plan is None and self.mover.last == last else 0
            assert idle < 2, f"live requests and nothing to run: {self.scheduler.snapshot()}"
        raise AssertionError(f"no end in {limit} turns: {self.scheduler.snapshot()}")

    def assert_empty(self) -> None:
        assert set(self.specs) == set(self.finished) | self.ended
        stats = self.scheduler.stats()
        assert stats["running"] == stats["waiting"] == stats["leaving"] == stats["in_flight"] == 0
        assert stats["queued_tokens"] == 0
        assert stats["kv_pages_free"] + stats["kv_pages_cached"] == stats["kv_pages_total"]
        assert stats["kv_pages_evictable"] == stats["kv_pages_cached"]
        assert stats["window_pages_free"] + stats["window_pages_idle"] == stats["window_pages_total"]
        assert stats["host_pages_free"] + stats["host_pages_cached"] == stats["host_pages_total"]
        assert stats["host_pages_pinned"] == 0
