"""Block-quantised weights as GGUF stores them. Invariant: `data` is always whole blocks of one format, so a slice, a
pad or a concatenation of QuantWeights is again one, bit for bit, and a rank can take its part without dequantising.

Block layouts are those of ggml (ggml-common.h); the value of a code is `scale * (code - zero) + minimum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.kernels.formats import QUANTISED, format_of


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight taken apart. q u8 [N, K]; scale f32 [N, K / group]; minimum f32 of the same shape or None."""

    q: Tensor
    zero: int
    scale: Tensor
    minimum: Tensor | None
    group: int

    def values(self) -> Tensor:
        """float32 [N, K]."""
        n, k = self.q.shape
        centred = (self.q.to(torch.int16) - self.zero).float().view(n, k // self.group, self.group)
        out = centred * self.scale[:, :, None]
        if self.minimum is not None:
            out = out + self.minimum[:, :, None]
        return out.view(n, k)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class QuantWeight:
    """A [N, K] matrix in block format `format`; `data` is u8 [N, K / block * block_bytes], contiguous rows."""

    data: Tensor
    format: str
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if self.format not in QUANTISED:
            raise ValueError(f"'{self.format}' is no quantised weight format; the known ones are {sorted(QUANTISED)}")
        n, k = self.shape
        fmt = format_of(self.format)
        if k % fmt.block:
            raise ValueError(f"{self.format} stores blocks of {fmt.block} values; {k} columns are no multiple of it")
        want = (n, k // fmt.block * fmt.block_bytes)
        if self.data.dtype != torch.uint8 or tuple(self.data.shape) != want:
            raise ValueError(
                f"a {self.format} weight of shape {self.shape} needs uint8 data of shape {want}, "
                f"got {self.data.dtype} {tuple(self.data.shape)}"
            )

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def rows(self, start: int, end: int) -> QuantWeight:
        """Rows [start, end) as a view; ValueError outside 0..N."""
        n, k = self.shape
        if not 0 <= start <= end <= n:
            raise ValueError(f"rows {start}..{end} of a weight with {n} rows")
        return QuantWeight(self.data[start:end], self.format, (end - start, k))

    def columns(self, start: int, end: int) -> QuantWeight:
        """Columns [start, end), copied; ValueError outside 0..K or off a block boundary."""
        n, k = self.shape
        fmt = format_of(self.format)
        if not 0 <= start <= end <= k:
            raise ValueError(f"columns {start}..{end} of a weight with {k} columns")
        if start % fmt.block or end % fmt.block:
            raise ValueError(
                f"columns {start}..{end} cut a block: {self.format} stores blocks of {fmt.block} columns; "
                "shard by a multiple of it, or dequantise the weight first"
            )
        first, last = start // fmt.block * fmt.block_bytes, end // fmt.block * fmt.block_bytes
        return QuantWeight(self.data[:, first:last].contiguous(), self.format, (n, end - start))

    def pad_rows(self, n: int) -> QuantWeight:
        """At least as many rows, `n` in all; the new ones are zero."""
        return self._padded(n, self.shape[1], f"{n} rows")

    def pad_columns(self, k: int) -> QuantWeight:
        """`k` columns in all (a multiple of the block); the new ones are zero."""
        fmt = format_of(self.format)
        if k % fmt.block:
            raise ValueError(f"{k} columns are no multiple of the {fmt.block} values of a {self.format} block")
        return self._padded(self.shape[0], k, f"{k} columns")

    def _padded(self, n: int, k: int, what: str) -> QuantWeight:
        if n < self.shape[0] or k < self.shape[1]:
            raise ValueError(f"cannot pad a weight of shape {self.shape} to {what}")
        fmt = format_of(self.format)
        data = self.data.new_zeros((n, k // fmt.block * fmt.block_bytes))  # a block of zero bytes has value zero
        data[: self.shape[0], : self.data.shape[1]] = self.data
        return QuantWeight(data, self.format, (n, k))

    @staticmethod
    def cat(weights: Sequence[QuantWeight]) -> QuantWeight:
        """The rows of several weights of one format and width, one after another."""
        if not weights:
            raise ValueError("cat needs at least one weight")
        kinds = {(w.format, w.shape[1]) for w in weights}
        if len(kinds) != 1:
            raise ValueError(f"cat needs weights of one format and width, got {sorted(kinds)}")
        data = torch.cat([w.data for w in weights])
        return QuantWeight(data, weights[0].format, (data.shape[0], weights[0].shape[1]))

    def codes(self) -> Codes:
        """The integer codes, scales and minima (all exact)."""
        return _DECODERS[self.format](self.data, *self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] of `dtype`, computed in float32; a block of zero rows at a time keeps the peak memory low."""
        out = torch.empty(self.shape, dtype=dtype)
        step = max(1, (1 << 22) // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            part = self.rows(start, min(self.shape[0], start + step))
            out[start : start + step] = part.codes().values().to(dtype)
        return out


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class QuantStack:
    """Matrices of one shape and format, as experts are: `data` is u8 [E, N, K / block * block_bytes], `shape` (E, N, K)."""

    data: Tensor
    format: str
    shape: tuple[int, int, int]

    @staticmethod
    def of(weights: Sequence[QuantWeight]) -> QuantStack:
        """A stack of matrices alike."""
        if len({(w.format, w.shape) for w in weights}) != 1:
            raise ValueError(
                f"a stack needs matrices of one format and shape, got {[(w.format, w.shape) for w in weights]}"
            )
        data = torch.stack([w.data for w in weights])
        return QuantStack(data, weights[0].format, (len(weights), *weights[0].shape))

    @staticmethod
    def cat(stacks: Sequence[QuantStack]) -> QuantStack:
        """The rows of several stacks, one after another in each matrix."""
        if len({(s.format, s.shape[0], s.shape[2]) for s in stacks}) != 1:
            raise ValueError(
                f"cat needs stacks of one format, count and width, got {[(s.format, s.shape) for s in stacks]}"
            )
        e, _, k = stacks[0].shape
        return QuantStack(
            torch.cat([s.data for s in stacks], 1), stacks[0].format, (e, sum(s.shape[1] for s in stacks), k)
        )

    def unbind(self) -> list[QuantWeight]:
        return [QuantWeight(data, self.format, self.shape[1:]) for data in self.data.unbind()]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[E, N, K] of `dtype`."""
        return torch.stack([w.dequantize(dtype) for w in self.unbind()])


def dense(weight: Tensor | QuantWeight | QuantStack) -> Tensor:
    """A weight as a plain tensor: what a kernel without quantised formats packs."""
    return weight if isinstance(weight, Tensor) else weight.dequantize()


# ---- decoders: raw rows u8 [N, bytes] -> Codes -----------------------------------------------------------------------


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [N, blocks]."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).float().squeeze(-1)


def _nibbles(raw: Tensor) -> Tensor:
    """u8 [..., B] -> [..., 2 * B]: the low nibbles, then the high ones."""
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _q4_0(data: Tensor, n: int, k: int) -> Codes:
    blocks = data.view(n, k // 32, 18)
    return Codes(_nibbles(blocks[:, :, 2:]).reshape(n, k), 8, _half(blocks, 0), None, 32)


def _q4_1(data: Tensor, n: int, k: int) -> Codes:
    blocks = data.view(n, k // 32, 20)
    return Codes(_nibbles(blocks[:, :, 4:]).reshape(n, k), 0, _half(blocks, 0), _half(blocks, 2), 32)


def _q5_0(data: Tensor, n: int, k: int) -> Codes:
    blocks = data.view(n, k // 32, 22)
    high = blocks[:, :, 2:6]  # bit i of the 32 belongs to value i
    bits = torch.stack([(high >> bit) & 1 for bit in range(8)], dim=-1).flatten(2)
    return Codes((_nibbles(blocks[:, :, 6:]) | (bits << 4)).reshape(n, k), 16, _half(blocks, 0), None, 32)


def _q8_0(data: Tensor, n: int, k: int) -> Codes:
    blocks = data.view(n, k // 32, 34)
    return Codes((blocks[:, :, 2:] ^ 0x80).reshape(n, k), 128, _half(blocks, 0), None, 32)


#: twice the values of e2m1 (OCP Microscaling Formats 1.0), by the magnitude bits of a code
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)


def _mxfp4(data: Tensor, n: int, k: int) -> Codes:
    blocks = data.view(n, k // 32, 17)
    table = torch.tensor([12 + v for v in _E2M1] + [12 - v for v in _E2M1], dtype=torch.uint8)
    scale = torch.ldexp(torch.ones(n, k // 32), blocks[:, :, 0].to(torch.int32) - 128)  # half of 2^(e - 127)
    return Codes(table[_nibbles(blocks[:, :, 1:]).long()].reshape(n, k), 12, scale, None, 32)


def mxfp4_of(blocks: Tensor, scales: Tensor) -> QuantWeight:
    """The weight of u8 [N, K/32, 16], a byte two neighbours, low nibble first, and their exponents u8 [N, K/32]: as checkpoints
    of gpt-oss hold it."""
    n, count = scales.shape
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [N, K/32, 32]
    halves = codes[..., :16] | (codes[..., 16:] << 4)
    return QuantWeight(torch.cat([scales[..., None], halves], -1).flatten(1), "mxfp4", (n, 32 * count))


def _int4_32(data: Tensor, n: int, k: int) -> Codes:
    blocks = data.view(n, k // 32, 18)
    scale = blocks[:, :, :2].contiguous().view(torch.bfloat16).view(n, k // 32).float()
    return Codes(_nibbles(blocks[:, :, 2:]).reshape(n, k), 8, scale, None, 32)


def int4_of(codes: Tensor, scales: Tensor) -> QuantWeight:
    """The weight of codes u8 [N, K] in 0 .. 15, which stand for -8 .. 7, and their scales bf16 [N, K/32]: as checkpoints of
    Kimi-K2.5 hold it."""
    n, k = codes.shape
    blocks = codes.view(n, k // 32, 32)
    halves = blocks[..., :16] | (blocks[..., 16:] << 4)
    scale = scales.contiguous().view(torch.uint8).view(n, k // 32, 2)
    return QuantWeight(torch.cat([scale, halves], -1).flatten(1), "int4_32", (n, k))


def _q4_k(data: Tensor, n: int, k: int) -> Codes:
    blocks = data.view(n, k // 256, 144)
    packed = blocks[:, :, 4:16]
    a, b, c = packed[:, :, 0:4], packed[:, :, 4:8], packed[:, :, 8:12]
    scale = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], dim=-1).float() * _half(blocks, 0)[:, :, None]
    minimum = torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], dim=-1).float() * _half(blocks, 2)[:, :, None]
    q = _nibbles(blocks[:, :, 16:].reshape(n, k // 256, 4, 32))
    return Codes(q.reshape(n, k), 0, scale.reshape(n, k // 32), -minimum.reshape(n, k // 32), 32)


def _q6_k(data: Tensor, n: int, k: int) -> Codes:
    blocks = data.view(n, k // 256, 210)
    low = blocks[:, :, :128].reshape(n, k // 256, 2, 2, 32)
    high = blocks[:, :, 128:192].reshape(n, k // 256, 2, 1, 32)
    nibbles = torch.cat([low & 15, low >> 4], dim=3)  # [.., half, 4 groups, 32]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 1, 4, 1)
    q = nibbles | (((high >> shifts) & 3) << 4)
    scale = blocks[:, :, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)[:, :, None]
    return Codes(q.reshape(n, k), 32, scale.reshape(n, k // 16), None, 16)


_DECODERS = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q8_0": _q8_0, "mxfp4": _mxfp4, "int4_32": _int4_32, "q4_k": _q4_k, "q6_k": _q6_k,
}  # fmt: skip
