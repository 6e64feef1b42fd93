"""The weight map: which checkpoint tensors a parameter is made of, and which part of them each rank holds.

Invariant (V14): over all ranks the slices of a parameter cover every entry of its checkpoint tensors exactly once, or as
often as its type replicates them; padding is zero. The map holds no path and no data; slices are derived from the type,
the plan and the runs of padded dims. Standard library and the IR only: the loader reads it without the passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.mesh import Plan
from tokenspeed.ir.text import parse_type
from tokenspeed.ir.types import DTYPE_BYTES, Type

#: stands in a name for the index of the leading dim, where each index has a tensor of its own (an expert)
EACH = "{e}"

Run = tuple[int, int, int]  # start in the checkpoint, start in the padded extent, length
Part = tuple[int, int, int]  # rows start .. stop of every `period` rows of a checkpoint tensor


@dataclass(frozen=True)
class Segment:
    """One checkpoint tensor, or one an index of the leading dim, or the same part of every group of a tensor's rows.
    `sources` are alternatives in order of preference."""

    sources: tuple[str, ...]
    type: Type
    rows: int  # dims before the columns of a matrix: those its output rows are made of, behind the stacked one
    stacked: bool = False  # the leading dim counts tensors, named with {e}
    part: Part | None = None  # of the tensor's rows, where several segments share it


@dataclass(frozen=True)
class Entry:
    """One parameter by absolute name. kind: weight, to which the loader adds `attrs["offset"]`, if any; or rope, a table that
    is computed at load from `attrs`."""

    name: str
    kind: str
    segments: tuple[Segment, ...] = ()
    attrs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class WeightMap:
    plan: Plan
    sizes: Mapping[str, int]  # padded extents
    runs: Mapping[str, tuple[Run, ...]]  # dims whose padded extent holds the checkpoint's entries in several runs
    logical: Mapping[str, int]
    entries: tuple[Entry, ...]

    def distinct(self) -> list[Entry]:
        """One entry of each group that shares its data (a tied head and the embedding are one)."""
        return list({(e.kind, e.segments, str(e.attrs)): e for e in self.entries}.values())

    def local_bytes(self, e: Entry, rank: int) -> int:
        """Bytes a rank holds of a parameter of plain numbers; of a rope table, its float32 positions by dim."""
        if e.kind == "rope":
            attrs = e.attrs or {}
            return 4 * int(attrs["positions"]) * int(attrs["dim"])
        parts = [part for s in e.segments for part in self.tensors(s, rank)]
        return sum(math.prod(self.matrix_pieces(s, rank)[2]) * DTYPE_BYTES.get(s.type.dtype, 0) for s in parts)

    @property
    def quantised(self) -> list[str]:
        """The block formats that weights are kept in, ascending; none where all are plain numbers."""
        return sorted({s.type.dtype for e in self.entries for s in e.segments} - DTYPE_BYTES.keys())

    def arithmetic(self, dtype: str) -> str:
        """What a user calls the arithmetic: a dtype, or `auto` where weights are multiplied in the formats of the file."""
        kept = ", ".join(self.quantised)
        return f"auto ({kept} weights as stored, {dtype} between)" if kept else dtype

    def dim_runs(self, dim: str) -> tuple[Run, ...]:
        return self.runs.get(dim) or ((0, 0, self.logical[dim]),)

    def pieces(self, t: Type, dim: int, rank: int) -> list[Run]:
        """What a rank holds of one dim: runs (start in the checkpoint, start in the local tensor, length)."""
        d = t.dims[dim]
        width = self.sizes[d.name] // self.plan.mesh.size(d.axes)
        first = self.plan.mesh.index(rank, d.axes) * width
        out: list[Run] = []
        for src, dst, n in self.dim_runs(d.name):
            lo, hi = max(dst, first), min(dst + n, first + width)
            if lo < hi:
                out.append((src + lo - dst, lo - first, hi - lo))
        return out

    def matrix_pieces(self, seg: Segment, rank: int) -> tuple[list[Run], list[Run], tuple[int, int]]:
        """Row and column runs that a rank holds of the segment as a matrix (of the part of a tensor that it is), and the
        local shape (rows, columns)."""
        local = seg.type.local_shape(self.sizes, self.plan)
        rows = self._flat(seg.type, 0, seg.rows, rank)
        cols = self._flat(seg.type, seg.rows, len(local), rank)
        return rows, cols, (math.prod(local[: seg.rows]), math.prod(local[seg.rows :]))

    def tensors(self, seg: Segment, rank: int) -> list[Segment]:
        """The segment, a checkpoint tensor each: itself, or of a stacked one those whose index this rank holds."""
        if not seg.stacked:
            return [seg]
        inner = Type(seg.type.dtype, seg.type.dims[1:], seg.type.pending)
        return [
            Segment(tuple(s.replace(EACH, str(i)) for s in seg.sources), inner, seg.rows - 1, part=seg.part)
            for start, _, n in self.pieces(seg.type, 0, rank)
            for i in range(start, start + n)
        ]

    def _flat(self, t: Type, start: int, stop: int, rank: int) -> list[Run]:
        """Runs of dims start..stop flattened; only the first of them may be split or padded."""
        if start == stop:
            return [(0, 0, 1)]
        inner = 1
        for k in range(start + 1, stop):
            name = t.dims[k].name
            if self.sizes[name] != self.logical[name]:
                raise VerifyError("V14", f"inner dim {name} of {t} is padded: its rows do not lie together")
            inner *= self.sizes[name]
        return [(s * inner, d * inner, n * inner) for s, d, n in self.pieces(t, start, rank)]

    def shape(self, seg: Segment) -> tuple[int, int]:
        """Shape of the checkpoint tensor as a matrix (1 column for a vector); stacked ones lie one under the other."""
        rows, cols = self.extent(seg)
        if seg.part:
            start, stop, period = seg.part
            rows = rows // (stop - start) * period
        return rows, cols

    def extent(self, seg: Segment) -> tuple[int, int]:
        """Shape of the segment as a matrix, without padding."""
        dims = [self.logical[d.name] for d in seg.type.dims]
        return math.prod(dims[: seg.rows]), math.prod(dims[seg.rows :])

    def keeps(self, t: Type, rank: int) -> bool:
        """Whether this rank keeps a pending weight (the first along the pending axes does)."""
        return self.plan.mesh.index(rank, t.pending) == 0 if t.pending else True


def verify_weights(m: WeightMap) -> None:
    """V14: every entry of every checkpoint tensor is held by as many ranks as the type says, none by fewer or more."""
    _verify_parts(m)
    seen: set[tuple[Type, int, bool, Part | None]] = set()
    for e in m.entries:
        for seg in e.segments:
            if (seg.type, seg.rows, seg.stacked, seg.part) in seen:
                continue
            seen.add((seg.type, seg.rows, seg.stacked, seg.part))
            axes = seg.type.axes()
            copies = m.plan.mesh.ranks // m.plan.mesh.size(axes)
            want = math.prod(m.extent(seg)) * copies
            have = 0
            for r in range(m.plan.mesh.ranks):
                if m.keeps(seg.type, r):
                    for part in m.tensors(seg, r):
                        rows, cols, _ = m.matrix_pieces(part, r)
                        have += sum(n for _, _, n in rows) * sum(n for _, _, n in cols)
            if have != want:
                raise VerifyError(
                    "V14", f"@{e.name} : {seg.type}: ranks hold {have} entries, {want} are due ({copies} copies)"
                )


def _verify_parts(m: WeightMap) -> None:
    """The parts that segments take of one tensor follow each other and make up its period."""
    parts: dict[str, set[Part]] = {}
    for e in m.entries:
        for seg in e.segments:
            if seg.part:
                parts.setdefault(seg.sources[0], set()).add(seg.part)
                if m.extent(seg)[0] % (seg.part[1] - seg.part[0]):
                    raise VerifyError(
                        "V14",
                        f"@{e.name} : {seg.type} has {m.extent(seg)[0]} rows: no whole number of parts {seg.part}",
                    )
    for name, taken in parts.items():
        bounds = [0, *(b for start, stop, _ in sorted(taken) for b in (start, stop)), *{p for _, _, p in taken}]
        if bounds[::2] != bounds[1::2]:
            raise VerifyError("V14", f"the parts {sorted(taken)} of {name!r} do not make up its rows, each once")


# ---- JSON ------------------------------------------------------------------------------------------------------------


def to_json(m: WeightMap) -> dict[str, Any]:
    return {
        "runs": {k: [list(r) for r in v] for k, v in sorted(m.runs.items())},
        "entries": [
            {"name": e.name, "kind": e.kind}
            | ({"attrs": dict(e.attrs)} if e.attrs is not None else {})
            | (
                {
                    "segments": [
                        {"sources": list(s.sources), "type": s.type.text(m.plan), "rows": s.rows}
                        | ({"stacked": True} if s.stacked else {})
                        | ({"part": list(s.part)} if s.part else {})
                        for s in e.segments
                    ]
                }
                if e.segments
                else {}
            )
            for e in m.entries
        ],
    }


def from_json(raw: Mapping[str, Any], plan: Plan, sizes: Mapping[str, int], logical: Mapping[str, int]) -> WeightMap:
    entries = tuple(
        Entry(
            e["name"], e["kind"],
            tuple(
                Segment(
                    tuple(s["sources"]), parse_type(s["type"], plan), s["rows"], s.get("stacked", False),
                    (s["part"][0], s["part"][1], s["part"][2]) if "part" in s else None,
                )
                for s in e.get("segments", ())
            ),
            e.get("attrs"),
        )
        for e in raw["entries"]
    )  # fmt: skip
    runs = {k: tuple((int(a), int(b), int(c)) for a, b, c in v) for k, v in raw["runs"].items()}
    return WeightMap(plan, sizes, runs, logical, entries)
