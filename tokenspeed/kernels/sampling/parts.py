"""The parts of the full sampler on a block of a sharded vocabulary, on any device, in torch.

Invariant: each computes what the op's reference does, bit for bit where ids and integers are concerned. On CPU rows that ask
for nothing are not computed; on a device nothing is looked at by the host, so that a step can be captured.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenspeed.ir.ops.filters import FILTERS, ROUNDS, UNIT, WORD, filtered, ordered
from tokenspeed.ir.ops.sampling import Flag, Word
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import KernelSpec, Priority

NEGLIGIBLE = 25.0  # e^-25 is no unit of a mass
_REFERENCES: dict[str, Callable[..., Any]] = {op.name: op.reference for op in FILTERS}


def shape_logits(
    z: Tensor, params: Tensor, counts: Tensor, seen: Tensor, bias: Tensor, *, valid: int, out: tuple[Tensor, Tensor]
) -> None:
    """z f32 [S, V] -> out (raw, shaped); see the op. Rows that are neither biased nor penalised read no state."""
    raw, x = out
    if z.is_cuda:
        for target, value in zip(out, _REFERENCES["shape_logits"](z, params, counts, seen, bias, valid=valid)):
            target.copy_(value)
        return
    low = float("-inf")
    torch.nan_to_num(z, nan=low, posinf=float("inf"), neginf=low, out=raw)
    raw[:, valid:] = low
    for i, (flags, word) in enumerate(params[:, [Word.FLAGS, Word.TEMPERATURE]].tolist()):
        if flags & (Flag.BIAS | Flag.PENALTIES):
            row = _REFERENCES["shape_logits"](raw[i : i + 1], params[i : i + 1], counts, seen, bias, valid=valid)
            x[i] = row[1][0]
        elif not flags & Flag.VALID:
            x[i] = low
        else:
            torch.div(raw[i], 1.0 if flags & Flag.GREEDY else _real(word), out=x[i])


def mask_logits(z: Tensor, params: Tensor, allow: Tensor, *, offset: int, out: Tensor) -> None:
    """z f32 [S, V], allow i32 [R, words]; out may be z; see the op. On CPU rows without a mask are not looked at."""
    if z.is_cuda:
        out.copy_(_REFERENCES["mask_logits"](z, params, allow, offset=offset))
        return
    if out.data_ptr() != z.data_ptr():
        out.copy_(z)
    wanted, words = int(Flag.VALID | Flag.MASK), allow.numpy().astype("<i4", copy=False)
    for i in ((params[:, Word.FLAGS] & wanted) == wanted).nonzero().flatten().tolist():
        if 0 <= (slot := int(params[i, Word.SLOT])) < len(words):
            bits = np.unpackbits(words[slot].view(np.uint8), bitorder="little")[offset : offset + z.shape[1]]
            out[i].masked_fill_(torch.from_numpy(bits) == 0, float("-inf"))


def tally(x: Tensor, params: Tensor, *rest: Tensor, by: str, round: int, out: Tensor) -> None:
    """out i32 [S, 768]; see the op. On CPU only what the prefix and the floor leave is counted."""
    if x.is_cuda:
        out.copy_(_REFERENCES["tally"](x, params, *rest, by=by, round=round))
        return
    out.zero_()
    shift = 8 * (ROUNDS - 1 - round)
    for i in filtered(params).nonzero().flatten().tolist():
        bits, inside = _comparable(x[i]), None
        if round:
            inside = bits >> shift + 8 == (int(rest[-1][i]) & 0xFFFFFFFF) - (1 << 23 - shift)
        if by == "mass":
            least = max(int(_comparable(rest[0][i : i + 1] - NEGLIGIBLE)), (int(rest[1][i]) & 0xFFFFFFFF) - (1 << 31))
            inside = bits >= least if inside is None else inside & (bits >= least)
        found = slice(None) if inside is None else inside.nonzero().flatten()
        digits = (bits[found] >> shift) + (128 if shift == 24 else 0) & 0xFF
        if by == "count":
            out[i, :256] = torch.bincount(digits, minlength=256)
            continue
        share = ((x[i][found] - rest[0][i]).exp().double() * UNIT).nan_to_num(0.0).long()
        for word in range(3):
            part = (share >> word * WORD & (1 << WORD) - 1).double()
            out[i, 256 * word : 256 * (word + 1)] = torch.bincount(digits, part, minlength=256)


def sift(x: Tensor, top: Tensor, params: Tensor, floor: Tensor, cut: Tensor, *, out: Tensor) -> None:
    """x f32 [S, V]; out may be x; see the op."""
    if x.is_cuda:
        out.copy_(_REFERENCES["sift"](x, top, params, floor, cut))
        return
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    for i in filtered(params).nonzero().flatten().tolist():
        least = max(int(floor[i]) & 0xFFFFFFFF, int(cut[i]) & 0xFFFFFFFF) - (1 << 31)
        rejected = _comparable(x[i]) < least
        if (min_p := _real(int(params[i, Word.MIN_P]))) > 0.0:
            rejected |= ~((x[i] - top[i]).exp() >= min_p)
        out[i].masked_fill_(rejected, float("-inf"))


def _comparable(x: Tensor) -> Tensor:
    """The bits of float32 as i32 that compare like the numbers: `ordered` less 2^31."""
    bits = (x + 0.0).contiguous().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _real(word: int) -> float:
    return struct.unpack("f", struct.pack("i", word))[0]


def topk(z: Tensor, *, k: int, offset: int = 0, out: tuple[Tensor, Tensor]) -> None:
    """z f32 [S, V] -> out (values f32 [S, k], global ids i32 [S, k]): the value and then the lower id decide. NaN never wins."""
    values, ids = out
    n = min(k, z.shape[1])
    clean = torch.where(z.isnan(), float("-inf"), z)
    rank = torch.arange(z.shape[1] - 1, -1, -1, device=z.device)
    best = ((ordered(clean) << 31) | rank).topk(n, dim=1).values
    at = (z.shape[1] - 1) - (best & (1 << 31) - 1)
    values[:, :n] = clean.gather(1, at)
    ids[:, :n] = (at + offset).int()
    values[:, n:] = float("-inf")
    ids[:, n:] = torch.iinfo(torch.int32).max


def row_reduce(x: Tensor, *, kind: str, out: Tensor) -> None:
    """The sum, maximum or minimum of the last dim of x f32."""
    out.copy_(x.sum(-1) if kind == "sum" else x.amax(-1) if kind == "max" else x.amin(-1))


def _plain(op: str) -> Callable[..., None]:
    """The reference, its results copied into `out`."""
    reference = _REFERENCES[op]

    def run(*inputs: Tensor, out: Tensor | tuple[Tensor, ...] | None = None, **attrs: Any) -> None:
        results = reference(*inputs, **attrs)
        if out is not None:
            targets, values = (x if isinstance(x, tuple) else (x,) for x in (out, results))
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)

    run.__doc__ = f"The op `{op}`; see its reference."
    return run


def register(registry: Registry) -> None:
    own: dict[str, Callable[..., None]] = {
        "mask_logits": mask_logits,
        "shape_logits": shape_logits,
        "tally": tally,
        "sift": sift,
        "topk": topk,
        "reduce": row_reduce,
    }
    for op, fn in ({op: _plain(op) for op in _REFERENCES} | own).items():
        registry.register(
            KernelSpec(
                name=f"torch.{op}",
                op=op,
                solution="torch",
                fn=fn,
                signatures=({"x": frozenset({"int32" if op in ("narrow", "count_token") else "float32"})},),
                priority=Priority.PORTABLE,
                tags=frozenset({"portability", "determinism"}),
            )
        )
