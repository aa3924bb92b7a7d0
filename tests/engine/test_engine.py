"""The engine over a real model: what a step that fails leaves behind, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chairlift import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.errors import InvalidRequest
from chairlift.runner.interface import NewSequence

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = list(range(100, 140))


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    return Engine(EngineConfig(model=str(model_dir), max_model_len=256, max_num_seqs=4, num_kv_blocks=65, max_num_batched_tokens=64))


def answer(engine: Engine, tag: int, prompt: list[int]) -> list[int]:
    engine.add(EngineRequest.of(tag, prompt, GREEDY))
    tokens: list[int] = []
    while engine.has_work:
        report = engine.step()
        assert report is not None
        tokens += np.frombuffer(report.tokens, "<i4").tolist()
    return tokens


@pytest.mark.parametrize(("failing", "error"), [("launch", MemoryError), ("sample", MemoryError), ("collect", KeyboardInterrupt)])
@pytest.mark.slow
def test_a_step_that_fails_ends_its_requests_and_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, failing: str, error: type
) -> None:
    expected = answer(engine, 1, PROMPT)

    def fail(*sizes: int) -> None:
        raise error

    fresh = [ord(failing[0]), *PROMPT]  # in no cache: its blocks get their names in the step that fails
    engine.add(EngineRequest.of(2, fresh, GREEDY))
    engine.add(EngineRequest.of(3, PROMPT, GREEDY))
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, failing, fail)
        with pytest.raises(error):
            engine.step()
    assert not engine.has_work
    engine.check()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)
    assert answer(engine, 4, PROMPT) == expected
    hits = engine.stats().prefix_hits
    answer(engine, 5, fresh)
    assert engine.stats().prefix_hits == hits, "found a block that was never computed"


def test_a_tag_in_use_and_tokens_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    engine.add(EngineRequest.of(1, PROMPT, GREEDY))
    with pytest.raises(InvalidRequest, match="already running"):
        engine.add(EngineRequest.of(1, PROMPT, GREEDY))
    with pytest.raises(InvalidRequest, match="from 0 to 49151"):
        engine.add(EngineRequest.of(2, [49152], GREEDY))
    with pytest.raises(InvalidRequest, match="no tokens"):
        engine.add(EngineRequest.of(2, [], GREEDY))
    assert engine.abort(1)
    assert not engine.abort(1)
    assert not engine.has_work


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_without_a_model_there_are_no_log_probabilities(model_dir: Path, name: str) -> None:
    engine = Engine(EngineConfig(model=str(model_dir), max_model_len=256, num_kv_blocks=65, load_format="none"))
    with pytest.raises(InvalidRequest, match="log-probabilities") as refused:
        engine.add(EngineRequest.of(1, PROMPT, SamplingParams(max_tokens=4, **{name: 0})))
    assert refused.value.param == "logprobs"
    assert not engine.has_work


@pytest.mark.slow
def test_a_sequence_that_cannot_be_sampled_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(engine, 1, PROMPT)
    add_request, poison = engine.runner.add_request, replace(GREEDY, seed=13)

    def poisoned(slot: int, sequence: NewSequence) -> None:
        if sequence.params is poison:
            raise ZeroDivisionError("a bug in the sampler")
        add_request(slot, sequence)

    monkeypatch.setattr(engine.runner, "add_request", poisoned)
    engine.add(EngineRequest.of(2, PROMPT, GREEDY))
    engine.add(EngineRequest.of(3, [7, *PROMPT, *PROMPT], poison))  # it takes two steps to its first token, or what would be that
    engine.add(EngineRequest.of(4, PROMPT, GREEDY))
    tokens: dict[int, list[int]] = {2: [], 3: [], 4: []}
    finishes = {}
    while engine.has_work:
        report = engine.step()
        assert report is not None
        for tag, token, finish in zip(
            np.frombuffer(report.tags, "<u8").tolist(), np.frombuffer(report.tokens, "<i4").tolist(), report.finishes, strict=True
        ):
            tokens[tag].append(token)
            finishes[tag] = finish
    assert tokens == {2: expected, 3: [-1], 4: expected}
    assert finishes == {2: 2, 3: 3, 4: 2}
    engine.check()
    monkeypatch.undo()
    assert answer(engine, 5, PROMPT) == expected  # in the same row, maybe
