"""Errors of the IR and the compiler: each carries a stable code, and says what is wrong, where, why and what to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where in the author's source a value was made."""

    file: str = ""
    line: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "?"


NOWHERE = Origin()  # of what no author wrote


class TokenSpeedError(Exception):
    """Base of every error a user of the compiler can meet; `code` is stable (P012, V3, ...)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code} {message}")
        self.code = code
        self.message = message


class SpecError(TokenSpeedError):
    """A placement annotation that does not parse or contradicts itself."""


class PlanError(TokenSpeedError):
    """A deployment plan (mesh, axes) that this model cannot have."""


class PlacementError(TokenSpeedError):
    """A body or a program that no rule allows."""


class VerifyError(TokenSpeedError):
    """A finished program that breaks a rule of the verifier: a fault of the compiler or of an edited artifact."""


class RuleError(Exception):
    """Raised by an op's placement rule: `code`, a sentence of reason, the axis it concerns, and fixes. The tracer adds the place,
    the types, and what would go wrong on that axis."""

    def __init__(self, code: str, reason: str, fixes: tuple[str, ...] = (), axis: str = "") -> None:
        super().__init__(reason)
        self.code, self.reason, self.fixes, self.axis = code, reason, fixes, axis
