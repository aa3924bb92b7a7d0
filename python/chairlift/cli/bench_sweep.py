"""`chairlift bench sweep`: the same load at several rates, and the largest rate that meets the targets."""

from __future__ import annotations

import argparse
import math
from typing import Any

from chairlift.bench import workload
from chairlift.bench.arrivals import arrivals, describe_gaps
from chairlift.bench.client import Target
from chairlift.bench.figures import Figures, Goodput
from chairlift.bench.sweep import MIN_REQUESTS, Point, knee, notes, search
from chairlift.cli import bench_load, flags, values
from chairlift.errors import ChairliftError, InvalidSetting

MAX_DURATIONS = 8
"""A search stops below the rate at which `MIN_REQUESTS` requests take this many times --duration."""

_EXAMPLES = """\
examples:
  chairlift bench sweep --goodput ttft:1000 tpot:100            doubles the rate until it misses the targets, then bisects
  chairlift bench sweep --request-rates 1,2,4,8 --report sweep.html
  chairlift bench sweep --max-concurrencies 1,4,16,64 --ignore-eos
"""


def add_parser(commands: Any) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(
        commands, "sweep", "run a load at several rates, and find the largest that meets the targets", _EXAMPLES, run
    )
    bench_load.add_server(parser)
    bench_load.add_requests(parser)
    group = parser.add_argument_group("sweep")
    loads = group.add_mutually_exclusive_group()
    rates = values.several(bench_load.request_rate)
    flags.add_value(loads, "--request-rates", rates, "X,X", "requests a second to run (default: search)")
    flags.add_value(
        loads,
        "--max-concurrencies",
        values.several(bench_load.request_count),
        "N,N",
        "numbers of requests in flight to run, instead of rates",
    )
    flags.add_value(group, "--start-rate", bench_load.request_rate, "X", "first rate of the search", 1.0)
    flags.add_value(group, "--steps", values.whole(0, 20), "N", "bisections after the doublings", 3)
    flags.add_value(group, "--duration", values.number(1e-3, 1e6), "S", "seconds of requests at each rate", 30.0)
    flags.add_value(group, "--attainment", values.number(0, 100), "X", "percent of requests that must meet all targets", 95.0)
    bench_load.add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the given loads, or searches for the largest. Returns 1 if no request succeeded, 130 after an interrupt."""
    if not (args.goodput or args.request_rates or args.max_concurrencies):
        raise InvalidSetting("a search needs targets: set --goodput ttft:1000 tpot:100, or --request-rates")
    bench_load.check(args)
    target, longest = bench_load.connect(args)
    goodput = Goodput.parse(args.goodput) if args.goodput else None
    points, interrupted = _run_points(args, target, bench_load.RequestSource(args, longest), goodput)
    points.sort(key=lambda point: point.load)
    best, closed = knee(points), bool(args.max_concurrencies)
    unit = "at a time" if closed else "requests a second"
    if best is not None:
        highest = "" if best is not points[-1] else ", the highest that was tried"
        print(f"\nLargest load with {args.attainment:g} % of requests within {goodput}: {best.load:.3g} {unit}{highest}")
    elif goodput is not None:
        print(f"\nNo load had {args.attainment:g} % of requests within {goodput}.")
    bench_load.print_notes(notes(points))
    loads = [point.load for point in points]
    if args.save_result or args.save_detailed:
        load = {"request_rate": "inf", "max_concurrency": loads} if closed else {"request_rate": loads, "max_concurrency": None}
        document = {**load, "points": [point.to_json() for point in points], "knee": None if best is None else best.load}
        bench_load.save(args, target, "sweep", document, [record for point in points for record in point.run.records])
    if args.report:
        from chairlift.bench.report.sweep import page

        kind = "at a time, each when another has finished" if closed else f"a second ({describe_gaps(args.burstiness)})"
        description = f"{', '.join(f'{load:.3g}' for load in loads)} {kind}, one load after the other"
        page(points, bench_load.settings(args, target, description), goodput, closed=closed).write(args.report)
        print(f"Report: {args.report}")
    return bench_load.exit_status((point.figures for point in points), interrupted)


def _run_points(
    args: argparse.Namespace, target: Target, source: bench_load.RequestSource, goodput: Goodput | None
) -> tuple[list[Point], bool]:
    """Runs each load and prints its line. Returns the points, and whether an interrupt ended the sweep."""
    points: list[Point] = []

    def meets(load: float) -> bool:
        point = _point(args, target, source, load, goodput, len(points))
        if point.run.interrupted:  # an incomplete run is not comparable
            raise KeyboardInterrupt
        points.append(point)
        print(_row(point), flush=True)
        return bool(point.meets)

    print(_HEADER)
    try:
        if args.max_concurrencies or args.request_rates:
            for load in args.max_concurrencies or args.request_rates:
                meets(load)
        else:
            # Below this rate requests hardly overlap, so a server that fails is too slow for any rate.
            search(meets, args.start_rate, args.steps, least=MIN_REQUESTS / (MAX_DURATIONS * args.duration))
    except (ChairliftError, KeyboardInterrupt) as error:
        if not points:
            raise
        # Report the completed points.
        interrupted = isinstance(error, KeyboardInterrupt)
        print(f"The sweep ends here: {'interrupted' if interrupted else error}")
        return points, interrupted
    return points, False


def _point(
    args: argparse.Namespace, target: Target, source: bench_load.RequestSource, load: float, goodput: Goodput | None, index: int
) -> Point:
    """One run of a sweep. Its prompts differ from those of other runs, which the server has cached."""
    seed, limit = args.seed + index, int(load) if args.max_concurrencies else None
    default = math.ceil(load * args.duration) if limit is None else 4 * limit
    jobs = source.repeated(args.num_prompts or max(MIN_REQUESTS, default), seed)
    if limit:
        jobs = workload.as_fast_as_possible(jobs, limit)
    else:
        jobs = workload.with_due_times(jobs, arrivals(len(jobs), load, args.burstiness, seed))
    result = bench_load.send(args, target, jobs, limit, f"{load:.3g}")
    figures = Figures(result.records, goodput)
    met = None if figures.attainment is None else figures.attainment * 100 >= args.attainment
    return Point(load, result, figures, met)


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
