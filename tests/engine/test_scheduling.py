"""The engine with the real scheduler and a tiny random model: what sharing, moving, waiting and refusing do to the answers."""

import json
from pathlib import Path

import numpy as np
import pytest
from model_sizes import TINY

from chairlift import SamplingParams, Scheduling, Timeline
from chairlift.config import EngineConfig
from chairlift.engine.choice import FINISH_REASONS
from chairlift.engine.engine import Engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.errors import QueueFull

NEW = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.5, max_tokens=NEW, ignore_eos=True, seed=5, presence_penalty=0.5)
PROMPTS = [np.random.default_rng(length).integers(0, 199, length).tolist() for length in (33, 5, 48, 17, 1, 64, 20, 31)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    return path


@pytest.fixture
def make(directory: Path):
    def engine(**settings) -> Engine:
        roomy = {
            "num_kv_blocks": 200,
            "block_size": 8,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "speculative_config": {"method": "off"},
        }
        return Engine(EngineConfig(model=str(directory), load_format="dummy", **roomy | settings))

    return engine


class Run:
    """Takes an engine's reports until all is done: the tokens and the timeline of each tag."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.timelines: dict[int, Timeline] = {}

    def step(self) -> bool:
        report = self.engine.step()
        self.engine.check()
        if report is None:
            return False
        tags, tokens = np.frombuffer(report.tags, "<u8").tolist(), np.frombuffer(report.tokens, "<i4").tolist()
        logprobs = np.frombuffer(report.logprobs, "<f4").tolist() or [0.0] * len(tags)
        for tag, token, logprob in zip(tags, tokens, logprobs, strict=True):
            self.tokens.setdefault(tag, []).append(token)
            self.logprobs.setdefault(tag, []).append(logprob)
        self.timelines |= {timeline["tag"]: Timeline.read(timeline) for timeline in report.ended}
        for tag, finish in zip(tags, report.finishes, strict=True):
            assert FINISH_REASONS[finish] == (self.timelines[tag].finish if tag in self.timelines else None)
        return True

    def all(self) -> dict[int, list[int]]:
        while self.engine.has_work:
            assert self.step(), "the engine found nothing to run"
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.swapped) == (0, 0, 0)
        assert stats.free_blocks == stats.total_blocks
        assert stats.free_host_blocks == stats.host_blocks
        return self.tokens


def answers(engine: Engine, params: SamplingParams) -> list[list[int]]:
    run = Run(engine)
    for tag, prompt in enumerate(PROMPTS):
        engine.add(EngineRequest.of(tag, prompt, params))
    tokens = run.all()
    for timeline in run.timelines.values():
        assert timeline.ended is not None
        assert sum(timeline.states.values()) == pytest.approx(timeline.ended - timeline.arrived, abs=1e-6)
        assert timeline.output_tokens == NEW
    return [tokens[tag] for tag in range(len(PROMPTS))]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.slow
def test_answers_are_the_same_swapped_recomputed_and_undisturbed(make, monkeypatch, params):
    undisturbed = make()
    expected = answers(undisturbed, params)
    assert undisturbed.stats().preemptions == 0
    recomputing = make(num_kv_blocks=24, max_model_len=100)
    assert answers(recomputing, params) == expected
    stats = recomputing.stats()
    assert stats.preemptions == stats.preemptions_recompute > 0
    monkeypatch.setattr("chairlift.runner.build.time_swap", lambda model, blocks: 1)  # so quick that it is always worth it
    swapping = make(num_kv_blocks=24, max_model_len=100, swap_space=2**22)
    assert swapping.stats().host_blocks > 100
    assert answers(swapping, params) == expected
    stats = swapping.stats()
    assert stats.preemptions_swap > 0
    assert stats.swapped_blocks > 0
    assert stats.recomputed_tokens <= recomputing.stats().recomputed_tokens


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline", "shortest", "prefix", "vtc"])
@pytest.mark.slow
def test_a_policy_changes_the_order_and_not_the_answers(make, policy):
    engine = make(num_kv_blocks=24, max_model_len=100, scheduling_policy=policy, tenant_weights={"a": 3})
    run = Run(engine)
    for tag, prompt in enumerate(PROMPTS):
        scheduling = Scheduling(priority=tag % 3, tenant="ab"[tag % 2], deadline_ms=1e8, predicted_tokens=NEW)
        engine.add(EngineRequest.of(tag, prompt, GREEDY, scheduling))
    tokens = run.all()
    assert [tokens[tag] for tag in range(len(PROMPTS))] == answers(make(), GREEDY)
    assert engine.usage()["tenants"]["a"]["output_tokens"] == NEW * len(PROMPTS) // 2
    assert engine.usage()["classes"][1]["requests"] == 3
    assert run.timelines[1].tenant == "b"


@pytest.mark.parametrize("batching", ["static", "dynamic"])
@pytest.mark.slow
def test_batches_give_the_same_answers(make, batching):
    assert answers(make(batching=batching, static_batch_size=3), GREEDY) == answers(make(), GREEDY)


def test_several_answers_share_the_prompt_and_draw_for_themselves(make):
    def drawn(tag: int, **params) -> list[list[int]]:
        engine = make()
        run = Run(engine)
        engine.add(EngineRequest.of(tag, PROMPTS[5], SamplingParams(temperature=20.0, max_tokens=NEW, ignore_eos=True, **params)))
        tokens = run.all()
        # The prompt once, and of it at most its last block anew for each of the others.
        assert engine.stats().computed_tokens <= len(PROMPTS[5]) + len(tokens) * (8 + NEW)
        return [tokens[tag + index] for index in range(len(tokens))]

    alone = drawn(1, seed=3)
    three = drawn(1, n=3, seed=3)
    assert three[0] == alone[0]
    assert len({tuple(tokens) for tokens in three}) == 3
    assert drawn(50, n=2, best_of=3, seed=3) == three
    assert len({tuple(tokens) for tokens in drawn(1, n=3)}) == 3


def test_ranked_answers_carry_the_log_probabilities_of_their_tokens(make):
    engine = make()
    run = Run(engine)
    engine.add(EngineRequest.of(1, PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, best_of=2)))
    engine.add(EngineRequest.of(3, PROMPTS[1], GREEDY))
    run.all()
    assert run.tokens[1] == run.tokens[2]
    assert run.logprobs[1] == pytest.approx(run.logprobs[2], abs=1e-4)
    assert len(run.logprobs[1]) == NEW
    assert all(-10 < logprob < 0 for logprob in run.logprobs[1])
    assert set(run.logprobs[3]) == {0.0}


def test_a_request_waits_as_one_and_is_refused_as_one(make):
    engine = make(max_num_queued_reqs=2)
    engine.add(EngineRequest.of(1, PROMPTS[0], SamplingParams(n=4, max_tokens=1)))
    engine.add(EngineRequest.of(5, PROMPTS[0], GREEDY))
    with pytest.raises(QueueFull) as caught:
        engine.add(EngineRequest.of(10, PROMPTS[1], SamplingParams(n=4, max_tokens=1)))
    assert caught.value.retry_after >= 0
    assert engine.stats().rejected_queue_full == 1
    assert len(Run(engine).all()) == 5


def test_what_is_late_ends_without_a_token(make, monkeypatch):
    clock = [1_000_000]
    monkeypatch.setattr("chairlift.engine.clock.now", lambda: clock[0])
    engine = make()
    run = Run(engine)
    engine.add(EngineRequest.of(1, PROMPTS[0], GREEDY, Scheduling(deadline_ms=5)))
    engine.add(EngineRequest.of(2, PROMPTS[1], SamplingParams(n=2, max_tokens=4), Scheduling(ttft_deadline_ms=5)))
    engine.add(EngineRequest.of(4, PROMPTS[1], GREEDY, Scheduling(deadline_ms=1e6)))
    clock[0] += 6000
    run.all()
    assert {tag: timeline.finish for tag, timeline in run.timelines.items()} == {1: "deadline", 2: "deadline", 3: "deadline", 4: "length"}
    assert set(run.tokens) == {4}
    assert engine.stats().expired == 3
    assert engine.explain(1)["finish"] == "deadline"


def test_a_batch_waits_for_its_time_and_says_how_long(make, monkeypatch):
    clock = [1_000_000]
    monkeypatch.setattr("chairlift.engine.clock.now", lambda: clock[0])
    engine = make(batching="dynamic", static_batch_size=4, batch_timeout_ms=20.0)
    assert engine.wakes_in() is None
    engine.add(EngineRequest.of(1, PROMPTS[0], GREEDY))
    assert engine.step() is None
    assert engine.wakes_in() == pytest.approx(0.02)
    clock[0] += 20_000
    assert engine.step() is not None
    Run(engine).all()


def test_salts_keep_caches_apart_and_tenants_alone_do_not(make):
    engine = make()

    def cached(tag: int, **scheduling) -> tuple[bool, bool]:
        engine.add(EngineRequest.of(tag, PROMPTS[5], GREEDY, Scheduling(**scheduling)))
        run = Run(engine)
        run.all()
        timeline = run.timelines[tag]
        assert timeline.own_cached_tokens in (0, timeline.cached_tokens)
        return timeline.cached_tokens > 0, timeline.own_cached_tokens > 0

    assert cached(1) == (False, False)
    assert cached(2, tenant="a") == (True, False), "the tenant is not told that another had this prompt"
    assert cached(3, tenant="a") == (True, True)
    assert cached(4, cache_salt="s") == (False, False)
    assert cached(5, cache_salt="s") == (True, True)


def test_a_sequence_is_explained_while_it_lives_and_afterwards(make, tmp_path):
    engine = make(journal=str(tmp_path / "journal"))
    engine.add(EngineRequest.of(1, PROMPTS[0], GREEDY))
    assert engine.step() is not None
    assert engine.explain(1)["finish"] is None
    Run(engine).all()
    assert engine.explain(1)["finish"] == "length"
    assert engine.explain(2) is None
    assert (tmp_path / "journal").stat().st_size > 0
    engine.close()
