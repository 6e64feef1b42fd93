"""A small engine core with the real signature: it echoes, counts, stalls or dies as the prompt tells it to.

For a prompt of ids p0..pn it generates p0, p1, ..., round and round: the text of an output is known beforehand.
The first id chooses a mode (the constants below). The entries are module-level, so that a core process can import
them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.messages import (
    Abort,
    Control,
    Deltas,
    Died,
    Finish,
    Ready,
    Reply,
    Stats,
    Submit,
    TokenDelta,
    TokenLogprob,
)
from tokenspeed.runtime.transport import Inbox, Outbox

VOCAB = 49152
MAX_LEN = 512
STALL = 901  # as first prompt id: no token ever comes
DIE = 902  # the core raises
KILL = 903  # the core process is killed
FAIL = 904  # the request ends with an error after two tokens
SLOW = 905  # 5 ms a token


@dataclass
class Running:
    submit: Submit
    made: int = 0
    cached: int = 0


class Core:
    """The loop. `burst` tokens of each request a step."""

    def __init__(
        self, config: EngineConfig, inbox: Inbox, outbox: Outbox, burst: int = 1, kv_tokens: int = 100_000
    ) -> None:
        self.config, self.inbox, self.outbox, self.burst, self.kv_tokens = config, inbox, outbox, burst, kv_tokens
        self.running: dict[int, Running] = {}
        self.seen: set[tuple[int, ...]] = set()
        self.counts = {"submits": 0, "aborts": 0, "finishes": 0}
        self.seeds: list[int] = []
        self.structures: list[str | None] = []
        self.stats = Stats(kv_pages_total=100, kv_pages_free=100)

    def run(self) -> None:
        limit = self.config.max_model_len or MAX_LEN
        running = self.config.max_num_seqs
        self.outbox.put(Ready(limit, VOCAB, self.kv_tokens, running, {"model": self.config.model, "ranks": 1}))
        while True:
            idle = not any(r.submit.prompt_ids[0] != STALL for r in self.running.values())
            first = self.inbox.get(None if idle else 0)
            for message in ([first] if first is not None else []) + self.inbox.drain():
                if self.handle(message):
                    return
            self.step()

    def handle(self, message: object) -> bool:
        if isinstance(message, Submit):
            self.counts["submits"] += 1
            self.seeds.append(message.params.seed)
            self.structures.append(message.params.structure and message.params.structure.source)
            run = Running(message, cached=16 if tuple(message.prompt_ids) in self.seen else 0)
            self.seen.add(tuple(message.prompt_ids))
            self.running[message.request_id] = run
        elif isinstance(message, Abort):
            self.counts["aborts"] += 1
            self.running.pop(message.request_id, None)
        elif isinstance(message, Finish):
            self.counts["finishes"] += 1
            self.running.pop(message.request_id, None)
        elif isinstance(message, Control):
            if message.name == "shutdown":
                return True
            if message.name == "stats":
                result = {
                    **self.counts,
                    "running": len(self.running),
                    "seeds": self.seeds,
                    "structures": self.structures,
                    "pid": os.getpid(),
                }
                self.outbox.put(Reply(message.call_id, result))
            elif message.name in ("flush_cache", "scheduler"):
                self.outbox.put(Reply(message.call_id, {"pages": len(self.seen)}))
            elif message.name == "update_weights" and message.args["path"] == "fits":
                self.outbox.put(Reply(message.call_id, {"seconds": 0.5}))
            else:
                self.outbox.put(Reply(message.call_id, error=f"no such call: {message.name}"))
        return False

    def step(self) -> None:
        deltas = [delta for run in list(self.running.values()) if (delta := self.advance(run))]
        self.stats.steps += 1
        self.stats.running = len(self.running)
        self.stats.step_tokens += len(deltas)
        if deltas:
            self.outbox.put(Deltas(deltas, replace(self.stats)))

    def advance(self, run: Running) -> TokenDelta | None:
        submit, mode = run.submit, run.submit.prompt_ids[0]
        params, prompt = submit.params, submit.prompt_ids
        if mode == STALL:
            return None
        if mode == DIE:
            raise RuntimeError("scripted death")
        if mode == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == SLOW:
            time.sleep(0.005)
        delta = TokenDelta(submit.request_id, [], cached_tokens=0 if run.made else run.cached)
        for _ in range(self.burst):
            token = prompt[run.made % len(prompt)]
            if params.allowed_token_ids:
                token = params.allowed_token_ids[0]
            run.made += 1
            delta.token_ids.append(token)
            if params.logprobs >= 0:
                delta.logprobs = [*(delta.logprobs or []), self.logprob(token, params.logprobs)]
            if token in params.stop_token_ids and run.made > params.min_tokens:
                delta.finish_reason, delta.stop_token_id = "stop", token
            elif run.made == params.max_tokens:
                delta.finish_reason = "length"
            elif mode == FAIL and run.made == 2:
                delta.finish_reason, delta.error = "error", "scripted failure"
            if delta.finish_reason:
                del self.running[submit.request_id]
                break
        return delta

    @staticmethod
    def logprob(token: int, top: int) -> TokenLogprob:
        ids = [(token + i) % VOCAB for i in range(top)]
        return TokenLogprob(token, -float(token % 7), ids, [-float(token % 7) - i for i in range(top)])


def run_core(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    Core(config, inbox, outbox).run()


def run_core_bursts(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    Core(config, inbox, outbox, burst=3).run()


def run_core_small_cache(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    Core(config, inbox, outbox, kv_tokens=40).run()


def run_core_for_two(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    """Runs two requests at once, as an artifact may say against the options' default."""
    Core(replace(config, max_num_seqs=2), inbox, outbox).run()


def run_core_refusing(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    outbox.put(Died("model.safetensors is missing shard 2 of 3"))


def run_core_raising(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    raise ValueError("dtype float7 is unknown")


def run_core_exiting(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    outbox.put(Ready(MAX_LEN, VOCAB, 100_000, 256))


def run_core_deaf(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    """Comes up and ignores even a shutdown."""
    outbox.put(Ready(MAX_LEN, VOCAB, 100_000, 256))
    while True:
        time.sleep(0.1)


def run_core_with_worker(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    """Comes up with a child of its own, as a rank's worker is, and tells its process id."""
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    outbox.put(Ready(MAX_LEN, VOCAB, 100_000, 256, {"worker": worker.pid}))
    inbox.get(None)


class MinusInfinityCore(Core):
    """Every log-probability is that of a masked token."""

    @staticmethod
    def logprob(token: int, top: int) -> TokenLogprob:
        return TokenLogprob(token, float("-inf"), [token] * top, [float("-inf")] * top)


def run_core_minus_infinity(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    MinusInfinityCore(config, inbox, outbox).run()


PLAYS: deque[list[int]] = deque()  # outputs to come of the players in this process, one a request


class Player(Core):
    """Plays fixed outputs in a large context; the last of their tokens is the end of sequence, unless it is cut off.

    Where none is left it echoes. One token a step, or three.
    """

    def handle(self, message: object) -> bool:
        if isinstance(message, Submit) and PLAYS:
            self.playing[message.request_id] = PLAYS.popleft()
        return super().handle(message)

    def advance(self, run: Running) -> TokenDelta | None:
        play = self.playing.get(run.submit.request_id)
        if play is None:
            return super().advance(run)
        if play[0] == SLOW:
            time.sleep(0.005)
        tokens = play[run.made : run.made + self.burst]
        tokens = tokens[: run.submit.params.max_tokens - run.made]
        delta = TokenDelta(run.submit.request_id, tokens, cached_tokens=0 if run.made else run.cached)
        run.made += len(tokens)
        if tokens[-1] in run.submit.params.stop_token_ids:
            delta.finish_reason, delta.stop_token_id = "stop", tokens[-1]
        elif run.made == run.submit.params.max_tokens:
            delta.finish_reason = "length"
        elif run.made == len(play):
            delta.finish_reason, delta.error = "error", "the play is over"
        if delta.finish_reason:
            del self.running[run.submit.request_id]
        return delta

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.playing: dict[int, list[int]] = {}


def run_player(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    Player(config, inbox, outbox).run()


def run_player_bursts(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    Player(config, inbox, outbox, burst=3).run()


def run_core_loading(config: EngineConfig, inbox: Inbox, outbox: Outbox) -> None:
    """Never gets ready."""
    time.sleep(60)
