"""Pass 12: the bytes a rank holds, and the memory limit.

Exact: weights, and the arena of each program as emission will plan it. Where a program's arena exceeds what the limit
leaves, the solver is asked again for the cheapest plan that holds less at every node, until one fits; so a plan is
chosen only if it fits, and the cheapest of all is chosen if that one does.

Invariant: `holding` counts what is live at a node of the flat program for one choice of rows; the arena, which also
packs, is never compared with it, only with the limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenspeed.compiler.binding import format_name
from tokenspeed.compiler.passes.bind import Binder
from tokenspeed.compiler.passes.eliminate import Factor
from tokenspeed.compiler.passes.repair import Repairs
from tokenspeed.compiler.passes.rows import Row
from tokenspeed.compiler.passes.solve import Value
from tokenspeed.compiler.storage import FIXED, Layout, place
from tokenspeed.compiler.weightmap import WeightMap
from tokenspeed.ir.graph import Program
from tokenspeed.kernels.formats import format_of


def weight_bytes(m: WeightMap) -> int:
    """Bytes of parameters on a rank (on each the same: what is split is padded first), in the formats they are stored in."""
    total = 0.0
    for e in m.distinct():
        total += m.local_bytes(e, 0) if e.kind == "rope" else 0
        for s in e.segments:
            f = format_of(format_name(s.type.dtype))
            total += math.prod(s.type.local_shape(m.sizes, m.plan)) * f.block_bytes / f.block
    return round(total)


@dataclass
class Arenas:
    """Arena bytes of programs; programs with one body and one choice of fused kernels share a layout."""

    binder: Binder
    known: dict[object, Layout] = field(default_factory=dict)

    def nbytes(self, p: Program) -> int:
        """Bytes of the arena that emission will ask for; binds the program's kernels."""
        calls = self.binder.bind(p)
        key = (id(p.nodes), tuple(c.request[0] for c in calls))  # the ops say what was fused
        if key not in self.known:
            self.known[key] = place(p, calls)
        return self.known[key].plan(dict(p.sizes) | FIXED)[1]


class Holding:
    """What a rank holds of the flat program's values at each node, by the choices of rows."""

    def __init__(self, values: Sequence[Value], rows: list[list[Row]], repairs: Repairs) -> None:
        self.rows, self.repairs = rows, repairs
        self.live: list[list[Value]] = [[] for _ in rows]
        self.taken: list[list[tuple[Value, int]]] = [[] for _ in rows]
        for v in values:
            last = max(len(rows) - 1 if i < 0 else i for i, _ in v.consumers)
            if v.maker >= 0:  # ports lie outside the arena
                for i in range(v.maker, last + 1):
                    self.live[i].append(v)
            for j, (i, _) in enumerate(v.consumers):
                if i >= 0:
                    self.taken[i].append((v, j))

    def at(self, node: int, choice: dict[int, int]) -> float:
        """Bytes live at `node`: values made before and needed after, repaired copies it takes, what its body holds."""
        pick = lambda i: choice.get(i, 0)  # noqa: E731
        total = self.rows[node][pick(node)].held
        for v in self.live[node]:
            total += self.repairs.nbytes(v.sources[pick(v.maker)])
        for v, j in self.taken[node]:
            want = v.wanted[j][pick(node)]
            if want != v.sources[pick(v.maker) if v.maker >= 0 else 0]:
                total += self.repairs.nbytes(want)
        return total

    def peak(self, picks: Sequence[int]) -> float:
        choice = dict(enumerate(picks))
        return max(self.at(i, choice) for i in range(len(self.rows)))

    def below(self, limit: float) -> list[Factor]:
        """Factors that forbid every choice which holds `limit` bytes or more at some node."""
        out: list[Factor] = []
        seen: dict[object, np.ndarray] = {}
        for i in range(len(self.rows)):
            makers = {v.maker for v in self.live[i]} | {v.maker for v, _ in self.taken[i] if v.maker >= 0}
            scope = tuple(sorted(x for x in makers | {i} if len(self.rows[x]) > 1))
            key = (tuple(v.key[0] for v in self.live[i]), id(self.rows[i]), tuple(v.key[0] for v, _ in self.taken[i]),
                   tuple(scope.index(v.maker) if v.maker in scope else -1 for v in self.live[i]))  # fmt: skip
            if key not in seen:
                shape = [len(self.rows[x]) for x in scope]
                cells = [
                    np.inf if self.at(i, dict(zip(scope, cell))) >= limit else 0.0
                    for cell in itertools.product(*map(range, shape))
                ]
                seen[key] = np.array(cells).reshape(shape)
            if scope and np.isinf(seen[key]).any():
                out.append((scope, seen[key]))
            elif not scope and np.isinf(seen[key]):
                raise NothingHolds
        return out


class NothingHolds(Exception):
    """No choice of rows holds less than the limit at some node."""
