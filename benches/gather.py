"""CPU time of the engine for each output token at low load, with and without `--gather-ms auto`.

    python benches/gather.py           prints a table; takes two minutes with the default model

Requests arrive at random times, on average one in `GAP` seconds, each with a deadline for its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics

from peers.machine import cpu_seconds

from chairlift import AsyncEngine, SamplingParams, Scheduling
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.scheduling import LONGEST_MS

REQUESTS, GAP, OUTPUT, DEADLINE_MS = 60, 0.4, 16, 4000.0


async def run(model: str, gather_ms: float | None) -> tuple[float, float]:
    """Output tokens for each CPU second of the engine's process, and the median TTFT in seconds."""
    randomness = random.Random(1)
    engine = AsyncEngine(EngineConfig(model=model, gather_ms=gather_ms))
    await engine.start()
    assert engine.pid is not None
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    first_tokens: list[float] = []

    async def ask(number: int) -> None:
        prompt = [1 + (number * 31 + at) % 900 for at in range(24)]
        async for output in engine.generate(prompt, params, scheduling=Scheduling(ttft_deadline_ms=DEADLINE_MS)):
            if output.timing is not None and output.timing.first_token is not None:
                first_tokens.append(output.timing.first_token)

    for number in range(12):  # the step-time model is learned
        await ask(1000 + number)
    first_tokens.clear()
    before = cpu_seconds(engine.pid)
    tasks = []
    for number in range(REQUESTS):
        tasks.append(asyncio.create_task(ask(number)))
        await asyncio.sleep(randomness.expovariate(1 / GAP))
    await asyncio.gather(*tasks)
    used = cpu_seconds(engine.pid) - before
    await engine.close()
    return REQUESTS * OUTPUT / used, statistics.median(first_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    model = parser.parse_args().model
    print("| `--gather-ms` | output tokens per CPU second | median TTFT, s |\n|---|---|---|")
    for name, gather_ms in (("off", None), ("auto", LONGEST_MS)):
        rate, first_token = asyncio.run(run(model, gather_ms))
        print(f"| {name} | {rate:.1f} | {first_token:.2f} |")


if __name__ == "__main__":
    main()
