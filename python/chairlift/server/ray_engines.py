"""Keeps a server's engines deployed on a Ray cluster, through a process that speaks with Ray."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import sys
from asyncio.subprocess import PIPE
from typing import TYPE_CHECKING, Any, ClassVar

from chairlift.engine.machine_files import OWN
from chairlift.errors import InvalidSetting, pip_install

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift.server.config import ServerConfig

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""Pause before the engines are deployed again, after Ray was not reached or was lost."""
MAX_REASON = 300
"""Most characters of an error of Ray's."""
GRACE_SECONDS = 10.0
"""Seconds after those of --shutdown-timeout until Ray kills an engine that it ends."""
REMOVE_SECONDS = 15.0
"""Seconds that Ray gets to remove the engines when the server ends."""


class RayEngines:
    """The owner of the process that deploys the engines."""

    command: ClassVar[tuple[str, ...]] = ("-m", "chairlift.fleet.placement")

    def __init__(self, config: ServerConfig, engine: EngineConfig, port: int) -> None:
        """The engines join at `port` of the address in `--engine-listen`. The files that `engine` names are those of their machines."""
        assert config.engine_listen is not None
        if importlib.util.find_spec("ray") is None:
            raise InvalidSetting(f"--ray-address needs Ray: {pip_install('fleet')}")
        self._address = config.ray_address
        options: dict[str, Any] = {"ray_actor_options": dict(config.ray_actor_options or {"num_cpus": 1})}
        options["graceful_shutdown_timeout_s"] = config.shutdown_timeout + GRACE_SECONDS
        if config.ray_autoscaling_config is None:
            options["num_replicas"] = config.replicas
        else:
            policy = {"policy_function": "chairlift.fleet.replica:by_saturation"}
            options["autoscaling_config"] = {"policy": policy, **config.ray_autoscaling_config}
        order = {"address": config.ray_address, "host": config.engine_listen[0], "port": port, "secret_file": config.engine_secret_file}
        files = {name: getattr(engine, name) for name in ("model", *OWN)}
        self._order = json.dumps({**order, "files": files, "options": options})

    async def keep(self) -> None:
        """Deploys the engines, again after each failure, until this is cancelled. Then Ray removes them.

        Ray Serve restarts single engines by itself.
        """
        while True:
            logger.info("deploying engines on Ray (%s)", self._address)
            logger.error("Ray (%s): %s: trying again in %.0f s", self._address, await self._run(), RETRY_SECONDS)
            await asyncio.sleep(RETRY_SECONDS)

    async def _run(self) -> str:
        """Runs the process until its end. Returns the last line of its errors."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, *self.command, self._order, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        assert process.stdin is not None
        communicating = asyncio.create_task(self._communicate(process))
        try:
            return await asyncio.shield(communicating)
        finally:
            process.stdin.close()  # it removes the engines
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(communicating, REMOVE_SECONDS)
            if process.returncode is None:
                process.kill()

    async def _communicate(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(process.stderr.read())
        while line := await process.stdout.readline():
            logger.info("engines on Ray: %s", line.decode(errors="replace").strip())
        lines = (await errors).decode(errors="replace").strip().splitlines()
        status = await process.wait()
        return lines[-1][:MAX_REASON] if lines else f"the process that deploys ended with exit status {status}"
