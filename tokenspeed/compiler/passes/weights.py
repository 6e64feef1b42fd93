"""Pass 13: the weight map of a program, and the storage format of every weight.

Invariant: a weight keeps the checkpoint's quantised format only where each rank's part is a whole number of blocks and
all its segments share one format; otherwise it is stored in the stream's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tokenspeed.compiler.passes.layout import Layout
from tokenspeed.compiler.passes.leaves import Binding, param_types
from tokenspeed.compiler.passes.trace import Flat
from tokenspeed.compiler.weightmap import EACH, Entry, Part, Segment, WeightMap
from tokenspeed.ir.errors import PlanError
from tokenspeed.kernels.formats import QUANTISED, format_of
from tokenspeed.models.nn.maps import STREAM, HeadLinear, Matrices, Weight
from tokenspeed.models.nn.params import LatentCache, PagedAttention, RMSNorm, Rope, SamplingState
from tokenspeed.models.nn.state import StateCache

STACKED = frozenset({"mxfp4", "int4_32"})  # formats in which kernels read stacks of matrices


@dataclass
class Names:
    """Checkpoint names of a model's parameters, from its family's table ({i}: a list position, {e}: an expert). A tensor is
    called by its entry and `.weight` or `.bias`; by the entry alone where that starts with `=`. Biases may have an entry of
    their own, PATH.bias. `name#{e}` is index e of a tensor that holds all experts, `name#{e}'` its transpose. `name[a:b/c]` are rows a to b
    of every c rows of a tensor that several segments share."""

    table: Mapping[str, str]
    memo: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)

    def sources(
        self, path: str, segments: int, suffix: str, each: str = ""
    ) -> list[tuple[tuple[str, ...], Part | None]]:
        """Alternatives, and the part of their rows, a segment; a module without an entry is named by its own path, then
        `each`."""
        index = re.findall(r"\.(\d+)(?=\.|$)", path)
        pattern = re.sub(r"\.\d+(?=\.|$)", ".{i}", path)
        text = next((t for p in (path + suffix, pattern + suffix, path, pattern) if (t := self.table.get(p))), None)
        if text is None:
            own = path + each
            return [((f"{own}.{k}{suffix}" if segments > 1 else f"{own}{suffix}",), None) for k in range(segments)]
        for i in index:
            text = text.replace("{i}", i)
        found = [[_tensor(alt.strip(), suffix) for alt in segment.split(" or ")] for segment in text.split("|")]
        if len(found) != segments:
            raise PlanError(
                "P034", f"the names of {path!r} list {len(found)} tensors, its map has {segments} segments: {text!r}"
            )
        if any(len({part for _, part in alts}) > 1 for alts in found):
            raise PlanError("P034", f"the names of {path!r} give alternatives of unlike parts: {text!r}")
        return [(tuple(name for name, _ in alts), alts[0][1]) for alts in found]


def _tensor(text: str, suffix: str) -> tuple[str, Part | None]:
    name, bracket, rows = text.partition("[")
    name = name[1:] if name.startswith("=") else name + suffix
    if not bracket:
        return name, None
    m = re.fullmatch(r"(\d+):(\d+)/(\d+)\]", rows)
    start, stop, period = map(int, m.groups()) if m else (0, 0, 0)
    if not start < stop <= period:
        raise PlanError("P034", f"{text!r}: write a part of a tensor's rows as name[START:STOP/PERIOD]")
    return name, (start, stop, period)


def choose_formats(
    flat: Flat, layout: Layout, names: Names, stored: Callable[[str], str | None], dtype: str
) -> dict[str, str]:
    """Storage format of every matrix: the checkpoint's where a kernel reads it and it can be sliced, else the stream's dtype."""
    out: dict[str, str] = {}
    for path, decl in flat.decls.items():
        if not isinstance(decl, Matrices | Weight) or (isinstance(decl, Weight) and decl.dtype != STREAM):
            continue
        if isinstance(decl, HeadLinear):  # no kernel reads them in blocks
            out[path] = dtype
            continue
        stacked = isinstance(decl, Matrices) and decl.stacked
        segs = len(decl.segments) if isinstance(decl, Matrices) else 1
        sources = names.sources(path, segs, ".weight", f".{EACH}" if stacked else "")
        formats = {next(filter(None, (stored(s.replace(EACH, "0")) for s in alts)), None) for alts, _ in sources}
        fmt = formats.pop() if len(formats) == 1 else None
        readable = fmt in (STACKED if stacked else QUANTISED)
        out[path] = fmt if fmt and readable and _sliceable(decl, layout, format_of(fmt).block) else dtype
    return out


def _sliceable(decl: Matrices | Weight, layout: Layout, block: int) -> bool:
    dims = decl.inp if isinstance(decl, Matrices) else decl.spec.dims[1:]
    columns, first = 1, True
    for d in dims:
        f = d.factors[0]
        ranks = layout.plan.mesh.size(layout.axes(f)) if first else 1
        columns *= layout.sizes[f.name] // ranks
        if first and layout.sizes[f.name] != layout.logical[f.name]:
            inner = 1
            for rest in dims[1:]:
                inner *= layout.sizes[rest.factors[0].name]
            if any((start * inner) % block for run in layout.runs(f.name) for start in run):
                return False
        first = False
    return columns % block == 0


def build_weight_map(flat: Flat, layout: Layout, b: Binding, names: Names) -> WeightMap:
    entries: list[Entry] = []
    for path, decl in flat.decls.items():
        if isinstance(decl, PagedAttention | LatentCache | SamplingState | StateCache):
            continue
        if isinstance(decl, Rope):
            attrs = {"dim": decl.dim, "positions": decl.positions, "parameters": decl.parameters}
            entries.append(Entry(path, "rope", attrs=attrs))
            continue
        for name, param in param_types(path, decl, b).items():
            suffix = ".bias" if name.endswith(".bias") else ".weight"
            n_in = len(decl.inp) if isinstance(decl, Matrices) else min(len(decl.spec.dims) - 1, 1)
            stacked = isinstance(decl, Matrices) and decl.stacked
            sources = names.sources(path, len(param.types), suffix, f".{EACH}" if stacked else "")
            segs = tuple(
                Segment(alts, t, len(t.dims) if suffix == ".bias" else len(t.dims) - n_in, stacked, part)
                for (alts, part), t in zip(sources, param.types)
            )
            offset = {"offset": decl.offset} if isinstance(decl, RMSNorm) and decl.offset else None
            entries.append(Entry(name, "weight", segs, offset))
    runs = {n: tuple(layout.runs(n)) for n in layout.groups if len(layout.runs(n)) > 1}
    return WeightMap(layout.plan, layout.sizes, runs, layout.logical, tuple(entries))
