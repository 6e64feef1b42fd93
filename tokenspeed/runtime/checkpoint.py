"""A checkpoint: the configuration and the tensors of a model, whatever file form they have. Opening reads headers only.

Invariant: `matrix(name, rows, cols)` reads just the rows a rank holds (and of those the columns), in the stored format;
names are Hugging Face names, also out of a GGUF. Errors name the file and what is missing in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenspeed.kernels.weights import QuantWeight, mxfp4_of
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.scaled_weights import ScaleError, find_scaled

Stored = Tensor | QuantWeight
_DENSE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

MAX_POSITIONS = 1 << 24  # of a model; the rope table holds a row for each


#: the tensors that hold the matrices of all experts of a layer, one under the other: what each holds of an expert
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


class CheckpointError(StartupError):
    """The model's files cannot be used; says which file and why."""


class Checkpoint(Protocol):
    """What the compiler and the loader ask of a model's files."""

    config: dict[str, Any]

    def names(self) -> Collection[str]:
        """The tensors that its files hold; none where weights are made up."""
        ...

    def stored(self, name: str) -> str | None:
        """Storage format of a tensor (float32, bfloat16, float16, q4_1 ...), None where the checkpoint has no such tensor.
        `name#3` is index 3 of tensor `name`, `name#3'` its transpose."""
        ...

    def matrix(self, name: str, rows: tuple[int, int], shape: tuple[int, int]) -> Stored:
        """Rows [start, stop) of a tensor seen as a matrix of `shape`; CheckpointError where its own shape differs."""
        ...

    def note(self) -> dict[str, Any]:
        """What checkpoint.json keeps, so that an artifact finds its weights again."""
        ...

    def sources(self) -> list[Path]:
        """The files that hold its tensors, in a fixed order; none where weights are made up."""
        ...


class SafetensorsCheckpoint:
    """A Hugging Face directory: config.json and one or several .safetensors files. Of a multi-modal model it is the language
    model, under the names that a text model has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_config(path / "config.json")
        self.files = self._index()
        self.stored_as = {name: name for name in self.files}
        if "text_config" in _read_json(path / "config.json"):
            self.stored_as = {text: name for name in self.files if (text := _text_name(name))}
            self.files = {text: self.files[name] for text, name in self.stored_as.items()}
        self._open: dict[str, Any] = {}
        self._missing()
        try:
            self.scaled = find_scaled(self.files)
        except ScaleError as e:
            raise CheckpointError(f"{path}: {e}") from None
        self.parts = {part for s in self.scaled.values() for part in s.parts}

    def _index(self) -> dict[str, str]:
        from safetensors import safe_open

        index = self.path / "model.safetensors.index.json"
        if index.exists():
            files = _read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
                raise CheckpointError(f"{index} has no weight_map of tensor names to file names; download it again")
            return files
        names: dict[str, str] = {}
        for f in sorted(self.path.glob("*.safetensors")):
            try:
                with safe_open(str(f), "pt") as h:
                    names.update((k, f.name) for k in h.keys())  # noqa: SIM118 (not a dict)
            except Exception as e:
                raise CheckpointError(f"{f} cannot be read: {e}; the download may be incomplete") from None
        if not names:
            raise CheckpointError(
                f"{self.path} has no .safetensors file; give a directory with config.json and weights, or --load-format dummy"
            )
        return names

    def _missing(self) -> None:
        lacking = sorted({f for f in self.files.values() if not (self.path / f).exists()})
        if lacking:
            raise CheckpointError(
                f"{self.path}: {len(lacking)} of {len(set(self.files.values()))} shards are missing: {', '.join(lacking[:3])}"
            )

    def _handle(self, name: str) -> Any:
        from safetensors import safe_open

        f = self.files[name]
        if f not in self._open:
            try:
                self._open[f] = safe_open(str(self.path / f), "pt")
            except Exception as e:
                raise CheckpointError(f"{self.path / f} cannot be read: {e}; the download may be incomplete") from None
        return self._open[f]

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(self.stored_as[name])

    def names(self) -> Collection[str]:
        return {*(self.files.keys() - self.parts), *self.scaled}

    def _of_stack(self, name: str) -> tuple[str, int, int, int] | None:
        """Of a matrix of one expert: the tensor of all experts that holds it, the expert, and which part of how many."""
        m = _EXPERT.fullmatch(name)
        for stack, parts in _STACKED.items() if m else ():
            if m and m[3] in parts and (whole := f"{m[1]}.{stack}") in self.files:
                return whole, int(m[2]), parts.index(m[3]), len(parts)
        return None

    def stored(self, name: str) -> str | None:
        name = name.partition("#")[0]
        if name in self.scaled:
            return self.scaled[name].format(self._slice)
        if name not in self.files:
            stack = self._of_stack(name)
            return self.stored(stack[0]) if stack else None
        if name.endswith("_blocks") and _scales(name) in self.files:
            return "mxfp4"
        try:
            dtype = self._slice(name).get_dtype()
        except CheckpointError:
            raise
        except Exception as e:
            raise CheckpointError(
                f"{self.path / self.files[name]} does not hold {name!r}, which the index promises: {e}"
            ) from None
        return _DENSE.get(dtype, dtype.lower())

    def matrix(self, name: str, rows: tuple[int, int], shape: tuple[int, int]) -> Stored:
        name, _, index = name.partition("#")
        if name in self.scaled and not index:
            try:
                return self.scaled[name].rows(self._slice, rows, shape, self.config)
            except ScaleError as e:
                raise CheckpointError(f"{self.path}: {name!r} is stored as {e}") from None
        stack = None if name in self.files else self._of_stack(name)
        name = stack[0] if stack else name
        part = self._slice(name)
        if name.endswith("_blocks") and _scales(name) in self.files:
            blocks, scales = part[int(index)], self._slice(_scales(name))[int(index)]
            if blocks.dim() != 3 or scales.shape != blocks.shape[:2] or (len(blocks), 32 * scales.shape[1]) != shape:
                raise CheckpointError(
                    f"{self.path}: {name!r} has blocks {list(blocks.shape)} and scales {list(scales.shape)} an expert, the "
                    f"configuration asks for {list(shape)}"
                )
            return mxfp4_of(blocks[rows[0] : rows[1]], scales[rows[0] : rows[1]])
        if part.get_dtype() not in _DENSE:  # such numbers mean nothing without their scales
            raise CheckpointError(
                f"{self.path / self.files[name]}: {name!r} is stored as {part.get_dtype()}; weights are read as "
                f"{', '.join(_DENSE)}: convert the checkpoint to bfloat16"
            )
        if index:
            part = part[int(index.rstrip("'"))]
            part = part.t() if index.endswith("'") else part
            _check_shape(self.path, f"{name}[{index}]", tuple(part.shape), shape)
            return part[rows[0] : rows[1]].reshape(rows[1] - rows[0], -1)
        if stack:
            _, expert, index, count = stack
            _check_shape(self.path, name, tuple(part.get_shape())[1:], (shape[0] * count, shape[1]))
            first = index * shape[0]
            return part[expert : expert + 1, first + rows[0] : first + rows[1]][0]
        _check_shape(self.path, name, tuple(part.get_shape()), shape)
        return part[rows[0] : rows[1]].reshape(rows[1] - rows[0], -1)

    def note(self) -> dict[str, Any]:
        return {"form": "safetensors", "path": str(self.path.resolve())}

    def sources(self) -> list[Path]:
        return [self.path / name for name in sorted(set(self.files.values()))]


class DummyCheckpoint:
    """Random weights of a configuration, equal for equal names, seed and device: for benchmarks and tests without files.

    `device` is where they are made (a GPU makes its own much faster)."""

    device = "cpu"

    def __init__(self, config: dict[str, Any], seed: int = 0, origin: str = "") -> None:
        self.config, self.seed, self.origin = config, seed, origin

    def names(self) -> Collection[str]:
        return ()

    def stored(self, name: str) -> str | None:
        return "float32"

    def matrix(self, name: str, rows: tuple[int, int], shape: tuple[int, int]) -> Stored:
        g = torch.Generator(self.device).manual_seed(
            (self.seed * 1000003 + sum(ord(c) * 31 ** (i % 7) for i, c in enumerate(name))) % 2**63
        )
        if shape[1] == 1:
            return torch.ones(rows[1] - rows[0], 1)
        return (torch.randn(shape, generator=g, device=self.device) / shape[1] ** 0.5)[rows[0] : rows[1]]

    def note(self) -> dict[str, Any]:
        return {"form": "dummy", "seed": self.seed, "config": self.config, "path": self.origin}

    def sources(self) -> list[Path]:
        return []


class ConfigOnly:
    """A configuration without weights: it compiles, and what comes out says that it cannot be served."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def names(self) -> Collection[str]:
        return ()

    def stored(self, name: str) -> str | None:
        return None

    def matrix(self, name: str, rows: tuple[int, int], shape: tuple[int, int]) -> Stored:
        raise CheckpointError(f"{name!r}: this checkpoint is a configuration without weights")

    def note(self) -> dict[str, Any]:
        return {"form": "none"}

    def sources(self) -> list[Path]:
        return []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; a checkpoint directory holds config.json and .safetensors files"
        ) from None
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object, but {type(value).__name__}")
    return value


def _scales(blocks: str) -> str:
    return blocks.removesuffix("_blocks") + "_scales"


def read_config(path: Path) -> dict[str, Any]:
    """A config.json; of a multi-modal model that of its language model, with what the whole says beside it."""
    whole = _read_json(path)
    text = whole.get("text_config")
    if text is None:
        return whole
    if not isinstance(text, dict):
        raise CheckpointError(f"{path}: text_config is {text!r}: it must be an object")
    beside = {k: v for k, v in whole.items() if k != "text_config"}
    return beside | text | {k: whole[k] for k in ("architectures",) if k in whole}


def _text_name(name: str) -> str | None:
    """What a text model calls a tensor of a multi-modal one; None for a tensor of another part (a vision tower)."""
    for prefix, own in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name if name.startswith(("lm_head.", "model.layers.", "model.embed_tokens.", "model.norm.")) else None


def each_of_stack(name: str) -> list[str]:
    """What the tensors would be called that one of all experts holds, `{e}` for an expert."""
    head, _, last = name.rpartition(".")
    return [f"{head}.{{e}}.{part}.weight" for part in _STACKED.get(last, ())] if head.endswith(".experts") else []


def _check_shape(where: object, name: str, have: tuple[int, ...], want: tuple[int, int]) -> None:
    n = 1
    for s in have:
        n *= s
    if n != want[0] * want[1] or (have and have[0] * (n // max(have[0], 1)) != n):
        raise CheckpointError(
            f"{where}: {name!r} has shape {list(have)}, the configuration asks for {[s for s in want if s != 1]}"
        )
    if len(have) == 2 and have != want:
        raise CheckpointError(f"{where}: {name!r} has shape {list(have)}, the configuration asks for {list(want)}")


def open_checkpoint(
    model: str, load_format: str = "auto", config: str = "", seed: int = 0, weights: bool = True
) -> Checkpoint:
    """Opens a directory, a .gguf file or `smollm2`; with `weights` False a directory may hold a configuration alone.

    `config` is a configuration file, for weights that are dummies or absent; beside weights it must be theirs.
    `load_format` is the form that the weights must have (auto: whichever is found). CheckpointError names what is wrong
    and what would be right.
    """
    if load_format == "dummy":
        source = Path(config) if config else Path(model)
        if source.suffix == ".gguf" or (str(model) == "smollm2" and not config):
            return DummyCheckpoint(_gguf(model).config, seed, model)
        path = source / "config.json" if source.is_dir() else source
        return DummyCheckpoint(read_config(path), seed, str(path.resolve()))
    path = Path(model).expanduser()
    if found := _find_gguf(model, load_format):
        if load_format == "safetensors":
            raise CheckpointError(f"{model} is a GGUF, and load_format asks for safetensors: leave it out")
        if config and Path(config).expanduser().resolve() != path.resolve():
            raise CheckpointError(
                f"{found} holds its own configuration, so config ({config}) would be ignored: leave it out"
            )
        return _gguf(found)
    if path.is_dir():
        described = path / "config.json" if not config or Path(config).is_dir() else Path(config)
        if not weights and load_format == "auto" and not any(path.glob("*.safetensors*")):
            return ConfigOnly(read_config(described))
        if described.resolve() != (path / "config.json").resolve():
            raise CheckpointError(f"{described} does not belong to the weights in {path}: put it there as config.json")
        return SafetensorsCheckpoint(path)
    raise CheckpointError(
        f"{model!r} is no directory, .gguf file or artifact, and not `smollm2`; models are not downloaded: give a path"
    )


def _find_gguf(model: str, load_format: str) -> str | None:
    """The GGUF that a model is, or that its directory holds as its only weights; None where the weights are another."""
    path = Path(model).expanduser()
    if model == "smollm2" or path.suffix == ".gguf" or (load_format == "gguf" and not path.is_dir()):
        return model
    if load_format == "gguf" or (load_format == "auto" and path.is_dir() and not (path / "config.json").exists()):
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return str(ggufs[0])
        if load_format == "gguf":
            raise CheckpointError(f"{path} holds {len(ggufs)} .gguf files: give the path of one")
    return None


def _gguf(model: str) -> Checkpoint:
    from tokenspeed.runtime.gguf_checkpoint import GgufCheckpoint

    if model == "smollm2":
        from tokenspeed.runtime.gguf_metadata import find_embedded_model

        return GgufCheckpoint(find_embedded_model(), embedded=True)
    return GgufCheckpoint(Path(model).expanduser())


def context_length(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Tokens that prompt and output of a request may have together: max_model_len, or all of the model's positions."""
    limit = checkpoint.config.get("max_position_embeddings")
    if limit is None:
        limit = 2048
    if not isinstance(limit, int) or not 2 <= limit <= MAX_POSITIONS:
        raise CheckpointError(
            f"max_position_embeddings is {limit!r}: a prompt and one token of output need 2, and {MAX_POSITIONS} are the most"
        )
    if config.max_model_len > limit:
        raise StartupError(f"max_model_len={config.max_model_len} is beyond the model's positions ({limit}); lower it")
    return config.max_model_len or limit


def checkpoint_of(note: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint that an artifact's note stands for."""
    form = note.get("form")
    if form == "embedded":
        return _gguf("smollm2")
    if form == "gguf":
        return _gguf(note["path"])
    if form == "safetensors":
        return SafetensorsCheckpoint(Path(note["path"]))
    if form == "dummy":
        return DummyCheckpoint(dict(note["config"]), int(note["seed"]), note.get("path", ""))
    raise CheckpointError(
        "this artifact was compiled from a configuration without weights; compile it from a checkpoint, or with --load-format dummy"
    )
