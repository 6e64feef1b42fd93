"""The artifact: a directory that holds everything a server needs of a compiled model but the weights themselves.

    manifest.json   schema, keys, plan, dims, buckets, variants, dtypes
    programs/       one IR text a (variant, token bucket)
    weights.json    the weight map            ports.json    the scheduler ABI and the cache groups
    kernels.json    the kernel of every op signature, by bucket
    explain.json    every collective          checkpoint.json   where the weights were (not covered by the key)

Invariant: all files but checkpoint.json are a pure function of source, configuration, plan and calibration table. No
pickles. Loading imports neither `tokenspeed.models` nor the compiler's passes.
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
        return parse_program((self.path / "programs" / program_name(variant, bucket)).read_text())

    def explain(self) -> dict[str, Any]:
        return _read(self.path, "explain.json")

    def checkpoint(self) -> dict[str, Any]:
        return _read(self.path, "checkpoint.json")


def program_name(variant: str, bucket: int) -> str:
    return f"{variant}.t{bucket}.ir"


def dump(value: Any) -> str:
    """Canonical JSON."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


def digest(*parts: str) -> str:
    h = hashlib.sha256()
    for p in parts:
        h.update(len(p).to_bytes(8, "little"))
        h.update(p.encode())
    return h.hexdigest()


def is_artifact(path: str | Path) -> bool:
    return (Path(path) / "manifest.json").is_file() and (Path(path) / "weights.json").is_file()


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((path / name).read_text())
    except FileNotFoundError:
        raise ArtifactError(f"{path} has no {name}: it is no artifact, or an incomplete one; run `tokenspeed compile` again") from None
    except ValueError as e:
        raise ArtifactError(f"{path / name} is damaged: {e}") from None


def load_artifact(path: str | Path, compat: Mapping[str, str] | None = None) -> Artifact:
    """Reads an artifact. `compat`: what this process is; ArtifactError names the first field that differs."""
    root = Path(path)
    manifest = _read(root, "manifest.json")
    if manifest.get("schema") != SCHEMA:
        raise ArtifactError(f"{root}: schema is {manifest.get('schema')}, this version reads {SCHEMA}; run `tokenspeed compile` again")
    for key, value in (compat or {}).items():
        have = manifest["compat"].get(key)
        if have != value:
            raise ArtifactError(
                f"{root}: compat key {key!r} is {have!r} in the artifact and {value!r} here; run `tokenspeed compile` again on this machine"
            )
    plan = parse_plan(manifest["plan"])
    sizes, logical = manifest["sizes"], manifest["logical"]
    weights = from_json(_read(root, "weights.json"), plan, sizes, logical)
    return Artifact(root, manifest, weights, _read(root, "ports.json"), _read(root, "kernels.json"))
