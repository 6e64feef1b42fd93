"""List semantics of the redistributions: what each moves between the ranks of its groups, block by block.

Invariant: a rank's result is made of the locals of its own group alone, in group order, as the kernels make it; that the
meaning of the value stays the same is a consequence (rulecheck shows it), not an assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tokenspeed.ir.errors import RuleError
from tokenspeed.ir.meaning import Meaning, Value, merge
from tokenspeed.ir.mesh import Axes, Plan
from tokenspeed.ir.ops.moe import wanted
from tokenspeed.ir.types import ROW_DIMS, Type

Made = TypeVar("Made")


def outer_blocks(plan: Plan, factors: Axes, held: Axes, axes: Axes, dim: str) -> int:
    """Into how many blocks that lie apart a row dim falls when `axes` move: the product of its factors outside them that
    a rank holds whole. `held`: axes that shard the dim besides. RuleError V5 where a whole factor lies between `axes`."""
    if dim not in ROW_DIMS:
        return 1
    missing = [a for a in axes if a not in factors]
    if missing:
        raise RuleError("V5", f"{dim} cannot be split over {missing} in this bucket")
    at = [factors.index(a) for a in axes]
    if at != sorted(at):
        raise RuleError("V4", f"{list(axes)} move along {dim} in another order than its factors {list(factors)}")
    whole = [a for a in factors if a not in held and a not in axes]
    between = [a for a in whole if at[0] < factors.index(a) < at[-1]]
    if between:
        raise RuleError("V5", f"{list(axes)} do not move together along {dim}: {between} lies whole between them")
    return plan.mesh.size([a for a in whole if factors.index(a) < at[0]])


def collective(op: str, xs: Sequence[Value], before: Type, axes: Axes, dim: str, m: Meaning) -> list[Value]:
    """The locals after redistribution `op` of `xs` : `before` over `axes` (and `dim`, where it has one)."""
    held = tuple(a for a in before.dim(dim).axes if a not in axes) if dim else ()
    outer = outer_blocks(m.plan, m.factors.get(dim, ()), held, axes, dim) if dim else 1
    k = before.names.index(dim) if dim else 0
    last = set(axes) == set(before.pending)
    return _by_group(
        m.mesh.groups(axes), [(id(x),) for x in xs],
        lambda group: _moved(op, [xs[r] for r in group], before.kind, last, k, outer),
    )  # fmt: skip


def _by_group(
    groups: Sequence[Sequence[int]], held: Sequence[tuple[int, ...]], make: Callable[[Sequence[int]], list[Made]]
) -> list[Made]:
    """What `make` gives the ranks of each group, by rank. Groups whose ranks hold the very same (`held`: by rank, what tells it
    apart) make the same, once."""
    made: dict[tuple[tuple[int, ...], ...], list[Made]] = {}
    out: dict[int, Made] = {}
    for group in groups:
        key = tuple(held[r] for r in group)
        if key not in made:
            made[key] = make(group)
        out.update(zip(group, made[key], strict=True))
    return [out[r] for r in range(len(held))]


def _moved(op: str, mine: list[Value], kind: str, last: bool, k: int, outer: int) -> list[Value]:
    """What the ranks of one group hold after `op`. `last`: nothing of the value stays pending; `k`: the dim that moves, in
    `outer` blocks."""
    parts = len(mine)
    if op in ("all_reduce", "reduce_scatter"):
        whole = merge(kind, mine)
        if op == "all_reduce":
            return [whole[0] if last and kind == "lse" else whole] * parts
        return [_each(whole, lambda x, i=i: _block(x, k, outer, parts, i)) for i in range(parts)]
    if op == "slice":
        return [_each(x, lambda x, i=i: _block(x, k, outer, parts, i)) for i, x in enumerate(mine)]
    if op == "all_gather":
        return [_join(mine, k, outer)] * parts
    if op == "keep_first":
        return [x if i == 0 else torch.zeros_like(x) for i, x in enumerate(mine)]
    raise RuleError("V1", f"{op!r} is no redistribution")


def exchange(
    args: Sequence[Sequence[Tensor]], firsts: Sequence[int], axes: Axes, m: Meaning, run: Callable[[int, list[Tensor]], Tensor]
) -> list[Tensor]:  # fmt: skip
    """The locals of `experts` where its rows lie on `axes` of the experts. `args[r]`: operands of rank r, whose experts count
    from `firsts[r]`. A rank is given the rows of its group that picked one of its experts, in group order (NaN stands where it
    is given none) and `run(r, operands)` is what it makes of them; a row is the sum of what comes back, in group order."""
    held = [(first, *map(id, operands)) for first, operands in zip(firsts, args, strict=True)]
    return _by_group(m.mesh.groups(axes), held, lambda group: _exchanged(args, firsts, group, run))


def _exchanged(
    args: Sequence[Sequence[Tensor]], firsts: Sequence[int], group: Sequence[int], run: Callable[[int, list[Tensor]], Tensor]
) -> list[Tensor]:  # fmt: skip
    x, ids, shares = (torch.cat([args[r][k] for r in group]) for k in range(3))
    rows = len(x) // len(group)
    wants = [wanted(ids, firsts[r], args[r][3].shape[0]) for r in group]
    made = [
        run(r, [torch.where(mine[:, None], x, float("nan")), ids, shares, *args[r][3:]])
        for r, mine in zip(group, wants)
    ]
    out: list[Tensor] = []
    for i in range(len(group)):
        block = slice(i * rows, (i + 1) * rows)
        total = torch.zeros_like(made[0][block])
        for mine, y in zip(wants, made):
            total += torch.where(mine[block, None], y[block], 0.0)
        out.append(total)
    return out


def _each(x: Value, fn: Callable[[Tensor], Tensor]) -> Value:
    return tuple(map(fn, x)) if isinstance(x, tuple) else fn(x)


def _block(x: Tensor, k: int, outer: int, parts: int, i: int) -> Tensor:
    """Block i of `parts` of dim k, within each of its `outer` blocks."""
    split = x.unflatten(k, (outer, parts, -1))
    return split.select(k + 1, i).flatten(k, k + 1).clone()


def _join(xs: Sequence[Value], k: int, outer: int) -> Value:
    if isinstance(xs[0], tuple):
        return tuple(_join(part, k, outer) for part in zip(*xs))
    return torch.stack([x.unflatten(k, (outer, -1)) for x in xs], k + 1).flatten(k, k + 2)
