"""`chairlift generate`: completes prompts."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Mapping
from contextlib import aclosing
from typing import Any

from chairlift.cli import flags, values
from chairlift.cli.flags import add_engine, add_sampling, sampling_settings
from chairlift.cli.text_input import text_input
from chairlift.config import EngineConfig
from chairlift.engine.client import AsyncEngine
from chairlift.errors import InvalidRequest
from chairlift.sampling import MAX_SEQUENCES, SamplingParams

_EXAMPLES = """\
examples:
  chairlift generate "The capital of France is" --max-tokens 8 --temperature 0
  chairlift generate "One" "Two" "Three"             several prompts, run together
  cat story.txt | chairlift generate                 a prompt from standard input
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "generate", summary, _EXAMPLES, run)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to complete (default: all of standard input, as one)")
    flags.add_model(parser, positional=False)
    parser.add_argument("-n", type=values.whole(1, MAX_SEQUENCES), metavar="N", help="completions of each prompt (default: 1)")
    add_sampling(parser, max_tokens=128)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the completions. A single one is streamed; several are printed in order once all are complete."""
    sampling, prompts = sampling_settings(args), args.prompts
    if not prompts:
        if sys.stdin.isatty():
            raise InvalidRequest("no prompt: give one as an argument or on standard input")
        prompts = [text_input().removesuffix("\n")]
    asyncio.run(_generate(args.engine, prompts, sampling, args.started))
    return 0


async def _generate(config: EngineConfig, prompts: list[str], sampling: Mapping[str, Any], started: float) -> None:
    engine = AsyncEngine(config)
    await engine.start(started)
    try:
        params = engine.default_params(**sampling)
        if len(prompts) == 1 and params.n == 1:
            await _complete(engine, prompts[0], params, stream=True)
            print()
            return
        completions = await asyncio.gather(*(_numbered(number, _complete(engine, text, params)) for number, text in enumerate(prompts, 1)))
        for prompt, texts in zip(prompts, completions, strict=True):
            for text in texts:
                print(f"==> {prompt} <==\n{text}\n")
    finally:
        await engine.close()


async def _complete(engine: AsyncEngine, prompt: str, params: SamplingParams, *, stream: bool = False) -> list[str]:
    """The `n` completions of a prompt; with `stream`, prints the text as it is generated."""
    pieces: list[list[str]] = [[] for _ in range(params.n)]
    async with aclosing(engine.generate(prompt, params)) as outputs:
        async for output in outputs:
            pieces[output.index].append(output.text)
            if stream:
                print(output.text, end="", flush=True)
    return list(map("".join, pieces))


async def _numbered(number: int, completion: Awaitable[list[str]]) -> list[str]:
    """Awaits a completion and puts the prompt's number into its errors."""
    try:
        return await completion
    except InvalidRequest as error:
        raise InvalidRequest(f"prompt {number}: {error}", param=error.param, code=error.code) from error
