"""The engine between its core and a runner that take notes: what is asked of them, in which order, and what is made of it."""

import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from chairlift import SamplingParams, Scheduling, _core
from chairlift.config import EngineConfig
from chairlift.engine import engine as engine_module
from chairlift.engine import scheduler_settings
from chairlift.engine.adapters import Adapter, Adapters
from chairlift.engine.engine_request import EngineRequest, ResumedChoice, pack_tokens
from chairlift.errors import InvalidRequest, InvalidSetting, QueueFull
from chairlift.models.config import ModelConfig
from chairlift.runner.buffers import Layout, Sampled, StepBuffers
from chairlift.runner.memory.decision import Decision
from chairlift.runner.null_runner import NullRunner

NOW = 5_000_000
"""The clock's microseconds at the beginning of every test."""


class NotedCore:
    """A scheduler that notes its settings, the calls of a step, the last request and the journal."""

    def __init__(self, scheduler, **settings):
        self.settings = settings
        self.calls = []
        self.journal_bytes = b""
        self._scheduler = scheduler(**settings)

    def __getattr__(self, name):
        if name in ("expire", "plan", "commit"):
            self.calls.append(name)
        return getattr(self._scheduler, name)

    def add(self, *request):
        self.added = request
        return self._scheduler.add(*request)

    def journal(self):
        record = self._scheduler.journal()
        self.journal_bytes += record
        return record


class NotedRunner(NullRunner):
    """A runner that notes its calls. It was fitted to a machine, whatever the settings are."""

    host_blocks, swap_ns_per_block, kv_cache_bytes = 7, 900, 1 << 20
    batch_invariant = False
    has_logprobs = True
    decisions = (Decision("threads", "2", "why not"),)

    def __init__(self, config, directory, eos, on_phase):
        fitted = {"num_kv_blocks": 100, "max_num_seqs": 30, "max_num_batched_tokens": 120, "max_model_len": 50}
        super().__init__(replace(config, **fitted), directory, eos)
        self.buffers = [StepBuffers(Layout(120, 30, 4), index=index) for index in range(1 + self.overlaps)]
        self.calls = []
        self.seeds = []
        self.launched = 0

    def add_request(self, slot, sequence):
        self.seeds.append(sequence.seed)
        self.calls.append("add")

    def swap(self, outs, ins):
        self.calls.append("swap")

    def remove_request(self, slot):
        self.calls.append(("remove", slot))

    def launch(self, buffer_index, sizes):
        self.launched += 1
        self.calls.append(f"launch {self.launched} in {buffer_index}")
        return self.launched, super().launch(buffer_index, sizes)

    def sample(self, step):
        self.calls.append(f"sample {step[0]}")

    def collect(self, step):
        self.calls.append(f"collect {step[0]}")
        return Sampled(step[1], np.full(len(step[1]), -0.5, dtype=np.float32), {}, [], {})

    def wait(self):
        self.calls.append("wait")


@pytest.fixture
def clock(monkeypatch):
    """A list with the time."""
    now = [NOW]
    monkeypatch.setattr("chairlift.engine.clock.now", lambda: now[0])
    return now


@pytest.fixture
def make(monkeypatch, byte_model, clock):
    scheduler = _core.Scheduler
    monkeypatch.setattr(_core, "Scheduler", lambda **settings: NotedCore(scheduler, **settings))
    monkeypatch.setattr(engine_module, "_build_runner", NotedRunner)

    def engine(**settings):
        made = engine_module.Engine(EngineConfig(model=str(byte_model), **{"speculative_config": {"method": "off"}} | settings))
        made.core = made._scheduler  # noqa: SLF001
        # One list for both, so that it shows who was called before whom.
        made.runner.calls = made.core.calls
        return made

    return engine


def add(engine, tag, **params):
    engine.add(EngineRequest.of(tag, [1, 2], SamplingParams(ignore_eos=True, **params)))


def accounts(report):
    return [(timeline["tag"], timeline["finish"]) for timeline in report.ended]


def seeds(engine, count):
    """The seeds of so many sequences by their tags, once all of them run."""
    tags = []
    while len(tags) < count:
        tags += [tag for tag, *_ in engine.step().started]
    return dict(zip(tags, engine.runner.seeds, strict=True))


def test_settings_reach_the_core_in_its_units(make, monkeypatch):
    monkeypatch.setattr(engine_module.secrets, "token_bytes", lambda count: count.to_bytes(count))
    engine = make(
        scheduling_policy="fair",
        batching="dynamic",
        static_batch_size=8,
        batch_timeout_ms=2.5,
        max_num_queued_reqs=3,
        target_itl_ms=0.5,
        watermark=0.1,
    )
    assert engine.core.settings == {
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
        "end_tokens": engine.info.eos_token_ids,
        "tenant_weights": {},
        "tier_weights": {"priority": 4, "default": 2, "flex": 1},
    }


def test_a_model_with_states_has_its_slots_and_drafts(make, monkeypatch):
    monkeypatch.setattr(NotedRunner, "state_slots", 31)
    monkeypatch.setattr(ModelConfig, "state_bytes", 5000)
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
    monkeypatch.setattr(NotedRunner, "batch_invariant", True)
    assert make().info.determinism == "batch-invariant"


def test_a_request_reaches_the_core_as_one_value(make):
    engine = make(tenant_weights={"a": 3}, tier_weights={"flex": 5})
    assert engine.core.settings["tenant_weights"] == {"a": 3}
    assert engine.core.settings["tier_weights"] == {"priority": 4, "default": 2, "flex": 5}
    request = EngineRequest.of(1, [1, 2, 3], SamplingParams(), Scheduling(cache_salt="ü", predicted_tokens=4))
    engine.add(request)
    assert engine.core.added == (request, NOW, "ü".encode(), None)


def test_the_unfinished_choices_of_a_lost_request_go_on_with_their_seeds(make):
    engine = make()
    answers = [ResumedChoice(0, pack_tokens([4, 5]), 2, 1, 100, 200, 300), ResumedChoice(2, b"", 2, 1, 100, 200, None)]
    engine.add(EngineRequest.of(7, [1, 2], SamplingParams(n=3, seed=9), spent={"receive": 1000}, resumed=answers))
    resumed = seeds(engine, 2)
    assert [engine.abort(tag) for tag in (7, 8, 9)] == [True, False, True]
    engine = make()
    add(engine, 1, n=3, seed=9)
    whole = seeds(engine, 3)
    assert resumed == {7: whole[1], 9: whole[3]}


def test_answers_have_draws_of_their_own(make):
    engine = make()
    add(engine, 4, n=2, best_of=3, seed=77)
    add(engine, 7, n=2)
    first = seeds(engine, 5)
    assert first[4] == 77
    assert len(set(first.values())) == 5
    engine = make()
    add(engine, 14, n=3, seed=77)
    again = seeds(engine, 3)
    assert again == {14: first[4], 15: first[5], 16: first[6]}, "a seed gives the same draws whenever it is asked with"
    with pytest.raises(InvalidRequest, match="already running"):
        add(engine, 13, n=2)


def test_negative_seeds_give_draws_of_their_own(make):
    engine = make()
    for tag, seed in ((0, -1), (3, -2), (6, 0), (9, 1), (12, 7)):
        add(engine, tag, n=3, seed=seed)
    assert len(set(seeds(engine, 15).values())) == 15


def test_a_sequence_that_cannot_be_sampled_is_computed_with_its_adapter_and_its_prompt_is_scored(make, monkeypatch):
    engine, added = make(), []

    def add_request(slot, sequence):
        added.append(sequence)
        if len(added) == 1:
            raise InvalidRequest("too slow")

    monkeypatch.setattr(Adapters, "get", lambda adapters, name: Adapter(3, b"digest"))
    monkeypatch.setattr(engine.runner, "add_request", add_request)
    add(engine, 1, lora="a", prompt_logprobs=0)
    assert accounts(engine.step()) == [(1, "error")]
    first, second = added
    assert (second.adapter, second.prompt) == (first.adapter, first.prompt)
    assert (first.adapter, first.prompt.tag) == (3, 1)


def test_a_preempted_sequence_leaves_nothing_in_its_slot(make, monkeypatch):
    engine, slots = make(), set()
    monkeypatch.setattr(engine.runner, "add_request", lambda slot, sequence: slots.add(slot))
    monkeypatch.setattr(engine.runner, "remove_request", slots.discard)
    for tag in range(30):
        add(engine, tag, max_tokens=48)
    ended = []
    while engine.has_work:
        ended += engine.step().ended
    assert sum(timeline["preemptions"] for timeline in ended) > 0
    assert slots == set()


def test_a_sequence_that_is_aborted_or_late_leaves_nothing_in_its_slot(make, monkeypatch, clock):
    engine, slots = make(), set()
    monkeypatch.setattr(engine.runner, "add_request", lambda slot, sequence: slots.add(slot))
    monkeypatch.setattr(engine.runner, "remove_request", slots.discard)
    add(engine, 1, max_tokens=48)
    engine.add(EngineRequest.of(2, [1] * 2, SamplingParams(max_tokens=48, ignore_eos=True), Scheduling(deadline_ms=3_600_000)))
    engine.step()
    assert len(slots) == 2
    assert engine.abort(1)
    assert len(slots) == 1
    clock[0] += 2 * 3_600_000_000
    engine.step()
    assert slots == set()


def test_what_the_core_refuses_is_said_in_our_words_and_leaves_nothing(make, monkeypatch):
    engine = make(max_num_queued_reqs=1)
    add(engine, 1)
    for tag, n in ((2, 4), (2, 1)):
        with pytest.raises(QueueFull, match="at most 1 may"):
            add(engine, tag, n=n)
        assert [engine.abort(tag + index) for index in range(n)] == [False] * n
    engine.abort(1)
    with pytest.raises(InvalidRequest, match="51 prompt tokens") as refused:
        engine.add(EngineRequest.of(1, [1] * 51, SamplingParams()))
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    errors = [(_core.NeverFits("too long"), InvalidRequest), (_core.QueueFull("1 request waits", 1_500_000), QueueFull)]
    for error, kind in errors:

        def refuse(*request, error=error):
            raise error

        monkeypatch.setattr(engine.core, "add", refuse)
        with pytest.raises(kind) as refused:
            add(engine, 1)
        expected = {"retry_after": 1.5} if kind is QueueFull else {"param": "prompt", "code": "context_length_exceeded"}
        assert {name: getattr(refused.value, name) for name in expected} == expected
    assert not engine.has_work


def test_a_step_swaps_before_it_runs_and_expires_before_it_plans(make, clock):
    engine = make()
    core = engine.core
    add(engine, 1)
    engine.add(EngineRequest.of(2, [1, 2], SamplingParams(), Scheduling(deadline_ms=1)))
    add(engine, 3, max_tokens=1)
    clock[0] += 1000
    report = engine.step()
    assert core.calls == ["expire", "plan", "add", "add", "swap", "launch 1 in 0", "sample 1", "collect 1", "commit", ("remove", 1)]
    assert np.frombuffer(report.tags, "<u8").tolist() == [1, 3]
    assert np.frombuffer(report.logprobs, "<f4").tolist() == [-0.5, -0.5]
    assert (len(report.tokens), report.finishes) == (8, b"\0\2")
    assert report.started == [(1, 0, 0, 1000), (3, 0, 0, 1000)]
    assert accounts(report) == [(2, "deadline"), (3, "length")]
    assert [engine.abort(tag) for tag in (1, 2, 3)] == [True, False, False]


@pytest.fixture
def overlapping(monkeypatch):
    monkeypatch.setattr(NotedRunner, "overlaps", True)


@pytest.mark.usefixtures("overlapping")
def test_the_next_step_is_launched_before_this_one_is_collected_and_sampled_after(make):
    engine = make()
    core = engine.core
    add(engine, 1, max_tokens=2)
    add(engine, 3)
    assert [tag for tag, *_ in engine.step().started] == [1, 3]
    first, second = ["plan", "add", "add", "swap", "launch 1 in 0", "sample 1"], ["plan", "swap", "launch 2 in 1", "collect 1", "commit"]
    assert core.calls == ["expire", *first, *second, "sample 2"]
    core.calls.clear()
    assert accounts(engine.step()) == [(1, "length")]
    assert core.calls == ["expire", "plan", "swap", "launch 3 in 0", "collect 2", "commit", ("remove", 0), "sample 3"]
    core.calls.clear()
    assert engine.abort(3)
    assert core.calls == [("remove", 1)]
    core.calls.clear()
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
    add(engine, 1)
    engine.step()
    assert stages == {
        **{"expire": "plan", "plan": "plan", "add": "run", "swap": "run"},
        **{"launch 1 in 0": "run", "sample 1": "run", "collect 1": "run", "commit": "commit"},
    }


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("failing", ["launch", "collect", "sample"])
def test_when_a_step_fails_all_that_are_under_way_are_committed_without_tokens(make, monkeypatch, failing):
    engine = make()
    core = engine.core
    add(engine, 1)
    engine.step()
    commit, committed = core.commit, []
    monkeypatch.setattr(core, "commit", lambda plan, sampled, now: committed.append((plan, sampled.tolist())) or commit(plan, sampled, now))
    monkeypatch.setattr(engine.runner, failing, lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    # Without tokens, but for the one that was collected before the next one failed.
    assert [tokens == [-1] for _, tokens in committed] == ([False, True] if failing == "sample" else [True, True])
    assert len({id(plan) for plan, _ in committed}) == 2
    assert core.calls[-1] == "wait", "the buffers may still be read"
    assert not engine.has_work


def test_log_probabilities_are_of_those_that_are_still_there(make, monkeypatch):
    engine = make()
    for tag in (1, 2, 3):
        add(engine, tag)
    sampled = Sampled(np.array([7, 8, 9], np.int32), np.array([-1, -2, -3], np.float32), {0: b"one", 1: b"two", 2: b"three"}, [], {})
    monkeypatch.setattr(engine.runner, "collect", lambda step: engine.abort(1) and sampled)
    report = engine.step()
    assert np.frombuffer(report.tags, "<u8").tolist() == [2, 3]
    assert np.frombuffer(report.logprobs, "<f4").tolist() == [-2, -3]
    assert report.details == {2: b"two", 3: b"three"}


ALONE = {"batching": "dynamic", "static_batch_size": 2, "batch_timeout_ms": 2500.0}
"""The settings with which a request waits for a second one."""


def test_a_step_is_none_only_if_nothing_at_all_happened(make, clock):
    engine = make(**ALONE)
    engine.add(EngineRequest.of(1, [1], SamplingParams(), Scheduling(deadline_ms=1)))
    assert engine.step() is None
    clock[0] += 1000
    report = engine.step()
    assert (report.tags, report.finishes, accounts(report)) == (b"", b"", [(1, "deadline")])
    assert not engine.has_work
    assert engine.step() is None


def test_the_cores_time_is_told_in_seconds_from_now(make, clock):
    engine = make(**ALONE)
    assert engine.wakes_in() is None
    add(engine, 1)
    assert engine.step() is None
    for seconds in (2.5, 1.5, 0.5, 0.0):
        assert engine.wakes_in() == seconds
        clock[0] += 1_000_000


def test_the_journal_is_whole_when_the_work_is_done_and_when_the_engine_is_closed(make, tmp_path):
    path = tmp_path / "journal"
    engine = make(journal=str(path))
    core = engine.core
    assert core.settings["journal"]
    for tag in (1, 2):
        add(engine, tag, max_tokens=tag)
    while engine.has_work:
        assert path.read_bytes() == b""
        engine.step()
    written = path.read_bytes()
    assert written == core.journal_bytes
    add(engine, 3)
    engine.abort(3)
    assert path.read_bytes() == core.journal_bytes != written
    add(engine, 4)
    engine.step()
    assert path.read_bytes() != core.journal_bytes
    engine.close()
    assert path.read_bytes() == core.journal_bytes


def test_a_journal_that_cannot_be_written_is_named_before_anything_is_loaded(make, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "_build_runner", None)
    with pytest.raises(InvalidSetting, match=r"--journal .*missing/journal: cannot write there \(No such file or directory\)"):
        make(journal=str(tmp_path / "missing" / "journal"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_the_journal_and_not_the_work(make, caplog):
    engine = make(journal="/dev/full")
    for tag in (1, 2):
        add(engine, tag)
        assert engine.abort(tag)
    engine.close()
    assert [record.getMessage() for record in caplog.records if "journal" in record.getMessage()] == [
        "cannot write the journal, which ends here: [Errno 28] No space left on device"
    ]
    assert engine.core.journal() == b""


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
