"""Whose pages they are. Invariant: two ranks share a namespace only if equal tokens give them pages of equal meaning: the same
weights and program, the same arithmetic, the same part of the model, the same layout of a page, the same form of record and key.

Weights are told apart by what their files hold, so copies of a checkpoint share pages wherever they lie: a file of up to 256 MiB
is read whole; of a larger one the size, the first 64 KiB (names and shapes) and 4,096 samples of 64 bytes are taken, as reading
hundreds of gigabytes for it would take minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tokenspeed import _scheduler
from tokenspeed.runtime.checkpoint import Checkpoint
from tokenspeed.runtime.kv.record import FORMAT, NAMESPACE_BYTES

_WHOLE, _HEAD, _SAMPLES, _SAMPLE = 256 << 20, 64 << 10, 4096, 64


def weights_digest(checkpoint: Checkpoint) -> str:
    """Of the files that hold the weights, or of the note where no file does (random weights)."""
    h = hashlib.blake2b(digest_size=16)
    files = checkpoint.sources()
    if not files:
        h.update(json.dumps(checkpoint.note(), sort_keys=True).encode())
    for path in files:
        _sample(h, path)
    return h.hexdigest()


def namespace(engine: Mapping[str, Any], part: Mapping[str, int], caches: Sequence[Tensor], page_size: int) -> bytes:
    """16 bytes. `engine`: what holds for all ranks; `part`: the rank's coordinates but for the home axes."""
    layout = [[str(c.dtype), list(c.shape[1:])] for c in caches]
    what = {
        "format": FORMAT, "keys": _scheduler.PAGE_KEY_VERSION, "engine": dict(engine), "part": dict(part),
        "layout": layout, "page_size": page_size,
    }  # fmt: skip
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=NAMESPACE_BYTES).digest()


def _sample(h: Any, path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        h.update(size.to_bytes(8, "little"))
        if size <= _WHOLE:
            while block := file.read(1 << 20):
                h.update(block)
            return
        h.update(os.pread(file.fileno(), _HEAD, 0))
        for i in range(_SAMPLES):
            h.update(os.pread(file.fileno(), _SAMPLE, size * i // _SAMPLES))
