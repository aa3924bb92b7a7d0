"""Run by test_server_life: a whole server around the fake engine, in a process of its own, on the port of argument 1."""

import asyncio
import logging
import sys

from fake_async_engine import MODEL, FakeEngine

from chairlift.config import ServerConfig
from chairlift.errors import ModelNotFound
from chairlift.server.life import Life
from chairlift.server.port import open_port


async def main(port: int, shutdown_timeout: float, loads: str) -> int:
    engine = FakeEngine()
    engine.ready = False

    async def start() -> None:
        while loads == "never":
            await asyncio.sleep(1)
        if loads == "badly":
            raise ModelNotFound("there is no such model")
        engine.ready = True

    life = Life(engine, MODEL, ServerConfig(shutdown_timeout=shutdown_timeout))
    return await life.run(asyncio.create_task(start()), open_port("127.0.0.1", port))


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    sys.exit(asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])))
