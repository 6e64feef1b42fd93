"""Many sessions with shared prefixes, in seeded orders of everything that can happen, give the tokens they give alone.

    python -m tests.e2e.interleavings [--seeds 200] [--model smollm2|windows]

A session is a conversation of two or three turns; a turn sends all that was said before and some tokens more. What each turn
must say is found once, without any cache. A seed then draws the sizes of the pool and the tiers, the overlap and the chunks, and
at every step of the loop which sessions go on, which requests are sent back to wait, which tier is emptied, and which stored
pages are spoilt; at the end nothing may be left behind.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.tiny import VOCAB, tiny_model
from tokenspeed import Engine, SamplingParams
from tokenspeed.runtime.build import build_engine
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.core import EngineLoop
from tokenspeed.runtime.messages import CoreParams, Deltas, Submit, ToCore, ToFront, packed, unplain

SESSIONS, PAGE, OUT, LONGEST = 50, 16, 10, 224
BUCKETS = [1, 2, 4, 8, 16, 64]
TURNS_AT_MOST = 200_000  # of the loop


class Silent:
    """An inbox in which nothing comes."""

    def get(self, timeout: float | None) -> ToCore | None:
        return None

    def drain(self) -> list[ToCore]:
        return []


class Collected:
    """An outbox that keeps tokens by request, and which have ended."""

    def __init__(self) -> None:
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.ended: set[int] = set()

    def put(self, message: ToFront) -> None:
        if isinstance(message, Deltas):
            for delta in (*message.deltas, *unplain(message.plain)):
                assert delta.error is None, delta.error
                self.tokens[delta.request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    self.ended.add(delta.request_id)


def windowed_model(folder: Path, **over: Any) -> Path:
    """A random model whose second layer sees 24 tokens, the first all."""
    windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    return tiny_model(folder, "qwen2", **windows | over)


@dataclass
class Session:
    """`appended[i]`: what turn i adds to the conversation."""

    appended: list[list[int]]

    def prompt(self, answers: list[list[int]]) -> list[int]:
        """The prompt of the turn behind so many answers."""
        out = list(self.appended[0])
        for said, more in zip(answers, self.appended[1:]):
            out += said + more
        return out


def sessions(vocabulary: int, count: int = SESSIONS) -> list[Session]:
    """Of three kinds, each with a prefix of its own; half begin with more that others of the kind have too."""
    rng = random.Random(7)
    draw = lambda n: [rng.randrange(vocabulary) for _ in range(n)]  # noqa: E731
    kinds = [(draw(rng.randrange(35, 60)), draw(30)) for _ in range(3)]
    out: list[Session] = []
    for i in range(count):
        prefix, more = kinds[i % 3]
        first = prefix + (more if i % 2 else []) + draw(rng.randrange(1, 40))
        out.append(Session([first, *(draw(rng.randrange(1, 14)) for _ in range(rng.randrange(1, 3)))]))
    return out


def options(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "page_size": PAGE,
        "max_num_batched_tokens": 64,
        "buckets": BUCKETS,
        "max_model_len": LONGEST,
    }


def expected(model: str, work: list[Session]) -> list[list[list[int]]]:
    """[session][turn] tokens, without a cache and without company that matters."""
    answers: list[list[list[int]]] = [[] for _ in work]
    params = SamplingParams(temperature=0, max_tokens=OUT, ignore_eos=True, detokenize=False)
    plain = options(model) | {"core": "inproc", "enable_prefix_caching": False, "num_pages": 400, "max_num_seqs": 8}
    with Engine(**plain) as engine:
        for turn in range(max(len(s.appended) for s in work)):
            going = [i for i, s in enumerate(work) if turn < len(s.appended)]
            prompts = [work[i].prompt(answers[i]) for i in going]
            for i, result in zip(going, engine.generate(input_ids=prompts, sampling_params=params)):
                answers[i].append(result.token_ids)
    return answers


def interleave(model: str, work: list[Session], want: list[list[list[int]]], seed: int) -> dict[str, int]:
    """Runs one seed; the scheduler's figures. AssertionError where a token differs or something is left behind."""
    rng = random.Random(seed)
    storage = rng.random() < 0.7
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            **options(model) | {"num_pages": rng.randrange(LONGEST // PAGE + 1, 60), "max_num_seqs": rng.choice([2, 4, 8])},
            prefill_chunk=rng.choice([0, 0, 7, 16]), overlap_depth=rng.choice([0, 1]),
            host_kv_gib=rng.choice([0.0006, 0.001, 0.003]) * _page_scale(model),
            kv_storage=f"file://{folder}?limit=1GiB" if storage else "",
        )  # fmt: skip
        built, outbox = build_engine(config), Collected()
        loop = EngineLoop(built, config.overlap_depth, Silent(), outbox)
        try:
            _run(loop, outbox, rng, work, want, Path(folder))
            return _at_rest(loop)
        finally:
            built.ranks.close()


def _run(
    loop: EngineLoop,
    outbox: Collected,
    rng: random.Random,
    work: list[Session],
    want: list[list[list[int]]],
    folder: Path,
) -> None:
    scheduler = loop.scheduler
    turn = [0] * len(work)
    waiting = set(range(len(work)))  # sessions that may go on
    asked: dict[int, tuple[int, int]] = {}  # request -> session, turn
    for _ in range(TURNS_AT_MOST):
        while waiting and rng.random() < 0.4:
            session = rng.choice(sorted(waiting))
            waiting.discard(session)
            request = len(asked)
            asked[request] = (session, turn[session])
            prompt = work[session].prompt(want[session][: turn[session]])
            loop._handle(Submit(request, packed(prompt), CoreParams(max_tokens=OUT, temperature=0.0)))
        if rng.random() < 0.1 and (live := scheduler.snapshot()):
            scheduler.retract(rng.choice(live)["id"])
        if rng.random() < 0.03:
            scheduler.flush_cache(rng.choice(["device", "host", "all"]))
        if rng.random() < 0.02 and (files := [f for f in folder.rglob("*") if f.is_file() and f.suffix != ".tmp"]):
            _spoil(rng.choice(files), rng)
        if rng.random() < 0.8:
            loop._transferred()
        if not (len(loop.flying) <= loop.depth and loop._launch()):
            if loop.flying:
                loop._collect()
            else:
                time.sleep(0.0002)  # all that is asked waits for transfers
        for request in [r for r in outbox.ended if r in asked]:
            session, number = asked[request]
            assert outbox.tokens[request] == want[session][number], (session, number)
            outbox.ended.discard(request)
            turn[session] += 1
            if turn[session] < len(work[session].appended):
                waiting.add(session)
        if rng.random() < 0.05:
            scheduler.check()
        if not waiting and all(t == len(s.appended) for t, s in zip(turn, work)):
            return
    raise AssertionError(f"no end: {scheduler.snapshot()[:4]}")


def _spoil(path: Path, rng: random.Random) -> None:
    """A bit flipped, or the end cut off. It may be gone, or be another page's by now."""
    try:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    except (OSError, ValueError):
        return


def _at_rest(loop: EngineLoop) -> dict[str, int]:
    deadline = time.monotonic() + 30
    loop._transfer()
    while loop.scheduler.snapshot() or loop._transferring() or loop.flying:
        assert time.monotonic() < deadline, loop.scheduler.snapshot()
        loop._transferred()
        if loop.flying:
            loop._collect()
        loop._launch()
        time.sleep(0.0002)
    loop.scheduler.check()
    stats = loop.scheduler.stats()
    for tier in ("kv", "host"):
        assert stats[f"{tier}_pages_free"] + stats[f"{tier}_pages_cached"] == stats[f"{tier}_pages_total"], stats
    assert stats["kv_pages_evictable"] == stats["kv_pages_cached"] and not stats["host_pages_pinned"], stats
    assert stats["window_pages_free"] + stats["window_pages_idle"] == stats["window_pages_total"], stats
    return stats


def _page_scale(model: str) -> float:
    """Pages of the embedded model are so many times as large as the tiny one's."""
    return 45.0 if model == "smollm2" else 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--model", default="", help="smollm2, or a random model where none is given; windows: one with them"
    )
    args = parser.parse_args()
    began, totals = time.perf_counter(), defaultdict(int)
    with tempfile.TemporaryDirectory() as folder:
        random_model = windowed_model if args.model == "windows" else tiny_model
        model = args.model if args.model == "smollm2" else str(random_model(Path(folder) / "tiny"))
        work = sessions(10_000 if args.model == "smollm2" else VOCAB)
        want = expected(model, work)
        for seed in range(args.first, args.first + args.seeds):
            try:
                for name, value in interleave(model, work, want, seed).items():
                    totals[name] += value
            except BaseException:
                print(f"seed {seed}")
                raise
    names = ("steps", "retractions", "hit_tokens_device", "hit_tokens_host", "hit_tokens_storage", "host_evicted_pages")
    print(
        f"{args.seeds} interleavings of {len(work)} sessions: equal tokens, nothing left, {time.perf_counter() - began:.0f} s; "
        + ", ".join(f"{name.replace('_', ' ')} {totals[name]}" for name in names)
    )


if __name__ == "__main__":
    main()
