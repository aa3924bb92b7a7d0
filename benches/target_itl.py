"""Times the steps of four streams while a long prompt is computed beside them, with and without --target-itl-ms.

Writes benches/results/target_itl.md. Takes about two minutes on a quiet machine; the model is the default one.
"""

from __future__ import annotations

import time

import numpy as np
from pages import machine, write

from chairlift.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.sampling import SamplingParams

STREAMS, PROMPT = 4, 4000
TARGETS = (None, 300.0, 150.0)


def greedy(tokens: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def steps(engine: Engine, random: np.random.Generator) -> tuple[list[float], list[float]]:
    """Milliseconds of steps of the streams alone, and of those beside the prompt."""
    for i in range(8):  # what the step-time model learns from
        engine.add(EngineRequest.of(1000 + 128 * i, random.integers(10, 4000, 200), greedy(20)))
    while engine.has_work:
        engine.step()
    for i in range(STREAMS):
        engine.add(EngineRequest.of(10_000 + 128 * i, random.integers(10, 4000, 50), greedy(1500)))  # more than the prompt takes
    alone, beside = [], []
    for _ in range(20):
        alone.append(timed(engine))
    engine.add(EngineRequest.of(1, random.integers(10, 4000, PROMPT), greedy(1)))
    while engine.explain(1)["finish"] is None:  # type: ignore[index]
        beside.append(timed(engine))
    return alone[5:], beside


def timed(engine: Engine) -> float:
    """Milliseconds of a step."""
    start = time.perf_counter()
    engine.step()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Runs everything and writes the table."""
    lines = [
        "# Time between tokens beside a long prompt",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}. {STREAMS} streams decode while a prompt of {PROMPT} tokens is computed;",
        "512 tokens a step at most, milliseconds. The streams alone are what no target can better.",
        "",
        "| --target-itl-ms | alone p50 | beside p50 | p90 | p99 | p99 / target | p99 / alone | the prompt takes, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        engine = Engine(EngineConfig(target_itl_ms=target, max_num_batched_tokens=512, enable_prefix_caching=False))
        alone, beside = steps(engine, np.random.default_rng(0))
        p50, p90, p99 = np.percentile(beside, [50, 90, 99])
        base = float(np.median(alone))
        ratio = "" if target is None else f"{p99 / target:.2f}"
        cells = [
            target or "none",
            f"{base:.0f}",
            f"{p50:.0f}",
            f"{p90:.0f}",
            f"{p99:.0f}",
            ratio,
            f"{p99 / base:.1f}",
            f"{sum(beside) / 1e3:.1f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    write("target_itl.md", lines)


if __name__ == "__main__":
    main()
