"""Sampling on CPU. Invariant: a token depends on its row's logits, its parameters and (seed, position, token id) alone,
so the batch, the thread count and the sharding of the vocabulary change nothing (Gumbel-max over a counter RNG).

NaN never wins; ties go to the lowest id. A row without anything above -inf (all NaN, say) gives id -1; the
full sampler counts nothing then. Reported log-probabilities are clamped to -9999.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed import _cpu
from tokenspeed.kernels.arguments import fail
from tokenspeed.kernels.elementwise import register_cpu
from tokenspeed.kernels.registry import Registry
from tokenspeed.kernels.spec import Capability

PARAM_WORDS = 16
TOP_LOGPROBS = 20
_F32 = frozenset({"float32"})


def _checked(op: str, z: Tensor, params: Tensor | None) -> tuple[int, int, int, int]:
    """(rows, columns, row stride of z, address of params); ValueError where they do not fit."""
    s, v = z.shape
    zs = z.stride()
    if z.dtype != torch.float32 or (zs[1] != 1 and v != 1):
        raise fail(op, z=z)
    if params is None:
        return s, v, zs[0], 0
    if params.dtype != torch.int32 or params.shape != (s, PARAM_WORDS) or not params.is_contiguous():
        raise fail(op, z=z, params=params)
    return s, v, zs[0], params.data_ptr()


def _mapped(op: str, z: Tensor, params: Tensor, offset: int, out: Tensor, temper_: bool, gumbel: bool) -> None:
    s, v, ldz, words = _checked(op, z, params)
    os = out.stride()
    if out.dtype != torch.float32 or out.shape != z.shape or (os[1] != 1 and v != 1):
        raise fail(op, z=z, out=out)
    _cpu.logits(z.data_ptr(), ldz, words, out.data_ptr(), os[0], 0, 0, s, v, offset, temper_, gumbel)


def _picked(
    op: str, z: Tensor, params: Tensor | None, offset: int, out: tuple[Tensor, Tensor], temper_: bool, gumbel: bool
) -> None:
    s, v, ldz, words = _checked(op, z, params)
    value, index = out
    if value.dtype != torch.float32 or index.dtype != torch.int32 or value.shape != (s,) or index.shape != (s,):
        raise fail(op, z=z, value=value, index=index)
    if not (value.is_contiguous() and index.is_contiguous()):
        raise fail(op, value=value, index=index)
    _cpu.logits(z.data_ptr(), ldz, words, 0, 0, value.data_ptr(), index.data_ptr(), s, v, offset, temper_, gumbel)


def temper(z: Tensor, params: Tensor, *, out: Tensor) -> None:
    """z f32 [S, V] / temperature; greedy rows unchanged; params i32 [S, 16]; out may be z."""
    _mapped("temper", z, params, 0, out, True, False)


def add_gumbel(z: Tensor, params: Tensor, *, offset: int = 0, out: Tensor) -> None:
    """z f32 [S, V] + noise of the global ids offset..; greedy rows unchanged; out may be z."""
    _mapped("add_gumbel", z, params, offset, out, False, True)


def argmax(z: Tensor, *, offset: int = 0, out: tuple[Tensor, Tensor]) -> None:
    """out = (value f32 [S], global id i32 [S]) of each row's largest logit; (-inf, -1) where there is none."""
    _picked("argmax", z, None, offset, out, False, False)


def gumbel_argmax(z: Tensor, params: Tensor, *, offset: int = 0, out: tuple[Tensor, Tensor]) -> None:
    """temper, add_gumbel and argmax in one pass; the same bits as the three."""
    _picked("gumbel_argmax", z, params, offset, out, True, True)


def merge_argmax(values: Tensor, indices: Tensor, *, out: tuple[Tensor, Tensor]) -> None:
    """values f32, indices i32 [R, S] of R shards -> (value [S], id [S]): the largest value, its lowest id on a tie."""
    if values.shape != indices.shape or values.dim() != 2 or values.shape[0] < 1:
        raise fail("merge_argmax", values=values, indices=indices)
    best = values.amax(0)
    out[0].copy_(best)
    out[1].copy_(torch.where(values == best, indices, 2**31 - 1).amin(0))


def sample(
    z: Tensor, params: Tensor, counts: Tensor, seen: Tensor, bias: Tensor,
    *, vocab: int, out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """The full sampler: z f32 [S, V], params i32 [S, 16], state by request slot counts i32, seen u8, bias f32 [R, V].

    out = (token i32 [S], logprob f32 [S], top ids i32 [S, 20], top logprobs f32 [S, 20]); an unused place holds id -1.
    Adds the drawn token to `counts` where the row has the penalties flag.
    """
    s, v, ldz, words = _checked("sample", z, params)
    token, logprob, ids, logprobs = out
    rows = counts.shape[0]
    if not 0 < vocab <= v or counts.shape[1] < vocab or seen.shape[1] < vocab or bias.shape[1] < vocab:
        raise fail("sample", z=z, counts=counts, seen=seen, bias=bias, vocab=vocab)
    if counts.dtype != torch.int32 or seen.dtype != torch.uint8 or bias.dtype != torch.float32:
        raise fail("sample", counts=counts, seen=seen, bias=bias)
    if seen.shape[0] < rows or bias.shape[0] < rows or not counts.stride(1) == seen.stride(1) == bias.stride(1) == 1:
        raise fail("sample", counts=counts, seen=seen, bias=bias)
    for tensor, shape, dtype in (
        (token, (s,), torch.int32),
        (logprob, (s,), torch.float32),
        (ids, (s, TOP_LOGPROBS), torch.int32),
        (logprobs, (s, TOP_LOGPROBS), torch.float32),
    ):
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise fail("sample", token=token, logprob=logprob, top_ids=ids, top_logprobs=logprobs)
    _cpu.sample(
        z.data_ptr(), ldz, words, counts.data_ptr(), counts.stride(0), seen.data_ptr(), seen.stride(0), bias.data_ptr(),
        bias.stride(0), rows, token.data_ptr(), logprob.data_ptr(), ids.data_ptr(), logprobs.data_ptr(), s, vocab,
    )  # fmt: skip


def register(registry: Registry, capability: Capability) -> None:
    for op, fn, roles in (
        ("temper", temper, ("x", "out")),
        ("add_gumbel", add_gumbel, ("x", "out")),
        ("argmax", argmax, ("x",)),
        ("gumbel_argmax", gumbel_argmax, ("x",)),
        ("merge_argmax", merge_argmax, ("x",)),
        ("sample", sample, ("x",)),
    ):
        same = (dict.fromkeys(roles, _F32),)
        register_cpu(registry, capability, op, fn, same, native=op != "merge_argmax")
