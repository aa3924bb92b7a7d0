"""Greedy token ids equal transformers' own, however the requests are batched, chunked, cached or preempted."""

from pathlib import Path

import numpy as np
import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.tokenizer import Tokenizer

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    """32 prompts of 1 to 1,000 tokens of English, all different from their first token on."""
    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    ids = Tokenizer(model_dir).encode(text)
    lengths = np.geomspace(1, 1000, 32).round().astype(int)
    return [ids[37 * i : 37 * i + length] for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def expected(hf_model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' `generate` gives for each prompt alone, with the same weights in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_model_dir, dtype=torch.float32).eval()
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


def test_alone(prompts: list[list[int]], expected: list[list[int]]) -> None:
    llm = LLM(max_model_len=2048, max_num_seqs=1, num_kv_blocks=1024, enable_prefix_caching=False)
    assert run(llm, prompts) == expected


def test_all_together_and_again_from_the_prefix_cache(prompts: list[list[int]], expected: list[list[int]]) -> None:
    llm = LLM(max_model_len=2048, max_num_seqs=32, num_kv_blocks=1024)
    assert run(llm, prompts) == expected
    again = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in again] == expected
    # Everything but the last token, which must run: whole blocks, or all of it where the prompt fills its blocks.
    for prompt, output in zip(prompts, again, strict=True):
        assert output.cached_tokens >= (len(prompt) - 1) // 16 * 16


def test_small_chunks(prompts: list[list[int]], expected: list[list[int]]) -> None:
    llm = LLM(max_model_len=2048, max_num_seqs=24, max_num_batched_tokens=48, num_kv_blocks=1024, enable_prefix_caching=False)
    assert run(llm, prompts) == expected


def test_preempted_for_want_of_blocks(prompts: list[list[int]], expected: list[list[int]]) -> None:
    # Large steps, or so few are admitted at a time that all find blocks.
    llm = LLM(max_model_len=1040, max_num_seqs=32, num_kv_blocks=72, max_num_batched_tokens=256)
    outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.preemptions for output in outputs) > 0
