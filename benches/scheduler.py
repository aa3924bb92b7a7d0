"""Times the scheduler from Rust and through Python, counts its instructions, and writes benches/results/scheduler.md.

Needs cargo; valgrind for the instruction counts, which are left out without it. Takes about two minutes on a quiet machine.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from pages import ROOT, machine, write

from chairlift import SamplingParams, Scheduling, _core
from chairlift.engine.engine_request import EngineRequest
from chairlift.runner.buffers import Layout, StepBuffers
from chairlift.scheduling import LONGEST_MS

SIZES = (1, 16, 64, 256, 1024)
CASES = [f"decode/{n}" for n in SIZES] + ["mixed/16", "mixed/256"]
SESSIONS = (16, 256, 1024)
POLICIES = ("fcfs", "priority", "fair", "deadline", "shortest", "prefix")
ROUNDS = 5
"""Rounds through Python: shared machines change their speed from second to second."""
CONTEXT, BLOCK_SIZE, MAX_TOKENS, MAX_MODEL_LEN = 500, 16, 8192, 2048


def cargo_bench() -> dict[str, float]:
    """Median microseconds of each case, by criterion."""
    subprocess.run(["cargo", "bench", "-p", "chairlift-benches", "--bench", "scheduler"], cwd=ROOT, check=True)
    found = {}
    for case in [*CASES, *(f"floor/{n}" for n in SIZES)]:
        estimates = json.loads((ROOT / "target/criterion" / case / "new/estimates.json").read_text())
        found[case] = estimates["median"]["point_estimate"] / 1000
    return found


def binary() -> Path:
    """The benchmark program that was built last."""
    binaries = (ROOT / "target/release/deps").glob("scheduler-*")
    return max((path for path in binaries if not path.suffix), key=lambda path: path.stat().st_mtime)


def while_waiting(policy: str) -> tuple[float, float]:
    """Median microseconds of a step of 256 while ten wait and while a million do."""
    output = subprocess.run([str(binary()), "--waiting", policy], check=True, capture_output=True, text=True).stdout
    few, many = output.split()
    return float(few), float(many)


def instructions(case: str, few: int = 32, many: int = 64) -> int | None:
    """Instructions of one step: the difference between runs of `many` and `few` steps, so that set-up does not count."""
    if shutil.which("valgrind") is None:
        return None
    counts = []
    for steps in (few, many):
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(binary()), "--steps", str(steps), case]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        counts.append(int(re.search(r"Collected : (\d+)", output)[1]))  # type: ignore[index]
    return (counts[1] - counts[0]) // (many - few)


def python_scheduler(running: int, **settings: Any) -> tuple[_core.Scheduler, _core.StepBuffers]:
    """A scheduler and its buffers, with room for all unless the settings say otherwise."""
    sizes = {"num_kv_blocks": running * (MAX_MODEL_LEN // BLOCK_SIZE) + 1, "max_model_len": MAX_MODEL_LEN, **settings}
    scheduler = _core.Scheduler(block_size=BLOCK_SIZE, max_num_batched_tokens=MAX_TOKENS, max_num_seqs=running, **sizes)
    layout = Layout(MAX_TOKENS, running, sizes["max_model_len"] // BLOCK_SIZE)
    return scheduler, _core.StepBuffers(**StepBuffers(layout).arrays())


def through_python(running: int, *, everything: bool) -> float:
    """Median microseconds of a decode step driven from Python: plan with fill, then commit.

    `everything`: policy fair with eight tenants, deadlines looked at, a target, host blocks, and the journal.
    """
    settings = {"scheduling_policy": "fair", "target_itl": 10_000_000, "host_blocks": 1000, "swap_ns_per_block": 1000, "journal": True}
    scheduler, buffers = python_scheduler(running, **(settings if everything else {}))
    random = np.random.default_rng(0)
    for tag in range(running):
        prompt = random.integers(0, 50_000, CONTEXT - tag % BLOCK_SIZE, dtype=np.int32)
        limits = Scheduling(tenant=f"tenant {tag % 8}", deadline_ms=LONGEST_MS) if everything else Scheduling()
        params = SamplingParams(max_tokens=MAX_MODEL_LEN - CONTEXT, stop_token_ids=(50_000,))
        scheduler.add(EngineRequest.of(tag, prompt, params, limits), 0)
    sampled = np.full(MAX_TOKENS, 7, np.int32)
    times = []
    for now in range(1200):
        start = time.perf_counter()
        if everything:
            scheduler.expire(now)
        plan = scheduler.plan(buffers, now)
        assert plan is not None
        scheduler.commit(plan, sampled, now)
        if everything:
            scheduler.journal()
        elapsed = time.perf_counter() - start
        if plan.num_tokens == plan.num_seqs == running:
            times.append(elapsed * 1e6)
    return statistics.median(times)


def adding(tokens: int) -> float:
    """Median microseconds of adding a prompt of so many tokens from Python, with names recorded."""
    scheduler = _core.Scheduler(
        num_kv_blocks=tokens,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=1,
        max_model_len=2 * tokens,
        scheduling_policy="prefix",
        journal=True,
    )
    prompt = np.random.default_rng(0).integers(0, 50_000, tokens, dtype=np.int32)
    times = []
    for tag in range(200):
        request = EngineRequest(tag, prompt.tobytes(), SamplingParams(max_tokens=100, stop_token_ids=(50_000,)))
        start = time.perf_counter()
        scheduler.add(request, 0)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def turns(sessions: int) -> tuple[float, float]:
    """Median microseconds of a request from the call that adds it to the commit of its only token: as a turn of a session, and without one.

    The requests come by turns, so that both kinds see the same machine. Each prompt continues the one before of its session.
    """
    pairs = [python_scheduler(max(64, sessions)) for _ in range(2)]
    sampled = np.full(MAX_TOKENS, 7, np.int32)
    random = np.random.default_rng(0)
    texts = random.integers(0, 50_000, (sessions, CONTEXT + ROUNDS * BLOCK_SIZE), dtype=np.int32)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS):
        for number in range(sessions):
            prompt = texts[number, : CONTEXT + turn * BLOCK_SIZE]
            for named, ((scheduler, buffers), taken) in enumerate(zip(pairs, times, strict=True)):
                limits = Scheduling() if named else Scheduling(session=str(number))
                request = EngineRequest.of(turn * sessions + number, prompt, SamplingParams(max_tokens=1), limits)
                start = time.perf_counter()
                scheduler.add(request, 0)
                plan = scheduler.plan(buffers, 0)
                assert plan is not None
                scheduler.commit(plan, sampled, 0)
                if turn:
                    taken.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    """Runs everything and writes the table."""
    times = cargo_bench()
    lines = [
        "# A scheduling decision: plan + fill + commit",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}. Contexts of {CONTEXT} tokens, blocks of {BLOCK_SIZE}, prefix cache on; medians.",
        "`floor` is a loop that reads and writes one cache line of state and the step's arrays per sequence, in the same run:",
        "no scheduler can be quicker. `mixed`: a 512-token prompt arrives in each step and is computed in it. With everything on:",
        "policy fair with eight tenants, deadlines, a target for the step time, a host pool, and the journal. Through Python, the",
        f"medians of {ROUNDS} rounds, from the lowest to the highest.",
        "",
        "| case | Rust µs | floor µs | ratio | through Python µs | with everything on µs | instructions |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        group, size = case.split("/")
        floor = times[f"floor/{size}"]
        python = ["", ""]
        if group == "decode":
            rounds = [[through_python(int(size), everything=everything) for everything in (False, True)] for _ in range(ROUNDS)]
            python = [f"{min(medians):.1f} to {max(medians):.1f}" for medians in zip(*rounds, strict=True)]
        count = instructions(case)
        lines.append(f"| {case} | {times[case]:.2f} | {floor:.2f} | {times[case] / floor:.1f} | {' | '.join(python)} | {count or ''} |")
    lines += ["", "A step of 256 while others wait:", "", "| policy | 10 wait, µs | 1,000,000 wait, µs | ratio |", "|---|---|---|---|"]
    for policy in POLICIES:
        few, many = while_waiting(policy)
        lines.append(f"| {policy} | {few:.1f} | {many:.1f} | {many / few:.2f} |")
    lines += [
        "",
        "A request of one token through Python:",
        "",
        "| sessions | as a turn of one, µs | without a session, µs |",
        "|---|---|---|",
    ]
    lines += [f"| {sessions:,} | {named:.1f} | {without:.1f} |" for sessions in SESSIONS for named, without in [turns(sessions)]]
    # The first turns of the sessions do not count.
    counts = [instructions(case, 128, 192) for case in ("session/16", "repeated/16")]
    if counts[0] is not None and counts[1] is not None:
        lines += [
            "",
            f"A turn of one of 64 sessions, 512 tokens long, takes {counts[0] - counts[1]} instructions more than a request without one.",
        ]
    lines += ["", f"Adding a prompt of 32,768 tokens from Python, policy prefix, journal on: {adding(32_768):.0f} µs."]
    write("scheduler.md", lines)


if __name__ == "__main__":
    main()
