"""`chairlift bench sweep`: the same load at several rates, and the largest that meets the targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from chairlift.bench import workload
from chairlift.bench.arrivals import arrivals, gaps_in_words
from chairlift.bench.client import Target
from chairlift.bench.figures import Figures, Goodput
from chairlift.bench.sweep import FEWEST, Point, knee, notes, search
from chairlift.cli.bench_serve import Requests, save, send, settings_of, status, tell
from chairlift.errors import ChairliftError

LONGEST_POINT = 8
"""A search gives up below the rate at which its fewest requests take so many times --duration."""


def run(given: Mapping[str, Any], target: Target, requests: Requests) -> int:
    """Runs the loads that are named, or searches for the largest; 1 if no request succeeded, 130 if it was interrupted."""
    goodput = Goodput.parse(given["goodput"]) if given["goodput"] else None
    points: list[Point] = []
    closed, interrupted = bool(given["max_concurrencies"]), False

    def try_(load: float) -> bool:
        point = _point(given, target, requests, load, goodput, len(points))
        if point.run.interrupted:  # part of a run says nothing of its load
            raise KeyboardInterrupt
        points.append(point)
        print(_row(point), flush=True)
        return bool(point.meets)

    print(_HEADER)
    try:
        if given["max_concurrencies"] or given["request_rates"]:
            for load in given["max_concurrencies"] or given["request_rates"]:
                try_(load)
        else:
            # Few enough requests come at this rate that hardly two meet: a server that fails with it is too slow for one alone.
            search(try_, given["start_rate"], given["steps"], least=FEWEST / (LONGEST_POINT * given["duration"]))
    except (ChairliftError, KeyboardInterrupt) as error:
        if not points:
            raise
        # The server is not there any more, or nobody wants to wait; what was measured is.
        interrupted = isinstance(error, KeyboardInterrupt)
        print(f"The sweep ends here: {'interrupted' if interrupted else error}")
    points.sort(key=lambda point: point.load)
    best = knee(points)
    unit = "at a time" if closed else "requests a second"
    if best is not None:
        share = f"{given['attainment']:g} % of the requests within {goodput}"
        print(f"\nThe largest load with {share}: {best.load:.3g} {unit}")
    elif goodput is not None:
        print(f"\nNo load had {given['attainment']:g} % of the requests within {goodput}.")
    tell(notes(points))
    loads = [point.load for point in points]
    if given["save_result"] or given["save_detailed"]:
        came = {"request_rate": "inf", "max_concurrency": loads} if closed else {"request_rate": loads, "max_concurrency": None}
        found = {**came, "points": [point.to_json() for point in points], "knee": None if best is None else best.load}
        save(given, target, "sweep", found, [record for point in points for record in point.run.records])
    if given["report"]:
        from chairlift.bench.report.sweep import page

        coming = "at a time, each when a seat is free" if closed else f"a second ({gaps_in_words(given['burstiness'])})"
        told = f"{', '.join(f'{load:.3g}' for load in loads)} {coming}, one load after the other"
        page(points, settings_of(given, target, told), goodput, closed=closed).write(given["report"])
        print(f"Report: {given['report']}")
    return status((point.figures for point in points), interrupted)


def _point(given: Mapping[str, Any], target: Target, requests: Requests, load: float, goodput: Goodput | None, index: int) -> Point:
    """One run of a sweep, with prompts of its own: those of the run before are in the server's cache."""
    seed, seats = given["seed"] + index, int(load) if given["max_concurrencies"] else None
    usual = math.ceil(load * given["duration"]) if seats is None else 4 * seats
    jobs = requests.jobs(given["num_prompts"] or max(FEWEST, usual), seed)
    jobs = workload.at_once(jobs, seats) if seats else workload.due(jobs, arrivals(len(jobs), load, given["burstiness"], seed))
    done = send(given, target, jobs, seats, f"{load:.3g}")
    figures = Figures(done.records, goodput)
    met = None if figures.attainment is None else figures.attainment * 100 >= given["attainment"]
    return Point(load, done, figures, met)


_HEADER = "    load  requests  failed    req/s     tok/s    TTFT p50        p95    TPOT p50        p95     met"


def _row(point: Point) -> str:
    figures = point.figures
    ttft, tpot = figures.latencies["ttft"], figures.latencies["tpot"]
    times = [value * 1e3 for latency in (ttft, tpot) for value in (latency.percentile(50), latency.percentile(95))]
    met = "" if figures.attainment is None else f"{figures.attainment:.1%}"
    return (
        f"{point.load:8.3g} {figures.requests:9} {figures.failed:7} {figures.rate(figures.completed):8.2f} "
        f"{figures.rate(figures.output_tokens):9.1f} " + " ".join(f"{value:7.0f} ms" for value in times) + f" {met:>7}"
    )
