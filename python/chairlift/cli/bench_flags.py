"""The flags of `chairlift bench`; vLLM's names where the meaning is the same."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from chairlift.cli import flags, remote, values
from chairlift.config import EngineConfig

_count = values.whole(1, 10**8)
_tokens = values.whole(1, 10**7)
_rate = values.number(1e-6, 1e6)
_seconds = values.number(1e-3, 1e6)

EXAMPLES = """\
examples:
  chairlift bench serve                               100 random prompts at once to http://127.0.0.1:8000
  chairlift bench serve --request-rate 4 --goodput ttft:500 tpot:50 --report today.html
  chairlift bench serve --dataset-path azure.csv.gz --speedup 2
  chairlift bench sweep --goodput ttft:1000 tpot:100 --report sweep.html
  chairlift bench throughput --num-prompts 64         without a server
  chairlift bench latency --batch-size 8

docs/benchmarks.md says how to measure well, and what the numbers mean.
"""

_SERVE = """\
examples:
  chairlift bench serve --num-prompts 200 --request-rate 4
  chairlift bench serve --max-concurrency 16 --random-input-len 512 --random-output-len 64 --ignore-eos
  chairlift bench serve --dataset-path trace.jsonl.gz --speedup 2 --report trace.html
  chairlift bench serve --base-url https://api.example.com --api-key KEY --model NAME --backend openai-chat

A request's latency counts from when it was due, not from when the client came to send it.
"""

_SWEEP = """\
examples:
  chairlift bench sweep --goodput ttft:1000 tpot:100            doubles the rate until it is too much, then looks closer
  chairlift bench sweep --request-rates 1,2,4,8 --report sweep.html
  chairlift bench sweep --max-concurrencies 1,4,16,64 --ignore-eos
"""

_OFFLINE = """\
examples:
  chairlift bench {name} --model ./my-model
  chairlift bench {name} --load-format dummy --input-len 512 --output-len 64
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the commands of `chairlift bench`."""
    commands = parser.add_subparsers(dest="bench", required=True, metavar="COMMAND")

    command = partial(flags.command, commands)
    serve = command("serve", "put load on a server that speaks OpenAI's API, and report how it fared", _SERVE)
    _add_server(serve)
    _add_load(serve)
    _add_rate(serve)
    _add_percentiles(_add_results(serve))

    sweep = command("sweep", "run a load at several rates, and find the largest that meets the targets", _SWEEP)
    _add_server(sweep)
    _add_load(sweep)
    group = sweep.add_argument_group("sweep")
    loads = group.add_mutually_exclusive_group()
    loads.add_argument(
        "--request-rates", type=values.several(_rate), metavar="X,X", help="rates to run, in requests a second (default: search)"
    )
    loads.add_argument(
        "--max-concurrencies", type=values.several(_count), metavar="N,N", help="concurrencies to run instead, each without a rate"
    )
    group.add_argument(
        "--start-rate",
        type=_rate,
        default=1.0,
        metavar="X",
        help="rate at which the search begins, doubling from there (default: 1)",
    )
    group.add_argument(
        "--steps", type=values.whole(0, 20), default=3, metavar="N", help="times the search then halves its error (default: 3)"
    )
    group.add_argument("--duration", type=_seconds, default=30.0, metavar="S", help="seconds of requests at each rate (default: 30)")
    group.add_argument(
        "--attainment",
        type=values.number(0, 100),
        default=95.0,
        metavar="X",
        help="percent of the requests that must meet all targets (default: 95)",
    )
    _add_results(sweep)

    throughput = command("throughput", "run requests all at once in this process, without a server", _OFFLINE.format(name="throughput"))
    throughput.add_argument("--num-prompts", type=_count, default=100, metavar="N", help="requests (default: 100)")
    throughput.add_argument("--dataset-path", metavar="FILE", help="a trace whose lengths are used (default: --input-len, --output-len)")
    _add_offline(throughput, input_len=1024)

    latency = command("latency", "run one batch again and again in this process", _OFFLINE.format(name="latency"))
    latency.add_argument("--batch-size", type=_count, default=8, metavar="N", help="requests in the batch (default: 8)")
    latency.add_argument(
        "--num-iters-warmup", type=values.whole(0, 10**6), default=3, metavar="N", help="runs that do not count (default: 3)"
    )
    latency.add_argument("--num-iters", type=values.whole(1, 10**6), default=10, metavar="N", help="runs that count (default: 10)")
    _add_offline(latency, input_len=32)


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help="where the server is (default: http://HOST:PORT)")
    group.add_argument("--host", default="127.0.0.1", help="its host (default: 127.0.0.1)")
    group.add_argument("--port", type=values.whole(1, 65535), default=8000, metavar="N", help="its port (default: 8000)")
    group.add_argument(
        "--backend", choices=("openai", "vllm", "openai-chat"), default="openai", help="completions, or chat (default: completions)"
    )
    group.add_argument("--endpoint", metavar="PATH", help="the route (default: /v1/completions, or /v1/chat/completions for openai-chat)")
    group.add_argument("--model", metavar="NAME", help="the model's name (default: the first that the server lists)")
    group.add_argument("--served-model-name", metavar="NAME", help="the same, where --model names something else")
    remote.add_api_key(group)
    group.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="headers of each request")
    group.add_argument("--insecure", action="store_true", help="trust any certificate")
    group.add_argument(
        "--request-timeout",
        type=values.number(1e-3, 1e6, infinite=True),
        default=3600.0,
        metavar="S",
        help="seconds for a request (default: 3600)",
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=values.number(0, 1e6, infinite=True),
        default=0.0,
        metavar="S",
        help="seconds to wait for the server to be up (default: 0)",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt", "burstgpt", "timed_trace", "trace"),
        help="random words, or what --dataset-path has, whose form is told by its content (default: a trace if there is a path)",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="a trace: Azure or BurstGPT CSV, Mooncake JSONL, ShareGPT JSON, or ours")
    group.add_argument("--num-prompts", type=_count, metavar="N", help="requests (default: 100, or all of a trace; in a sweep by time)")
    group.add_argument(
        "--random-input-len", "--input-len", type=_tokens, default=1024, metavar="N", help="words of a prompt (default: 1024)"
    )
    group.add_argument(
        "--random-output-len", "--output-len", type=_tokens, default=128, metavar="N", help="tokens to ask for (default: 128)"
    )
    group.add_argument(
        "--random-range-ratio",
        type=values.number(0, 0.999),
        default=0.0,
        metavar="X",
        help="lengths vary by this share, up and down (default: 0)",
    )
    group.add_argument(
        "--random-prefix-len", type=values.whole(0, 10**7), default=0, metavar="N", help="words before each prompt, the same (default: 0)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="answers go on to their full length (not every server can)")
    group.add_argument("--temperature", type=values.number(0, 100), metavar="X", help="sampling temperature (default: the server's)")
    group.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="more fields of each request's body")
    group.add_argument(
        "--seed", type=values.whole(0, 2**63 - 1), default=0, metavar="N", help="of lengths, prompts and arrivals (default: 0)"
    )
    group.add_argument(
        "--num-warmups",
        type=values.whole(0, 10**6),
        default=1,
        metavar="N",
        help="requests before the run, which do not count (default: 1)",
    )
    add_burstiness(group)
    group.add_argument("--processes", type=values.whole(1, 1024), default=1, metavar="N", help="processes that send and read (default: 1)")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def add_burstiness(group: argparse._ArgumentGroup) -> None:
    """How evenly requests come, here and in `chairlift plan`."""
    group.add_argument(
        "--burstiness",
        type=values.number(0.01, 1e6, infinite=True),
        default=1.0,
        metavar="X",
        help="below 1: burstier than Poisson (default: 1)",
    )


def _add_rate(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("when requests come")
    group.add_argument(
        "--request-rate",
        type=values.number(1e-6, 1e6, infinite=True),
        metavar="X",
        help="requests a second (default: a trace's times, or all at once)",
    )
    group.add_argument("--max-concurrency", type=_count, metavar="N", help="most requests at a time; others wait for a seat")
    group.add_argument(
        "--speedup", type=values.number(1e-6, 1e6), default=1.0, metavar="X", help="a trace's times go by so much faster (default: 1)"
    )
    group.add_argument("--self-timed", action=argparse.BooleanOptionalAction, help="use a trace's times, or do not")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="the rate rises over the run")
    group.add_argument("--ramp-up-start-rps", type=_rate, metavar="X", help="rate at the start of the ramp")
    group.add_argument("--ramp-up-end-rps", type=_rate, metavar="X", help="rate at its end")


def _add_results(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="KEY:MS", help="targets for each request: ttft:500 tpot:50 e2el:10000, milliseconds"
    )
    group.add_argument("--report", type=values.output, metavar="FILE", help="write a page with plots, which needs no network")
    group.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    group.add_argument("--save-detailed", action="store_true", help="write them with what is known of each request")
    group.add_argument("--result-dir", type=values.output_directory, default=".", metavar="DIR", help="where to (default: here)")
    group.add_argument("--result-filename", metavar="NAME", help="under which name (default: made of rate, model and time)")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="more to note in the result")
    return group


def _add_percentiles(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="NAMES",
        help="latencies to show, of ttft,tpot,itl,e2el (default: the first 3)",
    )
    group.add_argument(
        "--metric-percentiles",
        type=values.several(values.number(0, 100)),
        default="99",
        metavar="X,X",
        help="percentiles of them (default: 99)",
    )


def _add_offline(parser: argparse.ArgumentParser, input_len: int) -> None:
    parser.add_argument("--input-len", type=_tokens, default=input_len, metavar="N", help=f"words of a prompt (default: {input_len})")
    parser.add_argument("--output-len", type=_tokens, default=128, metavar="N", help="tokens of an answer (default: 128)")
    parser.add_argument("--output-json", type=values.output, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--model", metavar="MODEL", help="a directory, a .gguf file, or a hub name (default: the default model) [CHAIRLIFT_MODEL]"
    )
    flags.heed(parser, "model")
    flags.add(parser, EngineConfig)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text}")
    return found
