"""The flags of `chairlift plan`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from chairlift.cli import flags, values
from chairlift.cli.bench_flags import add_burstiness
from chairlift.cli.simulate_flags import FLAGS
from chairlift.config import DEFAULT_MODEL, EngineConfig

EXAMPLES = """\
examples:
  chairlift plan                                     this machine and the default model: measures for a minute first
  chairlift plan --input-len 1000 --output-len 200 --range-ratio 0.5 --ttft-ms 1000 --itl-ms 50
  chairlift plan --trace conv.csv --model Llama-3.1-8B --device H100 --report plan.html
  chairlift calibrate -o here.json && chairlift plan --device here.json

Finds the largest rate of requests at which the times to first tokens, and those between tokens, keep their targets. The scheduler
that serves is run in virtual time, as by 'chairlift simulate', which names the machines and models that are known. Requests come as
'chairlift bench sweep' sends them, or when the trace says. The same command gives the same numbers for the same machine.

docs/capacity.md says how far to trust it.
"""

_tokens = values.whole(1, 10**7)
_milliseconds = values.number(0.001, 1e9)


def add(command: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Adds the command; `command` makes one of a name, what it does, and its examples."""
    parser = command("plan", "say how many users fit on a machine, what limits that, and which settings to use", EXAMPLES)
    parser.add_argument(
        "--model", metavar="MODEL", help=f"a known model, or any whose files are here (default: {DEFAULT_MODEL}) [CHAIRLIFT_MODEL]"
    )
    flags.heed(parser, "model")
    parser.add_argument(
        "--device", dest="machine", metavar="NAME", help="a known machine, or a measured one (default: this one, measured for a minute)"
    )
    group = parser.add_argument_group("targets")
    group.add_argument("--ttft-ms", type=_milliseconds, default=2000.0, metavar="MS", help="time to the first token (default: 2000)")
    group.add_argument("--itl-ms", type=_milliseconds, default=100.0, metavar="MS", help="time between two tokens (default: 100)")
    group.add_argument(
        "--percentile", type=values.number(1, 100), default=95.0, metavar="X", help="X of 100 such times must keep theirs (default: 95)"
    )
    group = parser.add_argument_group("traffic")
    group.add_argument("--trace", metavar="FILE", help="requests, in any form that 'chairlift bench' reads, instead of the lengths below")
    group.add_argument(
        "--num-requests", type=values.whole(1, 10**6), metavar="N", help="the trace's first N, repeated if need be (default: 2000)"
    )
    group.add_argument(
        "--self-timed",
        action=argparse.BooleanOptionalAction,
        help="use a trace's times, made faster or slower, or do not (default: if any)",
    )
    group.add_argument("--input-len", type=_tokens, metavar="N", help="tokens of a prompt (default: 256)")
    group.add_argument("--output-len", type=_tokens, metavar="N", help="tokens of an answer (default: 128)")
    group.add_argument(
        "--range-ratio", type=values.number(0, 0.999), metavar="X", help="lengths vary by this share, up and down (default: 0)"
    )
    add_burstiness(group)
    group.add_argument(
        "--users-every",
        type=values.number(1e-3, 1e9),
        default=30.0,
        metavar="S",
        help="a user sends a request every S seconds (default: 30)",
    )
    group = parser.add_argument_group("results")
    group.add_argument("--json", action="store_true", help="print all numbers as JSON, times in seconds")
    group.add_argument("--report", type=values.output, metavar="FILE", help="write a page with plots, which opens without a network")
    parser.add_argument(
        "--policy", dest="scheduling_policy", default=argparse.SUPPRESS, metavar="NAME", help="short for --scheduling-policy"
    )
    flags.add(parser, EngineConfig, FLAGS)
