"""A replica of Ray Serve that runs an engine for a server on another machine, and the application of such replicas."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingContext

from chairlift.engine.gauge import open_gauge, read_gauge
from chairlift.engine.joining import run_engine
from chairlift.engine.machine_files import OWN, MachineFiles
from chairlift.engine.secret import Secret, read_secret
from chairlift.settings import parse_host_and_port

CHECK_SECONDS = 1.0
"""Interval at which Ray Serve asks whether an engine runs."""
ANSWER_SECONDS = 10.0
"""Seconds after which a replica that does not answer counts as dead."""
START_CHECK_SECONDS = 0.1
"""Interval at which a replica looks whether its engine is ready."""
LEAVE_SECONDS = 60.0
"""Seconds that an engine gets to leave before Ray kills it, unless the deployment says otherwise."""
SATURATION = 0.7
"""The saturation that autoscaling aims at."""


class EngineReplica:
    """Runs one engine, which joins the server by itself. Ray Serve owns its restart: after the engine's end it replaces the replica.

    Requests do not pass through Ray: the engine and the server exchange frames over their own connection.
    """

    def __init__(self, host: str, port: int, secret: Secret, files: MachineFiles) -> None:
        """The engine joins the server that listens at `host` and `port` and knows the secret, and uses these files of its machine."""
        self._server = host, port, secret, files
        self._leaving = asyncio.Event()
        self._saturation = open_gauge()
        self._engine: asyncio.Task[str] | None = None

    async def check_health(self) -> None:
        """Starts the engine at the first call, and waits until it is ready. Raises RuntimeError after its end, or what `run_engine` raises.

        The first call raises nothing: Ray Serve gives up replicas that fail at once, and the server may only be late.
        """
        if self._engine is None:
            self._engine = asyncio.create_task(run_engine(*self._server, self._leaving, self._saturation))
            while not self._engine.done() and read_gauge(self._saturation) is None:
                await asyncio.sleep(START_CHECK_SECONDS)
        elif self._engine.done():
            raise RuntimeError(self._engine.result())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `by_saturation` gets of this replica."""
        return {"saturation": read_gauge(self._saturation) or 0.0}

    async def __del__(self) -> None:
        """Lets the engine leave: the server lets its requests end, or moves them to another engine. Ray Serve calls and awaits this."""
        self._leaving.set()
        if self._engine is not None:
            await asyncio.wait([self._engine])


def by_saturation(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """As many engines as have a saturation of 0.7 each with the work that arrives, and the state that Ray keeps for it, which is none.

    Ray Serve applies the bounds and delays of the deployment's `autoscaling_config`.
    """
    saturations = (context.aggregated_metrics or {}).get("saturation", {}).values()
    return max(1, math.ceil(sum(saturations) / SATURATION)), {}


def application(host: str, port: int, secret: Secret, files: MachineFiles, options: Mapping[str, Any]) -> serve.Application:
    """Replicas whose engines join this server and use these files; `options` are those of Ray Serve's deployments."""
    defaults = {
        "health_check_period_s": CHECK_SECONDS,
        "health_check_timeout_s": ANSWER_SECONDS,
        "graceful_shutdown_timeout_s": LEAVE_SECONDS,
    }
    deployed: serve.Deployment = serve.deployment(name="engines", **{**defaults, **options})(EngineReplica)
    return deployed.bind(host, port, secret, files)


def engines(arguments: Mapping[str, Any]) -> serve.Application:
    """The application for Ray's own tools, with the arguments `server`, HOST:PORT, and `secret_file`, a path on the cluster's machines.

    The other arguments are the settings of `join` that name files: `model`, `cache_dir`, `lora_modules` and so on. A file for `serve
    deploy` names this as `import_path: chairlift.fleet.replica:engines`, and has the deployment's options.
    """
    files = MachineFiles({name: arguments[name] for name in ("model", *OWN) if name in arguments})
    return application(*parse_host_and_port(arguments["server"]), read_secret(arguments["secret_file"]), files, {})
