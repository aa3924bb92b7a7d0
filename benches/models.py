"""TTFT of three models on one machine: one step loop beside a process for each model.

    python benches/models.py [--embedder DIR]      writes benches/results/models.md; takes about eight minutes
    python benches/models.py --simulated           the simulated part, which takes a second and is only printed

`chat` and `code` are the default model, twice; `embed` computes embeddings. Two traces: "A B A A C" is a burst of five requests, for chat,
code, chat, chat and embed, every four seconds; "skewed" has random arrivals, of which 80 % are for chat, 15 % for code and 5 % for embed.

Simulated, one step loop is the server's scheduler and arbiter; a process for each model has a third of the machine, so its steps take
three times as long. Run for real, all processes have all cores, and the system shares them. DIR is a sentence encoder in Hugging Face's
layout, such as all-MiniLM-L6-v2; without it `embed` is the default model with outputs of one token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from pages import machine, write

from chairlift import AsyncEngine, SamplingParams
from chairlift.bench.traces import TraceRequest
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.engine.engine_process import EngineProcess
from chairlift.sampling import EMBED
from chairlift.sim.devices import DEVICES
from chairlift.sim.models import SharedModel, simulate_models
from chairlift.sim.run import simulate
from chairlift.sim.shapes import shape

MODELS = ("chat", "code", "embed")
SECONDS, ROUNDS = 45.0, 2
"""How long requests arrive, and how often both ways are run in turns."""
SIZES = {"chat": (48, 32), "code": (96, 24), "embed": (64, 1)}
"""Tokens of a prompt and of an output."""
BURST, BURST_SECONDS = ("chat", "code", "chat", "chat", "embed"), 4.0
SHARES, RATE = (0.80, 0.15, 0.05), 1.2
SIMULATED_SHAPE = "SmolLM2-135M"
EMBEDDER_SHARE = 0.17
"""The embedder's weights divided by the chat model's: how long its steps take, relative to it."""

Trace = list[TraceRequest]


@dataclass(frozen=True)
class Times:
    """The results of one model's requests: seconds to the first token."""

    ttft: list[float]

    def row(self) -> str:
        """The cells of a table."""
        p50, p95 = (np.percentile(self.ttft, percent, method="inverted_cdf") for percent in (50, 95))
        return f"{len(self.ttft)} | {p50 * 1e3:,.0f} | {p95 * 1e3:,.0f}"


def request(arrival: float, model: str) -> TraceRequest:
    """A request of the model's size."""
    return TraceRequest(arrival, *SIZES[model], model=model)


def bursts(seconds: float = SECONDS) -> Trace:
    """ "A B A A C", again and again."""
    return [request(at * BURST_SECONDS, model) for at in range(int(seconds / BURST_SECONDS)) for model in BURST]


def skewed(seconds: float = SECONDS) -> Trace:
    """Random arrivals, most of them for one model."""
    draw, at, trace = random.Random(0), 0.0, []
    while (at := at + draw.expovariate(RATE)) < seconds:
        trace.append(request(at, draw.choices(MODELS, SHARES)[0]))
    return trace


TRACES: dict[str, Callable[[], Trace]] = {"A B A A C": bursts, "skewed": skewed}


def simulated(trace: Trace) -> dict[str, dict[str, Times]]:
    """Both ways in the simulator."""
    config = EngineConfig(model=SIMULATED_SHAPE)
    steps = DEVICES["cpu"].step_time(shape(SIMULATED_SHAPE), dtype="int8", kv="float32")
    step_times = {"chat": steps, "code": steps, "embed": steps.times(EMBEDDER_SHARE)}
    together = simulate_models(trace, [SharedModel(name, config) for name in MODELS], step_times=step_times).results
    apart = {
        name: simulate([one for one in trace if one.model == name], model=SIMULATED_SHAPE, step_time=step_times[name].times(len(MODELS)))
        for name in MODELS
    }
    return {
        "one step loop": {name: Times(result.ttft().tolist()) for name, result in together.items()},
        "a third of the machine each": {name: Times(result.ttft().tolist()) for name, result in apart.items()},
    }


async def drive(engines: Mapping[str, AsyncEngine], trace: Trace, embeds: bool) -> dict[str, Times]:
    """Sends the requests at their times."""
    found: dict[str, list[float]] = {name: [] for name in MODELS}

    async def ask(number: int, one: TraceRequest, due: float) -> None:
        assert one.model is not None
        prompt = [1000 + (number * 37 + at * 11) % 20000 for at in range(one.prompt_tokens)]
        text = SamplingParams(temperature=0.0, max_tokens=one.output_tokens, ignore_eos=True)
        first = None
        async for _ in engines[one.model].generate(prompt, EMBED if embeds and one.model == "embed" else text):
            first = first or time.perf_counter()
        assert first is not None
        found[one.model].append(first - due)

    for number, model in enumerate(MODELS * 3):  # the step-time model is learned
        await ask(-1 - number, request(0.0, model), time.perf_counter())
    for times in found.values():
        times.clear()
    began, tasks = time.perf_counter(), []
    for number, one in enumerate(trace):
        await asyncio.sleep(max(0.0, began + one.arrival - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(number, one, began + one.arrival)))
    await asyncio.gather(*tasks)
    return {name: Times(times) for name, times in found.items()}


async def served(trace: Trace, embedder: str | None, *, shared: bool) -> dict[str, Times]:
    """Real engines, in one process or in one each."""
    paths = dict.fromkeys(MODELS, DEFAULT_MODEL) | ({"embed": embedder} if embedder else {})
    process = EngineProcess() if shared else None
    memory = {name: None if name == "embed" and embedder else 1 << 30 for name in MODELS}
    engines = {
        name: AsyncEngine(EngineConfig(model=path, kv_cache_memory_bytes=memory[name], enable_prefix_caching=False), process=process)
        for name, path in paths.items()
    }
    try:
        for engine in engines.values():
            await engine.start()
        return await drive(engines, trace, embeds=embedder is not None)
    finally:
        for engine in engines.values():
            await engine.close()
        if process is not None:
            await process.close()


def real(trace: Trace, embedder: str | None) -> dict[str, dict[str, Times]]:
    """Both ways with real engines, in turns, because what disturbs the machine changes."""
    ways = {"one step loop": True, "a process each": False}
    found: dict[str, dict[str, Times]] = {way: {name: Times([]) for name in MODELS} for way in ways}
    for _ in range(ROUNDS):
        for way, shared in ways.items():
            for name, times in asyncio.run(served(trace, embedder, shared=shared)).items():
                found[way][name].ttft.extend(times.ttft)
    return found


def table(title: str, run: Callable[[Trace], dict[str, dict[str, Times]]]) -> list[str]:
    """The lines of a part of the page."""
    lines = [f"## {title}", "", "| trace | model | | requests | TTFT p50, ms | p95, ms |", "|---|---|---|---|---|---|"]
    for name, make in TRACES.items():
        found = run(make())
        lines += [f"| {name} | {model} | {way} | {times[model].row()} |" for model in MODELS for way, times in found.items()]
    return [*lines, ""]


def main() -> None:
    """Runs everything and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embedder", metavar="DIR", help="a sentence encoder")
    parser.add_argument("--simulated", action="store_true", help="print the simulated part only")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    lines = table("Simulated", simulated)
    if args.simulated:
        print("\n".join(lines))
        return
    lines += table("Run", lambda trace: real(trace, args.embedder))
    sizes = ", ".join(f"{name} {prompt} and {output}" for name, (prompt, output) in SIZES.items())
    embedder = "a sentence encoder" if args.embedder else "the default model with outputs of one token"
    head = [
        "# Three models on one machine",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}. `python benches/models.py`; {SECONDS:.0f} s of arrivals, run {ROUNDS} times.",
        f"Load average of the machine at the start: {load:.1f}. Beside other programs, three processes get more of the cores than one.",
        f"chat and code are {DEFAULT_MODEL}, embed is {embedder}. Tokens of prompt and output: {sizes}.",
        "",
    ]
    write("models.md", head + lines)


if __name__ == "__main__":
    main()
