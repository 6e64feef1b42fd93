"""Weights as the C++ kernels read them. Invariant: a packed weight holds 16 output rows interleaved a tile (layouts in
csrc/types.h), rows padded to 16 and columns to 32 with zeros; it is immutable and shared by every op that uses the same
weight, so a tied embedding is packed once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tokenspeed.kernels.memory import Arena
from tokenspeed.kernels.weights import Codes, QuantWeight

TILE, BLOCK = 16, 32
# Numbers of csrc/types.h Format.
F32, BF16, Q4_0, Q4_1, Q8_0, Q4F, Q8S16 = range(7)
_LAYOUT = {
    "q4_0": Q4_0, "q4_1": Q4_1, "q5_0": Q8_0, "q8_0": Q8_0, "mxfp4": Q8S16, "int4_32": Q8S16, "q4_k": Q4F, "q6_k": Q8S16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedWeight:
    """A [n, k] weight; `data` u8 [tiles, tile bytes] is kept alive here and read through `pointer`."""

    data: Tensor
    layout: int
    n: int
    k: int
    pointer: int
    quantised: bool

    @property
    def nbytes(self) -> int:
        return self.data.numel()


_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()
_arena = Arena()


def pack(weight: Tensor | QuantWeight) -> PackedWeight:
    """Packs [N, K] float32 / bfloat16 or a QuantWeight; the same weight object gives the same packed one.

    The result lives as long as the weight or any user of it. TypeError for another dtype.
    """
    known = _packed.get(weight)
    if known is not None:
        return known
    packed = _pack_quantised(weight) if isinstance(weight, QuantWeight) else _pack_dense(weight)
    _packed[weight] = packed
    return packed


def known(weight: object) -> PackedWeight | None:
    """What `weight` was packed into, if it was."""
    return _packed.get(weight) if isinstance(weight, Tensor | QuantWeight) else None


def adopt(weight: Tensor | QuantWeight, data: Tensor) -> None:
    """Has `data` u8 [tiles, tile bytes], which is copied, stand for what packing `weight` gives. ValueError where it cannot be."""
    from tokenspeed import _cpu

    layout = _layout(weight)
    n, k = weight.shape
    want = (-(-n // TILE), _cpu.tile_bytes(layout, -(-k // BLOCK)))
    if data.dtype != torch.uint8 or tuple(data.shape) != want:
        raise ValueError(f"a weight {(n, k)} is packed into u8 {want}, not {data.dtype} {tuple(data.shape)}")
    own = _arena.take(data.numel()).view(want)
    own.copy_(data)
    _packed[weight] = _made(own, layout, (n, k), isinstance(weight, QuantWeight))


def _layout(weight: Tensor | QuantWeight) -> int:
    """TypeError for a weight that cannot be packed."""
    if isinstance(weight, QuantWeight):
        return _LAYOUT[weight.format]
    if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"a dense weight must be float32 or bfloat16 [N, K], got {weight.dtype} {tuple(weight.shape)}")
    return F32 if weight.dtype == torch.float32 else BF16


def _made(data: Tensor, layout: int, shape: tuple[int, int], quantised: bool) -> PackedWeight:
    return PackedWeight(data, layout, shape[0], shape[1], data.data_ptr(), quantised)


def _pack_dense(weight: Tensor) -> PackedWeight:
    layout = _layout(weight)
    n, k = weight.shape
    tiles, blocks = -(-n // TILE), -(-k // BLOCK)
    padded = weight.new_zeros((tiles * TILE, blocks * BLOCK))
    padded[:n, :k] = weight
    group = 1 if weight.dtype == torch.float32 else 2  # a dword a row: one float32, or two bfloat16
    source = padded.view(tiles, TILE, blocks * BLOCK // group, group).transpose(1, 2)
    data = _arena.take(padded.numel() * padded.itemsize)
    data.view(weight.dtype).view(source.shape).copy_(source)
    return _made(data.view(tiles, -1), layout, (n, k), False)


def _pack_quantised(weight: QuantWeight) -> PackedWeight:
    from tokenspeed import _cpu

    layout = _layout(weight)
    n, k = weight.shape
    tiles, blocks = -(-n // TILE), k // BLOCK
    size = _cpu.tile_bytes(layout, blocks)
    data = _arena.take(tiles * size).view(tiles, size)
    step = max(1, (1 << 22) // max(1, TILE * k))  # tiles at a time: the codes of 4M values are taken apart at once
    for first in range(0, tiles, step):
        last = min(tiles, first + step)
        part = weight.rows(first * TILE, min(n, last * TILE))
        part = part.pad_rows((last - first) * TILE)
        _fill_tiles(data[first:last], part.codes(), layout, last - first, blocks)
    return _made(data, layout, (n, k), True)


def _fill_tiles(out: Tensor, codes: Codes, layout: int, tiles: int, blocks: int) -> None:
    """Writes the packed tiles of `codes`: of each block the quants, then the scales."""
    if layout in (Q4_0, Q4_1, Q4F):
        # [tile, row, block, nibble half, dword, byte] -> [tile, block, half, dword, row, byte]
        q = codes.q.view(tiles, TILE, blocks, 2, 4, 4).permute(0, 2, 3, 4, 1, 5)
        quants = q[:, :, 0] | (q[:, :, 1] << 4)
    else:
        biased = (codes.q.to(torch.int16) + (128 - codes.zero)).to(torch.uint8)
        quants = biased.view(tiles, TILE, blocks, 8, 4).permute(0, 2, 3, 1, 4)
    wide = layout in (Q4F, Q8S16)
    scale = codes.scale.view(tiles, TILE, blocks, -1)
    if layout == Q8S16:  # a scale for each 16 values, whatever the format's blocks are
        scale = scale.repeat_interleave(2 // scale.shape[3], 3)
    parts = [scale.permute(0, 2, 3, 1)]  # [tile, block, scales a block, row]
    if codes.minimum is not None:
        parts.append(codes.minimum.view(tiles, TILE, blocks, 1).permute(0, 2, 3, 1))
    scales = torch.cat(parts, dim=2).to(torch.float32 if wide else torch.float16).contiguous()
    whole = torch.cat([quants.reshape(tiles, blocks, -1), scales.view(tiles, blocks, -1).view(torch.uint8)], dim=2)
    used = blocks * whole.shape[2]
    out[:, :used] = whole.view(tiles, -1)
    out[:, used:] = 0
