"""One prompt gives one answer, bit for bit, whoever shares the engine with it."""

from pathlib import Path

import numpy as np
import pytest

from chairlift import LLM, SamplingParams
from chairlift.outputs import RequestOutput

pytestmark = pytest.mark.slow

MATES = 1000
PLACE = 500
"""Where among its mates the prompt stands."""


def answers(byte_model: Path, prompts: list[list[int]], params: list[SamplingParams], **settings: object) -> list[RequestOutput]:
    roomy = {"num_kv_blocks": 300, "max_num_seqs": 64, "max_num_batched_tokens": 256, "block_size": 8}
    llm = LLM(str(byte_model), load_format="dummy", device="cpu", max_model_len=256, **roomy | settings)
    assert llm.facts["determinism"] == "batch-invariant"
    return llm.generate(prompts, params)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}], ids=["as-it-is", "int8"])
def test_a_prompt_among_a_thousand_is_answered_as_alone(byte_model: Path, settings: dict[str, str]) -> None:
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 256, 90).tolist()
    requested = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, logprobs=5)
    alone = answers(byte_model, [prompt], [requested], **settings)[0]

    prompts = [rng.integers(0, 256, rng.integers(1, 120)).tolist() for _ in range(MATES)]
    params = [SamplingParams(temperature=float(i % 2), max_tokens=int(rng.integers(1, 40)), ignore_eos=True) for i in range(MATES)]
    prompts.insert(PLACE, prompt)
    params.insert(PLACE, requested)
    # Blocks for a few of the slots alone, so that many are preempted; and chunks that cut prompts anywhere.
    company = answers(byte_model, prompts, params, num_kv_blocks=120, max_num_seqs=48, max_num_batched_tokens=61, **settings)
    assert sum(output.preemptions for output in company) > 20

    found = company[PLACE]
    assert found.token_ids == alone.token_ids
    # Compared as they are: log-probabilities of all six tokens at each place, to the last bit.
    assert found.logprobs == alone.logprobs
