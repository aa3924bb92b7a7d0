"""A whole server around a scripted engine, in a process of its own, on the port of argument 1.

Argument 2 is its shutdown timeout, argument 3 how its engine fares: see `_engine`. SIGUSR1 releases "paused" requests.
"""

import asyncio
import logging
import signal
import sys
import time
from argparse import Namespace

from scripted_engine import ScriptedEngine
from server_here import MODEL

from chairlift.config import EngineConfig
from chairlift.errors import ModelNotFound
from chairlift.server import engine_keeper, supervisor
from chairlift.server.config import ServerConfig
from chairlift.server.http.sockets import open_port
from chairlift.server.keys import Keys
from chairlift.server.model import ServedModel
from chairlift.server.tiers import ServiceTiers


class Startable(ScriptedEngine):
    """An engine that dies of a prompt, and can be started again; `loads` says how that goes."""

    def __init__(self, loads: str) -> None:
        super().__init__()
        self.loads = loads
        self.may_start = False
        ended = self.one.ended

        async def broken() -> None:
            await ended()
            raise RuntimeError("a bug in the server")

        if loads == "broken":
            self.one.ended = broken
        for number, name in ((signal.SIGUSR1, "released"), (signal.SIGUSR2, "may_start")):
            asyncio.get_running_loop().add_signal_handler(number, setattr, self, name, True)

    async def before_start(self) -> None:
        while self.loads == "never":
            await asyncio.sleep(1)
        while self.loads == "waiting" and self.starts > 1 and not self.may_start:
            await asyncio.sleep(0.01)
        if self.loads == "failing" and self.starts > 1 and not self.may_start:
            raise ModelNotFound("there is no such model any more")
        if self.loads == "badly" or (self.loads == "limping" and self.starts == 2):
            raise ModelNotFound("there is no such model")


def _counting():
    """The engine that counts, in a process of its own."""
    import counting_engine

    counting_engine.install()
    return counting_engine


def _engine(loads: str):
    """How it loads: `well`, `never`, `badly`, or `limping`, which means badly at the second time.

    `waiting` and `failing` ones load once, and again after SIGUSR2: until then it takes for ever, or fails. Nobody notices the end of
    a `broken` one. Others have a process of their own, and are quickly found stuck.
    """
    if loads not in ("process", "killed"):
        return Startable(loads)
    from chairlift.engine.engine_process import EngineProcess
    from chairlift.engine.replicated_engine import ReplicatedEngine

    _counting().hurry(1.0)
    from chairlift.engine import heartbeat

    heartbeat.KILL_AFTER = 1.0 if loads == "killed" else 1000.0
    return ReplicatedEngine(EngineConfig(), [EngineProcess(exclusive=True)])


async def main(port: int, shutdown_timeout: float, loads: str) -> int:
    engine_keeper.restart_delay = lambda failures: failures / 100
    engine = _engine(loads)
    server = supervisor.Supervisor([ServedModel(MODEL, engine)], ServerConfig(shutdown_timeout=shutdown_timeout), Keys(), ServiceTiers())
    return await server.run(open_port("127.0.0.1", port), asyncio.create_task(engine.start()))


def download(port: int) -> int:
    """`chairlift serve` with a model that takes for ever to fetch."""
    from chairlift.cli import serve
    from chairlift.engine import client

    _counting()
    client.locate = lambda *_: time.sleep(3600)
    return serve.run(Namespace(engine=EngineConfig(), server=ServerConfig(port=port), started=time.perf_counter()))


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    if sys.argv[3] == "download":
        sys.exit(download(int(sys.argv[1])))
    sys.exit(asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])))
