"""The device mesh: named physical axes, and the deployment plan that maps logical axes to products of them.

Invariant: a rank's coordinates follow mesh order, first axis outermost; a process group is always named by the physical
axes it spans. An axis of size 1 vanishes from every product, so a one-rank plan has no axes at all.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from tokenspeed.ir.errors import PlanError

Axes = tuple[str, ...]

#: Logical axes every plan knows and what they stand for when the plan does not say; `etp` is without the axes of `ep`, as
#: an axis that counts experts cannot split their width too.
DEFAULT_AXES: dict[str, str] = {
    "dp": "1", "tp": "1", "cp": "1", "mlp": "cp*tp", "vp": "tp", "ep": "1", "etp": "mlp", "se": "mlp",
}  # fmt: skip

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*$")


@dataclass(frozen=True)
class Mesh:
    """Physical axes in order, e.g. (("dp", 2), ("tp", 4)). Sizes are ranks; size-1 axes are dropped, but for their names."""

    axes: tuple[tuple[str, int], ...] = ()
    alone: frozenset[str] = field(default=frozenset(), init=False, compare=False)  # axes of size 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "alone", frozenset(a for a, n in self.axes if n == 1))
        object.__setattr__(self, "axes", tuple((a, n) for a, n in self.axes if n != 1))

    @cached_property
    def names(self) -> Axes:
        return tuple(a for a, _ in self.axes)

    @property
    def ranks(self) -> int:
        return math.prod(n for _, n in self.axes)

    def size(self, axes: Iterable[str] | str) -> int:
        if not axes:
            return 1
        wanted = (axes,) if isinstance(axes, str) else tuple(axes)
        sizes = self.sizes
        return math.prod([sizes[a] for a in wanted])

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def ordered(self, axes: Iterable[str]) -> Axes:
        """The same axes in mesh order: the canonical form of a SET of axes."""
        wanted = set(axes)
        return tuple([a for a in self.names if a in wanted]) if wanted else ()

    def coords(self, rank: int) -> Mapping[str, int]:
        return self._coords[rank]

    @cached_property
    def _coords(self) -> list[dict[str, int]]:
        """Of every rank."""
        out: list[dict[str, int]] = []
        for rank in range(self.ranks):
            at: dict[str, int] = {}
            for name, n in reversed(self.axes):
                rank, at[name] = divmod(rank, n)
            out.append(at)
        return out

    def index(self, rank: int, axes: Axes) -> int:
        """Position of `rank` along the product of `axes`, first axis outermost."""
        coords, i = self.coords(rank), 0
        for a in axes:
            i = i * self.size(a) + coords[a]
        return i

    def group(self, rank: int, axes: Axes) -> list[int]:
        """The ranks that share every coordinate but those of `axes` with `rank`, ordered along `axes`."""
        mine = dict(self.coords(rank))
        members: list[int] = []
        for point in itertools.product(*(range(self.size(a)) for a in axes)):
            at = mine | dict(zip(axes, point))
            r = 0
            for name, n in self.axes:
                r = r * n + at[name]
            members.append(r)
        return members

    def groups(self, axes: Axes) -> list[list[int]]:
        """All process groups that span `axes`, each once, ordered by their first rank."""
        if axes not in self._groups:
            seen: dict[frozenset[int], list[int]] = {}
            for r in range(self.ranks):
                g = self.group(r, axes)
                seen.setdefault(frozenset(g), g)
            self._groups[axes] = list(seen.values())
        return self._groups[axes]

    @cached_property
    def _groups(self) -> dict[Axes, list[list[int]]]:
        return {}


def _parse_pairs(text: str, what: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in filter(None, (p.strip() for p in text.split(","))):
        name, eq, value = (s.strip() for s in item.partition("="))
        if not eq or not _NAME.match(name) or not value:
            raise PlanError("P034", f"{what}: cannot read {item!r}; write it as NAME=VALUE, e.g. tp=2,dp=1")
        if name in pairs:
            raise PlanError("P034", f"{what}: {name!r} is given twice")
        pairs[name] = value
    return pairs


MAX_RANKS = 1024  # of a mesh


def parse_mesh(text: str) -> Mesh:
    """`"dp=2,tp=4"` -> Mesh. PlanError P034 on anything else."""
    axes: list[tuple[str, int]] = []
    for name, value in _parse_pairs(text, "--mesh").items():
        if not value.isdigit() or int(value) < 1:
            raise PlanError("P034", f"--mesh: the size of {name!r} must be a positive integer, not {value!r}")
        axes.append((name, int(value)))
    if math.prod(n for _, n in axes) > MAX_RANKS:
        raise PlanError("P034", f"--mesh: {text} has more than {MAX_RANKS} ranks")
    return Mesh(tuple(axes))


@dataclass(frozen=True)
class Plan:
    """A mesh and the physical axes of every logical axis. `parts` says which axes were split (tp -> tp.0, tp.1)."""

    mesh: Mesh
    logical: Mapping[str, Axes]
    parts: Mapping[str, Axes]

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        """What was worked out on this plan (results of rules, texts of types), by all that it depends on: equal layers ask
        the same."""
        return {}

    def axes(self, name: str) -> Axes:
        """Physical axes of one logical (or mesh) axis name, outermost first; () where its size is 1."""
        if name in self.logical:
            return self.logical[name]
        raise PlanError("P034", f"axis {name!r} is not an axis of this plan; it knows {sorted(self.logical)}")

    @property
    def home(self) -> Axes:
        return self.mesh.ordered(self.logical["dp"])

    def split(self, axis: str, sizes: tuple[int, ...]) -> Plan:
        """The same plan with physical `axis` replaced by `axis.0, axis.1, ...` of the given sizes, outermost first."""
        sizes = tuple(n for n in sizes if n > 1)
        if len(sizes) < 2:
            return self
        for whole, parts in self.parts.items():
            if axis in parts:  # a part of an axis: the axis is split anew, into more parts
                at = parts.index(axis)
                every = tuple(self.mesh.size(a) for a in parts)
                return self._whole(whole).split(whole, (*every[:at], *sizes, *every[at + 1 :]))
        names = tuple(f"{axis}.{i}" for i in range(len(sizes)))
        mesh = Mesh(tuple(p for a, n in self.mesh.axes for p in (zip(names, sizes) if a == axis else [(a, n)])))
        logical = {k: tuple(p for a in v for p in (names if a == axis else (a,))) for k, v in self.logical.items()}
        return Plan(mesh, logical, dict(self.parts) | {axis: names})

    def _whole(self, axis: str) -> Plan:
        """The same plan with the parts of `axis` put together again."""
        parts = self.parts[axis]
        joined = [
            (axis, self.mesh.size(parts)) if a == parts[0] else (a, n) for a, n in self.mesh.axes if a not in parts[1:]
        ]
        logical = {
            k: tuple(axis if a == parts[0] else a for a in v if a not in parts[1:]) for k, v in self.logical.items()
        }
        return Plan(Mesh(tuple(joined)), logical, {a: p for a, p in self.parts.items() if a != axis})

    def fold(self, axes: Axes) -> Axes:
        """Print form: a run of all parts of a split axis becomes the axis again."""
        out = list(axes)
        for whole, parts in self.parts.items():
            for i in range(len(out) - len(parts) + 1):
                if tuple(out[i : i + len(parts)]) == parts:
                    out[i : i + len(parts)] = [whole]
                    break
        return tuple(out)

    def unfold(self, axes: Iterable[str]) -> Axes:
        return tuple(p for a in axes for p in self.parts.get(a, (a,)))

    def describe(self) -> str:
        """`mesh(dp=2, tp=4 as 2*2) axes(mlp=tp, vp=tp)`: the header of a program; `parse_plan` reads it back."""
        wholes: dict[str, list[int]] = {}
        owner = {p: w for w, ps in self.parts.items() for p in ps}
        for a, n in self.mesh.axes:
            wholes.setdefault(owner.get(a, a), []).append(n)
        mesh = ", ".join(
            f"{a}={math.prod(ns)}" + (f" as {'*'.join(map(str, ns))}" if len(ns) > 1 else "")
            for a, ns in wholes.items()
        )
        axes = ", ".join(
            f"{k}={'*'.join(self.fold(v)) or '1'}" for k, v in sorted(self.logical.items()) if k not in wholes
        )
        return f"mesh({mesh}) axes({axes})"


@lru_cache(maxsize=64)
def parse_plan(text: str) -> Plan:
    """Reads `Plan.describe()` back."""
    m = re.match(r"mesh\((.*?)\) axes\((.*?)\)$", text)
    if not m:
        raise ValueError(f"not a plan: {text!r}")
    mesh, splits = [], {}
    for item in filter(None, m[1].split(", ")):
        head, _, as_ = item.partition(" as ")
        name, size = head.split("=")
        mesh.append((name, int(size)))
        if as_:
            splits[name] = tuple(int(n) for n in as_.split("*"))
    plan = make_plan(Mesh(tuple(mesh)), m[2])
    for name, sizes in splits.items():
        plan = plan.split(name, sizes)
    return plan


def make_plan(mesh: Mesh, axes: str = "") -> Plan:
    """Maps logical axes to the mesh: `axes` like `"ep=dp*tp,mlp=tp"`; a mesh axis maps to itself (to
    none where it is of size 1), the rest by default.

    Raises PlanError P034 for an unknown axis, P031 for an axis used twice in one product.
    """
    given = _parse_pairs(axes, "--axes")
    names = set(mesh.names)
    expr = DEFAULT_AXES | dict.fromkeys(mesh.alone & set(DEFAULT_AXES), "1") | {a: a for a in mesh.names} | given
    logical: dict[str, Axes] = {}

    def resolve(name: str, seen: tuple[str, ...]) -> Axes:
        if name in logical:
            return logical[name]
        if name in seen:
            raise PlanError("P034", f"--axes: {' -> '.join((*seen, name))} goes in a circle")
        out: list[str] = []
        takes: dict[str, Axes] = {}  # mesh axes of each term
        for term in expr[name].split("*"):
            term, before = term.strip(), len(out)
            if term == "1" or (term in mesh.alone and term not in expr):
                continue
            if term in names and (term == name or term not in given):
                out.append(term)
            elif term in expr and term != name:
                out.extend(resolve(term, (*seen, name)))
            else:
                raise PlanError(
                    "P034",
                    f"--axes: {name}={expr[name]} names {term!r}, which is no axis of the mesh ({list(mesh.names)})",
                )
            takes[term] = tuple(out[before:])
        if len(set(out)) != len(out):
            twice = next(a for a in out if out.count(a) > 1)
            both = [t for t, axes in takes.items() if twice in axes]
            default = "" if name in given else " (its default)"
            raise PlanError(
                "P031",
                f"--axes: {' and '.join(both)} {'both lie' if len(both) == 2 else 'lies twice'} on mesh axis {twice!r}, and "
                f"{name}={expr[name]}{default} would use it twice\n"
                f"  fix 1: give {' and '.join(both)} mesh axes of their own (--mesh, --axes)\n  fix 2: say what {name} is (--axes)",
            )
        logical[name] = tuple(out)
        return logical[name]

    for name in expr:
        resolve(name, ())
    if "etp" not in given and "etp" not in names | mesh.alone:
        logical["etp"] = tuple(a for a in logical["etp"] if a not in logical["ep"])
    return Plan(mesh, logical, {})
