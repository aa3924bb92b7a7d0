"""The default number of sequences in a step, when many more requests come at once."""

import random

from chairlift.bench.traces import TraceRequest
from chairlift.config import EngineConfig
from chairlift.sim.run import simulate

REQUESTS = 400
BLOCKS = REQUESTS * 50
"""KV for all of them at once."""


def test_four_hundred_requests_at_once_lose_nothing_in_the_slots_of_a_cpu() -> None:
    rng = random.Random(0)
    trace = [TraceRequest(0.0, rng.randint(16, 461), rng.randint(8, 64)) for _ in range(REQUESTS)]
    default, spans = EngineConfig(device="cpu").slots, {}
    for slots in (16, default, REQUESTS):
        sizes = {"max_num_seqs": slots, "max_num_batched_tokens": max(slots, 128), "num_kv_blocks": BLOCKS}
        result = simulate(trace, model="smollm2-135m", device="cpu", speculative_config={"method": "off"}, **sizes)
        assert result.requests["output_tokens"].sum() == sum(request.output_tokens for request in trace)
        spans[slots] = result.requests["ended"].max()
    assert default < REQUESTS
    assert spans[default] < 1.01 * spans[REQUESTS]
    assert spans[default] < 1.01 * spans[16]
