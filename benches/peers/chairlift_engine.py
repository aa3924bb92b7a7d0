"""Runs `chairlift.LLM` without HTTP: see `orders.py`.

    python chairlift_engine.py MODEL SETTINGS

SETTINGS are those of `LLM`, as a JSON object. All requests of an order are given at once; when they were to arrive is not looked at.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from orders import Order, Reply, serve, spans


def load(path: str, settings: dict[str, Any]) -> Callable[[Order], Reply]:
    """The model in this process, with the prefix cache off, and what runs orders through it."""
    from chairlift import LLM, SamplingParams

    llm = LLM(path, enable_prefix_caching=False, **settings)

    def run(order: Order) -> Reply:
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for count in order["outputs"]]
        began = time.perf_counter()
        outputs = llm.generate(order["prompts"], params, progress=False)
        whole = time.perf_counter() - began
        timings = [output.timing for output in outputs]
        firsts, lasts = [timing.first_token for timing in timings], [timing.total for timing in timings]
        return spans(firsts, lasts, whole), [list(output.token_ids) for output in outputs]

    return run


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], json.loads(sys.argv[2])))
