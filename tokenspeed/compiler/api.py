"""`compile_model`: the compiler's public entry. Takes a model class, its configuration and a plan; writes an artifact.

It reads no weight: the caller says which tensors the checkpoint holds and in which format (`stored`). The artifact's
bytes depend on its arguments, the sources and the calibration table alone; checkpoint.json is the caller's note.
"""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed import __version__
from tokenspeed.compiler.artifact import KERNELS, SCHEMA, digest, dump, program_name, programs_key, semantic_key
from tokenspeed.compiler.compat import compat_of
from tokenspeed.compiler.costs import load_costs
from tokenspeed.compiler.explain import explain_text
from tokenspeed.compiler.passes.bind import Binder
from tokenspeed.compiler.passes.capture import verify_kernels
from tokenspeed.compiler.passes.certify import certify
from tokenspeed.compiler.passes.pipeline import Request, Result, run_passes
from tokenspeed.compiler.passes.tactics import parse_tactics
from tokenspeed.compiler.weightmap import to_json
from tokenspeed.ir.errors import PlanError
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.ir.types import ROW_DIMS, Type
from tokenspeed.models.nn.config import Config

DTYPES = {"float32": "f32", "bfloat16": "bf16"}


@dataclass
class Compiled:
    """What `compile_model` did: the passes' result, the files as text, and the seconds they took (after imports)."""

    result: Result
    files: dict[str, str]
    manifest: dict[str, Any]
    seconds: float
    certified: float = 0.0  # seconds of them that the certificate took

    def write(self, out: str | Path) -> Path:
        """Writes the artifact, manifest.json last; what an older one holds that this one lacks is removed, and kernels made from
        it. FileExistsError where other things lie there."""
        root = Path(out)
        programs = root / "programs"
        if root.is_dir() and not programs.is_dir() and next(root.iterdir(), None) is not None:
            raise FileExistsError("the directory holds other files and no artifact; name a new or an empty one")
        shutil.rmtree(root / KERNELS, ignore_errors=True)
        programs.mkdir(parents=True, exist_ok=True)
        for name in ("manifest.json", "certificate.json"):
            (root / name).unlink(missing_ok=True)
        for old in programs.glob("*.ir"):
            if f"programs/{old.name}" not in self.files:
                old.unlink()
        for name, text in sorted(self.files.items(), key=lambda item: item[0] == "manifest.json"):
            (root / name).write_text(text, "utf-8")
        return root

    def summary(self) -> str:
        """What was compiled, in a few lines: plan, extents, leaves, and the collectives of the ends of the bucket range."""
        m, r = self.manifest, self.result
        (first, *_), (*_, last) = m["buckets"], m["buckets"]
        ranks = f"{m['ranks']} rank{'s' if m['ranks'] > 1 else ''}"
        lines = [f"{m['model']} on {ranks}: {m['plan']}, {r.weights.arithmetic(m['dtype'])}, KV {m['cache_dtype']}"]
        extents = [
            f"{k}={v}" + (f" (padded to {m['sizes'][k]})" if m["sizes"][k] != v else "")
            for k, v in m["logical"].items()
        ]
        lines.append("  " + " ".join(extents))
        lines.append(
            f"  {len(r.programs)} programs: {len(m['buckets'])} token buckets {first[0]}..{last[0]}, variants {', '.join(m['variants'])}"
        )
        for t, _ in dict.fromkeys((tuple(first), tuple(last))):
            e = r.explain[f"{m['variants'][0]}.t{t}"]
            lines.append(
                f"  bucket {t}: {e['collectives']} collectives, {e['bytes_per_token']:.0f} B sent a token a rank"
            )
        arena = max(r.arena_bytes.values())
        lines.append(
            f"  a rank holds {r.weight_bytes / 2**20:.1f} MiB of weights and {arena / 2**20:.1f} MiB of activations at most"
        )
        if "certificate.json" in self.files:
            rows = json.loads(self.files["certificate.json"])["bodies"]
            lines.append(
                f"  certificate: {len(rows)} program bodies equal one rank on {sum(b['values'] for b in rows)} values"
            )
        lines.append(
            f"  artifact {m['semantic_key'][:16]}, {len(json.loads(self.files['kernels.json']))} kernel bindings"
        )
        return "\n".join(lines)


def default_buckets(max_tokens: int) -> list[int]:
    """Token buckets up to `max_tokens`: 1, 2, 4, then eight steps an octave from 8 on, so padding wastes at most 1/8."""
    out = [b for b in (1, 2, 3, 4, 6) if b <= max_tokens]
    step, at = 1, 8
    while at <= max_tokens:
        out.append(at)
        at += max(at // 8, step) if at >= 16 else 2
        if at >= 64:
            at = -(-at // 8) * 8
    return sorted({*out, max_tokens})


@contextmanager
def _no_collection() -> Iterator[None]:
    """The passes make millions of small objects and few cycles: looking for garbage meanwhile costs a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_no_collection()
def compile_model(
    model: Any, config: Mapping[str, Any], *, mesh: str = "", axes: str = "", dtype: str = "float32", cache_dtype: str = "float32",
    buckets: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), max_rows: int = 256, device: str = "cpu",
    calibration: str = "cpu", objective: str = "default", stored: Callable[[str], str | None] = lambda _: None,
    checkpoint: Mapping[str, Any] | None = None, tactics: Sequence[str] = (), memory_limit: int | None = None,
    certificate: bool = False,
    variants: Sequence[str] = ("gumbel", "full"), progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Compiled:  # fmt: skip
    """Compiles `model` (a root module class) for one plan and set of token buckets (rows a home group).

    `tactics`: NAME=VALUE items or .json files of them (`passes/tactics.py`), pinned choices of the solver.
    `certificate`: run every program body at reduced extents beside one rank, and say so in certificate.json.
    `memory_limit`: bytes a rank may hold of weights and arena (KV pages come on top).
    Raises a TokenSpeedError with a code: P0xx (annotation, body or plan), C001 (configuration), V (a compiler fault).
    """
    started = time.perf_counter()
    for name in (dtype, cache_dtype):
        if name not in DTYPES:
            raise PlanError("P036", f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    if not buckets or sorted(set(buckets)) != list(buckets) or min(buckets) < 1:
        raise PlanError("P036", f"buckets must be ascending positive integers, got {list(buckets)}")
    c = Config(config)
    request = Request(
        model, c, make_plan(parse_mesh(mesh), axes), [(t, min(t, max_rows)) for t in buckets], DTYPES[dtype],
        DTYPES[cache_dtype], load_costs(calibration), stored, tuple(variants), progress, parse_tactics(tactics),
        memory_limit, Binder(device, objective),
    )  # fmt: skip
    request.collectives = request.binder.collectives(dtype)
    result = run_passes(request)
    kernels = dict(sorted(request.binder.kernels.items()))
    verify_kernels(kernels, device)
    files = {f"programs/{program_name(v, t)}": text for (v, t), text in result.texts.items()}
    files["weights.json"] = dump(to_json(result.weights))
    files["ports.json"] = dump(_ports(result))
    files["kernels.json"] = dump(kernels)
    files["explain.json"] = dump({"programs": result.explain, "cost_us": result.costs_us})
    files["explain.txt"] = "\n".join(explain_text(e) for e in result.explain.values()) + "\n"
    before = time.perf_counter()
    if certificate:
        texts = {name: digest(text) for name, text in files.items() if name.startswith("programs/")}
        files["certificate.json"] = dump(certify(request, result.bodies) | {"programs": programs_key(texts)})
    certified = time.perf_counter() - before
    plan = result.layout.plan
    manifest = {
        "schema": SCHEMA, "compiler": __version__, "model": f"{model.__module__.rpartition('.')[2]}:{model.__name__}",
        "plan": plan.describe(), "ranks": plan.mesh.ranks, "home": list(plan.home),
        "sizes": result.layout.sizes, "logical": result.layout.logical, "dtype": dtype, "cache_dtype": cache_dtype,
        "buckets": [[t, s] for t, s in request.buckets], "variants": list(variants), "results": result.results,
        "config": dict(sorted(c.read.items())), "calibration": request.costs.id, "device": device,
        "memory_limit": memory_limit, "tactics": {p.name: p.text for p in request.tactics.pins},
        "files": {name: digest(text) for name, text in sorted(files.items())}, "compat": compat_of(kernels, device),
    }  # fmt: skip
    manifest["semantic_key"] = semantic_key(manifest)
    files["manifest.json"] = dump(manifest)
    files["checkpoint.json"] = dump(dict(checkpoint or {}))
    return Compiled(result, files, manifest, time.perf_counter() - started, certified)


def _ports(result: Result) -> dict[str, Any]:
    """The scheduler ABI: inputs, results and cache groups, from the program itself."""
    p = next(iter(result.programs.values()))
    caches = [q for q in p.all_params() if q.kind == "cache"]
    attends = [n for nodes in (p.nodes, *(leaf.nodes for leaf in p.leaves.values())) for n in nodes if n.op == "attend"]
    window = max((n.attrs.get("window", 0) for n in attends), default=0)  # the widest: pages are kept for all
    groups: dict[str, dict[str, Any]] = {
        "slots": {"name": "full", "kind": "full_attention"},
        "window_slots": {"name": "window", "kind": "sliding_window", "window": window},
        "states": {"name": "state", "kind": "recurrent_state"},
    }

    def shape(t: Type) -> list[str]:
        return [d.name for d in t.dims]

    return {
        "inputs": {n: {"dtype": t.dtype, "dims": shape(t), "type": t.text(p.plan)} for n, (t, _) in result.ports.items()},
        "results": result.results,
        "cache_groups": [
            group | {"caches": [{"name": q.name, "types": [t.text(p.plan) for t in q.types]} for q in held]}
            for dim, group in groups.items()
            if (held := [q for q in caches if q.types[0].dims[0].name == dim])
        ],
        "agreement": {k: e["agreement"] for k, e in result.explain.items()},
        "memory": {"weight_bytes": result.weight_bytes, "arena_bytes": result.arena_bytes},
        "rows": [d for d in ROW_DIMS if d in p.bucket],
    }  # fmt: skip
