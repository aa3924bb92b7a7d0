"""Asks the production scheduler, in simulated time, how an H100 would serve a burst under two policies. Needs no model and no GPU."""

import random

import numpy as np

from chairlift import simulate
from chairlift.bench.traces import TraceRequest

generator = random.Random(0)
requests = [TraceRequest(index / 10, generator.randint(50, 4000), generator.randint(10, 800)) for index in range(1000)]

for policy in ("fcfs", "shortest"):
    result = simulate(requests, model="Llama-3.1-8B", device="H100", max_num_seqs=64, scheduling_policy=policy)
    p50, p99 = np.percentile(result.ttft(), (50, 99))
    rate = result.finished["output_tokens"].sum() / result.span
    print(f"{policy:9} {rate:6,.0f} tokens/s, TTFT p50 {p50:6.2f} s, p99 {p99:6.2f} s")
