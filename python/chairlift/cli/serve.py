"""`chairlift serve`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.client import AsyncEngine
from chairlift.server.port import open_port


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Serves until a signal."""
    with open_port(server.host, server.port) as listener:
        return asyncio.run(_serve(engine, server, listener, began))


async def _serve(config: EngineConfig, server: ServerConfig, listener: socket.socket, began: float) -> int:
    engine = AsyncEngine(config)
    starting = asyncio.create_task(engine.start(began))
    # The engine's process loads its model while this one imports its web framework, which takes a while too.
    life = await asyncio.to_thread(import_module, "chairlift.server.life")
    status: int = await life.Life(engine, server.served_model_name or config.model, server).run(starting, listener)
    return status
