"""The simulator beside the engine on this CPU: the same trace at 30, 60 and 90 % of what it can do; writes benches/results/fidelity.md.

    python benches/fidelity.py                       calibrates, runs and simulates: about half an hour
    python benches/fidelity.py --requests 20 --seconds 20 --shares 0.6
                                                     a short look

Nothing else should run on the machine. The engine runs in this process, without a server, and every request comes when the trace says. Its
times are the scheduler's own, on both sides: to a first token, between tokens, to the end.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from peers.machine import Busy
from peers.results import DISTURBED

import chairlift.runner  # noqa: F401  (before torch, which reads what this sets)
from chairlift import EngineConfig, SamplingParams
from chairlift.bench.traces import read
from chairlift.engine.loop import Engine
from chairlift.runner.machine import usable_cores
from chairlift.sim.calibrate import calibrate
from chairlift.sim.devices import Profile
from chairlift.sim.run import simulate
from chairlift.sim.workload import Workload

ROOT = Path(__file__).parent.parent
TRACE = ROOT / "tests" / "data" / "traces" / "vtc_arena_27clients.csv.gz"
RESULT = ROOT / "benches" / "results" / "fidelity.md"
NOBODY = -1
"""No session: the engine is this very process."""

PERCENTS = {50: 0.10, 90: 0.15}
"""Percentiles that are compared, and by which part they may differ."""


def capacity(trace: Workload, profile: Profile) -> float:
    """Requests a second when all are there from the start, simulated."""
    result = simulate(trace.with_(arrival_us=0), device=profile)
    return len(trace) / result.span


def lived(config: EngineConfig, trace: Workload) -> dict[str, np.ndarray]:
    """Runs the engine on the trace, in real time; seconds to first tokens, between tokens and to the ends, and the span."""
    engine = Engine(config)
    dice, vocabulary = random.Random(1), engine.facts["vocab_size"]
    prompts = [np.array([dice.randrange(vocabulary) for _ in range(length)], np.int32) for length in trace.column("prompt")]
    arrivals, outputs = trace.column("arrival_us"), trace.column("output")
    warm = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add(10**6, [1, 2, 3], warm)
    while engine.has_work:
        engine.step()
    ledgers: list[Any] = []
    last: dict[int, int] = {}
    gaps: list[int] = []
    began, following = time.monotonic_ns() // 1000, 0
    while following < len(trace) or engine.has_work:
        now = time.monotonic_ns() // 1000 - began
        while following < len(trace) and arrivals[following] <= now:
            params = SamplingParams(max_tokens=int(outputs[following]), ignore_eos=True)
            engine.add(following, prompts[following], params, arrived=began + int(arrivals[following]))
            following += 1
        report = engine.step() if engine.has_work else None
        if report is None:
            if following < len(trace):
                time.sleep(max(0.0, (arrivals[following] - now) / 1e6) if not engine.has_work else 0.0005)
            continue
        now = time.monotonic_ns() // 1000
        for tag in np.frombuffer(report.tags, np.uint64).tolist():
            if tag in last:
                gaps.append(now - last[tag])
            last[tag] = now
        ledgers += report.ended
    engine.close()
    first = np.array([one["first_token"] - one["arrived"] for one in ledgers]) / 1e6
    whole = np.array([one["ended"] - one["arrived"] for one in ledgers]) / 1e6
    span = (max(one["ended"] for one in ledgers) - min(one["arrived"] for one in ledgers)) / 1e6
    return {"TTFT": first, "ITL": np.array(gaps) / 1e6, "E2EL": whole, "span": np.array([span])}


def rows(share: float, real: dict[str, np.ndarray], told: Any) -> list[str]:
    """A line of the table for each figure: measured, simulated, and their ratio."""
    lines = []
    simulated = {"TTFT": told.ttft(), "E2EL": told.e2e()}
    for name in ("TTFT", "ITL", "E2EL"):
        for percent, allowed in PERCENTS.items():
            measured = float(np.percentile(real[name], percent, method="inverted_cdf"))
            guessed = told.itl(percent) if name == "ITL" else float(np.percentile(simulated[name], percent, method="inverted_cdf"))
            lines.append(line(f"{name} p{percent}", share, measured * 1000, guessed * 1000, "ms", allowed))
    rate = len(real["TTFT"]) / float(real["span"][0])
    lines.append(line("requests a second", share, rate, len(told.requests) / told.span, "", PERCENTS[50]))
    return lines


def line(name: str, share: float, measured: float, simulated: float, unit: str, allowed: float) -> str:
    ratio = simulated / measured
    verdict = "" if abs(ratio - 1) <= allowed else f" (beyond {allowed:.0%})"
    return f"| {share:.0%} | {name} | {measured:,.4g} {unit} | {simulated:,.4g} {unit} | {ratio:.3f}{verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--requests", type=int, default=150, help="of the trace, for each share (default: 150)")
    parser.add_argument("--seconds", type=float, default=60.0, help="to calibrate for (default: 60)")
    parser.add_argument("--shares", type=lambda text: [float(part) for part in text.split(",")], default=[0.3, 0.6, 0.9])
    parser.add_argument("--profile", help="a file of 'chairlift calibrate', instead of calibrating")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    config = EngineConfig(model=args.model)
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    say(f"calibrating for {args.seconds:.0f} s")
    profile = Profile.load(args.profile) if args.profile else calibrate(config, args.seconds)
    trace = Workload.of(read(TRACE)).first(args.requests)
    most = capacity(trace, profile)
    own = len(trace) / (int(trace.column("arrival_us")[-1]) / 1e6)
    table, notes = [], []
    for share in args.shares:
        asked = trace.faster(share * most / own)
        say(f"{share:.0%} of {most:.2f} requests a second: about {len(trace) / share / most:.0f} s")
        before = Busy.now(NOBODY)
        real = lived(config, asked)
        others = Busy.now(NOBODY).shares(before)["others"]
        told = simulate(asked, device=profile)
        table += rows(share, real, told)
        longest = float(real["ITL"].max())
        notes.append(
            f"At {share:.0%} others took {others:.1%} of the CPU; the longest time between two tokens was {longest:.2f} s, simulated "
            f"{told.itl(100) or 0:.2f} s." + (" **Disturbed: run it again.**" if others > DISTURBED else "")
        )
    errors, steps = profile.errors, profile.measured["steps"]
    args.out.write_text(
        "# The simulator beside the engine\n\n"
        f"Written by `benches/fidelity.py`. {args.model}, the first {len(trace)} requests of {TRACE.name.split('.')[0]}, at shares of\n"
        f"the {most:.2f} requests a second that the simulator says this machine can do. Calibrated once, before: {steps:,} steps, told to\n"
        f"within {errors['p50']:.1%} (p50) and {errors['p90']:.1%} (p90). Allowed: 10 % at p50, 15 % at p90.\n\n"
        f"Machine: {platform.processor() or platform.machine()}, {usable_cores()} cores; Python {platform.python_version()}.\n\n"
        "| load | figure | measured | simulated | ratio |\n|---|---|---|---|---|\n" + "\n".join(table) + "\n\n" + "\n".join(notes) + "\n"
    )
    print(args.out.read_text())


if __name__ == "__main__":
    main()
