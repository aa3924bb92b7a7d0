"""`chairlift bench serve`: sends requests to a server and reports latency and throughput."""

from __future__ import annotations

import argparse
import math
from typing import Any

from chairlift.bench.text_report import HEADERS
from chairlift.cli import bench_load, bench_sessions, flags, values
from chairlift.errors import InvalidSetting

_EXAMPLES = """\
examples:
  chairlift bench serve --num-prompts 200 --request-rate 4
  chairlift bench serve --max-concurrency 16 --random-input-len 512 --random-output-len 64 --ignore-eos
  chairlift bench serve --dataset-path trace.jsonl.gz --speedup 2 --report trace.html
  chairlift bench serve --sessions agents.jsonl.gz --users 8 --duration 600 --ignore-eos
  chairlift bench serve --sessions agents.jsonl.gz --request-rate 2 --random-input-len 512 --ignore-eos
  chairlift bench serve --base-url https://api.example.com --api-key KEY --model NAME --backend openai-chat

The latency of a request counts from its due time, not from the time at which the client sent it.
"""


def add_parser(commands: Any) -> None:
    """Adds the command and its flags."""
    summary = "send requests to an OpenAI-compatible server, and report latency and throughput"
    parser = flags.add_command(commands, "serve", summary, _EXAMPLES, run)
    bench_load.add_server(parser)
    bench_load.add_requests(parser)
    _add_arrivals(parser)
    bench_sessions.add_flags(parser)
    group = bench_load.add_results(parser)
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="NAMES",
        help="latencies to show, of ttft,tpot,itl,e2el (default: the first 3)",
    )
    percentiles = values.several(values.number(0, 100))
    flags.add_value(group, "--metric-percentiles", percentiles, "X,X", "percentiles to show", "99")


def _add_arrivals(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("arrivals")
    flags.add_value(
        group,
        "--request-rate",
        values.number(1e-6, 1e6, infinite=True),
        "X",
        "requests a second (default: a trace's times, or all at once)",
    )
    flags.add_value(group, "--max-concurrency", bench_load.request_count, "N", "most requests in flight; others wait at the client")
    flags.add_value(group, "--speedup", values.number(1e-6, 1e6), "X", "replay a trace's times X times as fast", 1.0)
    group.add_argument("--self-timed", action=argparse.BooleanOptionalAction, help="use a trace's arrival times (default: if any)")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="increase the rate over the run")
    flags.add_value(group, "--ramp-up-start-rps", bench_load.request_rate, "X", "rate at the start of the ramp")
    flags.add_value(group, "--ramp-up-end-rps", bench_load.request_rate, "X", "rate at the end of the ramp")


def run(args: argparse.Namespace) -> int:
    """Sends the requests and prints the report. Returns 1 if no request succeeded, 130 after an interrupt."""
    if unknown := [name for name in args.percentile_metrics.split(",") if name not in HEADERS]:
        raise InvalidSetting(f"--percentile-metrics {','.join(unknown)}: expected some of {','.join(HEADERS)}")
    if args.sessions is not None:
        return bench_sessions.run(args)
    bench_sessions.reject(args)
    bench_load.check(args)
    target, longest = bench_load.connect(args)
    source = bench_load.RequestSource(args, longest)
    jobs, description = bench_load.schedule(args, source.jobs(args.num_prompts, args.seed))
    limit = args.max_concurrency
    description += "" if limit is None else f", at most {limit} at a time"
    print(f"{len(jobs)} requests to {target.model} at {target.url}{target.endpoint}: {description}")
    result = bench_load.send(args, target, jobs, limit, "requests")
    result.settings = bench_load.settings(args, target, description, result.cpu_share)
    rate = None if args.request_rate is None or math.isinf(args.request_rate) else args.request_rate
    figures = bench_load.print_figures(args, result.records, rate, limit)
    load = {"request_rate": "inf" if rate is None else rate, "max_concurrency": limit}
    name = f"{load['request_rate']}qps{'' if limit is None else f'-concurrency{limit}'}"
    return bench_load.finish(args, target, result, figures, name, load)
