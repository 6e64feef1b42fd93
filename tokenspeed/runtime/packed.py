"""Weights as the CPU's kernels read them, kept beside the artifact: a start then copies them and takes nothing apart.

Invariant: a file is used only for the weights it was made of (the checkpoint's files, their sizes and times of change) by
the code that would make it again; else it is made anew in its place. It is a convenience: where it cannot be written or
read, weights are packed as if it were not there.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tokenspeed.compiler.artifact import digest
from tokenspeed.kernels import packing
from tokenspeed.runtime.checkpoint import Checkpoint
from tokenspeed.runtime.sources import file_state, package_digest

log = logging.getLogger(__name__)

LEAST = 16 << 20  # bytes of packed weights from which on a file is worth it


class PackedFile:
    """The packed weights of one rank of an artifact, `packed-rank<N>.safetensors` in its directory."""

    def __init__(self, artifact: Path, checkpoint: Checkpoint, rank: int) -> None:
        self.path = artifact / f"packed-rank{rank}.safetensors"
        self._of = _identity(checkpoint)
        self._whole = False  # whether all that was packed came from the file

    def restore(self, params: Mapping[str, Any]) -> int:
        """Takes over what the file has of `params`; how many weights those are."""
        if not self._of or not self.path.is_file():
            return 0
        try:
            with safe_open(self.path, framework="pt") as file:
                if (file.metadata() or {}).get("of") != self._of:
                    return 0
                names = [name for name in file.keys() if name in params]  # noqa: SIM118 (not a mapping)
                for name in names:
                    packing.adopt(params[name], file.get_tensor(name))
        except (OSError, SafetensorError, ValueError) as fault:
            log.warning("%s is passed over and made anew: %s", self.path, fault)
            return 0
        self._whole = True
        return len(names)

    def keep(self, params: Mapping[str, Any]) -> None:
        """Writes what of `params` is packed by now, if it did not come from the file."""
        if self._whole or not self._of:
            return
        found: dict[int, tuple[str, Any]] = {}
        for name, weight in params.items():
            packed = packing.known(weight)
            if packed is not None:
                found.setdefault(id(packed), (name, packed.data))
        size = sum(data.numel() for _, data in found.values())
        if size < LEAST:
            return
        staged = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            if shutil.disk_usage(self.path.parent).free < 2 * size:
                log.info("%s is not written: %d MiB would fill the disk", self.path, size >> 20)
                return
            save_file(dict(found.values()), staged, {"of": self._of})
            staged.replace(self.path)
        except (OSError, SafetensorError) as fault:
            log.info("%s is not written: %s", self.path, fault)
            staged.unlink(missing_ok=True)


def _identity(checkpoint: Checkpoint) -> str:
    """Empty for weights that no file holds."""
    from tokenspeed import _cpu

    files = checkpoint.sources()
    return digest(_cpu.source_hash(), package_digest(), *map(file_state, files)) if files else ""
