"""TokenSpeed: a compiler-centric LLM inference engine for coding agents.

`import tokenspeed` loads no other module: the public names below are imported on first use (PEP 562), so the command
line starts in milliseconds and a program that needs only the compiler never pays for the server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed.runtime.engine import Engine
    from tokenspeed.runtime.outputs import RequestOutput
    from tokenspeed.runtime.sampling_params import SamplingParams
    from tokenspeed.runtime.weights_socket import send_weights

__version__ = "0.1.0"
__all__ = ["Engine", "RequestOutput", "SamplingParams", "__version__", "send_weights"]

_HOME = {
    "Engine": "tokenspeed.runtime.engine",
    "RequestOutput": "tokenspeed.runtime.outputs",
    "SamplingParams": "tokenspeed.runtime.sampling_params",
    "send_weights": "tokenspeed.runtime.weights_socket",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tokenspeed' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
