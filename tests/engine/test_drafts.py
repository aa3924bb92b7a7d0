"""Speculative decoding without a model: the same answers in fewer steps."""

import numpy as np
import pytest

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.loop import accepted_samples

pytestmark = pytest.mark.slow

REPEATS = "Copy this list twice. Apples, pears, plums, cherries, grapes, figs. Apples, pears, plums, cherries, grapes, figs. Apples, pears,"
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n    return a * b\n\ndef add(a, b):\n"
PLAIN = "The quickest way to learn a language is"

CASES = [
    (REPEATS, SamplingParams(temperature=0, max_tokens=48)),
    (CODE, SamplingParams(temperature=0, max_tokens=48)),
    (PLAIN, SamplingParams(temperature=0, max_tokens=24)),
    (REPEATS, SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=32)),
    (CODE, SamplingParams(temperature=1.0, top_k=20, min_p=0.05, seed=3, max_tokens=32)),
    (REPEATS, SamplingParams(temperature=0, stop=("cherries",), max_tokens=48)),
    (REPEATS, SamplingParams(temperature=0, n=2, seed=1, max_tokens=20)),
    (REPEATS, SamplingParams(temperature=0.8, n=3, seed=5, max_tokens=20)),
    (REPEATS, SamplingParams(temperature=0, repetition_penalty=1.1, max_tokens=20)),
    (CODE, SamplingParams(temperature=0, logprobs=2, max_tokens=20)),
    (PLAIN, SamplingParams(temperature=0, min_tokens=8, max_tokens=16)),
    (CODE, SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=12)),
]


def answers(**settings):
    llm = LLM(max_model_len=512, **settings)
    # Steps whose time is known are what a draft is weighed against.
    llm.generate(PLAIN, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    outputs = []
    for together in (False, True):
        batches = [CASES] if together else [[case] for case in CASES]
        for batch in batches:
            outputs += llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    found = [(one.token_ids, one.text, one.finish_reason, one.logprobs, one.prompt_logprobs) for one in outputs]
    return found, llm.engine.stats()


@pytest.fixture(scope="module")
def expected(model_dir):
    found, stats = answers()
    assert "drafts" not in stats
    return found


@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_answers_are_the_same_bit_for_bit(expected, tokens):
    found, stats = answers(speculative_config={"method": "ngram", "num_speculative_tokens": tokens})
    assert found == expected
    assert 0 < stats["accepted_draft_tokens"] <= stats["draft_tokens"] <= tokens * stats["drafts"]
    by_position = stats["accepted_draft_tokens_by_position"]
    assert sum(by_position) == stats["accepted_draft_tokens"]
    assert by_position == sorted(by_position, reverse=True)
    assert len(by_position) == tokens


def test_answers_are_the_same_where_sequences_are_preempted(expected):
    found, stats = answers(speculative_config={"method": "ngram"}, num_kv_blocks=40, max_num_seqs=4)
    assert found == expected
    assert stats["accepted_draft_tokens"] > 0


def test_a_timeline_has_the_requests_drafts(model_dir):
    llm = LLM(max_model_len=512, speculative_config={"method": "ngram"})
    llm.generate(PLAIN, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    [output] = llm.generate(REPEATS, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))
    [plain] = llm.generate(REPEATS, SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True))
    stats = llm.engine.stats()
    assert 0 < output.timeline.accepted_draft_tokens <= output.timeline.draft_tokens <= stats["draft_tokens"]
    assert (plain.timeline.draft_tokens, plain.timeline.accepted_draft_tokens) == (0, 0)


def test_of_each_tag_the_first_samples_count():
    asked = np.array([5, 7, 7, 7, 9, 3, 3], dtype=np.uint64)
    given = np.array([5, 7, 7, 3], dtype=np.uint64)
    assert accepted_samples(asked, given).tolist() == [True, True, True, False, False, True, False]
    assert not accepted_samples(asked, given[:0]).any()


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({}, "method must be 'ngram' or 'off', got None"),
        ({"method": "eagle"}, "got 'eagle'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 16, got 0"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "from 1 to 16, got 17"),
        ({"method": "ngram", "num_speculative_tokens": True}, "got True"),
        ({"method": "ngram", "model": "x"}, "unknown key 'model'"),
    ],
)
def test_a_wrong_configuration_is_one_clear_line(config, fault):
    with pytest.raises(ValueError, match=fault):
        EngineConfig(speculative_config=config)
