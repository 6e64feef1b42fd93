"""Compiles the GPU kernels of an artifact on any machine, so that a server of it starts without compiling.

Invariant: what is compiled is what an executor of the artifact would compile at its start: the same programs emitted by the
same code, with tensors that have shapes and no memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenspeed.compiler.artifact import KERNELS, load_artifact
from tokenspeed.kernels.launch import compiling_ahead
from tokenspeed.kernels.shipped import shipping
from tokenspeed.kernels.target import target_of
from tokenspeed.runtime.checkpoint import DummyCheckpoint, checkpoint_of
from tokenspeed.runtime.cuda_executor import CudaExecutor
from tokenspeed.runtime.executor import RankConfig
from tokenspeed.runtime.progress import Progress, silent


class _Shapes(DummyCheckpoint):
    """Weights of a configuration, without memory."""

    def matrix(self, name: str, rows: tuple[int, int], shape: tuple[int, int]) -> Tensor:
        return torch.empty(rows[1] - rows[0], shape[1], device="meta")


class _NoGpu:
    """What an executor asks of a device before it runs anything."""

    device = torch.device("meta")
    current = staticmethod(nullcontext)

    def event(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)


class _Compiling(CudaExecutor):
    """An executor up to the point where its kernels are compiled."""

    gpu_type = _NoGpu

    def _make(self, steps: Any, progress: Progress) -> None:
        with compiling_ahead(target_of(self.artifact.manifest["device"]).arch):
            self._walk(steps)


def compile_kernels(path: Path, page: int, progress: Progress = silent) -> int:
    """Compiles the kernels of the artifact at `path`, for pages of `page` tokens, into its folder of kernels; the number of
    them, 0 for one that no single GPU runs."""
    artifact = load_artifact(path)
    if artifact.manifest["device"] == "cpu" or artifact.plan.mesh.ranks > 1:
        return 0
    note = artifact.checkpoint()
    config = RankConfig(str(path), note, 0, page, 1024, 4096, 1, window_pages=1024)
    with shipping(path / KERNELS):
        _Compiling(config, artifact, _Shapes(checkpoint_of(note).config), progress)
    return sum(1 for _ in (path / KERNELS).glob("*/*.cubin"))
