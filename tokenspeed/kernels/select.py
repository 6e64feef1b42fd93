# pyright: strict
"""Which kernel runs an op. Invariant: selection is a pure function of the request, the registry, the machine's facts
and the settings in force, evaluated at compile time; the artifact stores its result and nothing is looked up later.

Order of precedence, first that speaks wins:
  1. the `override` argument;
  2. the context (`with selection(overrides={"gemm/linear": ...})`);
  3. the environment, `TOKENSPEED_KERNEL_OVERRIDE_<FAMILY>_<MODE>`;
  4. the config file (`selection(config=path)` or `TOKENSPEED_KERNEL_CONFIG`): {"overrides": {"gemm/linear": ...}};
  5. the tuned table (`selection(tuned=path)` or `TOKENSPEED_KERNEL_TUNED`; else the one measured on this machine for the
     target, else the one that ships for it), see tuned.py;
  6. the heuristic: the objective's tag, then priority, then name.
An override is a kernel's name or a solution ("reference"); one that cannot run the request is an error with the reason.
A tuned entry is advice: one that cannot run is passed over, and `explain` says why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenspeed.kernels.formats import format_of
from tokenspeed.kernels.ops import OPS, Op, op_of
from tokenspeed.kernels.registry import Registry, default_registry
from tokenspeed.kernels.spec import OBJECTIVES, KernelSpec, Objective, TraitValue
from tokenspeed.kernels.target import Target, miss, target_of
from tokenspeed.kernels.tuned import SettingsError, TunedTable, table_for

CONFIG_VARIABLE = "TOKENSPEED_KERNEL_CONFIG"
TUNED_VARIABLE = "TOKENSPEED_KERNEL_TUNED"


class SelectionError(LookupError):
    """No kernel can run the request, or an override cannot; the message lists each candidate's reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """What must be run: op, role -> format, facts, and where."""

    op: Op
    signature: Mapping[str, str]
    traits: Mapping[str, TraitValue]
    target: Target
    objective: Objective

    def describe(self) -> str:
        roles = ", ".join(f"{role}={name}" for role, name in sorted(self.signature.items()))
        facts = ", ".join(f"{name}={value}" for name, value in sorted(self.traits.items()))
        return f"{self.op.key} ({roles}{'; ' + facts if facts else ''}) on {self.target.name}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel's standing: `score` orders the eligible ones (largest first), `reasons` say why others fell out."""

    spec: KernelSpec
    eligible: bool
    score: tuple[int, int]
    reasons: tuple[str, ...] = ()
    chosen_by: str = ""  # the level of precedence that picked it; empty for the others


@dataclass(frozen=True, slots=True)
class Settings:
    """The context level: what `selection(...)` sets for the code under it."""

    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    config: Path | None = None
    tuned: Path | None = None


_NO_SETTINGS = Settings()
_settings: ContextVar[Settings] = ContextVar("tokenspeed_kernel_settings", default=_NO_SETTINGS)


@contextmanager
def selection(
    *, overrides: Mapping[str, str] | None = None, config: str | Path | None = None, tuned: str | Path | None = None
) -> Generator[None]:
    """Settings for selections made under it; an inner context adds to the outer. Keys of `overrides`: family/mode."""
    outer = _settings.get()
    token = _settings.set(
        replace(
            outer,
            overrides={**outer.overrides, **(overrides or {})},
            config=Path(config) if config is not None else outer.config,
            tuned=Path(tuned) if tuned is not None else outer.tuned,
        )
    )
    try:
        yield
    finally:
        _settings.reset(token)


def is_chosen_by_context() -> bool:
    """Whether the code around has set anything by `selection`."""
    return _settings.get() != _NO_SETTINGS


def select(
    op: str,
    *,
    signature: Mapping[str, str],
    traits: Mapping[str, TraitValue] | None = None,
    device: str = "cpu",
    objective: Objective = "default",
    override: str | None = None,
    registry: Registry | None = None,
) -> KernelSpec:
    """The kernel to run `op` with. Raises SelectionError naming every candidate's reason where none can, and SettingsError."""
    found = explain(
        op,
        signature=signature,
        traits=traits,
        device=device,
        objective=objective,
        override=override,
        registry=registry,
    )
    return next(candidate.spec for candidate in found if candidate.chosen_by)


def explain(
    op: str,
    *,
    signature: Mapping[str, str],
    traits: Mapping[str, TraitValue] | None = None,
    device: str = "cpu",
    objective: Objective = "default",
    override: str | None = None,
    registry: Registry | None = None,
) -> list[Candidate]:
    """Every kernel of `op`, the chosen one first, then the eligible by score, then the rest with their reasons.

    Raises SelectionError where nothing is eligible or an override is refused, SettingsError for a file that cannot be read.
    """
    request = _request(op, signature, traits or {}, device, objective)
    judged = _judged(request, registry)
    chosen, level = _choose(judged, request, override)
    rest = [candidate for candidate in judged if candidate is not chosen]
    return [replace(chosen, chosen_by=level), *rest]


def candidates(
    op: str,
    *,
    signature: Mapping[str, str],
    traits: Mapping[str, TraitValue],
    device: str,
    registry: Registry | None = None,
) -> list[Candidate]:
    """Every kernel of `op`, whether it can run the request and why not; nothing is chosen, so no setting is asked."""
    return _judged(_request(op, signature, traits, device, "default"), registry)


def _judged(request: Request, registry: Registry | None) -> list[Candidate]:
    registry = default_registry() if registry is None else registry
    return sorted((_judge(spec, request) for spec in registry.of(request.op.name)), key=_order)


def _request(
    op: str, signature: Mapping[str, str], traits: Mapping[str, TraitValue], device: str, objective: Objective
) -> Request:
    entry = op_of(op)
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective '{objective}'; use one of {', '.join(OBJECTIVES)}")
    for role, name in signature.items():
        if role not in entry.roles:
            raise ValueError(f"op '{op}' has no role '{role}'; its roles are {', '.join(entry.roles)}")
        format_of(name)
    return Request(entry, signature, traits, target_of(device), objective)


def _judge(spec: KernelSpec, request: Request) -> Candidate:
    reasons: list[str] = []
    if (reason := miss(spec.capability, request.target)) is not None:
        reasons.append(reason)
    misses = [_signature_miss(alternative, request.signature) for alternative in spec.signatures]
    if all(misses):
        reasons.append(min((text for text in misses if text is not None), key=len))
    for name, trait in spec.traits.items():
        value = _fact(name, request.traits)
        if value is None:
            reasons.append(f"needs {name} {trait.text}, which the request does not state")
        elif not trait.check(value):
            reasons.append(f"needs {name} {trait.text}, the request has {value}")
    if request.objective == "determinism" and "determinism" not in spec.tags:
        reasons.append("is not tagged determinism")
    priority = -spec.priority if request.objective == "debug" else spec.priority
    return Candidate(spec, not reasons, (int(request.objective in spec.tags), priority), tuple(reasons))


def _fact(name: str, facts: Mapping[str, TraitValue]) -> TraitValue | None:
    """The fact `name` of a request, or the product "a*b" of facts that are numbers; None where one is missing."""
    if "*" not in name:
        return facts.get(name)
    low = high = 1
    for factor in name.split("*"):
        value = facts.get(factor)
        ends = value if isinstance(value, tuple) else (value, value)
        if not isinstance(ends[0], int) or not isinstance(ends[1], int):
            return None
        low, high = low * ends[0], high * ends[1]
    return low if low == high else (low, high)


def _signature_miss(alternative: Mapping[str, frozenset[str]], signature: Mapping[str, str]) -> str | None:
    misses = [
        f"{role} takes {'|'.join(sorted(alternative[role]))}, not {name}"
        for role, name in signature.items()
        if role in alternative and name not in alternative[role]
    ]
    return "; ".join(misses) if misses else None


def _order(candidate: Candidate) -> tuple[bool, int, int, str]:
    return (not candidate.eligible, -candidate.score[0], -candidate.score[1], candidate.spec.name)


def _choose(judged: list[Candidate], request: Request, override: str | None) -> tuple[Candidate, str]:
    settings = _settings.get()
    key = request.op.key
    for level, wanted in (
        ("argument", override),
        ("context", settings.overrides.get(key)),
        (f"environment {request.op.override_variable}", os.environ.get(request.op.override_variable) or None),
        ("config file", _config_overrides(settings.config).get(key)),
    ):
        if wanted is not None:
            return _forced(judged, request, wanted, level), level
    eligible = [candidate for candidate in judged if candidate.eligible]
    if not eligible:
        raise SelectionError(f"no kernel can run {request.describe()}\n{_reasons(judged)}")
    named = settings.tuned or os.environ.get(TUNED_VARIABLE)
    if named:
        table = TunedTable.load(Path(named))
    else:
        table = table_for(request.target.name) if request.objective == "default" else None
    if table is not None:
        for name in table.advice(request.op.name, request.signature, request.traits):
            for candidate in eligible:
                if candidate.spec.name == name:
                    return candidate, "tuned table"
    return eligible[0], "heuristic"


def _forced(judged: list[Candidate], request: Request, wanted: str, level: str) -> Candidate:
    matching = [candidate for candidate in judged if wanted in (candidate.spec.name, candidate.spec.solution)]
    if not matching:
        names = ", ".join(sorted(candidate.spec.name for candidate in judged)) or "none"
        raise SelectionError(
            f"the {level} asks for kernel '{wanted}', but {request.op.key} has no kernel or solution of that name; "
            f"registered: {names}"
        )
    for candidate in matching:  # judged is ordered, so the best of a solution comes first
        if candidate.eligible:
            return candidate
    raise SelectionError(
        f"the {level} asks for kernel '{wanted}', which cannot run {request.describe()}\n{_reasons(matching)}"
    )


def _reasons(candidates: list[Candidate]) -> str:
    if not candidates:
        return "  (no kernel is registered for this op)"
    return "\n".join(f"  {candidate.spec.name}: {'; '.join(candidate.reasons)}" for candidate in candidates)


def _config_overrides(path: Path | None) -> Mapping[str, str]:
    where = path or (Path(text) if (text := os.environ.get(CONFIG_VARIABLE)) else None)
    if where is None:
        return {}
    try:
        content: object = json.loads(where.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(f"kernel config file {where}: {error}") from error
    overrides: object = content.get("overrides") if isinstance(content, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(overrides, dict):
        raise SettingsError(f'kernel config file {where} must hold {{"overrides": {{"family/mode": "kernel"}}}}')
    known = {entry.key for entry in OPS.values()}
    out: dict[str, str] = {}
    for key, value in overrides.items():  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(key, str) or not isinstance(value, str) or key not in known:
            raise SettingsError(
                f"kernel config file {where}: '{key}: {value}' names no family/mode; known: {sorted(known)}"
            )
        out[key] = value
    return out
