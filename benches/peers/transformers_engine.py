"""Runs transformers in its own virtual environment: it has no server that takes token ids.

    python transformers_engine.py MODEL one_by_one|static|continuous BATCH THREADS

It is spared the HTTP that the servers pay for: see `orders.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from orders import Order, Reply, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList


class Clock(StoppingCriteria):
    """Never stops: notes when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def batches(model: Any, order: Order, size: int) -> Reply:
    """`generate` on `size` requests after `size` requests: prompts padded on the left, all until the longest answer ends."""
    began, times, tokens = time.perf_counter(), [], []
    for start in range(0, len(order["prompts"]), size):
        prompts, outputs = order["prompts"][start : start + size], order["outputs"][start : start + size]
        longest, clock = max(map(len, prompts)), Clock()
        ids = torch.tensor([[2] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        # No end token: a length is a length.
        config = GenerationConfig(max_new_tokens=max(outputs), do_sample=False, eos_token_id=None, pad_token_id=2)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=StoppingCriteriaList([clock]))
        for row, output in enumerate(outputs):
            times.append([t - began for t in clock.times[:output]])
            tokens.append(out[row, longest : longest + output].tolist())
    return times, tokens


def continuous(manager: Any, order: Order) -> Reply:
    """Adds each request as it arrives; the manager notes when each token was there."""
    began, count = time.perf_counter(), len(order["prompts"])

    def arrive() -> None:
        for i, (prompt, output, at) in enumerate(zip(order["prompts"], order["outputs"], order["arrivals"], strict=True)):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            manager.add_request(prompt, f"{began}/{i}", max_new_tokens=output, record_timestamps=True, eos_token_id=-1)

    threading.Thread(target=arrive, daemon=True).start()
    done: dict[int, Any] = {}
    while len(done) < count:
        result = manager.get_result(timeout=1.0)
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(result.error)
            done[int(result.request_id.rsplit("/", 1)[1])] = result
        elif result is None and not manager.is_running():
            raise RuntimeError("the continuous batching thread has ended")
    times = [[t - began for t in done[i].timestamps] for i in range(count)]
    return times, [list(done[i].generated_tokens) for i in range(count)]


def load(path: str, mode: str, size: int, threads: int) -> Callable[[Order], Reply]:
    """The model in fp32, and what runs orders through it."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    if mode != "continuous":
        return lambda order: batches(model, order, 1 if mode == "one_by_one" else size)
    config = GenerationConfig(max_new_tokens=512, do_sample=False, eos_token_id=-1, pad_token_id=2)
    # The defaults take 60 % of the memory and 8192 tokens a step, and are slower: a step's mask and KV grow with its tokens.
    tuned = ContinuousBatchingConfig(
        page_size=32, num_blocks=64 * 24, max_batch_tokens=256, max_requests_per_batch=size, allow_block_sharing=False
    )
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=tuned)
    manager.start()
    return lambda order: continuous(manager, order)


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
