"""Compares `chairlift plan` with measurements on this machine; writes benches/results/plan.md.

    python benches/plan.py                           calibrates, plans and measures: about twelve minutes
    python benches/plan.py --quick                   a short look of two or three minutes, too short to say much
    python benches/plan.py --profile here.json       plans with a file of 'chairlift calibrate'

Nothing else should run on the machine. The server runs with the settings of the plan; the client runs beside it on the same cores, with
requests as `bench sweep` sends them and seeds that the plan has not seen. Both sides are judged by the same percentiles of TTFT and ITL.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pages import RESULTS, say
from peers.machine import Busy, describe
from peers.results import DISTURBED
from servers import server

import chairlift
from chairlift import EngineConfig
from chairlift.bench.arrivals import arrivals
from chairlift.bench.client import Target
from chairlift.bench.figures import Figures
from chairlift.bench.measure import measure, wait_for, wait_until_ready
from chairlift.bench.traces import TraceRequest
from chairlift.bench.workload import Job, random_jobs, with_due_times
from chairlift.errors import ChairliftError, InvalidSetting
from chairlift.machine import usable_cores
from chairlift.sim.calibrate import calibrate, from_journal, slowdown
from chairlift.sim.devices import Profile
from chairlift.sim.plan import Band, Plan, Point, Targets, plan
from chairlift.sim.run import simulate
from chairlift.sim.workload import Workload
from chairlift.sim.workload_spec import WorkloadSpec

RESULT = RESULTS / "plan.md"
SHARES = (0.7, 0.85, 0.95, 1.05, 1.15, 1.3)
"""Rates that are measured, as parts of the plan's."""
ALLOWED = 0.15
"""The part by which the plan may be off."""
SEED = 100
"""The first run's: the plan's own spells have other seeds."""
MIN_REQUESTS = 64
"""Requests of a run, at least."""


@dataclass(frozen=True)
class Run:
    """Latencies at one rate: measured, and simulated with the very same requests."""

    measured: Point
    simulated: Point
    requests: int
    others: float
    notes: list[str]


@contextlib.contextmanager
def served(model: str, settings: Mapping[str, int], journal: Path) -> Iterator[tuple[Target, int]]:
    """A server with these settings, and its session; it is ended at the end."""
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "chairlift.cli.main", "serve", model, "--port", "{port}", "--journal", str(journal), *flags]
    with server(command, log=journal.with_suffix(".log")) as (port, process):
        target = Target(f"http://127.0.0.1:{port}", fields={"ignore_eos": True})
        target = replace(target, model=wait_for(target, 120)[0]["id"])
        wait_until_ready(target, 120)
        yield target, process.pid


def jobs_of(args: argparse.Namespace, rate: float, seed: int) -> list[Job]:
    """Requests as `bench sweep` makes them."""
    jobs = random_jobs(max(MIN_REQUESTS, math.ceil(rate * args.duration)), args.input_len, args.output_len, seed=seed)
    return with_due_times(jobs, arrivals(len(jobs), rate, seed=seed))


def run(args: argparse.Namespace, target: Target, session: int, profile: Profile, settings: dict[str, Any], rate: float, seed: int) -> Run:
    """Measures one rate, and simulates it."""
    jobs = jobs_of(args, rate, seed)
    before = Busy.now(session)
    done = measure(target, jobs)
    others = Busy.now(session).shares(before)["others"]
    figures = Figures(done.records)
    if figures.failed:
        raise SystemExit(f"{figures.failed} of {figures.requests} requests failed at {rate:.3g} a second: {dict(figures.failures)}")
    ttft, itl = (figures.latencies[name].percentile(args.percentile) for name in ("ttft", "itl"))
    lines = [TraceRequest(job.due or 0.0, job.prompt_tokens, job.output_tokens) for job in jobs]
    predicted = simulate(Workload.of(lines), device=profile, **settings)
    simulated = Point(rate, float(np.percentile(predicted.ttft(), args.percentile)), predicted.itl(args.percentile) or 0.0)
    return Run(Point(rate, ttft, itl), simulated, len(jobs), others, done.notes)


def knee(points: Sequence[Point], targets: Targets) -> float | None:
    """The rate at which the targets are missed from then on, between the two runs around it; None if all keep them, or none does.

    A machine's pace changes from run to run, so a slower rate may miss what a faster one keeps: runs that fall out of line are pooled.
    """
    ordered = sorted(points, key=lambda point: point.rate)
    burdens = rising([math.log(max(point.ttft / targets.ttft, point.itl / targets.itl)) for point in ordered])
    missed = next((place for place, burden in enumerate(burdens) if burden > 0), None)
    if not missed:
        return None
    (low, high), (below, above) = burdens[missed - 1 : missed + 1], ordered[missed - 1 : missed + 1]
    return float(below.rate * (above.rate / below.rate) ** (-low / (high - low)))


def rising(values: Sequence[float]) -> list[float]:
    """The closest numbers, by least squares, of which none is below the one before: pool adjacent violators (Ayer et al., 1955)."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [statistics.fmean(pool) for pool in pools for _ in pool]


def sweep(args: argparse.Namespace, target: Target, session: int, profile: Profile, found: Plan) -> list[Run]:
    """Runs at rates around the plan's, and further out until some keep the targets and some miss them."""
    runs: list[Run] = []

    def add(rate: float) -> None:
        runs.append(run(args, target, session, profile, found.settings, rate, SEED + len(runs)))
        real, predicted = runs[-1].measured, runs[-1].simulated
        say(
            f"{rate:.3g} a second: TTFT {real.ttft:.3f} s (simulated {predicted.ttft:.3f}), ITL {real.itl * 1e3:.0f} ms "
            f"({predicted.itl * 1e3:.0f}), others {runs[-1].others:.1%}"
        )

    for share in SHARES[:: 3 if args.quick else 1]:
        add(share * found.capacity.rate)
    for _ in range(3):
        points = [one.measured for one in runs]
        if knee(points, found.targets) is None:
            add(0.75 * min(one.rate for one in points) if not found.targets.met(points[0]) else 1.2 * max(one.rate for one in points))
    return sorted(runs, key=lambda one: one.measured.rate)


def report(args: argparse.Namespace, profile: Profile, found: Plan, runs: Sequence[Run], again: Plan | None, slower: float) -> str:
    """The page."""
    targets, most = found.targets, found.capacity
    measured = knee([one.measured for one in runs], targets)
    predicted = knee([one.simulated for one in runs], targets)
    missed = min((one.measured.rate for one in runs if not targets.met(one.measured)), default=None)
    kept = max((one.measured.rate for one in runs if targets.met(one.measured)), default=None)
    extremes = f"{number(missed)}, {number(kept)}"
    flags = "".join(f" --{name.replace('_', '-')} {value}" for name, value in found.settings.items())
    percent = f"p{targets.percentile:g}"
    lines = [
        "# The plan beside the machine",
        "",
        f"Written by `benches/plan.py`{' --quick, which is too short to say much' if args.quick else ''}, "
        f"{time.strftime('%Y-%m-%d')}. {args.model}, prompts of {args.input_len} tokens, answers of",
        f"{args.output_len}, Poisson arrivals; {percent} of TTFT within {targets.ttft * 1e3:g} ms and {percent} of ITL within "
        f"{targets.itl * 1e3:g} ms; {args.duration:g} s at each rate, server and client on the same cores.",
        "",
        f"Machine: {describe()['cpu']}, {usable_cores()} cores; chairlift {chairlift.__version__}, Python {platform.python_version()}.",
        f"Served with `chairlift serve {args.model}{flags}`{'' if flags else ', the defaults'}.",
        "",
        "| | requests a second | beside what was measured |",
        "|---|---|---|",
        f"| planned | {band(most)} | {ratio(most.rate, measured)} |",
        f"| planned with the steps of the server's journal | {band(again.capacity if again else None)} | "
        f"{ratio(again.capacity.rate if again else None, measured)} |",
        f"| simulated with the requests that were sent | {number(predicted)} | {ratio(predicted, measured)} |",
        f"| measured, where latencies that never fall as rates rise cross the targets | {number(measured)} | 1 |",
        f"| measured, the first rate that missed a target, and the last that kept both | {extremes} | |",
        "",
        f"Allowed: {ALLOWED:.0%}. Calibrated before: {profile.measured.get('steps', 0):,} steps, told to within "
        f"{profile.errors.get('p50', 0):.1%} (p50) and {profile.errors.get('p90', 0):.1%} (p90).",
        f"While serving, steps took {slower:.3f} times what was calibrated: what the server's process and the client take of the cores,",
        "and what the machine's pace has changed by.",
        f"Binds: {found.bottleneck}. With twice as much: "
        + ", ".join(f"{name} {rate:.3g}" for name, rate in found.sensitivity.items())
        + f". With the settings as they come: {band(found.default)}.",
        "",
        f"| requests a second | requests | TTFT {percent} measured | simulated | ITL {percent} measured | simulated | kept | others' CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in runs:
        real, same = one.measured, one.simulated
        lines.append(
            f"| {real.rate:.3g} | {one.requests} | {real.ttft * 1e3:,.0f} ms | {same.ttft * 1e3:,.0f} ms | {real.itl * 1e3:.0f} ms | "
            f"{same.itl * 1e3:.0f} ms | {'yes' if targets.met(real) else 'no'} | {one.others:.1%}"
            f"{' **disturbed**' if one.others > DISTURBED else ''} |"
        )
    notes = [f"- At {one.measured.rate:.3g}: {note}" for one in runs for note in one.notes]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def band(of: Band | None) -> str:
    return "not found" if of is None else f"{of.rate:.3g} ({of.low:.3g} to {of.high:.3g})"


def number(rate: float | None) -> str:
    return "not found" if rate is None else f"{rate:.3g}"


def ratio(rate: float | None, measured: float | None) -> str:
    if rate is None or measured is None:
        return "-"
    return f"{rate / measured:.3f}" + ("" if abs(rate / measured - 1) <= ALLOWED else f" (beyond {ALLOWED:.0%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--itl-ms", type=float, default=150.0)
    parser.add_argument("--percentile", type=float, default=95.0)
    parser.add_argument("--duration", type=float, default=90.0, help="seconds of requests at each rate (default: 90)")
    parser.add_argument("--seconds", type=float, default=60.0, help="to calibrate for (default: 60)")
    parser.add_argument("--profile", help="a file of 'chairlift calibrate', instead of calibrating")
    parser.add_argument("--quick", action="store_true", help="a short look")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.quick:
        args.duration, args.seconds = min(args.duration, 20.0), min(args.seconds, 15.0)
    say(f"calibrating for {args.seconds:g} s" if not args.profile else f"taking {args.profile}")
    profile = Profile.load(args.profile) if args.profile else calibrate(EngineConfig(model=args.model), args.seconds)
    args.model = profile.model or args.model
    targets = Targets(ttft=args.ttft_ms / 1e3, itl=args.itl_ms / 1e3, percentile=args.percentile)
    mix = WorkloadSpec(prompt_tokens=args.input_len, output_tokens=args.output_len)
    found = plan(mix, targets, device=profile)
    say(f"planned: {band(found.capacity)} requests a second, {found.settings or 'defaults'}")
    with tempfile.TemporaryDirectory(prefix="chairlift-") as directory:
        journal = Path(directory) / "served.journal"
        with served(args.model, found.settings, journal) as (target, session):
            runs = sweep(args, target, session, profile, found)
        slower = slowdown(journal, profile)
        again = None
        with contextlib.suppress(InvalidSetting):
            settings: dict[str, Any] = found.settings
            again = plan(mix, targets, device=from_journal(journal, args.model), config=EngineConfig(model=args.model, **settings))
    args.out.write_text(report(args, profile, found, runs, again, slower))
    print(args.out.read_text())


if __name__ == "__main__":
    try:
        main()
    except ChairliftError as error:
        raise SystemExit(f"benches/plan.py: {error}") from None
