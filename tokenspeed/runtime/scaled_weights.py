"""Weights that a checkpoint stores in few bits beside scales. INT4 in groups of 32 may be kept so; others are dequantised as they
are read.

FP8 in blocks: `NAME` float8_e4m3 [N, K] and `NAME_scale_inv` [N / n, K / k], what each block of n x k values is multiplied by
(DeepSeek-V3, Qwen3-FP8). INT4 in groups: `NAME_packed` int32 [N, K / 8], eight values a word from its lowest bits up, 8 more
than they are, and `NAME_scale` [N, K / g], a group of g values of a row each; `NAME_shape` is [N, K] (Kimi-K2.5, pack-quantized
of compressed-tensors).

Invariant: a value is the stored number times its scale in float32, whatever rows are asked for, so every rank that holds a part
of a matrix holds what one rank does there, with the scales of its own blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed.kernels.weights import QuantWeight, int4_of

BLOCK = (128, 128)  # of FP8, where the configuration does not say
_SCALES = {"_scale_inv": "fp8", "_packed": "int4"}
_PARTS = {"fp8": ("", "_scale_inv"), "int4": ("_packed", "_scale", "_shape")}
_REFUSED = ("_zero_point", "_g_idx")
_METHODS = {"fp8": "fp8", "int4": "compressed-tensors"}  # what a configuration calls them

Read = Callable[[str], Any]  # a tensor's slice by name


class ScaleError(ValueError):
    """Says what does not fit; the caller knows which files."""


@dataclass(frozen=True)
class Scaled:
    """One weight; `parts`: the tensors that it is stored in."""

    name: str
    kind: str

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.name + suffix for suffix in _PARTS[self.kind])

    def format(self, read: Read) -> str:
        """What the weight may be kept as: blocks of 32 values, or plain numbers."""
        if self.kind == "int4":
            words, groups = (tuple(read(part).get_shape()) for part in self.parts[:2])
            in_blocks = len(words) == len(groups) == 2 and words[1] * 8 == groups[1] * 32
            if in_blocks and read(self.parts[1]).get_dtype() == "BF16":
                return "int4_32"
        return "bfloat16"

    def rows(
        self, read: Read, rows: tuple[int, int], shape: tuple[int, int], config: Mapping[str, Any]
    ) -> Tensor | QuantWeight:
        """Rows start .. stop of the weight, of which the model expects `shape`: in its format, or float32 [stop - start, K].
        ScaleError."""
        first, second, *rest = (read(part) for part in self.parts)
        said = _said(config, self.kind)
        if self.kind == "fp8":
            return _fp8(first, second, rows, shape, _block(said))
        codes, scales = _int4(first, second, rest[0], rows, shape, _group(said))
        if self.format(read) == "int4_32":
            return int4_of(codes, scales)
        return (codes.float() - 8) * scales.float().repeat_interleave(shape[1] // scales.shape[1], 1)


def find_scaled(names: Collection[str]) -> dict[str, Scaled]:
    """The weights among tensors of these names that are stored so, by the names that models know them by. ScaleError where a
    part is missing, or says more than a scale."""
    out: dict[str, Scaled] = {}
    for name in names:
        suffix = next((s for s in _SCALES if name.endswith(f".weight{s}")), None)
        if suffix is None:
            continue
        found = Scaled(name.removesuffix(suffix), _SCALES[suffix])
        if lacking := [p for p in found.parts if p not in names]:
            raise ScaleError(f"{name!r} is there without {lacking[0]!r}; download the checkpoint again")
        if found.name not in found.parts and found.name in names:
            raise ScaleError(f"{found.name!r} is there twice, as it is and as {name!r}: remove one of them")
        if more := [found.name + s for s in _REFUSED if found.name + s in names]:
            raise ScaleError(
                f"{more[0]!r}: weights with zero points or groups out of order are not read; quantise symmetrically, or convert "
                "the checkpoint to bfloat16"
            )
        out[found.name] = found
    return out


def _said(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The configuration's own words about its weights; empty where it has none. ScaleError where they are of another method."""
    said = config.get("quantization_config") or {}
    if not isinstance(said, Mapping):
        raise ScaleError(f"quantization_config is {said!r}: expected an object")
    method = said.get("quant_method", _METHODS[kind])
    if method != _METHODS[kind]:
        raise ScaleError(
            f"{kind}, while quantization_config.quant_method is {method!r}: tensors of these names are read where it is "
            f"{_METHODS[kind]!r}; convert the checkpoint to bfloat16"
        )
    return said


def _block(said: Mapping[str, Any]) -> tuple[int, int]:
    size = said.get("weight_block_size", BLOCK)
    if not (isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise ScaleError(f"quantization_config.weight_block_size is {size!r}: expected two numbers above zero")
    return size[0], size[1]


def _group(said: Mapping[str, Any]) -> int:
    """Values a group has by the configuration; 0 where it does not say. ScaleError where it says what is not read."""
    groups = said.get("config_groups", {})
    schemes = list(groups.values()) if isinstance(groups, Mapping) else [groups]
    sizes: set[int] = set()
    for scheme in schemes:
        weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ScaleError(f"quantization_config.config_groups holds {scheme!r}: expected an object with weights")
        for key, read in (
            ("num_bits", 4),
            ("type", "int"),
            ("symmetric", True),
            ("actorder", None),
            ("strategy", "group"),
        ):
            if weights.get(key, read) != read:
                raise ScaleError(
                    f"words whose quantization_config says {key} {weights[key]!r}; only {read!r} is read: convert the "
                    "checkpoint to bfloat16"
                )
        size = weights.get("group_size", 0)
        if type(size) is not int or size < 0:
            raise ScaleError(f"words whose quantization_config says group_size {size!r}: expected a number above zero")
        sizes.add(size)
    return sizes.pop() if len(sizes) == 1 else 0  # several: the scales themselves say which


def _finite(scales: Tensor) -> Tensor:
    """Scales in float32."""
    wide = scales.float()
    if not wide.isfinite().all():
        raise ScaleError("values whose scales are NaN or infinite; download the checkpoint again")
    return wide


def _fp8(weight: Any, scales: Any, rows: tuple[int, int], shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    want = tuple(-(-n // b) for n, b in zip(shape, block))
    if weight.get_dtype() != "F8_E4M3" or tuple(weight.get_shape()) != shape or tuple(scales.get_shape()) != want:
        raise ScaleError(
            f"{weight.get_dtype()} {list(weight.get_shape())} with scales {list(scales.get_shape())} for blocks of {list(block)}; the "
            f"configuration asks for F8_E4M3 {list(shape)} with scales {list(want)}"
        )
    first, last = rows[0] // block[0], -(-rows[1] // block[0])
    factor = _finite(scales[first:last]).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    skipped = rows[0] - first * block[0]
    return weight[rows[0] : rows[1]].float() * factor[skipped : skipped + rows[1] - rows[0], : shape[1]]


def _int4(
    packed: Any, scales: Any, extent: Any, rows: tuple[int, int], shape: tuple[int, int], group: int
) -> tuple[Tensor, Tensor]:
    """Codes u8 [stop - start, K], 8 more than the values, and the scales of their groups."""
    groups, of = tuple(scales.get_shape()), tuple(extent.get_shape())
    fits = len(groups) == 2 and groups[0] == shape[0] and groups[1] > 0 and shape[1] % groups[1] == 0
    fits = fits and group in (0, shape[1] // groups[1])
    said, words = tuple(extent[:].tolist()) if len(of) == 1 else of, (shape[0], -(-shape[1] // 8))
    if packed.get_dtype() != "I32" or tuple(packed.get_shape()) != words or said != shape or not fits:
        equal = f"groups of {group}" if group else "equal groups"
        raise ScaleError(
            f"{packed.get_dtype()} words {list(packed.get_shape())} of a weight {list(said)} with scales {list(groups)}; the "
            f"configuration asks for I32 {list(words)}, eight 4-bit values each, of {list(shape)} with scales of {equal}"
        )
    mine = scales[rows[0] : rows[1]]
    _finite(mine)
    bits = packed[rows[0] : rows[1]][..., None] >> 4 * torch.arange(8, dtype=torch.int32) & 15
    return bits.flatten(1)[:, : shape[1]].to(torch.uint8), mine
