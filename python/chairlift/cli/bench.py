"""`chairlift bench`: load on a server, or on the engine in this process, and what came of it."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from chairlift.bench import traces, workload
from chairlift.bench.arrivals import arrivals, ramp
from chairlift.bench.block import HEADERS, block
from chairlift.bench.client import Target
from chairlift.bench.figures import Figures, Goodput
from chairlift.bench.measure import measure, wait_for, wait_until_ready
from chairlift.bench.record import Record, Run
from chairlift.bench.sweep import FEWEST, Point, knee, notes, search
from chairlift.bench.workload import Job
from chairlift.config import EngineConfig, ServerConfig
from chairlift.errors import ChairliftError, InvalidSetting

NUM_PROMPTS = 100

TEMPLATE_TOKENS = {False: 8, True: 128}
"""Tokens that a server may add to a prompt, without and with a chat template."""

LONGEST_POINT = 8
"""A search gives up below the rate at which its fewest requests take so many times --duration."""


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Runs one command of `chairlift bench`; 1 if no request succeeded."""
    if given["bench"] in ("latency", "throughput"):
        from chairlift.cli import bench_offline

        return bench_offline.run(given, engine)
    _check(given)
    target, longest = _target(given, server.api_key)
    return (_serve if given["bench"] == "serve" else _sweep)(given, target, longest)


def _check(given: Mapping[str, Any]) -> None:
    """Refuses what cannot be, before anything is sent."""
    if unknown := [name for name in given["percentile_metrics"].split(",") if name not in HEADERS]:
        raise InvalidSetting(f"--percentile-metrics {','.join(unknown)}: expected some of {','.join(HEADERS)}")
    Goodput.parse(given["goodput"])
    if given["dataset_name"] not in (None, "random") and not given["dataset_path"]:
        raise InvalidSetting(f"--dataset-name {given['dataset_name']} needs --dataset-path")
    if given["dataset_name"] == "random" and given["dataset_path"]:
        raise InvalidSetting("--dataset-name random and --dataset-path name two different things: give one of them")
    for flag in ("report", "output_json"):
        if given.get(flag) and not Path(given[flag]).absolute().parent.is_dir():
            raise InvalidSetting(f"--{flag.replace('_', '-')} {given[flag]}: there is no such directory")
    for pair in (*given["header"], *given["metadata"]):
        if "=" not in pair:
            raise InvalidSetting(f"{pair}: expected KEY=VALUE")


def _target(given: Mapping[str, Any], api_key: str | None) -> tuple[Target, int | None]:
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


def _jobs(given: Mapping[str, Any], count: int | None, seed: int, longest: int | None) -> list[Job]:
    """The requests to be sent, with a trace's times if there is one."""
    if not given["dataset_path"]:
        lengths = given["random_input_len"], given["random_output_len"]
        spread = {"range_ratio": given["random_range_ratio"], "prefix_len": given["random_prefix_len"]}
        return workload.random_jobs(count or NUM_PROMPTS, *lengths, **spread, seed=seed)
    requests = traces.read(given["dataset_path"])
    jobs = workload.fitting(workload.trace_jobs(requests, seed=seed, speedup=given.get("speedup", 1.0)), longest)
    if not jobs:
        raise InvalidSetting(f"all requests of {given['dataset_path']} are longer than the {longest} tokens that the server takes")
    if len(jobs) < len(requests):
        print(
            f"{len(requests) - len(jobs)} of {len(requests)} requests are longer than the {longest} tokens that the server takes: left out."
        )
    return jobs[:count]


def _timed(given: Mapping[str, Any], jobs: list[Job]) -> tuple[list[Job], str]:
    """The requests at their times, and how those came about."""
    rate, seats, seed = given["request_rate"], given["max_concurrency"], given["seed"]
    shape = "Poisson" if given["burstiness"] == 1 else f"gamma, burstiness {given['burstiness']:g}"
    if given["ramp_up_strategy"]:
        start, end = given["ramp_up_start_rps"], given["ramp_up_end_rps"]
        if rate is not None or start is None or end is None:
            raise InvalidSetting("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, and no --request-rate")
        exponential = given["ramp_up_strategy"] == "exponential"
        times = ramp(len(jobs), start, end, exponential=exponential, burstiness=given["burstiness"], seed=seed)
        return workload.due(jobs, times), f"from {start:g} to {end:g} a second ({given['ramp_up_strategy']}, {shape})"
    if rate is not None and math.isfinite(rate):
        return workload.due(jobs, arrivals(len(jobs), rate, given["burstiness"], seed)), f"{rate:g} a second ({shape})"
    timed = any(job.due for job in jobs)
    if given["self_timed"] and not timed:
        raise InvalidSetting("--self-timed needs a --dataset-path whose requests have times")
    if timed and rate is None and given["self_timed"] is not False:
        faster = "" if given["speedup"] == 1 else f", {given['speedup']:g} times as fast"
        return jobs, f"at the trace's times{faster}"
    return workload.at_once(jobs, seats), "all at once" if seats is None else "each when a seat is free"


def _serve(given: Mapping[str, Any], target: Target, longest: int | None) -> int:
    jobs, coming = _timed(given, _jobs(given, given["num_prompts"], given["seed"], longest))
    seats = given["max_concurrency"]
    capped = "" if seats is None else f", at most {seats} at a time"
    print(f"{len(jobs)} requests to {target.model} at {target.url}{target.endpoint}: {coming}{capped}")
    done = _measure(given, target, jobs, seats, "requests")
    done.settings = _settings(given, target, coming + capped, done.cpu_share)
    figures = Figures(done.records, Goodput.parse(given["goodput"]) if given["goodput"] else None)
    names = given["percentile_metrics"].split(",")
    rate = None if given["request_rate"] is None or math.isinf(given["request_rate"]) else given["request_rate"]
    print(block(figures, rate=rate, seats=seats, names=names, percentiles=given["metric_percentiles"]))
    _tell(done.notes, figures)
    if given["save_result"] or given["save_detailed"]:
        _save(given, target, {**figures.to_json(given["metric_percentiles"]), "notes": done.notes}, done.records)
    if given["report"]:
        from chairlift.bench.report.serving import page

        page({target.model: done}, figures.goodput).write(given["report"])
        print(f"Report: {given['report']}")
    return 0 if figures.completed else 1


def _measure(given: Mapping[str, Any], target: Target, jobs: Sequence[Job], seats: int | None, text: str) -> Run:
    shown = not given["disable_tqdm"] and sys.stderr.isatty()
    return measure(target, jobs, seats=seats, workers=given["processes"], warmups=given["num_warmups"], progress=text if shown else None)


def _settings(given: Mapping[str, Any], target: Target, coming: str, share: float | None = None) -> dict[str, Any]:
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


def _tell(notes: Sequence[str], figures: Figures) -> None:
    for note in notes:
        print(f"Note: {note}")
    if figures.failed and not figures.completed:
        print("Every request failed; what the server said is in --save-detailed.")


def _sweep(given: Mapping[str, Any], target: Target, longest: int | None) -> int:
    goodput = Goodput.parse(given["goodput"]) if given["goodput"] else None
    if goodput is None and not (given["request_rates"] or given["max_concurrencies"]):
        raise InvalidSetting("a search needs targets: --goodput ttft:1000 tpot:100, or name what to run with --request-rates")
    points: list[Point] = []

    def try_(load: float) -> bool:
        point = _point(given, target, longest, load, goodput, len(points))
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
    except ChairliftError as error:
        if not points:
            raise
        # The server is not there any more; what was measured is.
        print(f"The sweep ends here: {error}")
    points.sort(key=lambda point: point.load)
    best = knee(points)
    unit = "at a time" if given["max_concurrencies"] else "requests a second"
    if best is not None:
        share = f"{given['attainment']:g} % of the requests within {goodput}"
        print(f"\nThe largest load with {share}: {best.load:.3g} {unit}")
    elif goodput is not None:
        print(f"\nNo load had {given['attainment']:g} % of the requests within {goodput}.")
    for note in notes(points):
        print(f"Note: {note}")
    if given["save_result"] or given["save_detailed"]:
        found = {"points": [point.to_json() for point in points], "knee": None if best is None else best.load}
        _save(given, target, found, [record for point in points for record in point.run.records])
    if given["report"]:
        from chairlift.bench.report.sweep import page

        page(points, _settings(given, target, "at several rates"), goodput, closed=bool(given["max_concurrencies"])).write(given["report"])
        print(f"Report: {given['report']}")
    return 0 if any(point.figures.completed for point in points) else 1


def _point(given: Mapping[str, Any], target: Target, longest: int | None, load: float, goodput: Goodput | None, index: int) -> Point:
    """One run of a sweep, with prompts of its own: those of the run before are in the server's cache."""
    seed = given["seed"] + index
    if given["max_concurrencies"]:
        seats: int | None = int(load)
        jobs = workload.at_once(_jobs(given, given["num_prompts"] or max(FEWEST, 4 * int(load)), seed, longest), seats)
    else:
        seats = None
        jobs = _jobs(given, given["num_prompts"] or max(FEWEST, math.ceil(load * given["duration"])), seed, longest)
        jobs = workload.due(jobs, arrivals(len(jobs), load, given["burstiness"], seed))
    done = _measure(given, target, jobs, seats, f"{load:.3g}")
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


def _save(given: Mapping[str, Any], target: Target, figures: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Writes the figures under the names of vLLM's result files."""
    rate, seats = given.get("request_rate"), given.get("max_concurrency")
    told = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": given["backend"],
        "model_id": target.model,
        "num_prompts": len(records),
        "request_rate": "inf" if rate is None or math.isinf(rate) else rate,
        "burstiness": given["burstiness"],
        "max_concurrency": seats,
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
    capped = "" if seats is None else f"-concurrency{seats}"
    name = (
        given["result_filename"]
        or f"{given['backend']}-{told['request_rate']}qps{capped}-{target.model.split('/')[-1]}-{told['date']}.json"
    )
    directory = Path(given["result_dir"] or ".")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(json.dumps(told))
    except OSError as error:
        raise InvalidSetting(f"{directory / name}: cannot be written ({error.strerror}); name another with --result-filename") from None
    print(f"Figures: {directory / name}")
