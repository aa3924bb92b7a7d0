"""`chairlift serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

from chairlift.checkpoint.locate import public_name
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.client import AsyncEngine
from chairlift.server.http.sockets import check_certificate, is_loopback, open_path, open_port
from chairlift.server.keys import Keys, read_keys

log = logging.getLogger("chairlift")

LAST_SECONDS = 1.0
"""How long the end waits for threads that still work."""


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Serves until a signal."""
    keys = read_keys(server.api_key, server.api_key_file)
    weights = {tenant.name: tenant.weight for tenant in keys if tenant.weight is not None}
    engine = replace(engine, tenant_weights={**weights, **(engine.tenant_weights or {})} or None)
    if server.ssl_certfile is not None:
        check_certificate(server.ssl_certfile, server.ssl_keyfile)
    with ExitStack() as sockets:
        listener = sockets.enter_context(open_port(server.host, server.port) if server.uds is None else open_path(server.uds, 0o660))
        admin = None if server.admin_socket is None else sockets.enter_context(open_path(server.admin_socket, 0o600))
        if not keys and server.uds is None and not is_loopback(server.host):
            log.warning("whoever reaches %s may use this server: give it a key with --api-key-file or --api-key", server.host)
        return asyncio.run(_serve(engine, server, keys, listener, admin, began))


async def _serve(
    config: EngineConfig, server: ServerConfig, keys: Keys, listener: socket.socket, admin: socket.socket | None, began: float
) -> int:
    engine = AsyncEngine(config)
    starting = asyncio.create_task(engine.start(began))
    # The engine's process loads its model while this one imports its web framework, which takes a while too.
    life = await asyncio.to_thread(import_module, "chairlift.server.supervisor")
    from chairlift.server.admin import serving  # imported by now

    served = life.Supervisor(engine, server.served_model_name or public_name(config.model), server, keys)
    async with nullcontext() if admin is None else serving(admin, served.admin()):
        status: int = await served.run(starting, listener)
    # A thread can't be ended, and asyncio and Python wait for all of them: one may fetch a model for another hour.
    leaving = threading.Timer(LAST_SECONDS, os._exit, (status,))
    leaving.daemon = True
    leaving.start()
    return status
