"""Runs vLLM's `LLM.generate` in its own virtual environment, in one process and without HTTP: see `orders.py`.

    python vllm_engine.py MODEL float32|bfloat16 MAX_MODEL_LEN

All requests of an order are given at once; when they were to arrive is not looked at.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from orders import Order, Reply, serve, spans

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported


def load(path: str, dtype: str, max_model_len: int) -> Callable[[Order], Reply]:
    """The model in this process, with the prefix cache off, and what runs orders through it."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=path,
        dtype=dtype,
        max_model_len=max_model_len,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # else there are no times
    )

    def run(order: Order) -> Reply:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in order["prompts"]]
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for count in order["outputs"]]
        began = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        whole = time.monotonic() - began
        firsts = [output.metrics.first_token_ts - began for output in outputs]
        lasts = [output.metrics.last_token_ts - began for output in outputs]
        return spans(firsts, lasts, whole), [list(output.outputs[0].token_ids) for output in outputs]

    return run


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3])))
