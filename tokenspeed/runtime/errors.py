"""The errors of the front process: every refused or failed request is one of these, and none is anything else.

`message` is safe to send to the client: it names the cause and the fix and never echoes the payload.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of the errors below; `retry_after` is in seconds where waiting helps."""

    retry_after: float | None = None

    @property
    def message(self) -> str:
        return str(self)


class RequestError(EngineError, ValueError):
    """The request itself is wrong. `param` names the field, `code` is the machine-readable kind."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""


class NotFound(RequestError):
    """The request names something that is not, or no longer, here."""


class QueueFullError(EngineError):
    """Too much is queued already (max_queued_requests, max_queued_tokens): come back after `retry_after` seconds."""

    retry_after = 1.0


class UnavailableError(EngineError):
    """The engine takes no requests now: it is loading, draining, closed or dead."""

    retry_after = 5.0


class GenerationError(EngineError):
    """The engine core failed on a request that it had accepted."""


class QueueTimeoutError(GenerationError):
    """The request waited longer for its first token than queue_timeout allows: come back after `retry_after` seconds."""

    retry_after = 1.0


class StartupError(EngineError, RuntimeError):
    """The engine core did not come up; the text is the core's own reason."""
