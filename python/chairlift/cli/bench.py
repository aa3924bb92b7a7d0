"""`chairlift bench`: the group of benchmark commands."""

from __future__ import annotations

from typing import Any

from chairlift.cli import bench_offline, bench_serve, bench_sweep, flags

_EXAMPLES = """\
examples:
  chairlift bench serve                               100 random prompts at once to http://127.0.0.1:8000
  chairlift bench serve --request-rate 4 --goodput ttft:500 tpot:50 --report today.html
  chairlift bench serve --dataset-path azure.csv.gz --speedup 2
  chairlift bench sweep --goodput ttft:1000 tpot:100 --report sweep.html
  chairlift bench throughput --num-prompts 64         without a server
  chairlift bench latency --batch-size 8

Flags have vLLM's names. docs/benchmarks.md explains how to benchmark, and the figures.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the commands of `chairlift bench`."""
    parser = flags.add_command(commands, "bench", summary, _EXAMPLES)
    benchmarks = parser.add_subparsers(dest="bench", required=True, metavar="COMMAND")
    bench_serve.add_parser(benchmarks)
    bench_sweep.add_parser(benchmarks)
    bench_offline.add_throughput_parser(benchmarks)
    bench_offline.add_latency_parser(benchmarks)
