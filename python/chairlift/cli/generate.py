"""`chairlift generate`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Mapping
from contextlib import aclosing
from typing import Any

from chairlift.cli.sampling import sampling
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.client import AsyncEngine
from chairlift.errors import InvalidRequest
from chairlift.sampling import SamplingParams


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Prints what follows each prompt: one as it comes, several in order when all are known."""
    chosen = sampling(given)
    prompts = given["prompts"]
    if not prompts:
        if sys.stdin.isatty():
            raise InvalidRequest("no prompt: give one as an argument or through a pipe")
        prompts = [sys.stdin.read().removesuffix("\n")]
    asyncio.run(_generate(engine, prompts, chosen, began))
    return 0


async def _generate(config: EngineConfig, prompts: list[str], chosen: Mapping[str, Any], began: float) -> None:
    engine = AsyncEngine(config)
    await engine.start(began)
    params = engine.default_params(**chosen)
    try:
        if len(prompts) == 1 and params.n == 1:
            await _texts(engine, prompts[0], params, show=True)
            print()
            return
        answers = await asyncio.gather(*(_named(number, _texts(engine, prompt, params)) for number, prompt in enumerate(prompts, 1)))
        for prompt, texts in zip(prompts, answers, strict=True):
            for text in texts:
                print(f"==> {prompt} <==\n{text}\n")
    finally:
        await engine.close()


async def _texts(engine: AsyncEngine, prompt: str, params: SamplingParams, *, show: bool = False) -> list[str]:
    """The answers to a prompt, shown as they come if so wished."""
    pieces: list[list[str]] = [[] for _ in range(params.n)]
    async with aclosing(engine.generate(prompt, params)) as outputs:
        async for output in outputs:
            pieces[output.index].append(output.text)
            if show:
                print(output.text, end="", flush=True)
    return list(map("".join, pieces))


async def _named(number: int, texts: Awaitable[list[str]]) -> list[str]:
    """Puts the prompt's place into what is wrong with it."""
    try:
        return await texts
    except InvalidRequest as error:
        raise InvalidRequest(f"prompt {number}: {error}", param=error.param, code=error.code) from error
