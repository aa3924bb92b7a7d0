"""The engine of a gate: steps that last as long as at the server whose model it schedules."""

import pytest

from chairlift.config import EngineConfig
from chairlift.engine import clock as engine_clock
from chairlift.engine import estimated_engine, hosted_engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.estimated_engine import HEADROOM, EstimatedEngine
from chairlift.engine.frames import Answering, Estimate, ServerRestarted
from chairlift.engine.hosted_engine import HostedEngine
from chairlift.engine.replica_router import PREFILL_TOKENS
from chairlift.gate.model_files import write_model_files
from chairlift.sampling import SamplingParams

BLOCKS = 64


class Clock:
    """Time that passes when the test says so."""

    seconds = 1000.0

    def monotonic(self):
        return self.seconds

    def pass_by(self, seconds):
        self.seconds += seconds
        return True

    def monotonic_ns(self):
        return round(self.seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (engine_clock, estimated_engine, hosted_engine):
        monkeypatch.setattr(module, "time", clock)
    return clock


def make(directory, budget):
    """An engine in front of a server with BLOCKS blocks, whose steps have so many tokens."""
    write_model_files(directory, 1024)
    sizes = {
        "block_size": 16,
        "num_kv_blocks": HEADROOM * BLOCKS,
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "max_num_batched_tokens": budget,
    }
    return EstimatedEngine(EngineConfig(model=str(directory), load_format="none", speculative_config={"method": "off"}, **sizes))


@pytest.fixture
def engine(clock, tmp_path):
    engine = make(tmp_path, 264)
    engine.learn(Estimate(step_us=10_000, token_ns=1_000_000, blocks=BLOCKS))
    yield engine
    engine.check()
    engine.close()


def add(engine, tag, tokens):
    engine.add(EngineRequest.of(tag, [tag] * tokens, SamplingParams(max_tokens=1024 - tokens, temperature=0.0)))


def started(engine):
    """Ends the step in flight, if its time has come, and begins the next; the tags that it admits."""
    outputs = engine.step()
    return [] if outputs is None else [tag for tag, *_ in outputs.started]


def test_a_step_lasts_as_long_as_its_prompts_take(engine, clock):
    add(engine, 1, 100)
    assert started(engine) == [1]
    assert engine.wakes_in() == pytest.approx(0.1)
    add(engine, 2, 10)
    assert started(engine) == []
    clock.seconds += 0.11
    assert started(engine) == [2]


def test_a_request_does_not_wait_for_a_step_that_only_decodes(engine, clock):
    add(engine, 1, 10)
    assert started(engine) == [1]
    clock.seconds += 0.02
    assert started(engine) == []
    assert engine.wakes_in() == pytest.approx(0.01)
    add(engine, 2, 10)
    assert started(engine) == [2]


def test_a_step_is_over_when_the_last_of_its_prompts_is_answered(engine, clock):
    add(engine, 1, 100)
    add(engine, 2, 50)
    assert sorted(started(engine)) == [1, 2]
    add(engine, 3, 10)
    engine.learn(Answering(1))
    assert engine.wakes_in() == pytest.approx(0.05)
    assert started(engine) == []
    engine.learn(Answering(2))
    assert started(engine) == [3]


def test_the_rest_of_an_answered_prompt_takes_no_time(engine, clock):
    add(engine, 1, 600)
    assert started(engine) == [1]
    engine.learn(Answering(1))
    assert started(engine) == []
    assert engine.wakes_in() == pytest.approx(0.01)


def test_a_step_is_over_when_the_last_of_its_prompts_is_aborted(engine, clock):
    add(engine, 1, 100)
    assert started(engine) == [1]
    add(engine, 2, 10)
    engine.abort(1)
    assert started(engine) == [2]


def test_what_is_said_of_an_unknown_sequence_changes_nothing(engine, clock):
    engine.learn(Answering(9))
    add(engine, 9, 100)
    assert started(engine) == [9]
    assert engine.wakes_in() == pytest.approx(0.1)


def test_before_the_first_estimate_it_counts_on_the_other_servers_blocks(clock, tmp_path):
    engine = make(tmp_path, 2048)
    add(engine, 1, 700)
    add(engine, 2, 700)
    assert started(engine) == [1]  # 64 blocks hold one of them
    engine.close()


def test_nothing_is_sent_of_steps_that_only_decode(engine, clock):
    sent = []
    hosted = HostedEngine(engine, sent.append, lambda _: None)
    add(engine, 1, 10)
    hosted.step()
    assert [tag for tag, *_ in sent[-1].started] == [1]
    before = len(sent)
    for _ in range(1000):
        clock.seconds += 0.01
        hosted.step()
        assert not hosted.busy  # it has nothing to do before the next step
        assert hosted.wakes_at == pytest.approx(clock.seconds + 0.01)
    # Counters are sent five times a second, and those of tenants once a second.
    assert len(sent) - before <= 61
    assert all(frame.stats for frame in sent[before:])
    engine.abort(1)
    clock.seconds += 0.01
    hosted.step()
    hosted.step()
    assert not hosted.busy
    assert sent[-1].stats["running"] == 0


def test_an_answer_that_pauses_is_not_over_here_before_it_is_over_there(engine, clock):
    engine.learn(Estimate(step_us=1, token_ns=1_000_000, blocks=BLOCKS))  # a server whose answers come at once
    add(engine, 1, 100)
    for _ in range(10_000):
        engine.step()
        clock.seconds += 0.0001
    assert engine.stats().running == 1


def test_no_request_follows_a_long_prompt_before_that_is_computed(engine, clock):
    add(engine, 1, 600)
    assert started(engine) == [1]
    add(engine, 2, 100)
    for _ in range(5):  # its three pieces
        clock.seconds += 0.119
        assert started(engine) == []
    clock.seconds += 0.006
    assert started(engine) == [2]


def test_the_next_prompt_is_passed_on_when_as_little_is_left_as_the_server_may_have_ahead(engine, clock):
    engine.learn(Estimate(step_us=10_000, token_ns=1_000_000, blocks=BLOCKS, ahead=50))
    add(engine, 1, 100)
    assert started(engine) == [1]
    assert engine.wakes_in() == pytest.approx(0.1)
    add(engine, 2, 30)
    assert engine.wakes_in() == pytest.approx(0.05)
    clock.seconds += 0.051
    assert started(engine) == [2]
    add(engine, 3, 30)  # 49 + 30 tokens are left
    assert engine.wakes_in() == pytest.approx(0.029)
    assert started(engine) == []
    engine.learn(Answering(1))  # 30 are left
    assert started(engine) == [3]


def test_an_answer_means_that_all_prompts_before_it_are_computed(engine, clock):
    for tag in (1, 2, 3):
        add(engine, tag, 80)
    assert sorted(started(engine)) == [1, 2, 3]
    add(engine, 4, 10)
    engine.learn(Answering(2))
    assert engine.wakes_in() == pytest.approx(0.08)
    engine.abort(3)
    assert started(engine) == [4]


def test_answers_to_one_prompt_count_once(engine, clock):
    engine.add(EngineRequest.of(1, [1] * 100, SamplingParams(n=3, max_tokens=50, temperature=0.0)))
    assert started(engine) == [1]
    clock.seconds += 0.101
    assert started(engine) == [2, 3]
    add(engine, 9, 10)
    assert started(engine) == [9]


def test_a_request_that_does_not_fit_costs_no_more_steps_than_time_passes(engine, clock):
    add(engine, 1, 700)
    add(engine, 2, 700)  # the blocks hold one of them
    steps = 0
    while clock.seconds < 1002.0:
        steps += engine.step() is not None
        clock.seconds += 0.001
    assert engine.stats().running == 1
    assert steps <= 2.0 / 0.01 + 3


def test_the_router_is_told_what_does_not_fit_any_more_where_fewer_tokens_are_found_than_expected(clock, tmp_path, engine):
    engine = EstimatedEngine(engine.config, hash_key=bytes(16))
    engine.learn(Estimate(step_us=10_000, token_ns=1_000, blocks=3 * BLOCKS))

    def changes(tag, tokens):
        """The names that were cached and dropped while a prompt was computed."""
        add(engine, tag, tokens)
        names = b"", b""
        for _ in range(8):
            clock.seconds += 1.0
            if (outputs := engine.step()) is not None:
                names = names[0] + outputs.cached, names[1] + outputs.dropped
        engine.abort(tag)
        return [len(one) for one in names]

    assert [changes(tag, 800)[1] for tag in (1, 2, 3)] == [0, 0, 0]
    engine.learn(Estimate(step_us=10_000, token_ns=1_000, blocks=BLOCKS))
    cached, dropped = changes(4, 17)
    assert dropped > 80 * cached > 0
    engine.close()


def test_steps_that_end_early_do_not_make_prompts_look_fast(engine, clock):
    for tag in range(1, 9):
        add(engine, tag, 100)
        engine.step()
        clock.seconds += 0.01
        engine.learn(Answering(tag))
    engine.learn(Estimate(step_us=10_000, token_ns=1_000_000, blocks=BLOCKS))
    assert engine.stats().predicted_prefill_us == PREFILL_TOKENS * 1000


def test_nothing_is_cached_after_a_restart_of_the_other_server(engine, clock):
    def cached(tag):
        """The cached tokens of a prompt that is then computed and cancelled."""
        engine.add(EngineRequest.of(tag, [5] * 200, SamplingParams(max_tokens=100, temperature=0.0)))
        assert started(engine) == [tag]
        engine.learn(Answering(tag))
        clock.seconds += 1.0
        engine.step()
        timeline = engine.explain(tag)
        engine.abort(tag)
        return timeline["cached_tokens"]

    assert [cached(1), cached(2)] == [0, 192]
    engine.learn(ServerRestarted())
    assert [cached(3), cached(4)] == [0, 192]
    assert engine.explain(2)["cached_tokens"] == 192, "what was before the restart is explained"


def test_the_router_is_told_of_a_restart_though_nothing_runs(clock, tmp_path, engine):
    engine = EstimatedEngine(engine.config, hash_key=bytes(16))
    engine.learn(Estimate(step_us=10_000, token_ns=1_000, blocks=BLOCKS))

    def changes():
        """The number of names that were cached and dropped since the last call."""
        steps = [engine.step() for _ in range(8) if clock.pass_by(1.0)]
        seen = [outputs for outputs in steps if outputs is not None]
        return [sum(len(getattr(outputs, name)) for outputs in seen) // 8 for name in ("cached", "dropped")]

    add(engine, 1, 200)
    assert changes() == [12, 0]
    engine.abort(1)
    assert changes() == [0, 0]
    engine.learn(ServerRestarted())
    assert changes() == [0, 12]
    assert engine.step() is None
    engine.close()
