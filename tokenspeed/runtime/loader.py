"""Weights of one rank: reads the slices that the weight map gives it, puts them into padded local matrices.

Invariant: a parameter is one matrix [rows of all segments, columns] in the storage format the artifact names, a stack of
them [experts, rows of all segments, columns], or a vector; parameters made of the same slices share one object. Nothing is
left uninitialised: what no slice covers is zero.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed.compiler.weightmap import EACH, Entry, Run, Segment, WeightMap
from tokenspeed.kernels.formats import QUANTISED, format_of
from tokenspeed.kernels.weights import QuantStack, QuantWeight
from tokenspeed.runtime.checkpoint import Checkpoint, CheckpointError, Stored, each_of_stack
from tokenspeed.runtime.rope import rope_table

log = logging.getLogger(__name__)

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def load_weights(
    m: WeightMap, checkpoint: Checkpoint, rank: int, progress: Callable[[int, int], None] = lambda done, total: None,
    device: torch.device | str = "cpu", length: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Local parameters by name, on `device`, for requests of up to `length` tokens. CheckpointError names a missing tensor or a
    wrong shape."""
    if rank == 0:
        _refuse_strangers(m, checkpoint)
    out: dict[str, Any] = {}
    shared: dict[object, Any] = {}
    for i, e in enumerate(m.entries):
        key = (e.kind, e.segments, str(e.attrs))
        if key not in shared:
            if e.kind == "rope":
                shared[key] = rope_table(dict(e.attrs or {}), length).to(device)
            else:
                shared[key] = _parameter(m, e, checkpoint, rank, torch.device(device))
        out[e.name] = shared[key]
        progress(i + 1, len(m.entries))
    return out


#: what files hold beside the weights of a model: a head that is tied, tables that are computed here, and the copies of embedding
#: and head in layers that guess tokens ahead
_KNOWN = re.compile(
    r"lm_head\.weight|rope_freqs\.weight|.*\.rotary_emb\.inv_freq|.*\.(masked_bias|attn\.bias)"
    r"|model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"
)


#: scales of an FP8 cache, under the names of several tools
_CACHE_SCALE = re.compile(
    r"model\.layers\.\d+\.self_attn\.([qkv]_scale|kv_scale|([qkv])_proj\.(\2_scale|output_scale)|attn\.[qkv]_scale)"
)


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
    scales = {name for name in strange if _CACHE_SCALE.fullmatch(name)}
    if scales:
        log.info(
            "%d scales of an FP8 cache are left out: keys and values are kept as floats that need none", len(scales)
        )
    drafts = any(
        _drafts(source, checkpoint.config) for source in sources
    )  # a model is one half of a checkpoint or the other
    others = {name for name in strange if name not in scales and _drafts(name, checkpoint.config) != drafts}
    if others:
        what = "the main model" if drafts else "the layers that predict further tokens"
        log.info("%d tensors of %s are left out", len(others), what)
    strange = [name for name in strange if name not in others | scales]
    if strange:
        kept = (checkpoint.config.get("quantization_config") or {}).get("quant_method")
        raise CheckpointError(
            f"the checkpoint holds {len(strange)} tensors that this model has no place for, as {', '.join(sorted(strange)[:3])}: "
            + (
                f"its weights are quantised ({kept}), which this family does not read: convert them to bfloat16"
                if kept
                else "its configuration (layers, biases) or its family is another"
            )
        )


def _drafts(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to a layer that predicts a further token (MTP): behind the model's own, or under `mtp`."""
    layer, own = re.match(r"model\.layers\.(\d+)\.", name), config.get("num_hidden_layers", 0)
    return name.startswith("mtp.") or (
        layer is not None and own <= int(layer[1]) < own + (config.get("num_nextn_predict_layers") or 0)
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
