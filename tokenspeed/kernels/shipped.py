"""Machine code of Triton kernels that travels in a folder, by the key that Triton itself finds it under.

Invariant: a kernel is taken from the folder exactly where Triton would find the same code in its own cache (same source,
types, constants, options, version and target), so a folder from elsewhere costs a look and never gives a wrong kernel.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEPT = (".cubin", ".json")  # of what the compiler leaves: all that a load reads


@contextmanager
def shipped(folder: Path) -> Generator[None]:
    """Kernels under it are looked for in `folder` (which need not exist) before Triton's own cache."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    if not folder.is_dir():
        yield
        return

    class Shipped(FileCacheManager):
        def __init__(self, key: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(key, *args, **kwargs)
            self.there = folder / key

        def get_group(self, filename: str) -> dict[str, str] | None:
            try:
                group = json.loads((self.there / f"__grp__{filename}").read_text())["child_paths"]
                return {name: str(self.there / name) for name in group if (self.there / name).exists()}
            except (OSError, ValueError, KeyError):
                return super().get_group(filename)

    before = knobs.cache.manager_class
    knobs.cache.manager_class = Shipped
    try:
        yield
    finally:
        knobs.cache.manager_class = before


@contextmanager
def shipping(folder: Path) -> Generator[None]:
    """What is compiled under it lies in `folder` afterwards, in place of what lay there, and in no other cache."""
    from triton import knobs

    staged = folder.with_name(f".{folder.name}.{os.getpid()}")
    before = knobs.cache.dir
    knobs.cache.dir = str(staged)
    try:
        staged.mkdir(parents=True)
        yield
        for file in staged.rglob("*"):
            if file.is_file() and file.suffix not in KEPT:
                file.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        staged.rename(folder)
    finally:
        knobs.cache.dir = before
        shutil.rmtree(staged, ignore_errors=True)
