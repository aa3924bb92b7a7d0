"""One prompt gives one answer, bit for bit, whoever shares the engine with it."""

from collections import Counter, defaultdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.steps import Step
from chairlift.outputs import RequestOutput

pytestmark = pytest.mark.slow

MATES = 1000
PLACE = 500
"""Where among its mates the prompt stands."""


def answers(byte_model: Path, prompts: list[list[int]], params: list[SamplingParams], **settings: object) -> list[RequestOutput]:
    roomy = {"num_kv_blocks": 300, "max_num_seqs": 64, "max_num_batched_tokens": 256, "block_size": 8}
    llm = LLM(str(byte_model), load_format="dummy", device="cpu", max_model_len=256, **roomy | settings)
    assert llm.info.determinism == "batch-invariant"
    return llm.generate(prompts, params)


@pytest.mark.parametrize(
    "settings", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}, {"cpu_math": "fast"}], ids=["as-it-is", "int8", "fast"]
)
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
    company = answers(byte_model, prompts, params, num_kv_blocks=80, max_num_seqs=48, max_num_batched_tokens=61, **settings)
    assert sum(output.preemptions for output in company) > 10

    found = company[PLACE]
    assert found.token_ids == alone.token_ids
    # Compared as they are: log-probabilities of all six tokens at each place, to the last bit.
    assert found.logprobs == alone.logprobs


ROOMY = {"num_kv_blocks": 300, "max_num_seqs": 64, "max_num_batched_tokens": 256}
DRAFTS = {"speculative_config": {"method": "auto"}}
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.3, seed=3, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.3, seed=4, n=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=30, ignore_eos=True),
]
"""What is asked of the prompt, alone and in company. The last is not drafted."""


class Leaving(Engine):
    """An engine whose callers may leave while their drafts are verified."""

    may_leave: frozenset[int] = frozenset()
    left = 0

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        sample = self._steps.sample

        def leave_and_sample(step: Step, *rest: Any) -> None:
            # A tag has several samples in a row where tokens were drafted.
            drafted = [tag for tag, samples in Counter(step.tags.tolist()).items() if samples > 1 and tag in self.may_leave]
            self.left += sum(self.abort(tag) for tag in drafted[:1])
            sample(step, *rest)

        self._steps.sample = leave_and_sample  # type: ignore[method-assign]


Asked = tuple[int, list[int], SamplingParams]


def served(byte_model: Path, requests: list[Asked], may_leave: frozenset[int] = frozenset(), **settings: Any) -> tuple[dict, Leaving]:
    """The tokens of each tag, and the engine."""
    engine = Leaving(EngineConfig(model=str(byte_model), load_format="dummy", device="cpu", max_model_len=256, block_size=8, **settings))
    engine.may_leave, tokens = may_leave, defaultdict(list)
    for tag, prompt, params in requests:
        engine.add(EngineRequest.of(tag, prompt, params))
    while engine.has_work:
        report = engine.step()
        assert report is not None
        engine.check()
        for tag, token in zip(np.frombuffer(report.tags, "<u8").tolist(), np.frombuffer(report.tokens, "<i4").tolist(), strict=True):
            tokens[tag].append(token)
    return tokens, engine


@pytest.mark.parametrize("company", [{"num_kv_blocks": 90}, {"num_kv_blocks": 90, "swap_space": 2**18}], ids=["recomputed", "swapped"])
def test_a_drafted_prompt_in_company_is_answered_as_alone_without_drafts(
    byte_model: Path, monkeypatch: pytest.MonkeyPatch, company: dict[str, Any]
) -> None:
    # Every step takes as long, so that drafts pay on any machine.
    monkeypatch.setattr("chairlift.engine.clock.now", count(1_000_000, 100).__next__)
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 256, 30).tolist() * 3
    asked = [(10 * i, prompt, params) for i, params in enumerate(ASKED)]
    alone: dict[int, list[int]] = {}
    for one in asked:
        alone |= served(byte_model, [one], **ROOMY)[0]

    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"presence_penalty": 0.5}, {"logprobs": 1}, {"n": 2, "seed": 1}]
    mates = []
    for i in range(150):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": int(rng.integers(1, 60)), "ignore_eos": True, **kinds[i % 5]})
        mates.append((MATES + 2 * i, rng.integers(0, 256, rng.integers(1, 40)).tolist() * 2, params))
    requests = mates[:75] + asked + mates[75:]
    may_leave = frozenset(tag for tag, _, _ in mates if tag % 7 == 0)
    found, engine = served(byte_model, requests, may_leave, max_num_seqs=24, max_num_batched_tokens=61, **DRAFTS, **company)

    assert {tag: found[tag] for tag in alone} == alone
    stats = engine.stats()
    assert stats.preemptions > 10
    assert (stats.preemptions_swap > 0) == ("swap_space" in company)
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert engine.left > 2
    timelines = [engine.explain(tag) or {} for tag, _, _ in asked]
    assert [timeline["accepted_draft_tokens"] > 0 for timeline in timelines] == [True, True, True, False]
