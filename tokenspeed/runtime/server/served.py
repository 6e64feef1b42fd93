"""What all routes share: the engine, the names it goes by, how its model writes, and the requests under way."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Protocol

from starlette.requests import Request

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import EngineConfig, ServerConfig
from tokenspeed.runtime.errors import ModelNotFound
from tokenspeed.runtime.parsers import families
from tokenspeed.runtime.server.run import Notation


def model_names(engine: EngineConfig, server: ServerConfig) -> list[str]:
    """The names that the model goes by: those given, else where it lies. The first one stands in answers and metrics."""
    given = [name.strip() for name in server.served_model_name.split(",") if name.strip()]
    return given or [PurePath(engine.model.rpartition(":")[2]).name.removesuffix(".gguf")]


class Stoppable(Protocol):
    """A stream or a run."""

    def close(self) -> None: ...
    def abort(self) -> None: ...


@dataclass(slots=True)
class Served:
    """One a server. `created` is the Unix time of its start, seconds."""

    llm: AsyncLLM
    config: ServerConfig
    created: int = field(default_factory=lambda: int(time.time()))
    names: list[str] = field(init=False)
    _notation: Notation | None = None
    _open: dict[str, list[Sequence[Stoppable]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = model_names(self.llm.config, self.config)

    @property
    def notation(self) -> Notation:
        """How the model writes calls and reasoning: as the options say, else as its family does."""
        if self._notation is None:
            template = self.llm.template
            architecture = str(self.llm.ready.summary.get("model", "")).rpartition(":")[2]
            tool, reasoning = families(architecture, template.source if template else "")
            given = (self.config.tool_call_parser, self.config.reasoning_parser)
            self._notation = Notation(_picked(given[0], tool), _picked(given[1], reasoning))
        return self._notation

    @property
    def model(self) -> str:
        """The name in answers."""
        return self.names[0]

    def track(self, request: Request, answer_id: str, streams: Sequence[Stoppable]) -> Callable[[], None]:
        """`abort` finds the streams by the answer's id and the request's, until the function returned is called.

        It closes them too, and may be called again.
        """
        names = (answer_id, request.state.request_id)
        for name in names:
            self._open.setdefault(name, []).append(streams)

        def close() -> None:
            for name in names:
                found = [other for other in self._open.pop(name, ()) if other is not streams]
                if found:
                    self._open[name] = found
            for stream in streams:
                stream.close()

        return close

    def abort(self, name: str | None) -> int:
        """End the requests of this id, all for None, each with its terminal event; how many there were."""
        found = {
            id(streams): streams for key in ([name] if name else self._open) for streams in self._open.get(key, ())
        }
        for streams in found.values():
            for stream in streams:
                stream.abort()
        return len(found)

    def check_model(self, given: str | None) -> None:
        """Raise ModelNotFound for a name that is none of ours; none at all is taken for ours."""
        if given is not None and given not in self.names:
            raise ModelNotFound(f"no such model here; this server has {', '.join(self.names)}", param="model")

    def model_object(self, name: str) -> dict[str, Any]:
        """A model as /v1/models lists it: the fields that OpenAI's clients know, and those that Anthropic's do."""
        card = {"id": name, "object": "model", "created": self.created, "owned_by": "tokenspeed"}
        began = datetime.datetime.fromtimestamp(self.created, datetime.UTC).isoformat()
        return {**card, "type": "model", "display_name": name, "created_at": began, "max_model_len": self.llm.max_len}

    def model_list(self) -> dict[str, Any]:
        """All names."""
        ends = {"has_more": False, "first_id": self.names[0], "last_id": self.names[-1]}
        return {"object": "list", "data": [self.model_object(name) for name in self.names], **ends}


def _picked(option: str, family: str | None) -> str | None:
    return family if option == "auto" else None if option == "none" else option
