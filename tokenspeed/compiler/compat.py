"""The compat key: what a process must have in common with the one that compiled. Checked at load, field by field.

It is not part of the semantic key: the program means the same elsewhere, but its kernels were bound for this.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tokenspeed.compiler.artifact import digest
from tokenspeed.kernels.registry import default_registry


def compat_of(kernels: Mapping[str, str], device: str) -> dict[str, str]:
    """device, torch (major.minor), kernels (a digest of the bound kernels' names and sources)."""
    registry = default_registry()
    names = sorted(set(kernels.values()))
    sources = [f"{n}:{registry.get(n).source_hash if n in registry else 'absent'}" for n in names]
    return {"device": device, "torch": ".".join(torch.__version__.split(".")[:2]), "kernels": digest(*sources)[:16]}
