"""`chairlift bench throughput` and `chairlift bench latency`: the engine in this process, without a server."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from chairlift.bench import traces
from chairlift.bench.figures import Latency
from chairlift.bench.workload import Job, fitting, random_jobs, trace_jobs
from chairlift.config import EngineConfig
from chairlift.engine.llm import LLM
from chairlift.errors import InvalidSetting
from chairlift.sampling import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def run(given: Mapping[str, Any], engine: EngineConfig) -> int:
    """Loads the model, runs the requests, and prints vLLM's lines."""
    if "enable_prefix_caching" not in given:
        engine = replace(engine, enable_prefix_caching=False)  # what is computed once only is no measure
    llm = LLM(**{field.name: getattr(engine, field.name) for field in fields(engine)})
    told = _throughput(llm, given) if given["bench"] == "throughput" else _latency(llm, given)
    if given["output_json"]:
        Path(given["output_json"]).write_text(json.dumps(told, indent=1))
    return 0


def _throughput(llm: LLM, given: Mapping[str, Any]) -> dict[str, Any]:
    """All requests at once."""
    if given["dataset_path"]:
        requests = traces.read(given["dataset_path"], lambda text: len(llm.tokenizer.encode(text)))
        jobs = trace_jobs(fitting(requests, llm.facts["max_model_len"]))[: given["num_prompts"]]
        if not jobs:
            raise InvalidSetting(f"all requests of {given['dataset_path']} are longer than --max-model-len {llm.facts['max_model_len']}")
    else:
        jobs = random_jobs(given["num_prompts"], given["input_len"], given["output_len"])
    _batch(llm, random_jobs(1, 16, 4, seed=-1))
    seconds, prompts, outputs = _batch(llm, jobs)
    rates = len(jobs) / seconds, (prompts + outputs) / seconds, outputs / seconds
    print(f"Throughput: {rates[0]:.2f} requests/s, {rates[1]:.2f} total tokens/s, {rates[2]:.2f} output tokens/s")
    print(f"Total num prompt tokens:  {prompts}")
    print(f"Total num output tokens:  {outputs}")
    return {
        "elapsed_time": seconds,
        "num_requests": len(jobs),
        "total_num_tokens": prompts + outputs,
        "requests_per_second": rates[0],
        "tokens_per_second": rates[1],
        "output_tokens_per_second": rates[2],
    }


def _latency(llm: LLM, given: Mapping[str, Any]) -> dict[str, Any]:
    """One batch, again and again."""
    jobs = random_jobs(given["batch_size"], given["input_len"], given["output_len"])
    for _ in range(given["num_iters_warmup"]):
        _batch(llm, jobs)
    seconds = [_batch(llm, jobs)[0] for _ in range(given["num_iters"])]
    latency = Latency(tuple(sorted(seconds)))
    percentiles = {percent: latency.percentile(percent) for percent in PERCENTILES}
    print(f"Avg latency: {latency.mean} seconds")
    print(f"Std latency: {latency.std} seconds")
    for percent, value in percentiles.items():
        print(f"{percent}% percentile latency: {value} seconds")
    return {"avg_latency": latency.mean, "std_latency": latency.std, "latencies": seconds, "percentiles": percentiles}


def _batch(llm: LLM, jobs: Sequence[Job]) -> tuple[float, int, int]:
    """Seconds, prompt tokens and output tokens of running all jobs together, to their full length."""
    prompts = [llm.tokenizer.encode(job.prompt()) for job in jobs]
    params = [SamplingParams(max_tokens=job.output_tokens, ignore_eos=True) for job in jobs]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - began
    return seconds, sum(map(len, prompts)), sum(len(output.token_ids) for output in outputs)
