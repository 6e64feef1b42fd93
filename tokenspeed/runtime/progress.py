"""Progress of long stages (compiling, loading) as one line on a terminal; nothing where stderr is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # stage, done, total


def silent(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


def bar() -> Progress:
    """A bar on stderr, or `silent`."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return silent

    def show(stage: str, done: int, total: int) -> None:
        filled = 30 * done // max(total, 1)
        end = "\n" if done == total else ""
        print(f"\r{stage:<8} [{'#' * filled:<30}] {done}/{total}", end=end, file=sys.stderr, flush=True)

    return show
