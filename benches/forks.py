"""What a fork of a live sequence costs by its context, in the core and through `LiveSequence.fork`.

    python benches/forks.py            writes benches/results/forks.md; takes ten seconds

No model runs. Microseconds are medians; each round forks once, and drops the forks.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pages import machine, write

from chairlift import LLM, LiveSequence
from chairlift.checkpoint.locate import locate
from chairlift.config import DEFAULT_MODEL

CONTEXTS = (512, 8192, 32_768, 131_072)
COUNTS = (1, 16)
LONGEST = 132_000
ROUNDS = 500
T = TypeVar("T")


def median_us(fork: Callable[[], T], drop: Callable[[T], object]) -> float:
    """Median microseconds of `fork`, whose result `drop` drops in time that does not count."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        forked = fork()
        times.append((time.perf_counter_ns() - began) / 1000)
        drop(forked)
    return statistics.median(times)


def drop_all(forks: list[LiveSequence]) -> None:
    """Drops forks."""
    for fork in forks:
        fork.drop()


def model(directory: Path) -> Path:
    """The default model's configuration with a longer context, and its tokenizer."""
    original = locate(DEFAULT_MODEL)
    config = json.loads((original / "config.json").read_text()) | {"max_position_embeddings": LONGEST}
    (directory / "config.json").write_text(json.dumps(config))
    for file in original.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


def measure(llm: LLM, context: int) -> list[float]:
    """The core's time, and that of `LiveSequence.fork` for each of `COUNTS`, per fork."""
    with llm.open([1] * context) as root:
        core, now, handles = llm.engine._sequences._scheduler, time.monotonic_ns() // 1000, itertools.count(2**40)

        def fork_held() -> int:
            handle = next(handles)
            core.fork_held(root.handle, [handle], now)
            return handle

        times = [median_us(fork_held, lambda fork: core.drop_held(fork, now))]
        for count in COUNTS:
            times.append(median_us(partial(root.fork, count), drop_all) / count)
        return times


def main() -> None:
    """Runs everything and writes the table."""
    lines = [
        "# Forks",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}.",
        "A fork of a live sequence, microseconds per fork, median. KV blocks have 16 tokens.",
        "",
        "| tokens of context | core | `fork(1)` | `fork(16)` |",
        "|---|---|---|---|",
    ]
    sizes: dict[str, Any] = {"num_kv_blocks": 10_000, "block_size": 16, "max_model_len": LONGEST, "max_num_batched_tokens": 8192}
    with tempfile.TemporaryDirectory() as folder, LLM(model(Path(folder)), load_format="none", **sizes) as llm:
        for context in CONTEXTS:
            lines.append(f"| {context:,} | {' | '.join(f'{microseconds:.1f}' for microseconds in measure(llm, context))} |")
    write("forks.md", lines)


if __name__ == "__main__":
    main()
