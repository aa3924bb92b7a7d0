"""`chairlift generate`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from chairlift.cli.sampling import sampling
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.client import AsyncEngine
from chairlift.errors import InvalidRequest
from chairlift.sampling import SamplingParams


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Prints what follows each prompt: one as it comes, several in order when all are known."""
    params = sampling(given)
    prompts = given["prompts"]
    if not prompts:
        if sys.stdin.isatty():
            raise InvalidRequest("no prompt: give one as an argument or through a pipe")
        prompts = [sys.stdin.read().removesuffix("\n")]
    asyncio.run(_generate(engine, prompts, params, began))
    return 0


async def _generate(config: EngineConfig, prompts: list[str], params: SamplingParams, began: float) -> None:
    engine = AsyncEngine(config)
    await engine.start(began)
    try:
        if len(prompts) == 1:
            await _text(engine, prompts[0], params, show=True)
            print()
            return
        texts = await asyncio.gather(*(_text(engine, prompt, params) for prompt in prompts))
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"==> {prompt} <==\n{text}\n")
    finally:
        await engine.close()


async def _text(engine: AsyncEngine, prompt: str, params: SamplingParams, *, show: bool = False) -> str:
    pieces = []
    async with aclosing(engine.generate(prompt, params)) as outputs:
        async for output in outputs:
            pieces.append(output.text)
            if show:
                print(output.text, end="", flush=True)
    return "".join(pieces)
