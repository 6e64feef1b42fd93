"""The engine core: the C++ scheduler, the ranks' executors, and the ONE loop that drives them.

Invariant: the loop plans, launches, collects and reports; nothing else decides what runs or ends. With depth 1 a step is
planned and launched while the previous one's tokens are still out, as late as that is safe (pace.py); with depth 0 it is the
same loop, synchronous. A step whose masks hang on those tokens is planned as early, and launched once they are here.
Every request ends with exactly one delta that carries a finish reason, except those the front itself finished or aborted.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tokenspeed.ir.errors import TokenSpeedError
from tokenspeed.runtime.build import Built, build_engine, check_config
from tokenspeed.runtime.checkpoint import checkpoint_of, open_checkpoint
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import EngineError
from tokenspeed.runtime.executor import StepResult
from tokenspeed.runtime.grammar.core import CoreGrammars
from tokenspeed.runtime.grammar.matcher import Matcher
from tokenspeed.runtime.kv.events import EventLog
from tokenspeed.runtime.kv.transfers import KINDS
from tokenspeed.runtime.messages import (
    Abort,
    Control,
    Deltas,
    Finish,
    Ready,
    Reply,
    Stats,
    Submit,
    ToCore,
    TokenDelta,
    TokenLogprob,
)  # fmt: skip
from tokenspeed.runtime.pace import Pace
from tokenspeed.runtime.ranks import Ranks
from tokenspeed.runtime.sampling_state import SamplingTable
from tokenspeed.runtime.transport import Inbox, Outbox

log = logging.getLogger(__name__)

NO_TOKEN = "no token could be drawn: the logits are no numbers, or all that the request allows is ruled out"
SEEN = 1e-4  # seconds: a step that is waited for no longer had ended before
IDLE_CHECK = 1.0  # seconds between looks at the workers while nothing runs
POLL = 0.001  # seconds between looks at transfers between tiers while nothing else can go on
SETTLE = 3.0  # seconds that transfers may take at the end: what reaches storage is found by the next start


def run_core(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    """Builds the engine, announces it, and serves until `Control("shutdown")`. Raises on a fault of the engine."""
    built = build_engine(config)
    try:
        loop = EngineLoop(built, config.overlap_depth, inbox, outbox)
        a = built.artifact
        running = max(rows for _, rows in a.buckets) * a.plan.mesh.size(a.plan.home)
        gc.collect()
        gc.freeze()  # what was built stays: a collection between two steps need not look at it
        outbox.put(Ready(built.max_model_len, built.vocab_size, built.kv_tokens, running, built.summary))
        loop.run()
    finally:
        built.ranks.close()


class EngineLoop:
    """See the module."""

    def __init__(self, built: Built, depth: int, inbox: Inbox, outbox: Outbox) -> None:
        self.scheduler: Any = built.scheduler
        self.ranks: Ranks = built.ranks
        self.artifact, self.stored = built.artifact, built.stored
        self.table = SamplingTable(built.vocab_size)
        self.depth, self.inbox, self.outbox = depth, inbox, outbox
        self.grammars = CoreGrammars(built.tokenizer)
        self.flying: deque[tuple[Any, Callable[[], list[StepResult]]]] = deque()
        self.announced: set[int] = set()  # whose cached tokens were reported
        self.pace = Pace()
        self.events = EventLog(self.scheduler, built.kv_events)
        self.running = True
        self.reported = True  # whether the front has seen the scheduler as it stands

    def run(self) -> None:
        while self.running:
            self._messages()
            if not self.running or self._waits():
                continue
            self._transferred()
            for m, matcher in self.grammars.ready():
                self._admit(m, matcher)
            if len(self.flying) <= self.depth and self._launch():
                continue
            if self.flying:
                self._collect()
            elif self._polls() and (message := self.inbox.get(POLL)) is not None:
                self._handle(message)
        while self.flying:
            self._collect()
        self._settle()
        self.grammars.close()

    def _waits(self) -> bool:
        """Whether the next step is not due yet, with only the running one ahead of it: then a message is waited for."""
        if not 0 < len(self.flying) <= self.depth:
            return False
        rest = self.pace.rest(self.flying[0][0].bucket)
        if rest <= 0:
            return False
        message = self.inbox.get(rest)
        if message is not None:
            self._handle(message)
        return True

    # ---- messages ----

    def _messages(self) -> None:
        waiting = self.inbox.drain()
        if not waiting and not self.flying and not self._has_work():
            self._transferred()
            self._transfer()
            if not self.reported:  # the last requests ended by an abort: no step follows to say so
                self._put([])
            message = self.inbox.get(POLL if self._polls() else IDLE_CHECK)
            self.ranks.check()
            waiting = [message] if message is not None else []
        for m in waiting:
            self._handle(m)

    def _polls(self) -> bool:
        """Whether something goes on elsewhere that ends without a message."""
        return self._transferring() or self.grammars.waiting

    def _has_work(self) -> bool:
        s = self.scheduler.stats()
        return bool(s["running"] or s["waiting"])

    def _handle(self, m: ToCore) -> None:
        self.reported = False
        if isinstance(m, Submit) and m.params.structure is not None:
            self.grammars.begin(m)
        elif isinstance(m, Submit):
            self._admit(m)
        elif isinstance(m, Abort):
            self.scheduler.abort(m.request_id)
            self._forget(m.request_id)
        elif isinstance(m, Finish):
            self.scheduler.finish(m.request_id)
            self._forget(m.request_id)
        elif isinstance(m, Control):
            self._control(m)

    def _admit(self, m: Submit, matcher: Matcher | str | None = None) -> None:
        """Hands a request to the scheduler; `matcher`: of its structure, or what is wrong with that."""
        if isinstance(matcher, str):
            return self._put([TokenDelta(m.request_id, [], "error", error=matcher)])
        p = m.params
        try:
            self.table.add(m, matcher)
            self.scheduler.submit(
                m.request_id,
                np.frombuffer(m.prompt, dtype=np.int32),
                p.max_tokens,
                min_new_tokens=p.min_tokens,
                stop_token_ids=p.stop_token_ids,
                priority=m.priority,
                cache_salt=m.cache_salt.encode(),
            )
        except Exception as e:  # whatever is wrong with one request ends that request alone, and the front is told why
            self.table.drop(m.request_id)
            told = isinstance(e, ValueError | RuntimeError)
            reason = str(e) if told else f"the request cannot be admitted: a field is out of range ({type(e).__name__})"
            self._put([TokenDelta(m.request_id, [], "error", error=reason)])

    def _control(self, m: Control) -> None:
        if m.name == "shutdown":
            self.running = False
            self.outbox.put(Reply(m.call_id))
        elif m.name == "stats":
            self.outbox.put(Reply(m.call_id, dict(self.scheduler.stats())))
        elif m.name == "scheduler":
            requests, stats = self.scheduler.snapshot(), dict(self.scheduler.stats())
            self.outbox.put(Reply(m.call_id, {"requests": requests, "stats": stats, "storage": self._storage()}))
        elif m.name == "kv_events":
            self._answer(m, lambda: self.events.since(int(m.args["since"])))
        elif m.name == "flush_cache":
            self._answer(m, lambda: {"pages": self.scheduler.flush_cache(**m.args)})
        elif m.name == "update_weights":
            self._answer(m, lambda: self._update_weights(str(m.args["path"]), bool(m.args["sent"])))
        elif m.name == "check":
            self.scheduler.check()
            self.outbox.put(Reply(m.call_id, {"requests": self.scheduler.snapshot()}))
        elif m.name == "retract":
            self.outbox.put(Reply(m.call_id, {"retracted": self.scheduler.retract(int(m.args["request_id"]))}))
        else:
            self.outbox.put(Reply(m.call_id, error=f"unknown control call {m.name!r}"))

    def _update_weights(self, path: str, sent: bool) -> dict[str, Any]:
        """Other weights for the same programs. What was computed with the old ones goes: the front has let its requests end.
        `sent`: a folder of tensors alone, which are said to be of this model's configuration."""
        while self.flying:  # of requests that have ended
            self._collect()
        if self._has_work() or self.grammars.waiting:
            raise ValueError("requests are running: weights are replaced between requests")
        if self.stored:
            raise ValueError("kv_storage keeps pages of the weights it was started with: start anew with the others")
        began = self.pace.clock()
        if sent:
            config = checkpoint_of(self.artifact.checkpoint()).config
            (Path(path) / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(path)
        check_config(self.artifact, checkpoint)
        self.ranks.update(checkpoint.note())
        self.scheduler.flush_cache()
        return {"seconds": self.pace.clock() - began}

    def _answer(self, m: Control, call: Callable[[], dict[str, Any]]) -> None:
        """A call whose arguments may be wrong, which is told and no more."""
        try:
            self.outbox.put(Reply(m.call_id, call()))
        except (ValueError, TypeError, OverflowError, EngineError, TokenSpeedError, OSError) as fault:
            self.outbox.put(Reply(m.call_id, error=str(fault)))
        except KeyError as fault:
            self.outbox.put(Reply(m.call_id, error=f"{m.name} needs the argument {fault}"))

    def _forget(self, request_id: int) -> None:
        self.grammars.drop(request_id)
        self.table.drop(request_id)
        self.announced.discard(request_id)

    # ---- transfers between tiers ----

    def _transferring(self) -> bool:
        return self.ranks.tiers is not None and self.ranks.tiers.busy

    def _transfer(self) -> None:
        """Starts what the scheduler wants moved, before the step that was planned with it."""
        if self.ranks.tiers is not None:
            self.ranks.tiers.start(self.scheduler.transfers())

    def _transferred(self) -> None:
        """Tells the scheduler what has arrived."""
        if self.ranks.tiers is not None:
            for ticket, pages in self.ranks.transferred():
                self.scheduler.transferred(ticket, pages)

    def _settle(self) -> None:
        """No step runs any more: lets what is under way to lower tiers arrive there."""
        deadline = self.pace.clock() + SETTLE
        self._transfer()
        while self._transferring() and self.pace.clock() < deadline:
            time.sleep(POLL)
            self._transferred()
            self._transfer()

    # ---- steps ----

    def _launch(self) -> bool:
        since = self.pace.clock()
        plan = self.scheduler.next_plan()
        self._transfer()
        if plan is None:
            return False
        deltas: list[TokenDelta] = []
        awaited = self.pace.clock()
        while self.flying and self.table.awaits(plan):
            deltas += self._arrived()
        since += self.pace.clock() - awaited
        params, variant, ops = self.table.rows(plan)
        flying = self.ranks.launch(self.ranks.publish(plan, params, variant, ops))
        self.pace.launched(since, alone=not self.flying)
        self.flying.append((plan, flying))
        if deltas:  # only now: the device idled
            self._put(deltas)
        return True

    def _collect(self) -> None:
        self._put(self._arrived())

    def _arrived(self) -> list[TokenDelta]:
        """Waits for the tokens of the oldest step, and tells the scheduler; what the front is to hear of them."""
        plan, wait = self.flying.popleft()
        looked = self.pace.clock()
        results = wait()
        self.pace.finished(plan.bucket, waited=self.pace.clock() - looked > SEEN)
        tokens = np.concatenate([r.tokens for r in results])
        outputs = self.scheduler.advance(plan.step, np.maximum(tokens, 0))
        nothing = {int(r) for r in plan.request_ids[tokens < 0]}  # requests for which nothing could be drawn
        rows = (
            {int(r): i for i, r in enumerate(plan.request_ids) if r >= 0}
            if any(r.logprobs is not None for r in results)
            else {}
        )
        ended = self._matched(outputs, nothing)
        deltas: list[TokenDelta] = []
        for o in outputs:
            delta = TokenDelta(o.request_id, [o.token], o.finish_reason)
            if o.request_id in nothing:
                if o.finish_reason is None:
                    self.scheduler.finish(o.request_id)
                delta = TokenDelta(o.request_id, [], "error", error=NO_TOKEN)
            elif o.request_id in ended:
                self._structure_ended(delta, ended[o.request_id])
            elif o.finish_reason == "stop":
                delta.stop_token_id = o.token
            if o.request_id not in self.announced:
                self.announced.add(o.request_id)
                delta.cached_tokens, delta.cached_host, delta.cached_storage = (
                    o.cached_tokens,
                    o.cached_host,
                    o.cached_storage,
                )
            wanted = self.table.output(o.request_id, o.token)
            if wanted >= 0 and delta.token_ids:
                g, i = divmod(rows[o.request_id], plan.rows)
                delta.logprobs = [_logprob(results[g], i, o.token, wanted)]
            if delta.finish_reason is not None:
                self._forget(o.request_id)
            deltas.append(delta)
        return deltas

    def _matched(self, outputs: Any, nothing: set[int]) -> dict[int, Matcher]:
        """Moves the matchers of requests with a structure on; those whose output ends by it, well or with an error."""
        if not self.table.structured:
            return {}
        moved = {
            o.request_id: (m, o.token)
            for o in outputs
            if o.finish_reason != "stop" and o.request_id not in nothing and (m := self.table.matcher(o.request_id))
        }
        self.grammars.consume(list(moved.values()))
        return {request_id: m for request_id, (m, _) in moved.items() if m.done or m.error}

    def _structure_ended(self, delta: TokenDelta, matcher: Matcher) -> None:
        """The request ends with this token, or without it where it does not fit."""
        if delta.finish_reason is None:
            self.scheduler.finish(delta.request_id)
        delta.finish_reason = "error" if matcher.error else "stop"
        if matcher.error:
            delta.token_ids, delta.error = [], matcher.error

    def _put(self, deltas: list[TokenDelta]) -> None:
        self.reported = True
        s = self.scheduler.stats()  # cached: pages that no request holds (a shared page is in use, and not cached)
        stats = Stats(
            running=s["running"], waiting=s["waiting"], kv_pages_total=s["kv_pages_total"], kv_pages_free=s["kv_pages_free"],
            kv_pages_cached=s["kv_pages_evictable"], prefix_query_tokens=s["prefix_query_tokens"],
            prefix_hit_tokens=s["prefix_hit_tokens"], retractions=s["retractions"], steps=s["steps"], step_tokens=s["step_tokens"],
            queue_age_steps=s["queue_age_steps"], decode_skips=s["decode_skips"], decode_stall_tokens=s["decode_stall_tokens"],
            plan_seconds=s["plan_seconds"],
        )  # fmt: skip
        if total := s["window_pages_total"]:
            free, cached = s["window_pages_free"], s["window_pages_idle"]
            stats.window_pages = {"held": total - free - cached, "cached": cached, "free": free}
        if self.ranks.tiers is not None:
            stats.hit_tokens = {tier: s[f"hit_tokens_{tier}"] for tier in ("device", "host", "storage")}
            stats.host = {what: s[f"host_pages_{what}"] for what in ("total", "free", "cached")}
            stats.page_bytes = self.ranks.tiers.page_bytes
            stats.transfers = {
                kind: {what: s[f"{kind}_{what}"] for what in ("in_flight", "pages", "missing_pages")} for kind in KINDS
            }
            stats.storage = self._storage()
        self.outbox.put(Deltas.of(deltas, stats))

    def _storage(self) -> dict[str, int]:
        return {} if self.ranks.tiers is None else self.ranks.tiers.totals()


def _logprob(r: StepResult, row: int, token: int, wanted: int) -> TokenLogprob:
    assert r.logprobs is not None and r.top_ids is not None and r.top_logprobs is not None
    ids, lps = r.top_ids[row, :wanted], r.top_logprobs[row, :wanted]
    keep = ids >= 0
    return TokenLogprob(token, float(r.logprobs[row]), ids[keep].tolist(), lps[keep].tolist())
