"""Runs OpenVINO GenAI's continuous batching in its own virtual environment, without HTTP: see `orders.py`.

python openvino_engine.py MODEL f32|bf16 THREADS STEP_TOKENS
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import numpy as np
import openvino
import openvino_genai as genai
from orders import Order, Reply, serve

KV_CACHE_GB, MAX_NUM_SEQS = 4, 64


def load(path: str, precision: str, threads: int, step_tokens: int) -> Callable[[Order], Reply]:
    """A pipeline with the prefix cache off, and what runs orders through it."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = KV_CACHE_GB, MAX_NUM_SEQS, step_tokens
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
    ids = itertools.count()
    return lambda order: run(pipeline, ids, order)


def run(pipeline: genai.ContinuousBatchingPipeline, ids: itertools.count[int], order: Order) -> Reply:
    """Adds each request when it is due, between two steps, and reads tokens after every step."""
    began, count = time.perf_counter(), len(order["prompts"])
    times: list[list[float]] = [[] for _ in range(count)]
    tokens: list[list[int]] = [[] for _ in range(count)]
    handles: dict[int, genai.GenerationHandle] = {}
    added = 0
    while added < count or handles:
        while added < count and order["arrivals"][added] <= time.perf_counter() - began:
            prompt = openvino.Tensor(np.array([order["prompts"][added]], dtype=np.int64))
            handles[added] = pipeline.add_request(next(ids), prompt, greedy(order["outputs"][added]))
            added += 1
        if not handles:
            time.sleep(max(0.0, began + order["arrivals"][added] - time.perf_counter()))
            continue
        pipeline.step()
        now = time.perf_counter() - began
        for i, handle in list(handles.items()):
            if handle.can_read():
                new = [token for output in handle.read().values() for token in output.generated_ids]
                times[i] += [now] * len(new)
                tokens[i] += new
            if handle.get_status() != genai.GenerationStatus.RUNNING and not handle.can_read():
                del handles[i]
    return times, tokens


def greedy(count: int) -> genai.GenerationConfig:
    """Exactly `count` tokens, the likeliest each."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
    return config


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
