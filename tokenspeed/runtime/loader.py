"""Weights of one rank: reads the slices that the weight map gives it, puts them into padded local matrices.

Invariant: a parameter is one matrix [rows of all segments, columns] in the storage format the artifact names, a stack of
them [experts, rows of all segments, columns], or a vector; parameters made of the same slices share one object. Nothing is
left uninitialised: what no slice covers is zero.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed.compiler.weightmap import EACH, Entry, Run, Segment, WeightMap
from tokenspeed.kernels.formats import QUANTISED, format_of
from tokenspeed.kernels.weights import QuantStack, QuantWeight
from tokenspeed.runtime.checkpoint import Checkpoint, CheckpointError, Stored, each_of_stack

log = logging.getLogger(__name__)

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def load_weights(
    m: WeightMap, checkpoint: Checkpoint, rank: int, progress: Callable[[int, int], None] = lambda done, total: None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Local parameters by name, on `device`. CheckpointError names a missing tensor or a wrong shape."""
    if rank == 0:
        _refuse_strangers(m, checkpoint)
    out: dict[str, Any] = {}
    shared: dict[object, Any] = {}
    for i, e in enumerate(m.entries):
        key = (e.kind, e.segments, str(e.attrs))
        if key not in shared:
            if e.kind == "rope":
                shared[key] = rope_table(dict(e.attrs or {})).to(device)
            else:
                shared[key] = _parameter(m, e, checkpoint, rank, torch.device(device))
        out[e.name] = shared[key]
        progress(i + 1, len(m.entries))
    return out


#: what files hold beside the weights of a model: a head that is tied, tables that are computed here, and layers that guess
#: tokens ahead
_KNOWN = re.compile(r"lm_head\.weight|mtp\..*|rope_freqs\.weight|.*\.rotary_emb\.inv_freq|.*\.(masked_bias|attn\.bias)")


def _refuse_strangers(m: WeightMap, checkpoint: Checkpoint) -> None:
    """CheckpointError where the checkpoint holds tensors that the model has no place for: it would run without them."""
    sources = {source.partition("#")[0] for e in m.entries for s in e.segments for source in s.sources}
    sources |= {s.removesuffix("_blocks") + "_scales" for s in sources if s.endswith("_blocks")}
    stacked = [re.compile(re.escape(s).replace(re.escape(EACH), r"\d+")) for s in sources if EACH in s]
    strange = [
        name
        for name in checkpoint.names()
        if name not in sources and not sources.intersection(each_of_stack(name)) and not _KNOWN.fullmatch(name)
        if not any(p.fullmatch(name) for p in stacked)
    ]
    if strange:
        raise CheckpointError(
            f"the checkpoint holds {len(strange)} tensors that this model has no place for, as {', '.join(sorted(strange)[:3])}: "
            "its configuration (layers, biases) or its family is another"
        )


def _parameter(m: WeightMap, e: Entry, checkpoint: Checkpoint, rank: int, device: torch.device) -> Any:
    parts = [_segment(m, e, s, checkpoint, rank, device) for s in e.segments]
    first = parts[0]
    if isinstance(first, QuantStack):
        return first if len(parts) == 1 else QuantStack.cat([p for p in parts if isinstance(p, QuantStack)])
    if isinstance(first, QuantWeight):
        return first if len(parts) == 1 else QuantWeight.cat([p for p in parts if isinstance(p, QuantWeight)])
    whole = first if len(parts) == 1 else torch.cat([p for p in parts if isinstance(p, Tensor)], -2)
    is_vector = all(len(s.type.dims) == s.rows for s in e.segments)
    if e.attrs:
        whole += e.attrs["offset"]
    return whole if not is_vector else whole.squeeze(-1) if e.segments[0].stacked else whole.flatten()


def _segment(
    m: WeightMap, e: Entry, s: Segment, checkpoint: Checkpoint, rank: int, device: torch.device
) -> Stored | QuantStack:
    if s.stacked:
        held = [_tensor(m, e, part, checkpoint, rank, device) for part in m.tensors(s, rank)]
        quantised = [x for x in held if isinstance(x, QuantWeight)]
        return QuantStack.of(quantised) if quantised else torch.stack([_dense(x) for x in held])
    return _tensor(m, e, s, checkpoint, rank, device)


def _tensor(m: WeightMap, e: Entry, s: Segment, checkpoint: Checkpoint, rank: int, device: torch.device) -> Stored:
    """What a rank holds of one checkpoint tensor."""
    source = next((n for n in s.sources if checkpoint.stored(n) is not None), None)
    if source is None:
        raise CheckpointError(
            f"the checkpoint has no tensor {' or '.join(map(repr, s.sources))}, which @{e.name} is made of"
        )
    if source != s.sources[0] and "#" not in source and rank == 0:
        log.warning("the checkpoint has no %r: @%s is tied to %r instead", s.sources[0], e.name, source)
    rows, cols, local = m.matrix_pieces(s, rank)
    fmt = s.type.dtype
    if not m.keeps(s.type, rank):
        return torch.zeros(local, dtype=_DTYPES[fmt], device=device)
    if fmt in QUANTISED:
        return _quantised(m, s, source, checkpoint, rows, cols, local)
    out = torch.zeros(local, dtype=_DTYPES[fmt], device=device)
    if not rows:  # a rank of padding alone
        return out
    held, first = _read(m, s, source, checkpoint, rows)
    dense = _dense(held)
    for src, dst, n in rows:
        for c_src, c_dst, width in cols:
            block = dense[src - first : src - first + n, c_src : c_src + width]
            out[dst : dst + n, c_dst : c_dst + width] = block.to(out.dtype)
    return out


def _read(m: WeightMap, s: Segment, source: str, checkpoint: Checkpoint, rows: list[Run]) -> tuple[Stored, int]:
    """What a segment's runs of rows lie in, in one read as they lie close, and the number of its first row. Of a tensor that
    several segments share whole periods are read."""
    start, stop, period = s.part or (0, 1, 1)
    width = stop - start
    first, last = min(src for src, _, _ in rows) // width, -(-max(src + n for src, _, n in rows) // width)
    held = checkpoint.matrix(source, (first * period, last * period), m.shape(s))
    if s.part is None:
        return held, first

    def picked(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, period))[:, start:stop].flatten(0, 1)

    if isinstance(held, QuantWeight):
        data = picked(held.data)
        return QuantWeight(data, held.format, (data.shape[0], held.shape[1])), first * width
    return picked(held), first * width


def _dense(part: Stored) -> Tensor:
    return part.dequantize(torch.float32) if isinstance(part, QuantWeight) else part


def _quantised(
    m: WeightMap,
    s: Segment,
    source: str,
    checkpoint: Checkpoint,
    rows: list[Any],
    cols: list[Any],
    local: tuple[int, int],
) -> QuantWeight:
    fmt = format_of(s.type.dtype)
    data = torch.zeros(local[0], local[1] // fmt.block * fmt.block_bytes, dtype=torch.uint8)
    if not rows:
        return QuantWeight(data, s.type.dtype, local)
    held, first = _read(m, s, source, checkpoint, rows)
    if not isinstance(held, QuantWeight) or held.format != s.type.dtype:
        raise CheckpointError(
            f"{source!r} is stored as {checkpoint.stored(source)}, the artifact was compiled for {s.type.dtype}; compile it again"
        )
    for src, dst, n in rows:
        part = held.rows(src - first, src - first + n)
        for c_src, c_dst, width in cols:
            block = part.columns(c_src, c_src + width).data
            at = c_dst // fmt.block * fmt.block_bytes
            data[dst : dst + n, at : at + block.shape[1]] = block
    return QuantWeight(data, s.type.dtype, local)


def rope_table(attrs: dict[str, Any]) -> Tensor:
    """float32 [positions, dim]: cos of dim/2 angles, then sin.

    Angles are position * theta^(-2i/dim) (Su et al., 2104.09864); `linear` divides positions by `factor`; `divisors` holds
    one divisor a frequency (as GGUF files of Llama 3.x do); `llama3` divides
    low frequencies by `factor` and blends between `low_freq_factor` and `high_freq_factor` turns of the original context.
    `yarn` (2309.00071) blends over the frequencies that turn `beta_fast` to `beta_slow` times in it, and scales both halves.
    The table depends on the configuration alone, never on the length of a request.
    """
    dim, p, gain = int(attrs["dim"]), dict(attrs["parameters"]), 1.0
    inv = 1.0 / (float(p["rope_theta"]) ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if p["rope_type"] == "linear":
        inv = inv / float(p["factor"])
    elif p["rope_type"] == "divisors":
        inv = inv / torch.tensor(p["divisors"])
    elif p["rope_type"] == "llama3":
        old = float(p["original_max_position_embeddings"])
        low, high, factor = float(p["low_freq_factor"]), float(p["high_freq_factor"]), float(p["factor"])
        wavelength = 2 * math.pi / inv
        smooth = (old / wavelength - low) / (high - low)
        blended = (1 - smooth) * inv / factor + smooth * inv
        scaled = torch.where(wavelength > old / low, inv / factor, inv)
        between = (wavelength <= old / low) & (wavelength >= old / high)
        inv = torch.where(between, blended, scaled)
    elif p["rope_type"] == "yarn":
        inv, gain = _yarn(inv, p), float(p["attention_factor"])
    angle = torch.arange(int(attrs["positions"]), dtype=torch.float32)[:, None] * inv
    return torch.cat([angle.cos(), angle.sin()], dim=1) * gain


def _yarn(inv: Tensor, p: dict[str, Any]) -> Tensor:
    """Frequencies [dim/2]: those that turn often in the original context as they are, slow ones divided by `factor`."""
    dim, theta = 2 * len(inv), float(p["rope_theta"])

    def turning(times: float) -> float:
        """Index of the frequency that turns so often in the original context."""
        return dim * math.log(p["original_max_position_embeddings"] / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(p["beta_fast"]), turning(p["beta_slow"])
    if p["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return inv / float(p["factor"]) * slow + inv * (1 - slow)
