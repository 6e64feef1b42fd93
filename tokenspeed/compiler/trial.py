"""Trial runs of compiled programs in the n-rank simulator: random weights, random ports, requests that prefill and decode.

Invariant: weights depend on their checkpoint names and the seed alone, so every plan of a model gets the same ones; their
padding is zero. Rows of a bucket that no request fills are holes: index -1, NaN in real ports.
"""

from __future__ import annotations

import itertools
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
        "window_slots": PAGE * PAGES * groups,
        "states": STATES * groups,
        "page": PAGE,
        "l": WIDTH,
        "r": p.bucket["s"] * groups,
    } | SAMPLING_DIMS


def sampled(p: Program, work: Sequence[Sequence[Request]]) -> list[list[list[int]]]:
    """Rows of its home block that each request of each home group samples behind: its last, or its last few drafted ones."""
    each = -(-p.bucket["drafted"] // p.bucket["s"]) if "drafted" in p.bucket else 1
    out: list[list[list[int]]] = []
    for requests in work:
        ends = list(itertools.accumulate(len(ids) for _, ids, _ in requests))
        out.append([list(range(end - min(each, len(ids)), end)) for end, (_, ids, _) in zip(ends, requests)])
    return out


def hidden(number: int, pos: int, width: int) -> Tensor:
    """The main model's last state of a request's position, on every plan alike."""
    return torch.randn(width, generator=torch.Generator().manual_seed(number * 7919 + pos))


def batch(p: Program, work: Sequence[Sequence[Request]], seeds: Mapping[int, int] | None = None) -> dict[str, Tensor]:
    """Ports of the decoder models: `work[g]` are the requests of home group g; `seeds` sample, else tokens are greedy. Of a
    program that drafts, ids are the tokens behind the rows."""
    bucket, rows, groups = p.bucket["t"], p.bucket["s"], p.plan.mesh.size(p.plan.home)
    picks, outs = sampled(p, work), p.bucket.get("drafted", rows)
    tokens = ("ids", "pos", "slot", "window_slot", "row")
    ports = {n: torch.full((bucket * groups,), -1, dtype=torch.int32) for n in tokens}
    ports |= {n: torch.zeros(rows * groups, WIDTH, dtype=torch.int32) for n in ("table", "window_table")}
    ports |= {n: torch.full((k * groups,), -1, dtype=torch.int32) for n, k in (("last", outs), ("state", rows))}
    ports["hidden"] = torch.full((bucket * groups, p.sizes.get("h", 0)), float("nan"))
    params = torch.zeros(outs * groups, PARAM_WORDS, dtype=torch.int32)
    params[:, Word.FLAGS] = int(Flag.GREEDY)
    floats = torch.tensor([0.8, 1.0, 1.0]).view(torch.int32)
    for g, requests in enumerate(work):
        at, out = g * bucket, g * outs
        for i, (number, ids, first) in enumerate(requests):
            # neighbours lie far apart: on ranks of their own
            pages = {
                prefix: [(number * 5 + k) * 37 % PAGES for k in range(start, start + WIDTH)]
                for prefix, start in (("", 0), ("window_", 2))
            }
            for prefix, held in pages.items():
                ports[f"{prefix}table"][g * rows + i] = torch.tensor(held, dtype=torch.int32)
            for pos, token in enumerate(ids, first):
                ports["ids"][at], ports["pos"][at], ports["row"][at] = token, pos, i
                ports["hidden"][at] = hidden(number, pos, p.sizes.get("h", 0))
                for prefix, held in pages.items():
                    ports[f"{prefix}slot"][at] = held[pos // PAGE] * PAGE + pos % PAGE
                at += 1
            ports["state"][g * rows + i] = number % STATES
            for pick in picks[g][i]:
                ports["last"][out] = pick
                row = params[out]
                row[Word.FLAGS] = int(Flag.VALID | (Flag.GREEDY if seeds is None else 0))
                after = 2 if "drafted" in p.bucket else 1  # a drafted token follows the one that follows its row
                row[Word.POSITION], row[Word.SLOT] = int(ports["pos"][g * bucket + pick]) + after, i
                row[Word.SEED_LO] = seeds[number] if seeds else 0
                row[Word.TEMPERATURE], row[Word.TOP_P], row[Word.REPETITION] = floats[0], floats[1], floats[2]
                out += 1
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
        tokens = iter(token for _, token in outcomes(p, work, results[0]))
        return results, [[[next(tokens) for _ in picks][-1] for picks in mine] for mine in sampled(p, work)]


def outcomes(p: Program, work: Sequence[Sequence[Request]], tokens: Tensor) -> list[tuple[int, int]]:
    """(row of the result, token) of all rows that the requests sampled behind, in their order."""
    outs = p.bucket.get("drafted", p.bucket["s"])
    at = [g * outs + k for g, mine in enumerate(sampled(p, work)) for k in range(sum(map(len, mine)))]
    return [(k, int(tokens[k])) for k in at]


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
