"""What a parser of model output takes and gives: the tools of a request, and the pieces of an answer in order.

Invariant: the pieces of one kind between two pieces of other kinds, joined, are the same for every chunking of the
same output. The joined `CallArguments` of a call are its `arguments` string. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call. `parameters` is a JSON schema; {} stands for anything.

    A custom (freeform) tool is shown to the model as a function with one string parameter, `input`.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    kind: Literal["function", "custom"] = "function"
    strict: bool = False


@dataclass(slots=True)
class Reasoning:
    """Text that the model thought."""

    text: str


@dataclass(slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(slots=True)
class CallBegin:
    """A call begins; `index` counts the calls of an answer from 0, `id` is the model's own where it writes one."""

    index: int
    name: str
    id: str | None = None


@dataclass(slots=True)
class CallArguments:
    """More of the arguments of a call."""

    index: int
    text: str


@dataclass(slots=True)
class CallEnd:
    """A call is over; cut-off output ends it too, with the arguments as far as they came."""

    index: int


Piece = Reasoning | Content | CallBegin | CallArguments | CallEnd
