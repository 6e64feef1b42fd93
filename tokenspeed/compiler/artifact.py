"""The artifact: a directory that holds everything a server needs of a compiled model but the weights themselves.

    manifest.json   schema, keys, plan, dims, buckets, variants, dtypes, a digest of every other file
    programs/       one IR text a (variant, token bucket)
    weights.json    the weight map            ports.json    the scheduler ABI and the cache groups
    kernels.json    the kernel of every op signature, by bucket
    certificate.json  what was run beside one rank, and how far apart (absent with --no-certificate)
    explain.json    every collective          checkpoint.json   where the weights were (not covered by the key)
    kernels/        machine code of a GPU's kernels by Triton's keys (covered by no key: what does not fit is compiled again)
    packed-rank*.safetensors  weights as a CPU's kernels read them, written where it is served (runtime/packed.py)
    tokenizer*.json and generation_config.json, where the model has a tokenizer (not covered by the key either)

Invariant: all files but checkpoint.json, kernels/ and packed weights are a pure function of source, configuration, plan,
calibration table and tokenizer. No pickles. Loading imports neither `tokenspeed.models` nor the compiler's passes. manifest.json is written
last, so a directory without one was left unfinished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.compiler.weightmap import WeightMap, from_json
from tokenspeed.ir.errors import TokenSpeedError
from tokenspeed.ir.graph import Program
from tokenspeed.ir.mesh import Plan, parse_plan
from tokenspeed.ir.text import parse_program

SCHEMA = 1
KERNELS = "kernels"  # folder of an artifact: kernels compiled ahead of its start, not the compiler's (runtime/ahead.py)
_AGAIN = "run `tokenspeed compile` again"
_FILES = ("manifest.json", "weights.json", "ports.json", "kernels.json")


class ArtifactError(TokenSpeedError):
    """A directory that is no artifact, is damaged, or was compiled for something else; names the field."""

    def __init__(self, message: str) -> None:
        super().__init__("A001", message)


@dataclass
class Artifact:
    """A loaded artifact. Programs are parsed when asked for."""

    path: Path
    manifest: dict[str, Any]
    weights: WeightMap
    ports: dict[str, Any]
    kernels: dict[str, Any]

    @property
    def plan(self) -> Plan:
        return self.weights.plan

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """(token rows, request rows) a home group, ascending."""
        return [(int(t), int(s)) for t, s in self.manifest["buckets"]]

    def program(self, variant: str, bucket: int) -> Program:
        return parse_program(_text(self.path, f"programs/{program_name(variant, bucket)}"))

    def check(self, compat: Mapping[str, str]) -> None:
        """ArtifactError names the first field in which this process (`compat`) is not what the artifact was made for."""
        for key, value in compat.items():
            have = self.manifest.get("compat", {}).get(key)
            if have != value:
                raise ArtifactError(
                    f"{self.path}: compat key {key!r} is {have!r} in the artifact and {value!r} here; {_AGAIN} on this machine"
                )

    def explain(self) -> dict[str, Any]:
        return _read(self.path, "explain.json")

    def certificate(self) -> dict[str, Any] | None:
        """The equivalence certificate; None where none was made."""
        return _read(self.path, "certificate.json") if "certificate.json" in self.manifest["files"] else None

    def checkpoint(self) -> dict[str, Any]:
        return _read(self.path, "checkpoint.json")


def program_name(variant: str, bucket: int) -> str:
    return f"{variant}.t{bucket}.ir"


def dump(value: Any) -> str:
    """Canonical JSON: keys sorted, one line a top-level entry and a line an entry of the objects and lists there."""

    def lines(x: Any, depth: int) -> str:
        pad = " " * depth
        if depth < 2 and isinstance(x, dict) and x:
            inner = (f"{pad} {json.dumps(k)}: {lines(x[k], depth + 1)}" for k in sorted(x))
            return "{\n" + ",\n".join(inner) + f"\n{pad}}}"
        if depth < 2 and isinstance(x, list) and x:
            return "[\n" + ",\n".join(f"{pad} {lines(y, depth + 1)}" for y in x) + f"\n{pad}]"
        return json.dumps(x, sort_keys=True, ensure_ascii=True)

    return lines(value, 0) + "\n"


def digest(*parts: str) -> str:
    h = hashlib.sha256()
    for p in parts:
        h.update(len(p).to_bytes(8, "little"))
        h.update(p.encode())
    return h.hexdigest()


def is_artifact(path: str | Path) -> bool:
    """Whether a directory holds an artifact, or what is left of one: a checkpoint directory has a config.json."""
    root = Path(path).expanduser()
    return any((root / n).is_file() for n in _FILES) and not (root / "config.json").is_file()


def _text(path: Path, name: str) -> str:
    try:
        return (path / name).read_text("utf-8")
    except FileNotFoundError:
        raise ArtifactError(f"{path} has no {name}: it is no artifact, or an incomplete one; {_AGAIN}") from None
    except ValueError as e:
        raise ArtifactError(f"{path / name} is damaged: {e}; {_AGAIN}") from None


def _read(path: Path, name: str) -> dict[str, Any]:
    text = _text(path, name)
    try:
        value = json.loads(text)
    except ValueError as e:
        raise ArtifactError(f"{path / name} is damaged: {e}; {_AGAIN}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{path / name} is damaged: it holds no object; {_AGAIN}")
    return value


def programs_key(files: Mapping[str, str]) -> str:
    """The name of a set of programs: of the digests of their texts by file name."""
    return digest(dump({name: d for name, d in files.items() if name.startswith("programs/")}))


def semantic_key(manifest: Mapping[str, Any]) -> str:
    """The name of what was compiled: of everything in the manifest but the machine it was compiled on."""
    return digest(dump({k: v for k, v in manifest.items() if k not in ("compat", "semantic_key")}))


def load_artifact(path: str | Path) -> Artifact:
    """Reads an artifact but its programs. ArtifactError names the file that is missing, damaged or of another schema."""
    root = Path(path)
    manifest = _read(root, "manifest.json")
    if manifest.get("schema") != SCHEMA:
        raise ArtifactError(f"{root}: schema is {manifest.get('schema')}, this version reads {SCHEMA}; {_AGAIN}")
    if manifest.get("semantic_key") != semantic_key(manifest):
        raise ArtifactError(f"{root / 'manifest.json'} is damaged: it is not what its key names; {_AGAIN}")
    for name, want in manifest["files"].items():
        if digest(_text(root, name)) != want:
            raise ArtifactError(f"{root / name} is damaged: it is not what the manifest names; {_AGAIN}")
    if "certificate.json" in manifest["files"]:
        certificate = _read(root, "certificate.json")
        if certificate.get("programs") != programs_key(manifest["files"]):
            raise ArtifactError(f"{root}: its certificate was made for other programs; {_AGAIN}")
    plan = parse_plan(manifest["plan"])
    weights = from_json(_read(root, "weights.json"), plan, manifest["sizes"], manifest["logical"])
    return Artifact(root, manifest, weights, _read(root, "ports.json"), _read(root, "kernels.json"))
