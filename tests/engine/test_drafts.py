"""Speculative decoding without a model: the same answers in fewer steps."""

import json

import numpy as np
import pytest
from core_requests import add

from chairlift import LLM, SamplingParams, _core
from chairlift.config import EngineConfig
from chairlift.engine.steps import accepted_samples
from chairlift.runner.buffers import Layout, StepBuffers
from chairlift.sampling import StructuredOutput

REPEATS = "Copy this list twice. Apples, pears, plums, cherries, grapes, figs. Apples, pears, plums, cherries, grapes, figs. Apples, pears,"
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n    return a * b\n\ndef add(a, b):\n"
PLAIN = "The quickest way to learn a language is"

CASES = [
    (REPEATS, SamplingParams(temperature=0, max_tokens=24)),
    (CODE, SamplingParams(temperature=0, max_tokens=24)),
    (PLAIN, SamplingParams(temperature=0, max_tokens=24)),
    (REPEATS, SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=16)),
    (CODE, SamplingParams(temperature=1.0, top_k=20, min_p=0.05, seed=3, max_tokens=16)),
    (REPEATS, SamplingParams(temperature=0, stop=("cherries",), max_tokens=24)),
    (REPEATS, SamplingParams(temperature=0, n=2, seed=1, max_tokens=12)),
    (REPEATS, SamplingParams(temperature=0.8, n=3, seed=5, max_tokens=12)),
    (REPEATS, SamplingParams(temperature=0, repetition_penalty=1.1, max_tokens=12)),
    (CODE, SamplingParams(temperature=0, logprobs=2, max_tokens=12)),
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
    found = [
        (one.token_ids, one.text, one.finish_reason, one.logprobs, one.prompt_logprobs) for output in outputs for one in output.outputs
    ]
    return found, llm.engine.stats()


SCHEMA = {
    "type": "object",
    "properties": {"opening_hours": {"enum": ["early", "evening"]}, "accessible": {"type": "boolean"}},
    "required": ["opening_hours", "accessible"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutput("json", json.dumps(SCHEMA), disable_any_whitespace=False),
    StructuredOutput("regex", r"(Once upon a time [a-c]{1,3}, ){2,4}the end"),
    StructuredOutput("choice", json.dumps(["undecided", "undeniable"])),
    StructuredOutput("grammar", 'start: "<think>" /[a-d]{2,5}/ "</think>the answer is " ("yes" | "yesterday")'),
    StructuredOutput("json_object", disable_any_whitespace=False),
    StructuredOutput("json", json.dumps(SCHEMA)),
]


def forms():
    """Requests whose grammars force some tokens, beside free ones."""
    requested = [
        SamplingParams(temperature=t, seed=i, max_tokens=90, structured_output=form) for i, form in enumerate(FORMS) for t in (0.0, 4.0)
    ]
    several = SamplingParams(temperature=4.0, seed=8, n=2, max_tokens=60, structured_output=FORMS[0])
    short = SamplingParams(temperature=0.0, max_tokens=9, structured_output=FORMS[1])
    scored = SamplingParams(temperature=0.0, logprobs=1, max_tokens=30, structured_output=FORMS[1])
    stopped = SamplingParams(temperature=0.0, stop=("upon",), max_tokens=30, structured_output=FORMS[1])
    penalised = SamplingParams(temperature=4.0, seed=2, presence_penalty=1.0, max_tokens=30, structured_output=FORMS[1])
    return [*requested, several, short, scored, stopped, penalised, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)]


def formed(byte_model, **settings):
    """The answers to these requests alone and in one batch, and the engine's statistics."""
    small = {"num_kv_blocks": 400, "block_size": 8, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    llm, outputs = LLM(str(byte_model), load_format="dummy", device="cpu", **small | settings), []
    try:
        prompt = list(b"Say it in the form")
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        for batch in [[one] for one in forms()] + [forms()]:
            outputs += llm.generate([prompt] * len(batch), batch)
        found = [(one.token_ids, one.text, one.finish_reason, one.logprobs) for output in outputs for one in output.outputs]
        return found, llm.engine.stats()
    finally:
        llm.close()


@pytest.fixture(scope="module")
def formed_without(byte_model):
    return formed(byte_model, speculative_config={"method": "off"})[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "ngram"])
@pytest.mark.parametrize("blocks", [400, 40])
def test_answers_in_a_form_are_the_same_bit_for_bit(byte_model, formed_without, method, blocks):
    found, stats = formed(byte_model, speculative_config={"method": method}, num_kv_blocks=blocks)
    assert found == formed_without
    assert stats.accepted_draft_tokens > 0


@pytest.mark.slow
def test_forced_tokens_are_always_accepted(byte_model):
    llm = LLM(str(byte_model), load_format="dummy", device="cpu", num_kv_blocks=100, speculative_config={"method": "auto"})
    try:
        llm.generate([1], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1))
        before = llm.engine.stats()
        form = StructuredOutput("regex", "The quick brown fox jumps over [0-9] lazy dogs")
        [output] = llm.generate([1], SamplingParams(temperature=1.0, seed=5, max_tokens=80, structured_output=form))
        assert output.finish_reason == "stop"
        after = llm.engine.stats()
        drafted = after.draft_tokens - before.draft_tokens
        assert output.timeline.draft_tokens == output.timeline.accepted_draft_tokens == drafted > 0
        assert after.steps - before.steps == len(output.token_ids) - drafted
    finally:
        llm.close()


@pytest.fixture(scope="module")
def expected(model_dir):
    found, stats = answers(speculative_config={"method": "off"})
    assert stats.drafts == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 16])  # the preempted ones draft the default of 8
def test_answers_are_the_same_bit_for_bit(expected, tokens):
    found, stats = answers(speculative_config={"method": "ngram", "num_speculative_tokens": tokens})
    assert found == expected
    assert 0 < stats.accepted_draft_tokens <= stats.draft_tokens <= tokens * stats.drafts
    by_position = stats.accepted_draft_tokens_by_position
    assert sum(by_position) == stats.accepted_draft_tokens
    assert by_position == sorted(by_position, reverse=True)
    assert len(by_position) == tokens


@pytest.mark.slow
def test_answers_are_the_same_where_sequences_are_preempted(expected):
    found, stats = answers(speculative_config={"method": "ngram"}, num_kv_blocks=40, max_num_seqs=4)
    assert found == expected
    assert stats.accepted_draft_tokens > 0


@pytest.mark.slow
def test_a_timeline_has_the_requests_drafts(model_dir):
    llm = LLM(max_model_len=512, speculative_config={"method": "ngram"})
    llm.generate(PLAIN, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    [output] = llm.generate(REPEATS, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))
    [plain] = llm.generate(REPEATS, SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True))
    stats = llm.engine.stats()
    assert 0 < output.timeline.accepted_draft_tokens <= output.timeline.draft_tokens <= stats.draft_tokens
    assert (plain.timeline.draft_tokens, plain.timeline.accepted_draft_tokens) == (0, 0)


def test_of_each_tag_the_first_samples_count():
    requested = np.array([5, 7, 7, 7, 9, 3, 3], dtype=np.uint64)
    given = np.array([5, 7, 7, 3], dtype=np.uint64)
    assert accepted_samples(requested, given).tolist() == [True, True, True, False, False, True, False]
    assert not accepted_samples(requested, given[:0]).any()


@pytest.mark.parametrize(
    ("config", "fault"),
    [
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


def test_a_step_must_hold_the_proposed_tokens():
    with pytest.raises(ValueError, match=r"num_speculative_tokens \(8\) must be below the tokens of a step"):
        EngineConfig(speculative_config={"method": "auto"}, max_num_batched_tokens=8, max_num_seqs=4)


def test_finished_answers_are_drafted_for_the_same_tenant_and_salt_only():
    layout = {"num_kv_blocks": 100, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 200}
    core = _core.Scheduler(draft_tokens=8, draft_corpus_tokens=4096, **layout)
    buffers, now = StepBuffers(Layout(64, 4, 25)), 0
    views, text = _core.StepBuffers(**buffers.arrays()), np.random.default_rng(1).permutation(250).astype(np.int32)

    def steps(tag, **whose):
        """Steps of an answer of 60 tokens, which is always the same text, on a device whose steps take 1 ms."""
        nonlocal now
        add(core, tag, np.arange(4, dtype=np.int32), 60, [], now, **whose)
        count, ended = 0, []
        while not ended:  # as in the engine, the next request comes before another plan and may get this one's place
            plan = core.plan(views, now)
            assert plan is not None
            now, count = now + 1000 + 10 * plan.num_samples, count + 1
            ended = core.commit(plan, text[buffers.positions[buffers.sample_at[: plan.num_samples]]], now).ended
        return count

    whose = [{"tenant": "warm"}, {"tenant": "a"}, {"tenant": "b"}, {"tenant": "a", "salt": b"s"}]
    assert [steps(tag, **one) for tag, one in enumerate(whose)] == [60] * 4, "nothing is found in the texts of others"
    assert all(steps(10 + tag, **one) < 12 for tag, one in enumerate(whose[1:]))
    assert core.stats()["accepted_draft_tokens"] == core.stats()["draft_tokens"]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"draft_corpus_tokens": 100, "speculative_config": {"method": "off"}}, "--draft-corpus-tokens needs --speculative-config"),
        ({"draft_corpus_tokens": -1, "speculative_config": {"method": "auto"}}, "must be from 0 to 1073741824, got -1"),
    ],
)
def test_a_wrong_corpus_is_one_clear_line(settings, fault):
    with pytest.raises(ValueError, match=fault):
        EngineConfig(**settings)
