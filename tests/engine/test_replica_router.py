"""Which of several engines gets a request."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from chairlift import AsyncEngine, SamplingParams, Scheduling, _core
from chairlift.config import EngineConfig
from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.engine_process import EngineProcess
from chairlift.engine.replica import Replica
from chairlift.engine.replica_router import ReplicaRouter
from chairlift.engine.replicated_engine import ReplicatedEngine
from chairlift.engine.stats import Stats
from chairlift.engine.stream import Stream
from chairlift.errors import SequenceDropped

BLOCK = 16


class FakeReplica:
    """An engine's number and load, as the router reads them."""

    recurrent = False

    def __init__(
        self, number: int, sequences: int = 0, prompt_tokens: int = 0, prefill_us: int = 1024_000, wait_us: int = 0, turn_us: int = 0
    ) -> None:
        self.number = number
        stats = Stats(predicted_prefill_us=prefill_us, predicted_wait_us=wait_us, predicted_turn_us=turn_us)
        info = EngineInfo(max_num_seqs=8, block_size=BLOCK, recurrent=self.recurrent)
        self.engine = SimpleNamespace(stats=lambda: stats, open_sequences=sequences, prompt_tokens=prompt_tokens, info=info)


def chosen(
    router: ReplicaRouter, replicas: list[FakeReplica], prompt: range, salt: bytes = b"", session: bytes | None = None
) -> tuple[int, int]:
    stream = SimpleNamespace(prompt_token_ids=list(prompt), scheduling=Scheduling())
    replica = router.choose(cast(list[Replica], replicas), cast(Stream, stream), salt, session)
    return replica.number, stream.expected_tokens


@pytest.mark.parametrize(("recurrent", "expected"), [(False, (0, 49)), (True, (1, 17))])
def test_the_blocks_before_a_recurrent_state_need_no_report(
    monkeypatch: pytest.MonkeyPatch, recurrent: bool, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(FakeReplica, "recurrent", recurrent)
    router, replicas = ReplicaRouter("prefix-aware"), [FakeReplica(0), FakeReplica(1)]
    core = _core.Scheduler(block_size=BLOCK, num_kv_blocks=9, hash_key=int.from_bytes(router.hash_key))
    core.record_cache_changes()
    for blocks in (1, 2):
        core.restore(np.arange(blocks * BLOCK, dtype=np.int32), 0)
        name, _ = core.take_cache_changes()
    assert len(name) == 8
    router.cache_changed(cast(Replica, replicas[1]), name, b"")
    assert chosen(router, replicas, range(3 * BLOCK + 1)) == expected


def test_a_prompt_goes_where_its_beginning_is_unless_that_engine_is_behind() -> None:
    router = ReplicaRouter("predicted")
    idle = [FakeReplica(0), FakeReplica(1)]
    assert chosen(router, idle, range(320)) == (0, 320)
    assert chosen(router, [FakeReplica(0, sequences=5), FakeReplica(1)], range(640)) == (0, 320)
    # A millisecond a token: 700 tokens are to be computed in one engine, and 60 in the other, after 600 or 700 others.
    assert chosen(router, [FakeReplica(0, prompt_tokens=600), FakeReplica(1)], range(700)) == (0, 60)
    assert chosen(router, [FakeReplica(0, prompt_tokens=800), FakeReplica(1)], range(700)) == (1, 700)


@pytest.mark.parametrize(
    ("speeds", "share"),
    [((0, 0), [16, 16]), ((1024_000, 0), [16, 16]), ((0, 1024_000), [16, 16]), ((1024_000, 2048_000, 0), [16, 8, 8])],
)
def test_engines_that_have_measured_nothing_count_as_the_slowest(speeds: tuple[int, ...], share: list[int]) -> None:
    router = ReplicaRouter("predicted")
    got = [0] * len(speeds)
    for start in range(0, 32_000, 1000):
        loads = zip(got, speeds, strict=True)
        replicas = [FakeReplica(at, sequences=n, prompt_tokens=256 * n, prefill_us=speed) for at, (n, speed) in enumerate(loads)]
        got[chosen(router, replicas, range(start, start + 256))[0]] += 1
    assert got == share


def test_a_prompt_stays_where_it_is_cached_although_another_engine_is_fresh() -> None:
    router = ReplicaRouter("predicted")
    assert chosen(router, [FakeReplica(0), FakeReplica(1, sequences=1)], range(320))[0] == 0
    assert chosen(router, [FakeReplica(0, sequences=1), FakeReplica(1, prefill_us=0)], range(640))[0] == 0


def test_an_engine_without_a_free_slot_is_as_far_behind_as_it_says() -> None:
    router = ReplicaRouter("predicted")
    full = FakeReplica(0, sequences=8, wait_us=10**6)
    assert chosen(router, [full, FakeReplica(1, sequences=7)], range(100))[0] == 1
    free = FakeReplica(0, sequences=6, wait_us=10**6)
    assert chosen(router, [free, FakeReplica(1, sequences=7)], range(100, 200))[0] == 0


def test_prefixes_of_another_salt_do_not_count() -> None:
    router = ReplicaRouter("predicted")
    assert chosen(router, [FakeReplica(0), FakeReplica(1)], range(320), b"one") == (0, 320)
    loads = [FakeReplica(0, sequences=1), FakeReplica(1)]
    assert chosen(router, loads, range(320), b"two") == (1, 320)
    assert chosen(router, loads, range(320), b"one") == (0, 1)


def test_what_an_engine_that_died_had_is_forgotten() -> None:
    router = ReplicaRouter("predicted")
    dead = FakeReplica(0)
    assert chosen(router, [dead, FakeReplica(1)], range(320)) == (0, 320)
    router.forget(cast(Replica, dead))
    assert chosen(router, [FakeReplica(0, sequences=1), FakeReplica(1)], range(320)) == (1, 320)


@pytest.mark.parametrize("routing", ["predicted", "lmetric", "prefix-aware", "least-loaded", "round-robin"])
def test_a_session_stays_with_its_engine(routing: str) -> None:
    router = ReplicaRouter(routing)
    home, _ = chosen(router, [FakeReplica(3), FakeReplica(5)], range(100), session=b"mine")
    for start in range(10):
        loads = [FakeReplica(number, sequences=4 if number == home else 0) for number in (3, 5)]
        assert chosen(router, loads, range(start, 200), session=b"mine")[0] == home


def test_a_session_moves_when_another_engine_finishes_its_prompt_sooner() -> None:
    router = ReplicaRouter("predicted")
    assert chosen(router, [FakeReplica(0), FakeReplica(1)], range(320), session=b"mine")[0] == 0
    # A millisecond a token: 80 tokens are to be computed at home, after others, and 400 in the other engine.
    assert chosen(router, [FakeReplica(0, prompt_tokens=320), FakeReplica(1)], range(400), session=b"mine") == (0, 80)
    assert chosen(router, [FakeReplica(0, prompt_tokens=460), FakeReplica(1)], range(460), session=b"mine") == (1, 460)


def test_a_session_that_has_lost_its_context_goes_where_it_need_not_wait_for_a_turn() -> None:
    router = ReplicaRouter("predicted")
    assert chosen(router, [FakeReplica(0), FakeReplica(1)], range(320), session=b"mine")[0] == 0
    crowded, other = FakeReplica(0, turn_us=300_000), FakeReplica(1, sequences=1)
    assert chosen(router, [crowded, other], range(400), session=b"mine")[0] == 0, "its context is there"
    assert chosen(router, [crowded, other], range(1000, 1400), session=b"mine")[0] == 1


def test_a_session_whose_engine_died_stays_with_the_next_one() -> None:
    router = ReplicaRouter("predicted")
    assert chosen(router, [FakeReplica(0), FakeReplica(1)], range(100), session=b"mine")[0] == 0
    router.forget(cast(Replica, FakeReplica(0)))
    assert chosen(router, [FakeReplica(1, sequences=3)], range(200), session=b"mine") == (1, 200)
    for end in (300, 400):  # the first one is back, and idle
        assert chosen(router, [FakeReplica(0), FakeReplica(1, sequences=4)], range(end), session=b"mine")[0] == 1


def test_engines_report_what_they_have_cached_and_evicted(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt goes to the engine that has it, whoever sent it there, and not to the one that has evicted it."""

    def refuse(spent: object) -> None:
        raise SequenceDropped("it ended before")

    async def run() -> None:
        size = {"num_kv_blocks": 17, "max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 256, "threads": 1}
        config = EngineConfig(model=str(byte_model), load_format="dummy", **size)
        processes = [EngineProcess(config.load_format, exclusive=True) for _ in range(2)]
        engine = ReplicatedEngine(config, processes, routing="prefix-aware")
        try:
            for replica in engine.replicas:
                await replica.start()
            second, prompt = engine.replicas[1].engine, list(range(160))

            async def answer(to: AsyncEngine | ReplicatedEngine, prompt: list[int], scheduling: Scheduling) -> Stream:
                stream = await to.prepare(prompt, SamplingParams(max_tokens=1), scheduling)
                async for _ in to.run(stream):
                    pass
                return stream

            for scheduling in (Scheduling(tenant="alice", cache_group="team"), Scheduling(cache_salt="own")):
                await answer(second, prompt, scheduling)  # past the router
                stream = await answer(engine, prompt, scheduling)
                assert stream.expected_tokens == 1, "the last token is always computed"
                assert [timeline.cached_tokens for timeline in stream.timelines()] == [159]
                other = [token + 1 for token in prompt]
                await answer(second, other + other[:90], scheduling)  # needs all blocks
                assert (await answer(engine, prompt, scheduling)).expected_tokens == 160, "evicted"

            refused = list(range(100, 260))
            for _ in range(2):
                stream = await engine.prepare(refused, SamplingParams(max_tokens=1))
                monkeypatch.setattr(stream, "begin", refuse)
                with pytest.raises(SequenceDropped):
                    await anext(engine.run(stream))
                assert stream.expected_tokens == 160, "a request that does not begin is not expected"
        finally:
            await engine.close()

    asyncio.run(run())
