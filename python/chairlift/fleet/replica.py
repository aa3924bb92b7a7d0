"""A replica of Ray Serve that runs an engine for a server on another machine, and the application of such replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve

from chairlift.engine.joining import run_engine
from chairlift.engine.secret import Secret, read_secret
from chairlift.settings import parse_host_and_port

CHECK_SECONDS = 1.0
"""Interval at which Ray Serve asks whether an engine runs."""
ANSWER_SECONDS = 10.0
"""Seconds after which a replica that does not answer counts as dead."""


class EngineReplica:
    """Runs one engine, which joins the server by itself. Ray Serve owns its restart: after the engine's end it replaces the replica.

    Requests do not pass through Ray: the engine and the server exchange frames over their own connection.
    """

    def __init__(self, host: str, port: int, secret: Secret) -> None:
        """The engine joins the server that listens at `host` and `port` and knows the secret."""
        self._server = host, port, secret
        self._engine: asyncio.Task[str] | None = None

    async def check_health(self) -> None:
        """Starts the engine at the first call. Raises RuntimeError after its end, and what `run_engine` raises."""
        if self._engine is None:
            self._engine = asyncio.create_task(run_engine(*self._server))
        if self._engine.done():
            raise RuntimeError(self._engine.result())


def application(host: str, port: int, secret: Secret, options: Mapping[str, Any]) -> serve.Application:
    """Replicas whose engines join this server; `options` are those of Ray Serve's deployments."""
    checks: dict[str, Any] = {"health_check_period_s": CHECK_SECONDS, "health_check_timeout_s": ANSWER_SECONDS}
    deployed: serve.Deployment = serve.deployment(name="engines", **checks, **options)(EngineReplica)
    return deployed.bind(host, port, secret)


def engines(arguments: Mapping[str, str]) -> serve.Application:
    """The application for Ray's own tools, with the arguments `server`, HOST:PORT, and `secret_file`, a path on the cluster's machines.

    A file for `serve deploy` names it as `import_path: chairlift.fleet.replica:engines`, and has the deployment's options.
    """
    return application(*parse_host_and_port(arguments["server"]), read_secret(arguments["secret_file"]), {})
