"""The flags of `chairlift simulate` and `chairlift calibrate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from chairlift.cli import flags, values
from chairlift.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from chairlift.engine import scheduler_settings

EXAMPLES = """\
examples:
  chairlift simulate --trace conv.csv --model Llama-3.1-8B --device H100
  chairlift simulate --trace conv.csv --model Llama-3.1-8B --device H100 --rate-scale 4 --policy shortest
  chairlift simulate --trace conv.csv --model Llama-3.1-8B --device A100 --batching static --static-batch-size 32
  chairlift simulate --trace conv.csv --model Llama-3.1-8B --device H100 --replicas 8 --num-requests 1000000
  chairlift calibrate -o here.json && chairlift simulate --trace conv.csv --device here.json

The scheduler is the one that serves and its decisions are real; only time is not: steps take what the machine's bandwidth
and peak allow, or what 'chairlift calibrate' measured. That kernels reach 80 % of a GPU's bandwidth and 60 % of its peak, and
that all else takes 0.5 ms a step, are assumptions: a roofline is there to compare settings and machines, and how far its
absolute numbers are off is not known. The same command gives the same numbers. Traces are read as 'chairlift bench' reads
them: Azure, BurstGPT, Mooncake, ShareGPT, or a CSV of arrival_s,prompt_tokens,output_tokens.

Machines: H200, H100, A100, A10G, L4, RTX4090, cpu (two cores of a Xeon), or a file of 'chairlift calibrate'.
Models: Llama-3.1-8B, Llama-3.1-70B, Llama-3.2-1B, Llama-3.2-3B, Mistral-7B, Qwen2.5-7B, Qwen3-8B, Qwen3-32B, SmolLM2-135M,
SmolLM2-1.7B; any other by its directory, .gguf file or hub name. A directory with a config.json goes before a known model of its
name. A file of 'chairlift calibrate' knows its model, and how that was kept.
"""

_CALIBRATE = """\
examples:
  chairlift calibrate -o here.json                   a minute with the default model; leave the machine alone meanwhile
  chairlift calibrate --model ./my-model --seconds 120 -o mine.json
  chairlift calibrate --from-journal day.journal -o day.json
                                                     what an engine's steps took while it served
"""

FLAGS = (
    *scheduler_settings.FLAGS,
    "tenant_weights",
    "block_size",
    "kv_cache_memory_bytes",
    "kv_cache_dtype",
    "swap_space",
    "dtype",
    "quantization",
)
"""The engine's settings that a simulation heeds."""


ROUTINGS = ("round-robin", "least-loaded", "prefix-aware", "predicted")


def add(command: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Adds both commands; `command` makes one of a name, what it does, and its examples."""
    _add_simulate(command("simulate", "say how a trace's requests would fare on a machine that need not be here", EXAMPLES))
    _add_calibrate(command("calibrate", "measure what steps take on this machine, for simulate", _CALIBRATE))


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", required=True, metavar="FILE", help="requests: when they came, and how long they and their answers were")
    parser.add_argument(
        "--model", metavar="MODEL", help=f"a known model, or any whose files are here (default: {DEFAULT_MODEL}) [CHAIRLIFT_MODEL]"
    )
    flags.heed(parser, "model")
    parser.add_argument("--device", dest="machine", default="cpu", metavar="NAME", help="a known machine, or a measured one (default: cpu)")
    parser.add_argument(
        "--rate-scale", type=values.number(1e-6, 1e6), default=1.0, metavar="X", help="requests come X times as fast (default: 1)"
    )
    parser.add_argument(
        "--num-requests",
        type=values.whole(1, 10**8),
        metavar="N",
        help="the first N requests; the trace is repeated until there are as many",
    )
    parser.add_argument(
        "--replicas", type=values.whole(1, 1024), default=1, metavar="N", help="so many engines behind a router (default: 1)"
    )
    parser.add_argument("--routing", choices=ROUTINGS, default=ROUTINGS[0], help=f"who gets a request (default: {ROUTINGS[0]})")
    parser.add_argument(
        "--policy", dest="scheduling_policy", default=argparse.SUPPRESS, metavar="NAME", help="short for --scheduling-policy"
    )
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON, times in seconds")
    parser.add_argument("--report", type=values.output, metavar="FILE", help="write a page of plots, which opens without a network")
    flags.add(parser, EngineConfig, FLAGS)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"a directory, a .gguf file, or a hub name (default: {DEFAULT_MODEL}; of a journal: not known) [CHAIRLIFT_MODEL]",
    )
    flags.heed(parser, "model")
    parser.add_argument(
        "-o", "--output", type=values.output, default="profile.json", metavar="FILE", help="where to write it (default: profile.json)"
    )
    parser.add_argument("--seconds", type=values.number(0.1, 86400), metavar="N", help="how long to measure (default: 60)")
    parser.add_argument("--from-journal", metavar="FILE", help="take the steps of what --journal wrote, and run nothing")
    flags.add(parser, EngineConfig)
    flags.add(parser, ServerConfig, ("log_level",))
