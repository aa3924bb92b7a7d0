"""Runs the same requests without batching and with four kinds of it, on this engine; writes benches/results/batching.md.

    python benches/batching.py                                  some twenty minutes on two cores; nothing else should run
    python benches/batching.py --requests 8 --repeats 1 --out DIR   a short look

Every mode has the same KV memory. Without paging a request reserves the longest context in one piece, as in FasterTransformer: a KV
block is as long as the context. With paging, blocks have 16 tokens, so the same memory holds more requests.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from pages import RESULTS, machine

from chairlift import EngineConfig
from chairlift.bench.traces import TraceRequest
from chairlift.engine.engine import Engine
from chairlift.engine.frames import StepOutputs
from chairlift.sim.compare import Variant, VariantResult
from chairlift.sim.compare_plot import plot
from chairlift.sim.live import run_live
from chairlift.sim.workload import Workload

SLOTS, PAGED_SLOTS, BLOCK_SIZE = 8, 32, 16
RATE, PROMPT, TIMEOUT_MS = 12.0, 64, 500.0
HEADER = ["", "tokens/s", "latency p50, s", "p95, s", "slot utilisation", "KV waste"]


@dataclass(frozen=True)
class Mix:
    """Requests of one kind, and the longest context, which must hold each of them."""

    name: str
    description: str
    context: int
    outputs: list[int]

    def workload(self) -> Workload:
        """Requests at even intervals, more than any mode can serve at once."""
        return Workload.of([TraceRequest(index / RATE, PROMPT, output) for index, output in enumerate(self.outputs)])

    def variants(self) -> list[Variant]:
        """The modes, from the slowest on."""
        # One block of --num-kv-blocks is scratch space.
        common = EngineConfig(max_model_len=self.context, enable_prefix_caching=False, max_num_seqs=SLOTS)
        whole: dict[str, Any] = {"block_size": self.context, "num_kv_blocks": SLOTS + 1, "kv_reservation": "max-tokens"}
        paged = {"block_size": BLOCK_SIZE, "num_kv_blocks": 1 + SLOTS * self.context // BLOCK_SIZE, "max_num_seqs": PAGED_SLOTS}
        modes: dict[str, tuple[str, dict[str, Any]]] = {
            "no batching": ("One request at a time.", {**whole, "max_num_seqs": 1}),
            "static": (
                "A batch starts with the requests that are waiting. None joins until all have finished.",
                {**whole, "batching": "static"},
            ),
            "dynamic": (
                f"A batch starts when it is full, or after {TIMEOUT_MS / 1e3:g} s.",
                {**whole, "batching": "dynamic", "batch_timeout_ms": TIMEOUT_MS},
            ),
            "continuous": ("A waiting request joins at the next step. Each reserves the longest context.", whole),
            "continuous, paged": ("As before. A request holds KV blocks for the tokens that it has.", paged),
        }
        return [Variant(name, name.capitalize(), text, replace(common, **settings)) for name, (text, settings) in modes.items()]


def mixes(requests: int) -> list[Mix]:
    """A mix in which the longest answer is many times the mean, and one in which all are equal."""
    generator = random.Random(0)
    skewed = [300 if index % 10 == 4 else generator.randint(5, 40) for index in range(requests)]
    return [
        Mix("skewed", "one answer in ten has 300 tokens, the others 5 to 40; the context is 512", 512, skewed),
        Mix("even", "every answer has 64 tokens; the context is the 128 that a request needs", 128, [64] * requests),
    ]


@dataclass
class KvUse:
    """KV slots that running requests held and those with a token, summed over steps by their duration."""

    held: float = 0.0
    used: float = 0.0
    last: float = field(default_factory=time.perf_counter)

    def add(self, engine: Engine, _: StepOutputs) -> None:
        """Adds the time since the step before."""
        stats, now = engine.stats(), time.perf_counter()
        self.held += stats.held_kv_slots * (now - self.last)
        self.used += stats.used_tokens * (now - self.last)
        self.last = now


@dataclass(frozen=True)
class Run:
    """One mode's result, and the share of the held KV slots without a token."""

    result: VariantResult
    kv_waste: float

    def figures(self) -> list[float]:
        """The numbers of a line, in the order of HEADER."""
        figures, spans = self.result.figures(), self.result.spans
        latency = np.percentile((spans["ended"] - spans["arrived"]) / 1e6, (50, 95), method="inverted_cdf")
        return [figures["tokens_per_s"], *latency.tolist(), figures["slot_utilisation"], self.kv_waste]


def measured(mix: Mix, repeats: int) -> dict[str, list[Run]]:
    """Runs all modes in turn, `repeats` times."""
    runs: dict[str, list[Run]] = {}
    for _ in range(repeats):
        for variant in mix.variants():
            use = KvUse()
            result = run_live(mix.workload(), variant, use.add)
            if result.unserved:
                raise SystemExit(f"{mix.name}, {variant.name}: {result.unserved} requests were not served")
            runs.setdefault(variant.name, []).append(Run(result, 1 - use.used / use.held))
            print(f"{mix.name}, {variant.name}: {runs[variant.name][-1].figures()[0]:.0f} tokens/s", flush=True)
    return runs


def lines(runs: dict[str, list[Run]]) -> list[list[str]]:
    """The table's cells: medians of the runs."""
    cells = [HEADER]
    for name, each in runs.items():
        rate, p50, p95, slots, waste = (statistics.median(values) for values in zip(*(run.figures() for run in each), strict=True))
        cells.append([name, f"{rate:.0f}", f"{p50:.1f}", f"{p95:.1f}", f"{slots:.0%}", f"{waste:.0%}"])
    return cells


def report(results: dict[str, dict[str, list[Run]]], described: list[Mix], requests: int, repeats: int) -> str:
    """The text of benches/results/batching.md."""
    text = [
        "# Batching modes on one engine",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}; Chairlift {version('chairlift')}, {EngineConfig().model}.",
        f"{requests} requests, {RATE:g} a second, with prompts of {PROMPT} tokens; no prefix cache; medians of {repeats} runs.",
        f"The KV memory holds {SLOTS} of the longest contexts, so the modes without paging have {SLOTS} slots.",
        f"With paging, the same memory serves up to {PAGED_SLOTS} slots.",
        "Latency is the time from a request's arrival to its last token.",
        "Slot utilisation is the share of slot-time in which a request holds the slot.",
        "KV waste is the share of the KV memory held by running requests that has no token, over time.",
    ]
    for mix in described:
        header, *cells = lines(results[mix.name])
        text += ["", f"## {mix.name.capitalize()}: {mix.description}", ""]
        text += ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *cells)]
    return "\n".join([*text, "", "![The skewed mix](batching.svg)", ""])


def main() -> None:
    """Measures both mixes; writes the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the results there")
    arguments = parser.parse_args()
    described = mixes(arguments.requests)
    results = {mix.name: measured(mix, arguments.repeats) for mix in described}
    out = arguments.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    (out / "batching.md").write_text(report(results, described, arguments.requests, arguments.repeats))
    drawn = [each[0].result for name, each in results["skewed"].items() if name != "no batching"]
    title, subtitle = f"The same {arguments.requests} requests, measured", f"{EngineConfig().model}: {described[0].description}."
    (out / "batching.svg").write_text(plot(drawn, title, subtitle))
    print((out / "batching.md").read_text())


if __name__ == "__main__":
    main()
