"""The flags and steps that `chairlift bench serve` and `bench sweep` share: the server, the requests and the result file."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from chairlift.bench import traces, workload
from chairlift.bench.arrivals import arrivals, describe_gaps, ramp
from chairlift.bench.client import Target
from chairlift.bench.figures import Figures, Goodput
from chairlift.bench.measure import measure, wait_for, wait_until_ready
from chairlift.bench.record import Record, Run
from chairlift.bench.text_report import block
from chairlift.bench.workload import Job
from chairlift.cli import flags, values
from chairlift.cli.remote import add_api_key, client_key
from chairlift.errors import ChairliftError, InvalidSetting, writing

NUM_PROMPTS = 100

TEMPLATE_TOKENS = {False: 8, True: 128}
"""Tokens that a server may add to a prompt, without and with a chat template."""

_NEXT_REPETITION = 1_000_003
"""What is added to the seed of a trace to repeat it. The runs of a sweep have successive seeds."""

token_count = values.whole(1, 10**7)
request_count = values.whole(1, 10**8)
request_rate = values.number(1e-6, 1e6)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the server to benchmark."""
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", "--url", metavar="URL", help="address of the server (default: http://HOST:PORT)")
    group.add_argument("--host", default="127.0.0.1", help="host of the server (default: 127.0.0.1)")
    flags.add_value(group, "--port", values.whole(1, 65535), "N", "port of the server", 8000)
    group.add_argument(
        "--backend", choices=("openai", "vllm", "openai-chat"), default="openai", help="completions or chat (default: completions)"
    )
    group.add_argument("--endpoint", metavar="PATH", help="route (default: /v1/completions, or /v1/chat/completions for openai-chat)")
    group.add_argument("--model", metavar="NAME", help="model name (default: the first that the server lists)")
    group.add_argument("--served-model-name", metavar="NAME", help="model name to send, if it differs from --model")
    add_api_key(group)
    group.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="headers of each request")
    group.add_argument("--insecure", action="store_true", help="accept any TLS certificate")
    flags.add_value(group, "--request-timeout", values.number(1e-3, 1e6, infinite=True), "S", "timeout of a request, in seconds", 3600.0)
    flags.add_value(
        group, "--ready-check-timeout-sec", values.number(0, 1e6, infinite=True), "S", "seconds to wait for the server to be ready", 0.0
    )


def add_requests(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the requests to send."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt", "burstgpt", "timed_trace", "trace"),
        help="random words, or the trace in --dataset-path, whose format is detected (default: a trace if there is a path)",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="a trace: Azure or BurstGPT CSV, Mooncake JSONL, ShareGPT JSON, or a CSV of arrival_s,prompt_tokens,output_tokens",
    )
    flags.add_value(
        group,
        ("--num-prompts", "--num-requests"),
        request_count,
        "N",
        "requests (default: 100, or all of a trace; in a sweep, as many as --duration needs)",
    )
    flags.add_value(group, ("--random-input-len", "--input-len"), token_count, "N", "prompt length, in words", 1024)
    flags.add_value(group, ("--random-output-len", "--output-len"), token_count, "N", "tokens to generate", 128)
    flags.add_value(group, "--random-range-ratio", values.number(0, 0.999), "X", "lengths vary by this share up and down", 0.0)
    flags.add_value(group, "--random-prefix-len", values.whole(0, 10**7), "N", "words of a shared prefix of all prompts", 0)
    group.add_argument("--ignore-eos", action="store_true", help="generate the full output length, if the server can")
    flags.add_value(group, "--temperature", values.number(0, 100), "X", "sampling temperature (default: the server's)")
    group.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="additional fields of each request's body")
    flags.add_value(group, "--seed", values.whole(0, 2**63 - 1), "N", "seed of lengths, prompts and arrivals", 0)
    flags.add_value(group, "--num-warmups", values.whole(0, 10**6), "N", "warm-up requests before the run", 1)
    flags.add_burstiness(group)
    flags.add_value(group, "--processes", values.whole(1, 1024), "N", "client processes", 1)
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def add_results(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the flags of targets and results; returns their group."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="KEY:MS", help="targets for each request: ttft:500 tpot:50 e2el:10000, milliseconds"
    )
    flags.add_report(group)
    group.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    group.add_argument("--save-detailed", action="store_true", help="write the figures and each request's record as JSON")
    flags.add_value(group, "--result-dir", values.output_directory, "DIR", "directory of the JSON file", ".")
    group.add_argument("--result-filename", metavar="NAME", help="name of the JSON file (default: from rate, model and time)")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="additional fields of the JSON file")
    return group


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text}")
    return value


def check(args: argparse.Namespace) -> None:
    """Raises InvalidSetting for flags that contradict each other, before any request is sent."""
    Goodput.parse(args.goodput)
    if args.dataset_name not in (None, "random") and not args.dataset_path:
        raise InvalidSetting(f"--dataset-name {args.dataset_name} needs --dataset-path")
    if args.dataset_name == "random" and args.dataset_path:
        raise InvalidSetting("--dataset-name random and --dataset-path exclude each other")
    if args.result_filename and (path := Path(args.result_dir, args.result_filename)).is_dir():
        raise InvalidSetting(f"--result-filename: {path} is a directory")
    for pair in (*args.header, *args.metadata):
        if "=" not in pair:
            raise InvalidSetting(f"{pair}: expected KEY=VALUE")


def connect(args: argparse.Namespace) -> tuple[Target, int | None]:
    """The server to benchmark, and the longest request that it accepts if it reports one. Waits until it is ready if requested."""
    api_key = client_key(args)
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    headers |= {name.strip().lower(): value.strip() for name, _, value in (pair.partition("=") for pair in args.header)}
    fields = dict(args.extra_body)
    if args.ignore_eos:
        fields["ignore_eos"] = True
    if args.temperature is not None:
        fields["temperature"] = args.temperature
    target = Target(
        (args.base_url or f"http://{args.host}:{args.port}").rstrip("/").removesuffix("/v1"),
        args.endpoint or ("/v1/chat/completions" if args.backend == "openai-chat" else "/v1/completions"),
        args.served_model_name or args.model or "",
        headers,
        fields,
        args.request_timeout,
        args.insecure,
    )
    try:
        listed = wait_for(target, args.ready_check_timeout_sec)
    except ChairliftError:
        if not target.model or args.ready_check_timeout_sec:
            raise
        listed = []  # some servers do not list their models
    if not listed and not target.model:
        raise InvalidSetting(f"{target.url} lists no model: set --model")
    target = replace(target, model=target.model or listed[0]["id"])
    if args.ready_check_timeout_sec:
        wait_until_ready(target, args.ready_check_timeout_sec)
    longest = next((model.get("max_model_len") for model in listed if model.get("id") == target.model), None)
    return target, longest - TEMPLATE_TOKENS[target.chat] if isinstance(longest, int) else None


class RequestSource:
    """The requests to send: a trace, or random words. Raises InvalidSetting if all of a trace exceed `longest` tokens."""

    def __init__(self, args: argparse.Namespace, longest: int | None) -> None:
        self._args = args
        self._trace: list[traces.TraceRequest] = []
        if path := args.dataset_path:
            requests = traces.read(path)
            self._trace = workload.fitting(requests, longest)
            if not self._trace:
                raise InvalidSetting(f"all requests of {path} exceed the server's limit of {longest} tokens")
            if len(self._trace) < len(requests):
                excluded = len(requests) - len(self._trace)
                print(f"{excluded} of {len(requests)} requests exceed the server's limit of {longest} tokens and are left out.")

    def jobs(self, count: int | None, seed: int) -> list[Job]:
        """`count` requests, or all of a trace with its times. Each seed has different prompts."""
        args = self._args
        if self._trace:
            return workload.trace_jobs(self._trace, seed=seed, speedup=getattr(args, "speedup", 1.0))[:count]
        lengths = args.random_input_len, args.random_output_len
        spread = {"range_ratio": args.random_range_ratio, "prefix_len": args.random_prefix_len}
        return workload.random_jobs(count or NUM_PROMPTS, *lengths, **spread, seed=seed)

    def repeated(self, count: int, seed: int) -> list[Job]:
        """`count` requests without times. A shorter trace is repeated with other prompts."""
        jobs = self.jobs(count, seed)
        while len(jobs) < count:
            seed += _NEXT_REPETITION
            jobs += self.jobs(count - len(jobs), seed)
        return jobs


def schedule(args: argparse.Namespace, jobs: list[Job]) -> tuple[list[Job], str]:
    """The requests with their due times, and a description of the arrivals."""
    rate, limit, seed, strategy = args.request_rate, args.max_concurrency, args.seed, args.ramp_up_strategy
    start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
    timed = any(job.due for job in jobs)
    use_trace_times = timed and not strategy and rate is None and args.self_timed is not False
    if args.self_timed and not timed:
        raise InvalidSetting("--self-timed needs a --dataset-path whose requests have times")
    if args.speedup != 1 and not use_trace_times:
        raise InvalidSetting("--speedup needs a --dataset-path whose requests have times, and no rate")
    if strategy and (rate is not None or start is None or end is None):
        raise InvalidSetting("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, and no --request-rate")
    if not strategy and (start or end):
        raise InvalidSetting("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    gaps = describe_gaps(args.burstiness)
    if strategy:
        times = ramp(len(jobs), start, end, exponential=strategy == "exponential", burstiness=args.burstiness, seed=seed)
        return workload.with_due_times(jobs, times), f"from {start:g} to {end:g} a second ({strategy}, {gaps})"
    if rate is not None and math.isfinite(rate):
        return workload.with_due_times(jobs, arrivals(len(jobs), rate, args.burstiness, seed)), f"{rate:g} a second ({gaps})"
    if use_trace_times:
        return jobs, "at the trace's times" + ("" if args.speedup == 1 else f", {args.speedup:g} times as fast")
    return workload.as_fast_as_possible(jobs, limit), "all at once" if limit is None else "each when another has finished"


def send(args: argparse.Namespace, target: Target, jobs: Sequence[Job], max_concurrency: int | None, text: str) -> Run:
    """Sends the requests, with a progress bar named `text` in a terminal."""
    progress = text if not args.disable_tqdm and sys.stderr.isatty() else None
    return measure(target, jobs, max_concurrency=max_concurrency, workers=args.processes, warmups=args.num_warmups, progress=progress)


def requests_text(args: argparse.Namespace) -> str:
    """The source of the requests, as text."""
    if args.dataset_path:
        return f"from {Path(args.dataset_path).name}"
    spread = f" ± {args.random_range_ratio:.0%}" if args.random_range_ratio else ""
    return f"random words: input {args.random_input_len}, output {args.random_output_len}{spread}"


def settings(args: argparse.Namespace, target: Target, arrivals: str, cpu_share: float | None = None) -> dict[str, Any]:
    """The settings of a run for its report."""
    busy = "" if cpu_share is None else f", the busiest at {cpu_share:.0%} of a core"
    return {
        "server": target.url + target.endpoint,
        "model": target.model,
        "requests": requests_text(args),
        "arrivals": arrivals,
        "outputs": "full length (ignore_eos)" if args.ignore_eos else "until the model stops",
        "client": f"{args.processes} process{'es' * (args.processes > 1)}{busy}",
        "when": datetime.now().astimezone().isoformat(" ", "minutes"),
        **_metadata(args),
    }


def _metadata(args: argparse.Namespace) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in args.metadata)


def print_notes(notes: Sequence[str]) -> None:
    """Prints the notes on a run."""
    for note in notes:
        print(f"Note: {note}")


def print_figures(args: argparse.Namespace, records: Sequence[Record], rate: float | None = None, limit: int | None = None) -> Figures:
    """Prints the figures of a run and returns them."""
    figures = Figures(records, Goodput.parse(args.goodput) if args.goodput else None)
    names = args.percentile_metrics.split(",")
    print(block(figures, rate=rate, max_concurrency=limit, names=names, percentiles=args.metric_percentiles))
    return figures


def finish(args: argparse.Namespace, target: Target, run: Run, figures: Figures, load: str, fields: Mapping[str, Any]) -> int:
    """Prints the notes, writes the files that the flags name, with further `fields`, and returns the exit status."""
    print_notes(run.notes)
    if args.save_result or args.save_detailed:
        save(args, target, load, {**fields, **figures.to_json(args.metric_percentiles), "notes": run.notes}, run.records)
    if args.report:
        from chairlift.bench.report.serving import page

        page({target.model: run}, figures.goodput).write(args.report)
        print(f"Report: {args.report}")
    return exit_status([figures], run.interrupted)


def exit_status(runs: Iterable[Figures], interrupted: bool) -> int:
    """130 after Ctrl-C, as in a shell; 1 if no request succeeded; else 0."""
    return 130 if interrupted else 0 if any(figures.completed for figures in runs) else 1


def save(args: argparse.Namespace, target: Target, load: str, figures: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Writes the figures with the names of vLLM's result files. `load` is part of the default file name."""
    document = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": target.model,
        "num_prompts": len(records),
        "burstiness": "inf" if math.isinf(args.burstiness) else args.burstiness,
        **_metadata(args),
        **figures,
    }
    if args.save_detailed:
        document |= {
            "input_lens": [record.prompt_tokens for record in records],
            "output_lens": [record.output_tokens for record in records],
            "ttfts": [record.ttft if record.ok else 0.0 for record in records],
            "itls": [record.itls for record in records],
            "latencies": [record.e2el if record.ok else 0.0 for record in records],
            "start_times": [record.sent for record in records],
            "errors": [f"{record.failure}: {record.detail}" if record.failure else "" for record in records],
            "records": [record.to_json() for record in records],
        }
    default = f"{args.backend}-{load}-{target.model.split('/')[-1]}-{document['date']}.json"
    path = Path(args.result_dir, args.result_filename or default)
    with writing(path, "; set --result-filename"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, allow_nan=False))
    print(f"Figures: {path}")
