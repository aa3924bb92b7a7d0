"""`chairlift bench serve`: sends requests to a server and reports latency and throughput."""

from __future__ import annotations

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
from chairlift.bench.arrivals import arrivals, gaps_in_words, ramp
from chairlift.bench.client import Target
from chairlift.bench.figures import Figures, Goodput
from chairlift.bench.measure import measure, wait_for, wait_until_ready
from chairlift.bench.record import Record, Run
from chairlift.bench.text_report import HEADERS, block
from chairlift.bench.workload import Job
from chairlift.errors import ChairliftError, InvalidSetting

NUM_PROMPTS = 100

TEMPLATE_TOKENS = {False: 8, True: 128}
"""Tokens that a server may add to a prompt, without and with a chat template."""


def check(given: Mapping[str, Any]) -> None:
    """Refuses what cannot be, before anything is sent."""
    serve = given["bench"] == "serve"
    if serve and (unknown := [name for name in given["percentile_metrics"].split(",") if name not in HEADERS]):
        raise InvalidSetting(f"--percentile-metrics {','.join(unknown)}: expected some of {','.join(HEADERS)}")
    Goodput.parse(given["goodput"])
    if given["dataset_name"] not in (None, "random") and not given["dataset_path"]:
        raise InvalidSetting(f"--dataset-name {given['dataset_name']} needs --dataset-path")
    if given["dataset_name"] == "random" and given["dataset_path"]:
        raise InvalidSetting("--dataset-name random and --dataset-path name two different things: give one of them")
    if not serve and not (given["goodput"] or given["request_rates"] or given["max_concurrencies"]):
        raise InvalidSetting("a search needs targets: --goodput ttft:1000 tpot:100, or name what to run with --request-rates")
    if given["result_filename"] and (path := Path(given["result_dir"], given["result_filename"])).is_dir():
        raise InvalidSetting(f"--result-filename: {path} is a directory")
    for pair in (*given["header"], *given["metadata"]):
        if "=" not in pair:
            raise InvalidSetting(f"{pair}: expected KEY=VALUE")


def target_of(given: Mapping[str, Any], api_key: str | None) -> tuple[Target, int | None]:
    """The server, and the longest request that it says it takes."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    headers |= {name.strip().lower(): value.strip() for name, _, value in (pair.partition("=") for pair in given["header"])}
    chat = given["backend"] == "openai-chat"
    fields = dict(given["extra_body"])
    if given["ignore_eos"]:
        fields["ignore_eos"] = True
    if given["temperature"] is not None:
        fields["temperature"] = given["temperature"]
    target = Target(
        (given["base_url"] or f"http://{given['host']}:{given['port']}").rstrip("/").removesuffix("/v1"),
        given["endpoint"] or ("/v1/chat/completions" if chat else "/v1/completions"),
        given["served_model_name"] or given["model"] or "",
        headers,
        fields,
        given["request_timeout"],
        given["insecure"],
    )
    try:
        listed = wait_for(target, given["ready_check_timeout_sec"])
    except ChairliftError:
        if not target.model or given["ready_check_timeout_sec"]:
            raise
        listed = []  # not every server lists its models
    if not listed and not target.model:
        raise InvalidSetting(f"{target.url} lists no model: name one with --model")
    target = replace(target, model=target.model or listed[0]["id"])
    if given["ready_check_timeout_sec"]:
        wait_until_ready(target, given["ready_check_timeout_sec"])
    longest = next((model.get("max_model_len") for model in listed if model.get("id") == target.model), None)
    return target, longest - TEMPLATE_TOKENS[target.chat] if isinstance(longest, int) else None


class Requests:
    """Where requests come from: the trace of --dataset-path, or random words."""

    def __init__(self, given: Mapping[str, Any], longest: int | None) -> None:
        self._given = given
        self._trace: list[traces.TraceRequest] = []
        if path := given["dataset_path"]:
            every = traces.read(path)
            self._trace = workload.fitting(every, longest)
            too_long = f"are longer than the {longest} tokens that the server takes"
            if not self._trace:
                raise InvalidSetting(f"all requests of {path} {too_long}")
            if len(self._trace) < len(every):
                print(f"{len(every) - len(self._trace)} of {len(every)} requests {too_long}: left out.")

    def jobs(self, count: int | None, seed: int) -> list[Job]:
        """`count` requests to be sent, or all of a trace, with its times; another seed has other prompts."""
        given = self._given
        if self._trace:
            return workload.trace_jobs(self._trace, seed=seed, speedup=given.get("speedup", 1.0))[:count]
        lengths = given["random_input_len"], given["random_output_len"]
        spread = {"range_ratio": given["random_range_ratio"], "prefix_len": given["random_prefix_len"]}
        return workload.random_jobs(count or NUM_PROMPTS, *lengths, **spread, seed=seed)


def _timed(given: Mapping[str, Any], jobs: list[Job]) -> tuple[list[Job], str]:
    """The requests at their times, and how those came about."""
    rate, seats, seed, ramped = given["request_rate"], given["max_concurrency"], given["seed"], given["ramp_up_strategy"]
    start, end = given["ramp_up_start_rps"], given["ramp_up_end_rps"]
    timed = any(job.due for job in jobs)
    own_times = timed and not ramped and rate is None and given["self_timed"] is not False
    if given["self_timed"] and not timed:
        raise InvalidSetting("--self-timed needs a --dataset-path whose requests have times")
    if given["speedup"] != 1 and not own_times:
        raise InvalidSetting("--speedup is for the times of a trace: give a --dataset-path that has some, and no rate")
    if ramped and (rate is not None or start is None or end is None):
        raise InvalidSetting("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, and no --request-rate")
    if not ramped and (start or end):
        raise InvalidSetting("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    shape = gaps_in_words(given["burstiness"])
    if ramped:
        times = ramp(len(jobs), start, end, exponential=ramped == "exponential", burstiness=given["burstiness"], seed=seed)
        return workload.due(jobs, times), f"from {start:g} to {end:g} a second ({ramped}, {shape})"
    if rate is not None and math.isfinite(rate):
        return workload.due(jobs, arrivals(len(jobs), rate, given["burstiness"], seed)), f"{rate:g} a second ({shape})"
    if own_times:
        return jobs, "at the trace's times" + ("" if given["speedup"] == 1 else f", {given['speedup']:g} times as fast")
    return workload.at_once(jobs, seats), "all at once" if seats is None else "each when a seat is free"


def run(given: Mapping[str, Any], target: Target, requests: Requests) -> int:
    """Sends the requests and prints the report; returns the exit status."""
    jobs, coming = _timed(given, requests.jobs(given["num_prompts"], given["seed"]))
    seats = given["max_concurrency"]
    capped = "" if seats is None else f", at most {seats} at a time"
    print(f"{len(jobs)} requests to {target.model} at {target.url}{target.endpoint}: {coming}{capped}")
    done = send(given, target, jobs, seats, "requests")
    done.settings = settings_of(given, target, coming + capped, done.cpu_share)
    figures = Figures(done.records, Goodput.parse(given["goodput"]) if given["goodput"] else None)
    names = given["percentile_metrics"].split(",")
    rate = None if given["request_rate"] is None or math.isinf(given["request_rate"]) else given["request_rate"]
    print(block(figures, rate=rate, seats=seats, names=names, percentiles=given["metric_percentiles"]))
    tell(done.notes)
    if given["save_result"] or given["save_detailed"]:
        load = {"request_rate": "inf" if rate is None else rate, "max_concurrency": seats}
        name = f"{load['request_rate']}qps{'' if seats is None else f'-concurrency{seats}'}"
        save(given, target, name, {**load, **figures.to_json(given["metric_percentiles"]), "notes": done.notes}, done.records)
    if given["report"]:
        from chairlift.bench.report.serving import page

        page({target.model: done}, figures.goodput).write(given["report"])
        print(f"Report: {given['report']}")
    return status([figures], done.interrupted)


def send(given: Mapping[str, Any], target: Target, jobs: Sequence[Job], seats: int | None, text: str) -> Run:
    """Sends the requests, with a bar named `text` in a terminal."""
    shown = not given["disable_tqdm"] and sys.stderr.isatty()
    return measure(target, jobs, seats=seats, workers=given["processes"], warmups=given["num_warmups"], progress=text if shown else None)


def settings_of(given: Mapping[str, Any], target: Target, coming: str, share: float | None = None) -> dict[str, Any]:
    """What a reader wants to know of a run."""
    if given["dataset_path"]:
        requests = f"as in {Path(given['dataset_path']).name}"
    else:
        spread = f" ± {given['random_range_ratio']:.0%}" if given["random_range_ratio"] else ""
        requests = f"random words: {given['random_input_len']} in, {given['random_output_len']} out{spread}"
    busy = "" if share is None else f", the busiest at {share:.0%} of a core"
    return {
        "server": target.url + target.endpoint,
        "model": target.model,
        "requests": requests,
        "came": coming,
        "answers": "to their full length" if given["ignore_eos"] else "end where the model ends them",
        "client": f"{given['processes']} process{'es' * (given['processes'] > 1)}{busy}",
        "when": datetime.now().astimezone().isoformat(" ", "minutes"),
        **dict(pair.split("=", 1) for pair in given["metadata"]),
    }


def tell(notes: Sequence[str]) -> None:
    """Prints what a reader must not miss."""
    for note in notes:
        print(f"Note: {note}")


def status(runs: Iterable[Figures], interrupted: bool) -> int:
    """The exit status: as a shell has it for Ctrl-C, else whether anything succeeded."""
    return 130 if interrupted else 0 if any(figures.completed for figures in runs) else 1


def save(given: Mapping[str, Any], target: Target, name: str, figures: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Writes the figures under the names of vLLM's result files; `name` says of which load, in the file's name."""
    told = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": given["backend"],
        "model_id": target.model,
        "num_prompts": len(records),
        "burstiness": "inf" if math.isinf(given["burstiness"]) else given["burstiness"],
        **dict(pair.split("=", 1) for pair in given["metadata"]),
        **figures,
    }
    if given["save_detailed"]:
        told |= {
            "input_lens": [record.prompt_tokens for record in records],
            "output_lens": [record.output_tokens for record in records],
            "ttfts": [record.ttft if record.ok else 0.0 for record in records],
            "itls": [record.itls for record in records],
            "latencies": [record.e2el if record.ok else 0.0 for record in records],
            "start_times": [record.sent for record in records],
            "errors": [f"{record.failure}: {record.detail}" if record.failure else "" for record in records],
            "records": [record.to_json() for record in records],
        }
    usual = f"{given['backend']}-{name}-{target.model.split('/')[-1]}-{told['date']}.json"
    path = Path(given["result_dir"], given["result_filename"] or usual)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told, allow_nan=False))
    except OSError as error:
        raise InvalidSetting(f"{path}: cannot be written ({error.strerror}); name another with --result-filename") from None
    print(f"Figures: {path}")
