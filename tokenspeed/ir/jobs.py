"""Long proofs on several processes, and in parts that run apart: one result an item, in the order of the items.

Invariant: what a caller makes of the results does not depend on the number of processes, if the work on an item depends
on that item alone (its seed, not a generator that items share). With one job everything runs in this process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
EVERY = 10.0  # seconds between two lines of progress


def each(
    do: Callable[[Item], Result], items: Sequence[Item], jobs: int = 1, label: str = "", chunk: int = 1
) -> Iterator[Result]:
    """`do` of each item, in order; on `jobs` processes, which get `chunk` items at a time (`do` is then a module's function).

    With a `label`, how many items are done goes to stderr now and then. A caller that stops early ends the work.
    """
    done = _progress(label, len(items))
    if jobs == 1:
        for item in items:
            yield do(item)
            done()
        return
    pool = ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for result in pool.map(do, items, chunksize=chunk):
            yield result
            done()
    finally:
        pool.shutdown(cancel_futures=True)


def _progress(label: str, total: int) -> Callable[[], None]:
    """Counts, and says so on stderr at most every EVERY seconds and at the end of what took longer."""
    start = last = time.monotonic()
    count = 0

    def done() -> None:
        nonlocal count, last
        count += 1
        now = time.monotonic()
        if label and (now - last >= EVERY or (count == total and now - start >= EVERY)):
            last = now
            print(f"{label}: {count} of {total}, {now - start:.0f} s", file=sys.stderr, flush=True)

    return done


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """The option --jobs of every long proof."""
    parser.add_argument("--jobs", type=_count, default=1, help="processes; the result is the same (default 1)")


def add_part(parser: argparse.ArgumentParser) -> None:
    """The option --part of what may take hours."""
    parser.add_argument(
        "--part", type=_part, default=(0, 1), metavar="I/N",
        help="only items I, I + N, I + 2N ... (I from 0); the N parts together are the whole (default 0/1: all)",
    )  # fmt: skip


def part_of(items: Sequence[Item], part: tuple[int, int]) -> Sequence[Item]:
    """The items of one part, as --part gives it."""
    first, of = part
    return items[first::of]


def _part(text: str) -> tuple[int, int]:
    first, _, of = text.partition("/")
    if not (first.isdecimal() and of.isdecimal() and int(first) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: give I/N with I from 0 to N - 1, such as 0/4")
    return int(first), int(of)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes: give 1 or more")
    return int(text)
