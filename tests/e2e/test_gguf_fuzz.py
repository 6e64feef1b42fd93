"""Damaged GGUF headers: whatever bytes stand there, opening the file and reading every tensor through it ends in an error that
names the file, or gives tensors of the shapes asked for; nothing else is raised and nothing crashes."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Format

from tests.e2e.test_checkpoints import write_gguf
from tests.e2e.tiny import tiny_config, tiny_weights
from tokenspeed.runtime.checkpoint import CheckpointError
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.gguf_checkpoint import GgufCheckpoint
from tokenspeed.runtime.gguf_metadata import read_header

ABSURD = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def damaged(data: bytes, header: int, draw: random.Random) -> bytes:
    """One of: cut off, a byte another, a number absurd, a run of noise, a piece taken out or put in twice."""
    at = draw.randrange(4, header)
    match draw.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + struct.pack("<Q", draw.choice(ABSURD)) + data[at + 8 :]
        case 3:
            return data[:at] + draw.randbytes(16) + data[at + 16 :]
        case 4:
            return data[:at] + data[at + draw.randrange(1, 40) :]
        case _:
            return data[: at + draw.randrange(1, 40)] + data[at:]


def read_all(path: Path) -> None:
    """Every tensor, in the shape that the header gives it."""
    checkpoint = GgufCheckpoint(path)
    for name, t in checkpoint.tensors.items():
        shape = (t.shape[0], 1) if len(t.shape) == 1 else (t.shape[0], t.shape[1])
        try:
            stored = checkpoint.matrix(name, (0, shape[0]), shape)
        except CheckpointError:
            continue
        assert stored.shape[0] in (shape[0], 1)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_headers_are_errors_that_name_the_file(tmp_path: Path, seed: int) -> None:
    config = tiny_config("llama" if seed % 2 else "qwen3")
    file = tmp_path / "model.gguf"
    write_gguf(file, config, tiny_weights(config), (Format.Q8_0, Format.Q4_1, Format.F32, Format.Q5_0)[seed])
    whole = file.read_bytes()
    start, draw, refused = read_header(file).data_start, random.Random(seed), 0
    read_all(file)
    for _ in range(250):
        file.write_bytes(damaged(whole, start, draw))
        try:
            read_all(file)
        except (CheckpointError, StartupError) as error:
            refused += 1
            assert str(file) in str(error)
    assert refused > 100
