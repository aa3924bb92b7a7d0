"""The engine between a core and a runner that only take notes: what is asked of them, in which order, and what is made of it."""

import math
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from chairlift import SamplingParams, Scheduling, _core
from chairlift.checkpoint.info import CheckpointInfo
from chairlift.config import EngineConfig
from chairlift.engine import engine as engine_module
from chairlift.engine import engine_info, scheduler_settings, sequences, steps
from chairlift.engine.engine_request import EngineRequest, ResumedChoice, pack_tokens
from chairlift.errors import InvalidRequest, InvalidSetting, QueueFull
from chairlift.runner.buffers import Sampled

NOW = 5_000_000
"""The clock's microseconds, in every test."""


class Rejected(ValueError):
    pass


class Full(Rejected):
    pass


class TooLong(Rejected):
    pass


class NeverFits(Rejected):
    pass


class FakeCore:
    """A scheduler that queues everything, and plans what a test puts into `plans`."""

    def __init__(self, **settings):
        self.settings = settings
        self.calls = []
        self.added = {}
        self.live = {}
        self.plans, self.expiring = [], []
        self.room = 100
        self.recorded = b""
        self.wake = None

    def add(self, request, now, salt, preparation):
        if not self.room:
            raise Full("1 request waits, and no more may", 1_500_000)
        prompt_tokens = len(request.prompt) // 4
        if prompt_tokens > 50:
            raise TooLong("that is too long")
        if prompt_tokens > 40:
            raise NeverFits("that is too long for the cache")
        self.room -= 1
        self.added[request.tag] = request, now, salt, preparation
        answers = [one.choice for one in request.resumed] or range(request.sampling.num_sequences)
        tags = {answer: request.tag + answer for answer in answers}
        self.live |= {10 * tag: tag for tag in tags.values()}
        return [(answer, 10 * tag) for answer, tag in tags.items()]

    def abort(self, seq, now):
        return self.live.pop(seq, None) is not None

    def take_cache_changes(self):
        return b"", b""

    def expire(self, now):
        self.calls.append("expire")
        return [{"tag": tag, "finish": "deadline"} for tag in self.expiring if self.live.pop(10 * tag, None)]

    def plan(self, buffers, now, forced):
        self.calls.append("plan")
        return self.plans.pop(0) if self.plans else None

    def commit(self, plan, sampled, now):
        self.calls.append("commit")
        ended = [{"tag": tag, "finish": "length"} for tag in plan.ending if self.live.pop(10 * tag, None)]
        return SimpleNamespace(tags=b"the tags", tokens=sampled.tobytes(), finishes=b"\2", ended=ended)

    def tokens(self, seq):
        return np.arange(3, dtype=np.int32).tobytes(), 2

    def journal(self):
        record, self.recorded = self.recorded, b""
        return record

    def wake_at(self):
        return self.wake


class FakeRunner:
    num_kv_blocks, kv_cache_bytes, max_model_len, host_blocks, swap_ns_per_block, state_slots = 101, 1 << 20, 50, 7, 900, 0
    max_num_seqs, max_num_batched_tokens = 30, 120
    batch_invariant = False
    has_logprobs = True
    generates = True
    pooling = None
    kv_blocks = None
    state_bytes = 0
    decisions = (("threads", "2", "why not"),)
    overlaps = False
    buffers = (SimpleNamespace(arrays=dict, sample_slots=np.zeros(1, dtype=np.int32)),)
    model_config = SimpleNamespace(
        vocab_size=1000,
        embedding_size=None,
        score=None,
        hidden_size=64,
        state_bytes=0,
        expert_counts=(0, 0),
        max_position_embeddings=2048,
        longest_context=2048,
    )

    def __init__(self, config, directory, eos, on_phase):
        self.calls = []
        self.seeds = {}
        self.launched = 0

    def add_request(self, slot, params, tokens, prompt_len, seed, **rest):
        self.seeds[slot] = seed
        self.calls.append("add")

    def swap(self, outs, ins):
        self.calls.append(("swap", outs, ins))

    def remove_request(self, slot):
        self.calls.append(("remove", slot))

    def launch(self, buffer_index, sizes):
        self.launched += 1
        self.calls.append(f"launch {self.launched} in {buffer_index}")
        return self.launched

    def sample(self, step):
        self.calls.append(f"sample {step}")

    def collect(self, step):
        self.calls.append(f"collect {step}")
        return Sampled(np.array([4], dtype=np.int32), np.array([-0.5], dtype=np.float32), {}, [], {})

    def wait(self):
        self.calls.append("wait")

    def close(self):
        self.calls.append("close")


@pytest.fixture
def make(monkeypatch):
    names = {"Rejected": Rejected, "QueueFull": Full, "TooLong": TooLong, "NeverFits": NeverFits}
    names["NoNewTokens"] = type("NoNewTokens", (Rejected,), {})
    cores = []

    def core(**settings):
        cores.append(FakeCore(**settings))
        return cores[-1]

    for module in (engine_module, sequences, steps):
        monkeypatch.setattr(module, "_core", SimpleNamespace(Scheduler=core, StepBuffers=lambda **arrays: None, **names))
    monkeypatch.setattr(engine_module, "_build_runner", FakeRunner)
    monkeypatch.setattr(engine_module, "eos_token_ids", lambda directory, tokenizer: frozenset({2}))
    monkeypatch.setattr(engine_module, "tokenizer_file", lambda directory, tokenizer: directory)
    monkeypatch.setattr(engine_module, "locate", lambda model, *_: Path(model))
    monkeypatch.setattr(engine_info, "fingerprint", lambda config, directory, runner, digest: "")
    monkeypatch.setattr(engine_info, "checkpoint_digest", lambda directory: "")
    monkeypatch.setattr(engine_module, "checkpoint_info", lambda *_: CheckpointInfo())
    monkeypatch.setattr("chairlift.engine.clock.now", lambda: NOW)

    def engine(**settings):
        made = engine_module.Engine(EngineConfig(**{"speculative_config": {"method": "off"}} | settings))
        made.core = cores[-1]
        # One list for both, so that it shows who was called before whom.
        made.runner.calls = made.core.calls
        return made

    return engine


def plan(admitted=(), ending=(), swap_out=(), swap_in=()):
    return SimpleNamespace(
        admitted=admitted,
        ending=ending,
        swap_out=swap_out,
        swap_in=swap_in,
        num_tokens=3,
        num_seqs=1,
        num_samples=1,
        num_copies=0,
        num_table_writes=0,
        num_state_copies=0,
        num_state_saves=0,
    )


def test_settings_reach_the_core_in_its_units(make, monkeypatch):
    monkeypatch.setattr(engine_module.secrets, "token_bytes", lambda count: count.to_bytes(count))
    settings = make(
        scheduling_policy="fair",
        batching="dynamic",
        static_batch_size=8,
        batch_timeout_ms=2.5,
        max_num_queued_reqs=3,
        target_itl_ms=0.5,
        watermark=0.1,
    ).core.settings
    assert settings == {
        "num_kv_blocks": 101,
        "block_size": 16,
        "max_num_batched_tokens": 120,
        "max_num_seqs": 30,
        "max_model_len": 50,
        "enable_prefix_caching": True,
        "watermark": 10,
        "kv_reservation": "watermark",
        "scheduling_policy": "fair",
        "batching": "dynamic",
        "static_batch_size": 8,
        "batch_timeout": 2500,
        "max_num_queued_reqs": 3,
        "max_num_queued_tokens": None,
        "queue_ageing": 10_000_000,
        "target_itl": 500,
        "background_slowdown": 300,
        "gather": None,
        "session_turns": "named",
        "max_session_wait": 510_000_000,
        "host_blocks": 7,
        "swap_ns_per_block": 900,
        "state_slots": 0,
        "state_tokens": 0,
        "experts": 0,
        "experts_used": 0,
        "journal": False,
        "hash_key": 16,
        "draft_tokens": 0,
        "draft_corpus_tokens": 0,
        "end_tokens": [2],
        "tenant_weights": {},
        "tier_weights": {"priority": 4, "default": 2, "flex": 1},
    }


def test_a_model_with_states_has_its_slots_and_drafts(make, monkeypatch):
    monkeypatch.setattr(FakeRunner, "state_slots", 31)
    monkeypatch.setattr(FakeRunner, "state_bytes", 31 * 5000)
    monkeypatch.setattr(FakeRunner.model_config, "state_bytes", 5000)
    settings = make(speculative_config=None).core.settings
    assert settings["state_slots"] == 31
    # 101 blocks of 16 tokens take 1 MiB.
    assert settings["state_tokens"] == math.ceil(5000 / (1 << 20) * 101 * 16)
    assert settings["draft_tokens"] > 0


def test_what_the_runner_was_fitted_to_is_told(make, monkeypatch):
    info = make(max_num_seqs=64).info
    assert (info.max_num_seqs, info.max_num_batched_tokens) == (30, 120)
    assert info.decisions[0] == ["threads", "2", "why not"]
    assert info.determinism == "best-effort"
    monkeypatch.setattr(FakeRunner, "batch_invariant", True)
    assert make().info.determinism == "batch-invariant"


def test_a_request_reaches_the_core_as_one_value(make):
    engine = make(tenant_weights={"a": 3}, tier_weights={"flex": 5})
    assert engine.core.settings["tenant_weights"] == {"a": 3}
    assert engine.core.settings["tier_weights"] == {"priority": 4, "default": 2, "flex": 5}
    assert engine.core.settings["end_tokens"] == [2]
    request = EngineRequest.of(1, [1, 2, 3], SamplingParams(), Scheduling(cache_salt="ü", predicted_tokens=4))
    engine.add(request)
    assert engine.core.added[1] == (request, NOW, "ü".encode(), None)


def test_the_unfinished_choices_of_a_lost_request_go_on_with_their_seeds(make):
    engine = make()
    answers = [ResumedChoice(0, pack_tokens([4, 5]), 2, 1, 100, 200, 300), ResumedChoice(2, b"", 2, 1, 100, 200, None)]
    engine.add(EngineRequest.of(7, [1, 2], SamplingParams(n=3, seed=9), spent={"receive": 1000}, resumed=answers))
    assert set(engine.core.live.values()) == {7, 9}
    engine.core.plans.append(plan([(row, 10 * tag, tag, 0, 0, 0) for row, tag in enumerate((7, 9))]))
    engine.step()
    resumed = dict(engine.runner.seeds)
    engine = make()
    engine.add(EngineRequest.of(1, [1, 2], SamplingParams(n=3, seed=9)))
    engine.core.plans.append(plan([(row, 10 * tag, tag, 0, 0, 0) for row, tag in enumerate((1, 3))]))
    engine.step()
    assert resumed == engine.runner.seeds


def test_answers_have_draws_of_their_own(make):
    engine = make()
    engine.add(EngineRequest.of(4, [1, 2], SamplingParams(n=2, best_of=3, seed=77)))
    engine.add(EngineRequest.of(7, [1, 2], SamplingParams(n=2)))

    def seeds(tags):
        engine.core.plans.append(plan([(row, 10 * tag, tag, 0, 0, 0) for row, tag in enumerate(tags)]))
        engine.step()
        return [engine.runner.seeds[row] for row in range(len(tags))]

    first = seeds([4, 5, 6, 7, 8])
    assert first[0] == 77
    assert len(set(first)) == 5
    again = make()
    again.add(EngineRequest.of(14, [1, 2], SamplingParams(n=3, seed=77)))
    engine = again
    assert seeds([14, 15, 16]) == first[:3], "a seed gives the same draws whenever it is asked with"
    with pytest.raises(InvalidRequest, match="already running"):
        engine.add(EngineRequest.of(13, [1], SamplingParams(n=2)))


def test_what_the_core_refuses_is_said_in_our_words_and_leaves_nothing(make):
    engine = make()
    engine.core.room = 0
    with pytest.raises(QueueFull, match="no more may") as full:
        engine.add(EngineRequest.of(1, [1, 2], SamplingParams(n=4)))
    assert full.value.retry_after == 1.5
    assert not engine.has_work
    assert not engine.core.live
    with pytest.raises(QueueFull):
        engine.add(EngineRequest.of(1, [1, 2], SamplingParams()))
    engine.core.room = 1
    for length in (51, 41):
        with pytest.raises(InvalidRequest, match="too long") as refused:
            engine.add(EngineRequest.of(1, [1] * length, SamplingParams()))
        assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    assert not engine.has_work


def test_a_step_swaps_before_it_runs_and_expires_before_it_plans(make):
    engine = make()
    for tag in (1, 2, 3):
        engine.add(EngineRequest.of(tag, [1, 2], SamplingParams()))
    core = engine.core
    core.expiring = [2]
    core.plans.append(plan([(0, 10, 1, 16, 8, 250)], ending=[3], swap_out=[(5, 0)], swap_in=[(1, 6)]))
    report = engine.step()
    assert core.calls == ["expire", "plan", "add", ("swap", [(5, 0)], [(1, 6)]), "launch 1 in 0", "sample 1", "collect 1", "commit"]
    assert (report.tags, report.tokens, report.finishes) == (b"the tags", b"\4\0\0\0", b"\2")
    assert np.frombuffer(report.logprobs, "<f4").tolist() == [-0.5]
    assert report.started == [(1, 16, 8, 250)]
    assert report.ended == [{"tag": 2, "finish": "deadline"}, {"tag": 3, "finish": "length"}]
    assert [engine.abort(tag) for tag in (1, 2, 3)] == [True, False, False]


def test_the_next_step_is_launched_before_this_one_is_collected_and_sampled_after(make, monkeypatch):
    monkeypatch.setattr(FakeRunner, "overlaps", True)
    monkeypatch.setattr(FakeRunner, "buffers", FakeRunner.buffers * 2)
    engine = make()
    core = engine.core
    for tag in (1, 2, 3):
        engine.add(EngineRequest.of(tag, [1, 2], SamplingParams()))
    # In the second plan 2 has taken the row of 1, which lost it, and whose last token is on its way.
    core.plans += [plan([(0, 10, 1, 0, 0, 0), (1, 30, 3, 0, 0, 0)]), plan([(0, 20, 2, 0, 0, 0)]), plan()]
    core.plans[0].ending, core.plans[1].ending = [1], [3]
    added = ["add", ("swap", (), ())]
    assert engine.step().started == [(1, 0, 0, 0), (3, 0, 0, 0), (2, 0, 0, 0)]
    first, second = ["plan", "add", *added, "launch 1 in 0", "sample 1"], ["plan", *added, "launch 2 in 1", "collect 1", "commit"]
    assert core.calls == ["expire", *first, *second, "sample 2"]
    core.calls.clear()
    assert engine.step().ended == [{"tag": 3, "finish": "length"}]
    last = ["plan", ("swap", (), ()), "launch 3 in 0", "collect 2", "commit", ("remove", 1), "sample 3"]
    assert core.calls == ["expire", *last]
    core.calls.clear()
    assert engine.abort(2)
    assert engine.has_work, "a step is under way"
    assert engine.step() is not None
    assert core.calls == ["expire", "plan", "collect 3", "commit"]
    assert not engine.has_work
    assert engine.step() is None


def test_each_stage_of_a_step_is_told(make):
    engine, stages = make(), {}

    class Calls(list):
        """Notes the engine's stage at each call."""

        def append(self, call):
            stages[call] = engine.stage[0]

    engine.core.calls = engine.runner.calls = Calls()
    engine.add(EngineRequest.of(1, [1, 2], SamplingParams()))
    engine.core.plans.append(plan([(0, 10, 1, 0, 0, 0)]))
    engine.step()
    assert stages == {
        **{"expire": "plan", "plan": "plan", "add": "run", ("swap", (), ()): "run"},
        **{"launch 1 in 0": "run", "sample 1": "run", "collect 1": "run", "commit": "commit"},
    }


@pytest.mark.parametrize("failing", ["launch", "collect", "sample"])
def test_when_a_step_fails_all_that_are_under_way_are_committed_without_tokens(make, monkeypatch, failing):
    monkeypatch.setattr(FakeRunner, "overlaps", True)
    monkeypatch.setattr(FakeRunner, "buffers", FakeRunner.buffers * 2)
    engine = make()
    core = engine.core
    engine.add(EngineRequest.of(1, [1, 2], SamplingParams()))
    core.plans += [plan([(0, 10, 1, 0, 0, 0)]), plan(), plan()]
    engine.step()
    core.calls.clear()
    committed = []
    monkeypatch.setattr(core, "commit", lambda plan, sampled, now: committed.append((plan, sampled.tolist())) or given)
    given = SimpleNamespace(tags=b"the tags", tokens=b"", finishes=b"", ended=[])
    monkeypatch.setattr(engine.runner, failing, lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    # Without tokens, but for the one that was collected before the next one failed.
    assert [tokens for _, tokens in committed] == ([[4], [-1]] if failing == "sample" else [[-1], [-1]])
    assert len({id(plan) for plan, _ in committed}) == 2
    assert core.calls[-1] == "wait", "the buffers may still be read"
    assert not engine.has_work


def test_log_probabilities_are_of_those_that_are_still_there(make, monkeypatch):
    engine = make()
    for tag in (1, 2, 3):
        engine.add(EngineRequest.of(tag, [1, 2], SamplingParams()))
    core = engine.core
    core.plans.append(plan([(row, 10 * tag, tag, 0, 0, 0) for row, tag in enumerate((1, 2, 3))]))
    core.plans[0].num_samples = 3
    monkeypatch.setattr(FakeRunner, "buffers", (SimpleNamespace(arrays=dict, sample_slots=np.array([2, 0, 1], dtype=np.int32)),))
    sampled = Sampled(np.array([7, 8, 9], np.int32), np.array([-1, -2, -3], np.float32), {0: b"three", 1: b"one", 2: b"two"}, [], {})
    monkeypatch.setattr(engine.runner, "collect", lambda step: sampled)
    tags = np.array([3, 2], np.uint64).tobytes()  # 1 has left
    monkeypatch.setattr(core, "commit", lambda *given: SimpleNamespace(tags=tags, tokens=b"", finishes=b"", ended=[]))
    report = engine.step()
    assert np.frombuffer(report.logprobs, "<f4").tolist() == [-1, -3]
    assert report.details == {3: b"three", 2: b"two"}


def test_a_step_is_none_only_if_nothing_at_all_happened(make):
    engine = make()
    engine.add(EngineRequest.of(1, [1], SamplingParams()))
    assert engine.step() is None
    engine.core.expiring = [1]
    report = engine.step()
    assert (report.tags, report.finishes, report.ended) == (b"", b"", [{"tag": 1, "finish": "deadline"}])
    assert not engine.has_work
    assert engine.step() is None


def test_the_cores_time_is_told_in_seconds_from_now(make):
    engine = make()
    for at, seconds in ((None, None), (NOW + 2_500_000, 2.5), (NOW - 1, 0.0)):
        engine.core.wake = at
        assert engine.wakes_in() == seconds


def test_the_journal_is_whole_when_the_work_is_done_and_when_the_engine_is_closed(make, tmp_path):
    path = tmp_path / "journal"
    engine = make(journal=str(path))
    core = engine.core
    assert core.settings["journal"]
    for tag in (1, 2):
        engine.add(EngineRequest.of(tag, [1], SamplingParams()))
    for record, ending in ((b"one ", [1]), (b"two ", [2])):
        assert path.read_bytes() == b""
        core.plans.append(plan(ending=ending))
        core.recorded = record
        engine.step()
    assert path.read_bytes() == b"one two "
    engine.add(EngineRequest.of(3, [1], SamplingParams()))
    core.recorded = b"three "
    engine.abort(3)
    assert path.read_bytes() == b"one two three "
    engine.add(EngineRequest.of(4, [1], SamplingParams()))
    core.recorded = b"four"
    engine.close()
    assert path.read_bytes() == b"one two three four"


def test_a_journal_that_cannot_be_written_is_named_before_anything_is_loaded(make, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "_build_runner", None)
    with pytest.raises(InvalidSetting, match=r"--journal .*missing/journal: cannot write there \(No such file or directory\)"):
        make(journal=str(tmp_path / "missing" / "journal"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_the_journal_and_not_the_work(make, caplog):
    engine = make(journal="/dev/full")
    core = engine.core
    for tag in (1, 2):
        core.recorded = b"record"
        engine.add(EngineRequest.of(tag, [1], SamplingParams()))
        assert engine.abort(tag)
    engine.close()
    assert [record.getMessage() for record in caplog.records if "journal" in record.getMessage()] == [
        "cannot write the journal, which ends here: [Errno 28] No space left on device"
    ]
    assert core.recorded == b""


def test_every_setting_of_the_core_comes_from_a_flag_and_goes_back_to_it():
    table = {setting["name"]: setting for setting in _core.settings()}
    flags = {field.name: field.metadata for field in fields(EngineConfig)}
    config = EngineConfig(
        batching="dynamic", static_batch_size=3, batch_timeout_ms=1.5, target_itl_ms=0.25, kv_reservation="peak", watermark=0.1
    )
    sizes = {"num_kv_blocks": 101, "max_num_batched_tokens": 20, "max_num_seqs": 8, "max_model_len": 50, "block_size": 16}
    host = {"host_blocks": 5, "swap_ns_per_block": 6, "state_slots": 7, "state_tokens": 9, "experts": 128, "experts_used": 8}
    settings = scheduler_settings.of_config(config, **sizes, **host)
    assert settings.keys() == table.keys()
    again = scheduler_settings.to_flags(settings)
    assert scheduler_settings.of_flags(again) | {"block_size": 16} == settings
    assert (again["watermark"], again["static_batch_size"], again["queue_ageing_ms"]) == (pytest.approx(0.1), 3, 10_000)
    # Names that flags and the core both list are the same ones.
    for name in ("scheduling_policy", "batching", "kv_reservation"):
        assert list(flags[name]["choices"]) == table[name]["names"]
    # So are defaults, unless they depend on the machine or the pool.
    defaults = scheduler_settings.of_config(EngineConfig(), **sizes, **dict.fromkeys(host, 0))
    for name in table.keys() - {"num_kv_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "watermark"}:
        assert defaults[name] == table[name]["default"], name
