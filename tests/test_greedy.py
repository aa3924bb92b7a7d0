"""Greedy token ids of exact products equal transformers' own, however the requests are batched, chunked, cached or preempted."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from chairlift import LLM, SamplingParams
from chairlift.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    """14 prompts of 1 to 500 tokens of English, all different from their first token on."""
    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    ids = Tokenizer(model_dir).encode(text)
    lengths = np.geomspace(1, 500, 14).round().astype(int)
    return [ids[37 * i : 37 * i + length] for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def reference(hf_model_dir: Path) -> PreTrainedModel:
    """The same weights in transformers, in fp32."""
    return AutoModelForCausalLM.from_pretrained(hf_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> list[list[int]]:
    """What we give for each prompt by itself."""
    return run(LLM(cpu_math="exact", max_model_len=1024, max_num_seqs=1, num_kv_blocks=512, enable_prefix_caching=False), prompts)


@torch.inference_mode()
def choices(reference: PreTrainedModel, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token after the prompt and after each token of the answer but the last, from one forward pass."""
    logits = reference(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer)).logits[0]
    return logits.argmax(dim=-1).tolist()


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


def test_alone(prompts: list[list[int]], alone: list[list[int]], reference: PreTrainedModel) -> None:
    # By induction this is what greedy decoding of the reference gives: up to each token, its prefix is the same.
    assert [len(answer) for answer in alone] == [NEW_TOKENS] * len(prompts)
    assert alone == [choices(reference, prompt, answer) for prompt, answer in zip(prompts, alone, strict=True)]


def test_all_together_and_again_from_the_prefix_cache(prompts: list[list[int]], alone: list[list[int]]) -> None:
    llm = LLM(cpu_math="exact", max_model_len=1024, max_num_seqs=32, num_kv_blocks=512)
    assert run(llm, prompts) == alone
    again = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in again] == alone
    # Everything but the last token, which must run: whole blocks, or all of it where the prompt fills its blocks.
    for prompt, output in zip(prompts, again, strict=True):
        assert output.cached_tokens >= (len(prompt) - 1) // 16 * 16


def test_small_chunks(prompts: list[list[int]], alone: list[list[int]]) -> None:
    llm = LLM(
        cpu_math="exact", max_model_len=1024, max_num_seqs=24, max_num_batched_tokens=48, num_kv_blocks=512, enable_prefix_caching=False
    )
    assert run(llm, prompts) == alone


def test_preempted_for_want_of_blocks(prompts: list[list[int]], alone: list[list[int]]) -> None:
    # Large steps, or so few are admitted at a time that all find blocks.
    llm = LLM(cpu_math="exact", max_model_len=528, max_num_seqs=32, num_kv_blocks=40, max_num_batched_tokens=256, watermark=0.0)
    outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == alone
    assert sum(output.preemptions for output in outputs) > 0
