"""Times the scheduler from Rust and through Python, counts its instructions, and writes benches/results/scheduler.md.

Needs cargo; valgrind for the instruction counts, which are left out without it. Takes about two minutes on a quiet machine.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from chairlift import _core

ROOT = Path(__file__).parent.parent
SIZES = (1, 16, 64, 256, 1024)
CASES = [f"decode/{n}" for n in SIZES] + ["mixed/16", "mixed/256", "waiting/10", "waiting/10000", "waiting/1000000"]
CONTEXT, BLOCK_SIZE, MAX_TOKENS, MAX_MODEL_LEN = 500, 16, 8192, 2048


def cargo_bench() -> dict[str, float]:
    """Median microseconds of each case, by criterion."""
    subprocess.run(["cargo", "bench", "-p", "chairlift-core", "--bench", "scheduler"], cwd=ROOT, check=True)
    found = {}
    for case in [*CASES, *(f"floor/{n}" for n in SIZES)]:
        estimates = json.loads((ROOT / "target/criterion" / case / "new/estimates.json").read_text())
        found[case] = estimates["median"]["point_estimate"] / 1000
    return found


def instructions(case: str) -> int | None:
    """Instructions of one step: the difference between runs of 64 and 32 steps, so that set-up does not count."""
    if shutil.which("valgrind") is None or case == "waiting/1000000":
        return None
    binaries = (ROOT / "target/release/deps").glob("scheduler-*")
    binary = max((path for path in binaries if not path.suffix), key=lambda path: path.stat().st_mtime)
    counts = []
    for steps in (32, 64):
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(binary), "--steps", str(steps), case]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        counts.append(int(re.search(r"Collected : (\d+)", output)[1]))  # type: ignore[index]
    return (counts[1] - counts[0]) // 32


def through_python(running: int) -> float:
    """Median microseconds of a decode step driven from Python: plan with fill, then commit."""
    rows = MAX_MODEL_LEN // BLOCK_SIZE
    scheduler = _core.Scheduler(
        num_blocks=running * rows + 1,
        block_size=BLOCK_SIZE,
        max_tokens=MAX_TOKENS,
        max_seqs=running,
        max_model_len=MAX_MODEL_LEN,
    )
    shapes = {
        "input_ids": MAX_TOKENS,
        "positions": MAX_TOKENS,
        "slots": MAX_TOKENS,
        "query_starts": running + 1,
        "context_lens": running,
        "rows": running,
        "sample_at": MAX_TOKENS,
        "sample_rows": MAX_TOKENS,
        "copies": 2 * running,
        "block_tables": (running, rows),
    }
    buffers = _core.StepBuffers(**{name: np.zeros(shape, np.int32) for name, shape in shapes.items()})
    random = np.random.default_rng(0)
    for tag in range(running):
        prompt = random.integers(0, 50_000, CONTEXT - tag % BLOCK_SIZE, dtype=np.int32)
        scheduler.add(tag, prompt, MAX_MODEL_LEN - CONTEXT, [50_000], 0)
    sampled = np.full(MAX_TOKENS, 7, np.int32)
    times = []
    for _ in range(1200):
        start = time.perf_counter()
        plan = scheduler.plan(buffers, 0)
        assert plan is not None
        scheduler.commit(plan, sampled, 0)
        elapsed = time.perf_counter() - start
        if plan.num_tokens == plan.num_seqs == running:
            times.append(elapsed * 1e6)
    return statistics.median(times)


def machine() -> str:
    """Processor, cores and versions, in one line."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    flags = "AVX-512" if "avx512f" in Path("/proc/cpuinfo").read_text() else "no AVX-512"
    cores = subprocess.run(["nproc"], capture_output=True, text=True).stdout.strip()
    rustc = subprocess.run(["rustc", "--version"], capture_output=True, text=True).stdout.split()[1]
    name = model[1] if model else platform.machine()
    return f"{name}, {cores} cores, {flags}; rustc {rustc}, Python {platform.python_version()}"


def main() -> None:
    """Runs everything and writes the table."""
    times = cargo_bench()
    lines = [
        "# A scheduling decision: plan + fill + commit",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}. Contexts of {CONTEXT} tokens, blocks of {BLOCK_SIZE}, prefix cache on; medians.",
        "`floor` is a loop that reads and writes one cache line of state and the step's arrays per sequence, in the same run:",
        "no scheduler can be quicker. `mixed`: a 512-token prompt arrives in each step and is computed in it. `waiting`: 256 decode",
        "while so many wait.",
        "",
        "| case | Rust µs | floor µs | ratio | through Python µs | instructions |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES:
        group, size = case.split("/")
        floor = times[f"floor/{size if group == 'decode' else 256 if group == 'waiting' else size}"]
        python = f"{through_python(int(size)):.1f}" if group == "decode" else ""
        count = instructions(case)
        lines.append(f"| {case} | {times[case]:.2f} | {floor:.2f} | {times[case] / floor:.1f} | {python} | {count or ''} |")
    ratio = times["waiting/1000000"] / times["waiting/10"]
    lines += ["", f"One million waiting costs {ratio:.2f} times what ten cost."]
    text = "\n".join(lines) + "\n"
    (ROOT / "benches/results/scheduler.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
