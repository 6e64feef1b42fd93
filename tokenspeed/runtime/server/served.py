"""What all routes share: the engine, the names it goes by, how its model writes, and the requests under way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import EngineConfig, ServerConfig
from tokenspeed.runtime.errors import ModelNotFound
from tokenspeed.runtime.server.run import Notation


def model_names(engine: EngineConfig, server: ServerConfig) -> list[str]:
    """The names that the model goes by: those given, else where it lies. The first one stands in answers and metrics."""
    given = [name.strip() for name in server.served_model_name.split(",") if name.strip()]
    return given or [PurePath(engine.model.rpartition(":")[2]).name.removesuffix(".gguf")]


@dataclass(slots=True)
class Served:
    """One a server. `created` is the Unix time of its start, seconds."""

    llm: AsyncLLM
    config: ServerConfig
    created: int = field(default_factory=lambda: int(time.time()))
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = model_names(self.llm.config, self.config)

    @property
    def notation(self) -> Notation:
        """How the model writes calls and reasoning."""
        return Notation()

    @property
    def model(self) -> str:
        """The name in answers."""
        return self.names[0]

    def check_model(self, given: str | None) -> None:
        """Raise ModelNotFound for a name that is none of ours; none at all is taken for ours."""
        if given is not None and given not in self.names:
            raise ModelNotFound(f"no such model here; this server has {', '.join(self.names)}", param="model")

    def model_object(self, name: str) -> dict[str, Any]:
        """A model as /v1/models lists it."""
        card = {"id": name, "object": "model", "created": self.created, "owned_by": "tokenspeed"}
        return {**card, "max_model_len": self.llm.max_len}
