# pyright: strict
"""Storage formats of a tensor argument: what a signature's strings mean.

A format is dense (a dtype) or block-quantised: `block` values along K share a scale (and a minimum), as GGUF lays them
out. The names are the strings that `select` takes and that a weight's `format` carries.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """One storage format. `block_bytes / block` is the bytes a value takes in memory."""

    name: str
    storage: str  # dtype of the stored tensor
    block: int = 1  # values a block along the last dimension
    block_bytes: int = 0  # bytes a block, scales included
    scale: str | None = None  # dtype and granularity of the scale; None: dense
    minimum: str | None = None  # the same of an additive minimum

    @property
    def quantised(self) -> bool:
        return self.scale is not None


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("float32", "float32", 1, 4),
        Format("float16", "float16", 1, 2),
        Format("bfloat16", "bfloat16", 1, 2),
        Format("int32", "int32", 1, 4),
        Format("q4_0", "uint8", 32, 18, scale="float16 a block"),
        Format("q4_1", "uint8", 32, 20, scale="float16 a block", minimum="float16 a block"),
        Format("q5_0", "uint8", 32, 22, scale="float16 a block"),
        Format("q8_0", "uint8", 32, 34, scale="float16 a block"),
        Format("q4_k", "uint8", 256, 144, scale="6 bits a 32 values times float16", minimum="6 bits a 32 values"),
        Format("mxfp4", "uint8", 32, 17, scale="a power of two a block"),
        Format("int4_32", "uint8", 32, 18, scale="bfloat16 a block"),
        Format("q6_k", "uint8", 256, 210, scale="int8 a 16 values times float16"),
    )
}

DENSE = frozenset({"float32", "bfloat16"})
QUANTISED = frozenset(name for name, fmt in FORMATS.items() if fmt.quantised)


def format_of(name: str) -> Format:
    """The format called `name`; KeyError that lists the known ones otherwise."""
    try:
        return FORMATS[name]
    except KeyError:
        raise KeyError(f"unknown format '{name}'; the known formats are: {', '.join(FORMATS)}") from None
