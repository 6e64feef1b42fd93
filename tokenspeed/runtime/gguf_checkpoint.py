"""A GGUF file as a checkpoint: Hugging Face names and configuration, tensors in their block formats, memory mapped.

Invariant: rows of a matrix are contiguous bytes of the file, so a rank touches only the pages of its rows. Files of the
llama architecture hold query and key rows interleaved for another rotary layout; they are put back in halves here.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenspeed.kernels.formats import FORMATS
from tokenspeed.kernels.weights import QuantWeight
from tokenspeed.runtime.checkpoint import CheckpointError, Stored
from tokenspeed.runtime.gguf_metadata import read_header

_TYPES = {
    0: "float32",
    1: "float16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    8: "q8_0",
    12: "q4_k",
    14: "q6_k",
    30: "bfloat16",
}
_DENSE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}


@dataclass(frozen=True)
class _Tensor:
    format: str
    shape: tuple[int, ...]  # Hugging Face order: rows first
    start: int  # byte in the file

    @property
    def row_bytes(self) -> int:
        fmt = FORMATS[self.format]
        return self.shape[-1] // fmt.block * fmt.block_bytes if len(self.shape) > 1 else fmt.block_bytes


class GgufCheckpoint:
    """One .gguf file. `embedded`: it is the installed model package's, found again by name and not by path."""

    def __init__(self, path: Path, embedded: bool = False) -> None:
        self.path, self.embedded = path, embedded
        header = read_header(path)
        self.metadata = header.metadata
        self.arch = str(self.metadata.get("general.architecture"))
        if self.arch not in _ARCHITECTURES:
            raise CheckpointError(
                f"{path}: architecture {self.arch!r} is not supported; supported: {', '.join(sorted(_ARCHITECTURES))}"
            )
        self._file = path.open("rb")
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the buffer is read-only and nothing writes to it
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.tensors = self._read_tensors(header.tensors, header.data_start)
        self.config = self._config()

    def _read_tensors(self, raw: list[tuple[str, tuple[int, ...], int, int]], start: int) -> dict[str, _Tensor]:
        out: dict[str, _Tensor] = {}
        for name, dims, kind, offset in raw:
            if kind not in _TYPES:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} has a storage type (ggml type {kind}) that is not supported"
                )
            hf = _hf_name(name)
            if hf is None:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is none that architecture {self.arch!r} is known to have"
                )
            t = _Tensor(_TYPES[kind], tuple(reversed(dims)), start + offset)
            block = FORMATS[t.format].block
            if not dims or 0 in dims or dims[0] % block:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} of type {t.format} has dimensions {list(dims)}; they must be above 0, the "
                    f"first a multiple of {block}: fetch the file again"
                )
            end = t.start + t.row_bytes * math.prod(t.shape[:-1] if len(t.shape) > 1 else t.shape)
            if end > len(self._map):
                raise CheckpointError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte {end} of {len(self._map)}; fetch the file again"
                )
            out[hf] = t
        return out

    def _config(self) -> dict[str, Any]:
        m, a = self.metadata, self.arch

        def need(key: str) -> Any:
            if f"{a}.{key}" not in m:
                raise CheckpointError(f"{self.path} has no metadata key {a}.{key}")
            return m[f"{a}.{key}"]

        heads, hidden = need("attention.head_count"), need("embedding_length")
        if not heads:
            raise CheckpointError(f"{self.path}: {a}.attention.head_count is 0")
        embed = self.tensors.get("model.embed_tokens.weight")
        if embed is None:
            raise CheckpointError(f"{self.path} has no tensor token_embd.weight")
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[a]], "model_type": a, "hidden_size": hidden, "num_hidden_layers": need("block_count"),
            "num_attention_heads": heads, "num_key_value_heads": m.get(f"{a}.attention.head_count_kv", heads),
            "head_dim": m.get(f"{a}.attention.key_length", hidden // heads), "intermediate_size": need("feed_forward_length"),
            "rms_norm_eps": _f32(need("attention.layer_norm_rms_epsilon")), "rope_theta": float(m.get(f"{a}.rope.freq_base", 10000.0)),
            "max_position_embeddings": need("context_length"), "vocab_size": embed.shape[0], "hidden_act": "silu",
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "attention_bias": a == "llama" and "model.layers.0.self_attn.q_proj.bias" in self.tensors,
            "sliding_window": m.get(f"{a}.attention.sliding_window"),
        }  # fmt: skip
        kind = m.get(f"{a}.rope.scaling.type")
        if kind and kind != "none":
            config["rope_scaling"] = {"rope_type": kind, "factor": m.get(f"{a}.rope.scaling.factor")}
        if "rope_freqs.weight" in self.tensors:  # Llama 3.x: the scaled frequencies are stored as divisors
            n = math.prod(self.tensors["rope_freqs.weight"].shape)
            factors = self.matrix("rope_freqs.weight", (0, n), (n, 1))
            assert isinstance(factors, torch.Tensor)
            config["rope_scaling"] = {"rope_type": "divisors", "divisors": factors.flatten().tolist()}
        return config

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def stored(self, name: str) -> str | None:
        t = self.tensors.get(name)
        return t.format if t else None

    def matrix(self, name: str, rows: tuple[int, int], shape: tuple[int, int]) -> Stored:
        t = self.tensors[name]
        if math.prod(t.shape) != shape[0] * shape[1] or (len(t.shape) == 2 and t.shape != shape):
            raise CheckpointError(
                f"{self.path}: {name!r} has shape {list(t.shape)}, the configuration asks for {list(shape)}"
            )
        if self.arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            return self._halves(t, rows)
        return self._rows(t, None, rows)

    def _rows(self, t: _Tensor, index: torch.Tensor | None, rows: tuple[int, int]) -> Stored:
        start = t.start + rows[0] * t.row_bytes
        data = self._bytes[start : start + (rows[1] - rows[0]) * t.row_bytes].view(rows[1] - rows[0], t.row_bytes)
        if index is not None:
            data = data[index]
        if t.format in _DENSE:
            return data.clone().view(_DENSE[t.format])  # a copy: rows of a file need not be aligned for their dtype
        return QuantWeight(data, t.format, (data.shape[0], t.shape[-1]))

    def _halves(self, t: _Tensor, rows: tuple[int, int]) -> Stored:
        """Rows of q or k in Hugging Face order: in each head, row 2i of the file is row i, row 2i+1 is row d/2 + i."""
        d = self.config["head_dim"]
        if rows[0] % d or rows[1] % d:
            raise CheckpointError(f"{self.path}: rows {rows} of a query or key weight cut a head of {d}")
        order = torch.arange(rows[1] - rows[0]).view(-1, d // 2, 2).transpose(1, 2).flatten()
        return self._rows(t, order, rows)

    def note(self) -> dict[str, Any]:
        return {"form": "embedded"} if self.embedded else {"form": "gguf", "path": str(self.path.resolve())}

    def sources(self) -> list[Path]:
        return [self.path]


def _hf_name(name: str) -> str | None:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("blk."):
        layer, _, part = stem.removeprefix("blk.").partition(".")
        return f"model.layers.{layer}.{_LAYER[part]}.{suffix}" if part in _LAYER else None
    return f"{_TOP[stem]}.{suffix}" if stem in _TOP else None


def _f32(x: float) -> float:
    """The shortest decimal that is this float32: 9.999999747378752e-06 is 1e-05."""
    return float(f"{x:.7g}")
