# pyright: strict
"""A table of measured choices: which kernel was fastest for an op, signature and range of facts on one device.

The file: {"device": NAME, "entries": [{"op": "linear", "signature": {"w": "q4_1"}, "traits": {"tokens": [1, 8]},
"kernel": "cpu.linear.int8", "us": 31.0}, ...]}. An entry applies where its signature is part of the request's and each
of its trait ranges covers the request's value. `us` (microseconds measured) orders entries that overlap.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.kernels.spec import TraitValue


class SettingsError(ValueError):
    """A table or a file of overrides that cannot be read; the message names it, and the entry at fault."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured choice."""

    op: str
    signature: Mapping[str, str]
    traits: Mapping[str, tuple[int, int]]
    kernel: str
    microseconds: float

    @property
    def request(self) -> tuple[object, ...]:
        """What the choice is for."""
        return self.op, *sorted(self.signature.items()), *sorted(self.traits.items())

    def applies(self, op: str, signature: Mapping[str, str], traits: Mapping[str, TraitValue]) -> bool:
        if op != self.op or any(signature.get(role) != name for role, name in self.signature.items()):
            return False
        return all(name in traits and _covers(span, traits[name]) for name, span in self.traits.items())


SHIPPED = Path(__file__).parent / "tables"
CACHE_VARIABLE = "TOKENSPEED_KERNEL_TABLES"


def cached_path(target: str) -> Path:
    """Where the table of a target ("cpu", "cuda:sm_90") that was measured here lies."""
    folder = os.environ.get(CACHE_VARIABLE) or "~/.cache/tokenspeed/kernels"
    return Path(folder).expanduser() / f"{target.removeprefix('cuda:')}.json"


def table_for(target: str) -> TunedTable | None:
    """The table that was measured here for a target, or that ships for it."""
    for path in (cached_path(target), SHIPPED / f"{target.removeprefix('cuda:')}.json"):
        if path.exists():
            return _loaded(path, path.stat().st_mtime_ns)
    return None


def _covers(span: tuple[int, int], value: TraitValue) -> bool:
    if isinstance(value, str):
        return False
    low, high = value if isinstance(value, tuple) else (value, value)
    return span[0] <= low and high <= span[1]


@dataclass(frozen=True, slots=True)
class TunedTable:
    """The entries of one file."""

    device: str
    entries: tuple[Entry, ...]

    @classmethod
    def load(cls, path: Path) -> TunedTable:
        """Reads a table. Raises SettingsError."""
        try:
            content: Any = json.loads(path.read_text())
            device = str(content["device"])
            raw: list[Any] = list(content["entries"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"tuned table {path} cannot be read: {error!r}; delete it, or write it anew with `tokenspeed kernels tune`"
            ) from error
        return cls(device, tuple(_entry(path, index, item) for index, item in enumerate(raw)))

    def dump(self) -> str:
        """The file's text; entries in order of op, signature and facts."""
        rows = [
            {
                "op": e.op, "signature": dict(sorted(e.signature.items())),
                "traits": {name: list(span) for name, span in sorted(e.traits.items())}, "kernel": e.kernel,
                "us": e.microseconds,
            }
            for e in self.entries
        ]  # fmt: skip
        lines = ",\n".join(sorted(json.dumps(r) for r in rows))
        return f'{{"device": {json.dumps(self.device)}, "entries": [\n{lines}\n]}}\n'

    def over(self, other: TunedTable) -> TunedTable:
        """These entries, and those of `other` for what has none here."""
        mine = {e.request for e in self.entries}
        return TunedTable(self.device, (*self.entries, *(e for e in other.entries if e.request not in mine)))

    def advice(self, op: str, signature: Mapping[str, str], traits: Mapping[str, TraitValue]) -> list[str]:
        """Names of the kernels that entries advise for the request, fastest first."""
        fitting = [entry for entry in self.entries if entry.applies(op, signature, traits)]
        return [entry.kernel for entry in sorted(fitting, key=lambda entry: (entry.microseconds, entry.kernel))]


@functools.cache
def _loaded(path: Path, _changed: int) -> TunedTable:
    return TunedTable.load(path)


def _entry(path: Path, index: int, item: Any) -> Entry:
    try:
        return Entry(
            op=str(item["op"]),
            signature={str(role): str(name) for role, name in item.get("signature", {}).items()},
            traits={str(name): _span(span) for name, span in item.get("traits", {}).items()},
            kernel=str(item["kernel"]),
            microseconds=_time(item["us"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingsError(
            f"tuned table {path}, entry {index}: {error!r}; delete it, or write it anew with `tokenspeed kernels tune`"
        ) from error


def _span(given: Any) -> tuple[int, int]:
    span: list[Any] = list(given) if isinstance(given, list) else []  # pyright: ignore[reportUnknownArgumentType]
    if len(span) != 2 or any(type(end) is not int for end in span) or span[0] > span[1]:
        raise ValueError(f"{given!r} is no range [least, most] of whole numbers")
    return span[0], span[1]


def _time(given: Any) -> float:
    if not isinstance(given, int | float) or not 0 <= given < float("inf"):
        raise ValueError(f"us is {given!r}, no time")
    return float(given)
