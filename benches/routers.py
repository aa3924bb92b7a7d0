"""The routers of `--routing` on traces with shared prefixes, simulated. Writes benches/results/routers.md, the same on any machine.

    python benches/routers.py        two minutes

The made traces are drawn with a fixed seed. "templates" has 200 prompt templates of 512 to 4,096 tokens, chosen by Zipf's law, with up to
256 own tokens; "conversations" has users whose next prompt is the last one, its answer and up to 512 own tokens.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from traces import mooncake

from chairlift.bench.traces import HASH_BLOCK, TraceRequest
from chairlift.sim.run import simulate
from chairlift.sim.workload import Workload

RESULT = Path(__file__).parent / "results" / "routers.md"
MODEL, DEVICE, REPLICAS = "Llama-3.1-8B", "H100", 4
ROUTINGS = ("round-robin", "least-loaded", "prefix-aware", "lmetric", "predicted")
REQUESTS = 4000
RATES = {"mooncake": 0.6, "templates": 1.0, "conversations": 1.0}
"""Factors of the traces' rates."""


def templates() -> Workload:
    """Prompts of few templates."""
    dice, now, lines = random.Random(1), 0.0, []
    sizes = [dice.randint(1, 8) for _ in range(200)]
    weights = [1 / (rank + 1) for rank in range(len(sizes))]
    for number in range(REQUESTS):
        now += dice.expovariate(40)
        [which] = dice.choices(range(len(sizes)), weights)
        own = dice.randint(1, 256)
        names = tuple(which * 100 + at for at in range(sizes[which]))
        lines.append(TraceRequest(now, sizes[which] * HASH_BLOCK + own, dice.randint(8, 256), (*names, 10**6 + number)))
    return Workload.of(lines)


def conversations() -> Workload:
    """Users who go on with what was said."""
    dice, lines, names = random.Random(2), list[TraceRequest](), 10**7
    while len(lines) < REQUESTS:
        now, prompt, known = len(lines) / 12, 0, tuple[int, ...]()
        for _ in range(dice.randint(1, 10)):
            prompt += dice.randint(32, 512)
            output = dice.randint(16, 512)
            blocks = -(-prompt // HASH_BLOCK)
            # Full blocks keep their names; the last one is another one when it is longer.
            names += 100
            known = (*known[: max(0, (prompt - 1) // HASH_BLOCK)], *range(names, names + blocks))[:blocks]
            lines.append(TraceRequest(now, prompt, output, known))
            prompt += output
            now += dice.uniform(10, 60)
    return Workload.of(sorted(lines, key=lambda line: line.arrival))


def main() -> None:
    """Simulates all and writes the table."""
    traces = {"mooncake": mooncake().first(REQUESTS), "templates": templates(), "conversations": conversations()}
    rows = []
    for name, trace in traces.items():
        for routing in ROUTINGS:
            result = simulate(trace, model=MODEL, device=DEVICE, replicas=REPLICAS, routing=routing, rate_scale=RATES[name])
            figures = result.figures()
            times = " | ".join(f"{figures[key] or 0:.3f} s" for key in ("ttft_p50_s", "ttft_p99_s"))
            rows.append(f"| {name} | {routing} | {times} | {figures['prefix_hit_share'] or 0:.1%} |")
            print(rows[-1], flush=True)
    text = f"""# Routers

Written by `benches/routers.py`; the same on any machine. {MODEL} on {REPLICAS} simulated {DEVICE}s, {REQUESTS:,} requests of each trace.

| trace | router | TTFT p50 | TTFT p99 | prompt tokens found in cache |
|---|---|---|---|---|
"""
    RESULT.write_text(text + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
