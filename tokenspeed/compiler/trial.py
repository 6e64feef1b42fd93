"""Trial runs of compiled programs in the n-rank simulator: random weights, random ports, requests that prefill and decode.

Invariant: weights depend on their checkpoint names and the seed alone, so every plan of a model gets the same ones; their
padding is zero. Rows of a bucket that no request fills are holes: index -1, NaN in real ports.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokenspeed.compiler.weightmap import WeightMap
from tokenspeed.ir.graph import Program
from tokenspeed.ir.ops.sampling import PARAM_WORDS, SAMPLING_DIMS, Flag, Word
from tokenspeed.ir.simulate import Simulator

PAGE, PAGES, WIDTH = 4, 128, 8  # KV pages a home group, and columns of the block table
STATES = 64  # state slots a home group
Request = tuple[int, list[int], int]  # number, ids of this step, position of the first


def random_weights(m: WeightMap, seed: int = 0) -> dict[str, Tensor]:
    """Global padded weights by `name:segment` (and `name`, where there is one segment)."""
    out: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    for e in m.entries:
        if e.kind == "rope":
            assert e.attrs
            inv = 1.0 / e.attrs["parameters"]["rope_theta"] ** (torch.arange(0, e.attrs["dim"], 2) / e.attrs["dim"])
            angle = torch.arange(e.attrs["positions"])[:, None] * inv
            out[e.name] = torch.cat([angle.cos(), angle.sin()], 1)
            continue
        for k, seg in enumerate(e.segments):
            shape = [m.logical[d.name] for d in seg.type.dims]
            source = seg.sources[0] + (str(seg.part) if seg.part else "")
            if source not in made:
                g = torch.Generator().manual_seed(seed * 1000003 + zlib.crc32(source.encode()))
                scale = 1.0 if len(shape) == 1 else 1.0 / math.sqrt(math.prod(shape[seg.rows :]))
                made[source] = torch.randn(shape, generator=g) * scale + (1.0 if "norm" in source else 0.0)
            full = made[source]
            for dim, d in enumerate(seg.type.dims):
                index = torch.cat([torch.arange(b, b + n) for _, b, n in m.dim_runs(d.name)])
                wide = list(full.shape)
                wide[dim] = m.sizes[d.name]
                full = torch.zeros(wide).index_copy(dim, index, full)
            out[f"{e.name}:{k}"] = full
            if len(e.segments) == 1:
                out[e.name] = full
    return out


def runtime_sizes(p: Program) -> dict[str, int]:
    """Extents that the runtime fixes, for a program of this size."""
    groups = p.plan.mesh.size(p.plan.home)
    return {
        "slots": PAGE * PAGES * groups,
        "states": STATES * groups,
        "page": PAGE,
        "l": WIDTH,
        "r": p.bucket["s"] * groups,
    } | SAMPLING_DIMS


def batch(p: Program, work: Sequence[Sequence[Request]], seeds: Mapping[int, int] | None = None) -> dict[str, Tensor]:
    """Ports of the decoder models: `work[g]` are the requests of home group g; `seeds` sample, else tokens are greedy."""
    bucket, rows, groups = p.bucket["t"], p.bucket["s"], p.plan.mesh.size(p.plan.home)
    ports = {n: torch.full((bucket * groups,), -1, dtype=torch.int32) for n in ("ids", "pos", "slot", "row")}
    ports["table"] = torch.zeros(rows * groups, WIDTH, dtype=torch.int32)
    ports |= {n: torch.full((rows * groups,), -1, dtype=torch.int32) for n in ("last", "state")}
    params = torch.zeros(rows * groups, PARAM_WORDS, dtype=torch.int32)
    params[:, Word.FLAGS] = int(Flag.GREEDY)
    floats = torch.tensor([0.8, 1.0, 1.0]).view(torch.int32)
    for g, requests in enumerate(work):
        at = g * bucket
        for i, (number, ids, first) in enumerate(requests):
            pages = [
                (number * 5 + k) * 37 % PAGES for k in range(WIDTH)
            ]  # neighbours lie far apart: on ranks of their own
            ports["table"][g * rows + i] = torch.tensor(pages, dtype=torch.int32)
            for pos, token in enumerate(ids, first):
                ports["ids"][at], ports["pos"][at], ports["row"][at] = token, pos, i
                ports["slot"][at] = pages[pos // PAGE] * PAGE + pos % PAGE
                at += 1
            ports["last"][g * rows + i] = at - 1 - g * bucket
            ports["state"][g * rows + i] = number % STATES
            row = params[g * rows + i]
            row[Word.FLAGS] = int(Flag.VALID | (Flag.GREEDY if seeds is None else 0))
            row[Word.POSITION], row[Word.SLOT] = first + len(ids), i
            row[Word.SEED_LO] = seeds[number] if seeds else 0
            row[Word.TEMPERATURE], row[Word.TOP_P], row[Word.REPETITION] = floats[0], floats[1], floats[2]
    return {name: port for name, port in (ports | {"params": params}).items() if name in p.ports}


class Steps:
    """Prefills and decodes requests on one plan: requests pinned to home groups, caches kept from step to step."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.caches: dict[str, list[Tensor]] = {}

    def run(
        self, p: Program, work: Sequence[Sequence[Request]], seeds: Mapping[int, int] | None = None
    ) -> tuple[list[Tensor], list[list[int]]]:
        """The results of one step, and the sampled token of each request of each home group."""
        results, _ = Simulator(p, runtime_sizes(p)).run(batch(p, work, seeds), self.weights, self.caches)
        rows = p.bucket["s"]
        return results, [
            [int(results[0][g * rows + i]) for i in range(len(requests))] for g, requests in enumerate(work)
        ]


def random_ports(p: Program, groups: int, seed: int) -> dict[str, Tensor]:
    """Ports of any program, for `groups` home blocks in all: on one rank the same rows, indices counted from the first.

    The last third of each home block's rows are holes; indices point at valid rows.
    """
    g = torch.Generator().manual_seed(seed)
    mine = p.plan.mesh.size(p.plan.home)
    out: dict[str, Tensor] = {}
    for name in p.ports:
        t = p.types[name]
        rows = p.sizes[t.dims[0].name] // groups
        valid = max(rows - rows // 3, 1)
        if t.index is None:
            x = torch.randn([p.sizes[d.name] for d in t.dims], generator=g)
            x.unflatten(0, (groups, -1))[:, valid:] = float("nan")
            out[name] = x
            continue
        targets = p.sizes[t.index.name] // groups
        index = torch.randint(0, max(targets - targets // 3, 1), (groups, rows), generator=g, dtype=torch.int32)
        if mine == 1:
            index += (torch.arange(groups, dtype=torch.int32) * targets)[:, None]
        index[:, valid:] = -1
        out[name] = index.flatten()
    return out
