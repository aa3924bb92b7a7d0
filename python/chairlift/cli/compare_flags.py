"""The flags of `chairlift compare`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from chairlift.cli import flags, simulate_flags, values
from chairlift.config import DEFAULT_MODEL, EngineConfig

TIMEOUT = 500.0
"""Milliseconds that a dynamic batch waits to fill, where nobody says."""

SEATS, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, RATE = 8, 32, 64, 96, 6.0
"""What is compared where nobody says: few enough to be followed by eye, and more than a bus can carry."""

_EXAMPLES = """\
examples:
  chairlift compare                                  32 requests on 8 seats: what batching does, in a table
  chairlift compare -o compare.svg                   the same as a picture
  chairlift compare --run                            really run, on this machine's engine
  chairlift compare --trace conv.csv --model Llama-3.1-8B --device H100 --report page.html
  chairlift compare --batching continuous --policy fcfs,shortest,fair --num-requests 200
  chairlift compare --max-num-seqs 16 --request-rate inf --output-tokens 200

Every variant gets the same requests. Without --run time is virtual and the scheduler real, as in 'chairlift simulate'; --trace,
--model and --device are as there, and the same command gives the same numbers and the same picture.
"""

_OWN = {"batching", "scheduling_policy", "static_batch_size", "batch_timeout_ms"}
"""Settings in which variants differ, and those that only some of them have."""


def add(command: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Adds the command; `command` makes one of a name, what it does, and its examples."""
    parser = command("compare", "put ways to batch, and policies, side by side on the same requests", _EXAMPLES)
    parser.add_argument("--run", action="store_true", help="run them on the engine in this process, one variant after the other")
    parser.add_argument("--trace", metavar="FILE", help="requests of a trace (default: made-up ones)")
    _add_requests(parser)
    parser.add_argument(
        "--model", metavar="MODEL", help=f"a known model, or any whose files are here (default: {DEFAULT_MODEL}) [CHAIRLIFT_MODEL]"
    )
    flags.heed(parser, "model")
    parser.add_argument("--device", dest="machine", metavar="NAME", help="simulate a known machine, or a measured one (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, times in seconds")
    parser.add_argument("-o", "--output", type=_drawn, metavar="FILE", help="draw it: an .svg")
    parser.add_argument(
        "--report", type=values.output, metavar="FILE", help="write a page with the picture and plots, which opens without a network"
    )
    _add_variants(parser)
    shared = [name for name in simulate_flags.FLAGS if name not in _OWN]
    flags.add(parser, EngineConfig, [*shared, "load_format", "threads"])


def _add_requests(parser: argparse.ArgumentParser) -> None:
    tokens = values.whole(1, 10**6)
    parser.add_argument(
        "--num-requests", type=values.whole(1, 10**8), metavar="N", help=f"requests (default: {REQUESTS}, or all of a trace)"
    )
    parser.add_argument("--prompt-tokens", type=tokens, metavar="N", help=f"mean of made-up prompts (default: {PROMPT_TOKENS})")
    parser.add_argument("--output-tokens", type=tokens, metavar="N", help=f"mean of made-up answers (default: {OUTPUT_TOKENS})")
    parser.add_argument(
        "--request-rate",
        type=values.number(1e-6, 1e6, infinite=True),
        metavar="X",
        help=f"made-up requests a second; inf: all at once (default: {RATE:g})",
    )
    parser.add_argument(
        "--rate-scale", type=values.number(1e-6, 1e6), metavar="X", help="a trace's requests come X times as fast (default: 1)"
    )


def _add_variants(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("variants")
    for flag, name, field in (("--batching", "batchings", "batching"), ("--policy", "policies", "scheduling_policy")):
        choices = EngineConfig.__dataclass_fields__[field].metadata["choices"]
        default = ["static", "dynamic", "continuous"] if name == "batchings" else ["fcfs"]
        shown = f"some of {', '.join(choices)} (default: {','.join(default)})"
        group.add_argument(flag, dest=name, type=values.several(_one_of(choices)), default=default, metavar="NAME,NAME", help=shown)
    group.add_argument(
        "--static-batch-size",
        dest="batch",
        type=values.whole(1, 10**6),
        metavar="N",
        help="sequences in a static or dynamic batch (default: as many as there are seats)",
    )
    group.add_argument(
        "--batch-timeout-ms",
        dest="timeout",
        type=values.number(1e-3, 1e9),
        metavar="MS",
        help=f"how long the first of a dynamic batch waits for the others (default: {TIMEOUT:g})",
    )


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(choices)}, got {text!r:.50}")
        return text

    return read


def _drawn(text: str) -> str:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text:.200}: expected a name that ends in .svg; --report writes a page")
    return values.output(text)
