"""`chairlift bench throughput` and `chairlift bench latency`: the engine in this process, without a server."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.bench import traces
from chairlift.bench.figures import Latency
from chairlift.bench.workload import Job, fitting, random_jobs, trace_jobs
from chairlift.cli import bench_load, flags, values
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift.engine.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)

_EXAMPLES = """\
examples:
  chairlift bench {name} --model ./my-model
  chairlift bench {name} --load-format dummy --input-len 512 --output-len 64
"""


def add_throughput_parser(commands: Any) -> None:
    """Adds `chairlift bench throughput` and its flags."""
    summary, examples = "run all requests at once in this process, without a server", _EXAMPLES.format(name="throughput")
    parser = flags.add_command(commands, "throughput", summary, examples, run_throughput)
    flags.add_value(parser, ("--num-prompts", "--num-requests"), bench_load.request_count, "N", "requests", 100)
    parser.add_argument("--dataset-path", metavar="FILE", help="a trace, for its lengths (default: --input-len, --output-len)")
    _add_engine(parser, input_len=1024)


def add_latency_parser(commands: Any) -> None:
    """Adds `chairlift bench latency` and its flags."""
    summary, examples = "run one batch repeatedly in this process, without a server", _EXAMPLES.format(name="latency")
    parser = flags.add_command(commands, "latency", summary, examples, run_latency)
    flags.add_value(parser, "--batch-size", bench_load.request_count, "N", "requests in the batch", 8)
    flags.add_value(parser, "--num-iters-warmup", values.whole(0, 10**6), "N", "warm-up runs", 3)
    flags.add_value(parser, "--num-iters", values.whole(1, 10**6), "N", "measured runs", 10)
    _add_engine(parser, input_len=32)


def _add_engine(parser: argparse.ArgumentParser, input_len: int) -> None:
    tokens = bench_load.token_count
    flags.add_value(parser, "--input-len", tokens, "N", "prompt length, in words", input_len)
    flags.add_value(parser, "--output-len", tokens, "N", "output length, in tokens", 128)
    flags.add_value(parser, "--output-json", values.output, "FILE", "write the figures as JSON")
    flags.add_model(parser)
    flags.add_fields(parser, EngineConfig)


def _load(args: argparse.Namespace) -> LLM:
    from chairlift.engine.llm import LLM  # imports torch

    config = args.engine
    if "enable_prefix_caching" not in args:
        config = replace(config, enable_prefix_caching=False)  # repeated prompts would be computed only once
    return LLM(**{field.name: getattr(config, field.name) for field in fields(config)})


def _save(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(figures, indent=1))


def run_throughput(args: argparse.Namespace) -> int:
    """Runs all requests at once and prints vLLM's lines."""
    llm = _load(args)
    if args.dataset_path:
        requests = traces.read(args.dataset_path, lambda text: len(llm.tokenizer.encode(text)))
        longest = llm.info.max_model_len
        jobs = trace_jobs(fitting(requests, longest))[: args.num_prompts]
        if not jobs:
            raise InvalidSetting(f"all requests of {args.dataset_path} exceed --max-model-len {longest}")
    else:
        jobs = random_jobs(args.num_prompts, args.input_len, args.output_len)
    _run_batch(llm, random_jobs(1, 16, 4, seed=-1))
    seconds, prompts, outputs = _run_batch(llm, jobs)
    rates = len(jobs) / seconds, (prompts + outputs) / seconds, outputs / seconds
    print(f"Throughput: {rates[0]:.2f} requests/s, {rates[1]:.2f} total tokens/s, {rates[2]:.2f} output tokens/s")
    print(f"Total num prompt tokens:  {prompts}")
    print(f"Total num output tokens:  {outputs}")
    figures = {
        "elapsed_time": seconds,
        "num_requests": len(jobs),
        "total_num_tokens": prompts + outputs,
        "requests_per_second": rates[0],
        "tokens_per_second": rates[1],
        "output_tokens_per_second": rates[2],
    }
    _save(args, figures)
    return 0


def run_latency(args: argparse.Namespace) -> int:
    """Runs one batch repeatedly and prints vLLM's lines."""
    llm = _load(args)
    jobs = random_jobs(args.batch_size, args.input_len, args.output_len)
    for _ in range(args.num_iters_warmup):
        _run_batch(llm, jobs)
    seconds = [_run_batch(llm, jobs)[0] for _ in range(args.num_iters)]
    latency = Latency(tuple(sorted(seconds)))
    percentiles = {percent: latency.percentile(percent) for percent in PERCENTILES}
    print(f"Avg latency: {latency.mean} seconds")
    print(f"Std latency: {latency.std} seconds")
    for percent, value in percentiles.items():
        print(f"{percent}% percentile latency: {value} seconds")
    _save(args, {"avg_latency": latency.mean, "std_latency": latency.std, "latencies": seconds, "percentiles": percentiles})
    return 0


def _run_batch(llm: LLM, jobs: Sequence[Job]) -> tuple[float, int, int]:
    """Seconds, prompt tokens and output tokens of running all jobs together, to their full length."""
    prompts = [llm.tokenizer.encode(job.prompt()) for job in jobs]
    params = [SamplingParams(max_tokens=job.output_tokens, ignore_eos=True) for job in jobs]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - start
    return seconds, sum(map(len, prompts)), sum(len(output.token_ids) for output in outputs)
