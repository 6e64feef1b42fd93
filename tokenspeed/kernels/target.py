# pyright: strict
"""The facts of the machine that capability checks read: device kind, architecture number and feature names."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from tokenspeed.kernels.spec import Capability

OLDEST = 80  # the first architecture that kernels are written for
KNOWN = (80, 86, 87, 89, 90, 100, 101, 103, 120, 121)  # what Triton compiles for


@dataclass(frozen=True, slots=True)
class Target:
    """A device to select for. `arch` is 10 * major + minor of the compute capability (0 on CPU)."""

    device: Literal["cpu", "cuda"]
    arch: int = 0
    features: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.device if self.device == "cpu" else f"cuda:sm_{self.arch}"


@functools.cache
def target_of(device: str) -> Target:
    """The target a device string names: "cpu", "cuda" (this machine's GPU) or "cuda:90" (compile for sm_90).

    Raises ValueError for another string, or for "cuda" on a machine without one.
    """
    if device == "cpu":
        return Target("cpu", 0, cpu_features())
    if device.startswith("cuda:") and device[5:].isdigit():
        if not OLDEST <= int(device[5:]) < 1000:
            raise ValueError(
                f"device '{device}' names sm_{device[5:]}, but kernels need sm_{OLDEST} or later: the number is an architecture "
                "(90 for an H200), not a GPU's index"
            )
        return Target("cuda", int(device[5:]))
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("device 'cuda' needs a GPU here; name the architecture ('cuda:90') to select without one")
        major, minor = torch.cuda.get_device_capability()
        return Target("cuda", 10 * major + minor)
    raise ValueError(f"unknown device '{device}'; use 'cpu', 'cuda' or 'cuda:<arch>' such as 'cuda:90'")


def cpu_features() -> frozenset[str]:
    """Instruction sets that the C++ kernels support on this machine; empty where the extension is not built."""
    try:
        from tokenspeed import _cpu
    except ImportError:
        return frozenset()
    return frozenset({"cpu_extension", *_cpu.supported_isas()})


def miss(capability: Capability, target: Target) -> str | None:
    """Why `capability` does not cover `target`, or None if it does."""
    if capability.device not in ("any", target.device):
        return f"runs on {capability.device}, not on {target.device}"
    if target.device == "cuda":
        if target.arch < capability.min_arch:
            return f"needs sm_{capability.min_arch} or later, the device is sm_{target.arch}"
        if capability.max_arch is not None and target.arch > capability.max_arch:
            return f"needs sm_{capability.max_arch} or earlier, the device is sm_{target.arch}"
    if lacking := capability.features - target.features:
        return f"needs {', '.join(sorted(lacking))}, which {target.name} lacks"
    return None
