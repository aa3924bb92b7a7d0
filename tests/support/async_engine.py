"""Runs tests with an `AsyncEngine` in an event loop, and collects what it streams."""

import asyncio

from chairlift.engine.client import AsyncEngine
from chairlift.sampling import SamplingParams

GUARD = 60


def run(test, **settings):
    """Runs `test(engine)` with a started engine."""

    async def main():
        async with asyncio.timeout(GUARD), AsyncEngine(**settings) as engine:
            await test(engine)

    asyncio.run(main())


async def collect(engine, prompt, **params):
    """A request's increments, all read as soon as they come."""
    return [output async for output in engine.generate(prompt, SamplingParams(**params))]


async def into(outputs, stream):
    """Appends a request's increments as they come, so that they are there when it fails."""
    async for output in stream:
        outputs.append(output)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def ids(outputs):
    return [token for output in outputs for token in output.token_ids]
