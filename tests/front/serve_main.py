"""The program of `serving.ServerProcess`: serve with the scripted core that the argument names."""

from __future__ import annotations

import asyncio
import json
import sys

import scripted_core

from tokenspeed.runtime.config import EngineConfig, ServerConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.logs import configure_logging
from tokenspeed.runtime.server.serve import serve


def main() -> int:
    given = json.loads(sys.argv[1])
    target = getattr(scripted_core, given.pop("target"))
    server = ServerConfig(port=given.pop("port", 0), drain_timeout=given.pop("drain_timeout", 30.0))
    engine = EngineConfig(**{"model": "smollm2", **given})
    configure_logging("info")
    try:
        return asyncio.run(serve(engine, server, target=target, on_listen=lambda url: print(url, flush=True)))
    except StartupError as fault:
        print(fault, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
