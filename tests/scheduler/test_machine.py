"""Random interleavings of everything that can happen to the scheduler, against the null-device executor and a model.

The model knows which requests are live and what each must output (`Spec.reference`); the executor knows what each KV
slot holds, and its mover what each host page and stored key holds (transfers end late, in any order, short or broken, and
are answered twice); the scheduler's own checker recounts every page, pin, ticket, slot and list after each call. At the end
everything is drained, which must terminate, and every page must be back.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from tests.scheduler.harness import VOCABULARY, Engine, Spec
from tokenspeed._scheduler import Config, Plan, window_pages_for

BASE = [
    0,
    1,
    2,
    3,
    0,
    1,
    2,
    4,
    5,
    3,
    1,
    1,
    0,
    2,
    5,
    4,
]  # prompts are prefixes of it as a rule, so that they share pages


class SchedulerMachine(RuleBasedStateMachine):
    ids = Bundle("ids")

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        dp=st.sampled_from([1, 2]),
        in_flight=st.sampled_from([1, 2]),
        tokens=st.integers(6, 24),
        requests=st.integers(1, 4),
        buckets=st.sampled_from([[1], [2, 3], [1, 2, 4, 8], [16]]),
        chunk=st.sampled_from([0, 1, 3]),
        stall=st.sampled_from([0, 1, 4]),
        cache=st.sampled_from([True, True, True, False]),
        snapshots=st.sampled_from([0, 0, 1, 4]),
        ageing=st.sampled_from([1, 3, 256]),
        host=st.sampled_from([0, 1, 6, 12, 40]),
        storage=st.booleans(),
        write_back=st.sampled_from([1, 1, 3]),
        bits=st.sampled_from([128, 128, 4]),
        window=st.sampled_from([0, 0, 1, 2, 4, 7]),
        spare=st.integers(0, 6),
    )
    def start(
        self,
        page_size: int,
        dp: int,
        in_flight: int,
        tokens: int,
        requests: int,
        buckets: list[int],
        chunk: int,
        stall: int,
        cache: bool,
        snapshots: int,
        ageing: int,
        host: int,
        storage: bool,
        write_back: int,
        bits: int,
        window: int,
        spare: int,
    ) -> None:
        least = window_pages_for(
            requests=1,
            window=window,
            page_size=page_size,
            budget=max(buckets),
            max_in_flight=in_flight,
            max_seq_len=tokens,
        )
        self.engine = Engine(
            Config(
                page_size=page_size,
                num_pages=-(-tokens // page_size),
                max_requests=requests,
                token_buckets=buckets,
                max_seq_len=tokens,
                dp=dp,
                prefill_chunk=chunk,
                prefix_cache=cache,
                max_in_flight=in_flight,
                decode_stall_tokens=stall,
                ageing_steps=ageing,
                state_snapshots=0 if cache and host else snapshots,
                host_pages=-(-host // page_size) if cache else 0,
                storage=cache and host > 0 and storage and bits == 128,
                hash_bits=bits,
                write_back_pages=write_back,
                window=window,
                window_pages=least + spare if window else 0,
            ),
            patient=True,
        )
        self.next_id = 0

    @rule(
        target=ids,
        shared=st.integers(0, len(BASE)),
        tail=st.lists(st.integers(0, VOCABULARY - 1), max_size=4),
        new=st.integers(1, 8),
        least=st.integers(0, 3),
        stops=st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        salt=st.sampled_from([b"", b"", b"", b"a"]),
        copies=st.sampled_from([1, 1, 2, 3]),
    )
    def submit(
        self,
        shared: int,
        tail: list[int],
        new: int,
        least: int,
        stops: list[int],
        priority: int,
        salt: bytes,
        copies: int,
    ):
        prompt = BASE[:shared] + tail
        room = self.engine.config.max_seq_len - len(prompt)
        assume(prompt and room >= 1)
        new = min(new, room)
        made = []
        for _ in range(copies):
            spec = Spec(self.next_id, prompt, new, min(least, new), tuple(stops), priority, salt)
            self.engine.submit(spec)
            made.append(self.next_id)
            self.next_id += 1
        return multiple(*made)

    @rule()
    def plan(self) -> None:
        out = len(self.engine.flights)
        plan = self.engine.plan()
        if out == self.engine.config.max_in_flight:
            assert plan is None
        elif out == 0 and plan is None and self.engine.scheduler.snapshot() and not self.engine.moving():
            plan = self.engine.plan()  # a turn passed in which copies were given up
            assert plan is not None or not self.engine.scheduler.snapshot() or self.engine.moving(), (
                "nothing is planned"
            )
        if plan is not None:
            assert Plan.unpack(plan.pack()).digest == plan.digest

    @rule()
    def advance(self) -> None:
        assume(self.engine.flights)
        self.engine.advance()

    @rule(turns=st.integers(1, 6))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.step()

    @rule()
    def fail(self) -> None:
        assume(self.engine.flights)
        self.engine.fail()

    @rule(which=st.integers(0, 5), most=st.sampled_from([None, None, None, 0, 1, 2]))
    def transfer(self, which: int, most: int | None) -> None:
        out = [t for t in self.engine.mover.out if t not in self.engine.mover.broken]
        assume(out)
        self.engine.mover.finish(out[which % len(out)], most)

    @rule()
    def settle(self) -> None:
        self.engine.settle()

    @rule(broken=st.sampled_from([False, False, True]))
    def loads(self, broken: bool) -> None:
        self.engine.break_loads = broken

    @rule(late=st.integers(-2, 3))
    def return_a_wrong_step(self, late: int) -> None:
        expected = self.engine.flights[0].plan.step if self.engine.flights else None
        step = (expected or 0) + late
        assume(step != expected)
        before = self.engine.scheduler.snapshot(), self.engine.scheduler.stats()
        tokens = self.engine.flights[0].tokens if self.engine.flights else ANSWER
        with pytest.raises(ValueError, match="step"):
            self.engine.scheduler.advance(step, tokens)
        with pytest.raises(ValueError, match="step"):
            self.engine.scheduler.fail(step)
        assert before == (self.engine.scheduler.snapshot(), self.engine.scheduler.stats())

    @rule(id=ids)
    def abort(self, id: int) -> None:
        self.engine.end(id, "abort")

    @rule(id=ids)
    def finish(self, id: int) -> None:
        self.engine.end(id, "finish")

    @rule(id=ids)
    def retract(self, id: int) -> None:
        states = {info["id"]: info["state"] for info in self.engine.scheduler.snapshot()}
        running = states.get(id) in {"Prefilling", "PrefillDone", "Decoding"}
        assert self.engine.scheduler.retract(id) is running
        self.engine.scheduler.check()

    @rule()
    def flush(self) -> None:
        stats = self.engine.scheduler.stats()
        assert self.engine.scheduler.flush_cache("device") == stats["kv_pages_evictable"]
        self.engine.scheduler.check()

    @rule()
    def flush_host(self) -> None:
        stats = self.engine.scheduler.stats()
        used = stats["host_pages_total"] - stats["host_pages_free"] - stats["host_pages_pinned"]
        assert self.engine.scheduler.flush_cache("host") == used
        self.engine.scheduler.check()

    @invariant()
    def live_requests_are_the_models(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        infos = engine.scheduler.snapshot()
        alive = {info["id"] for info in infos if info["state"] not in ENDED}
        assert alive == set(engine.specs) - set(engine.finished) - engine.ended
        for info in infos:
            if info["state"] not in ENDED:
                assert info["output_tokens"] == len(engine.outputs[info["id"]])
            if info["state"] in {"Submitted", "Prefetching", "PrefetchDone", "Retracted", "Draining", "WritingBack"}:
                assert info["pages"] == 0 and info["in_flight"] == 0
        stats = engine.scheduler.stats()
        assert stats["kv_pages_free"] + stats["kv_pages_cached"] <= stats["kv_pages_total"]

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.break_loads = False
            self.engine.drain()
            self.engine.scheduler.flush_cache()
            self.engine.scheduler.check()
            stats = self.engine.scheduler.stats()
            assert stats["kv_pages_free"] == stats["kv_pages_total"]


ENDED = {"Aborting", "Draining", "WritingBack"}
ANSWER = np.zeros(1, np.int32)

SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestScheduler = SchedulerMachine.TestCase
