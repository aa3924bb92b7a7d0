"""Compares the simulator with the engine on this CPU, at 30, 60 and 90 % load; writes benches/results/fidelity.md.

    python benches/fidelity.py                       calibrates, runs and simulates: about half an hour
    python benches/fidelity.py --requests 20 --seconds 20 --shares 0.6
                                                     a short look

Nothing else should run on the machine. The engine runs in this process, without a server, and every request comes when the trace says. Its
times are the scheduler's own, on both sides: to a first token, between tokens, to the end.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from pages import RESULTS, ROOT, say
from peers.machine import Busy, describe
from peers.results import DISTURBED

import chairlift
import chairlift.runner
from chairlift import EngineConfig
from chairlift.bench.traces import read
from chairlift.engine.engine import Engine
from chairlift.engine.frames import StepOutputs
from chairlift.machine import usable_cores
from chairlift.sim.calibrate import calibrate, slowdown
from chairlift.sim.compare import Variant
from chairlift.sim.devices import Profile
from chairlift.sim.live import run_live
from chairlift.sim.result import Result
from chairlift.sim.run import simulate
from chairlift.sim.workload import Workload

TRACE = ROOT / "tests" / "data" / "traces" / "vtc_arena_27clients.csv.gz"
RESULT = RESULTS / "fidelity.md"
NOBODY = -1
"""No session: the engine is this very process."""

PERCENTS = {50: 0.10, 90: 0.15}
"""Percentiles that are compared, and by which part they may differ."""


def capacity(trace: Workload, profile: Profile) -> float:
    """Requests a second when all are there from the start, simulated."""
    result = simulate(trace.with_(arrival_us=0), device=profile)
    return len(trace) / result.span


def lived(config: EngineConfig, trace: Workload, profile: Profile) -> tuple[dict[str, np.ndarray], float]:
    """Runs the engine on the trace, in real time: seconds to first tokens, between tokens and to the ends, the span, and the pace.

    The pace is how many times as long steps took as the profile says: the machine's own changes from minute to minute.
    """
    last: dict[int, int] = {}
    gaps: list[int] = []

    def watch(engine: Engine, report: StepOutputs) -> None:
        now = time.monotonic_ns() // 1000
        for tag in np.frombuffer(report.tags, np.uint64).tolist():
            if tag in last:
                gaps.append(now - last[tag])
            last[tag] = now

    with tempfile.TemporaryDirectory(prefix="chairlift-") as directory:
        journal = Path(directory) / "lived.journal"
        result = run_live(trace, Variant("engine", "", "", replace(config, journal=str(journal))), watch)
        slower = slowdown(journal, profile)
    spans = result.spans
    figures = {
        "TTFT": (spans["first_token"] - spans["arrived"]) / 1e6,
        "ITL": np.array(gaps) / 1e6,
        "E2EL": (spans["ended"] - spans["arrived"]) / 1e6,
        "span": np.array([result.duration]),
    }
    return figures, slower


def rows(share: float, real: dict[str, np.ndarray], predicted: Result, paced: Result) -> list[str]:
    """A line of the table for each figure: measured, simulated as calibrated, and at the pace of the run."""
    lines = []
    for name in ("TTFT", "ITL", "E2EL"):
        for percent, allowed in PERCENTS.items():
            measured = float(np.percentile(real[name], percent, method="inverted_cdf"))
            lines.append(
                line(
                    f"{name} p{percent}", share, measured * 1000, [1000 * figure(one, name, percent) for one in (predicted, paced)], allowed
                )
            )
    rate = len(real["TTFT"]) / float(real["span"][0])
    return [*lines, line("requests a second", share, rate, [len(one.requests) / one.span for one in (predicted, paced)], PERCENTS[50])]


def figure(predicted: Result, name: str, percent: int) -> float:
    """A percentile of a simulated run, in seconds."""
    if name == "ITL":
        return predicted.itl(percent) or 0.0
    return float(np.percentile(predicted.ttft() if name == "TTFT" else predicted.e2e(), percent, method="inverted_cdf"))


def line(name: str, share: float, measured: float, simulated: list[float], allowed: float) -> str:
    """A figure beside what was simulated, and the ratios."""
    cells = [f"{one:,.4g} | {one / measured:.3f}{'' if abs(one / measured - 1) <= allowed else ' (beyond)'}" for one in simulated]
    return f"| {share:.0%} | {name} | {measured:,.4g} | {' | '.join(cells)} |"


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
    say(f"calibrating for {args.seconds:.0f} s")
    profile = Profile.load(args.profile) if args.profile else calibrate(config, args.seconds)
    trace = Workload.of(read(TRACE)).first(args.requests)
    most = capacity(trace, profile)
    own = len(trace) / (int(trace.column("arrival_us")[-1]) / 1e6)
    table, notes = [], []
    for share in args.shares:
        workload = trace.faster(share * most / own)
        say(f"{share:.0%} of {most:.2f} requests a second: about {len(trace) / share / most:.0f} s")
        before = Busy.now(NOBODY)
        real, slower = lived(config, workload, profile)
        others = Busy.now(NOBODY).shares(before)["others"]
        predicted, paced = (simulate(workload, device=one) for one in (profile, replace(profile, step=profile.step.times(slower))))
        table += rows(share, real, predicted, paced)
        longest = float(real["ITL"].max())
        notes.append(
            f"- At {share:.0%} steps took {slower:.3f} times what was calibrated, and others {others:.1%} of the CPU; the longest time "
            f"between two tokens was {longest:.2f} s, simulated {predicted.itl(100) or 0:.2f} s."
            + (" **Disturbed: run it again.**" if others > DISTURBED else "")
        )
    errors, steps = profile.errors, profile.measured["steps"]
    args.out.write_text(
        "# The simulator beside the engine\n\n"
        f"Written by `benches/fidelity.py`. {args.model}, the first {len(trace)} requests of {TRACE.name.split('.')[0]}, at shares of\n"
        f"the {most:.2f} requests a second that the simulator says this machine can do. Calibrated once, before: {steps:,} steps, told to\n"
        f"within {errors['p50']:.1%} (p50) and {errors['p90']:.1%} (p90). Allowed: 10 % at p50, 15 % at p90; times in milliseconds.\n\n"
        "The first comparison is with steps as calibrated; the second with all of them as much longer or shorter as the machine's pace\n"
        "had changed by then, which is what is left for the simulator itself to answer for.\n\n"
        f"Machine: {describe()['cpu']}, {usable_cores()} cores; chairlift {chairlift.__version__}, Python {platform.python_version()}.\n\n"
        "| load | figure | measured | simulated | ratio | at the run's pace | ratio |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(table) + "\n\n" + "\n".join(notes) + "\n"
    )
    print(args.out.read_text())


if __name__ == "__main__":
    main()
