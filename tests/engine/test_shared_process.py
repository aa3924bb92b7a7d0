"""Several engines in one process: each serves as if it were alone, and none disturbs another by its start, its failure or its end."""

import asyncio
import json
import os
import re
import signal
import weakref
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import counting_engine
import numpy as np
import pytest
import tiny_encoders
from async_engine import GUARD, collect, ids, until
from counting_engine import CRASHING, ENDLESS

from chairlift import LLM
from chairlift.engine import step_loop
from chairlift.engine.client import AsyncEngine
from chairlift.engine.engine_process import EngineProcess
from chairlift.engine.frames import Load, Stop
from chairlift.engine.held_sequences import LEASE
from chairlift.engine.replicated_engine import ReplicatedEngine
from chairlift.errors import EngineClosed, EngineDead, InvalidRequest
from chairlift.sampling import EMBED, SamplingParams
from chairlift.scheduling import Scheduling


@asynccontextmanager
async def counting(monkeypatch, process, *settings):
    """Started engines that count, in a process, which ends with them."""
    counting_engine.install(monkeypatch.setattr)
    async with asyncio.timeout(GUARD), process:
        engines = [AsyncEngine(process=process, **one) for one in settings]
        await asyncio.gather(*(engine.start() for engine in engines))
        yield engines


def endless(engine):
    return asyncio.create_task(collect(engine, [1000], max_tokens=ENDLESS))


async def go_on(engine):
    """Waits until the engine has made some steps."""
    steps = engine.stats().steps
    await until(lambda: engine.stats().steps > steps + 10)


def test_each_engine_answers_its_own_requests(monkeypatch):
    async def main():
        async with counting(monkeypatch, EngineProcess(), {}, {}, {}) as engines:
            assert len({engine.pid for engine in engines}) == 1
            jobs = [collect(engine, [100 * (1 + at)], max_tokens=30, n=1 + at) for at, engine in enumerate(engines) for _ in range(5)]
            for at, outputs in enumerate(await asyncio.gather(*jobs)):
                first = [output for output in outputs if output.index == 0]
                assert ids(first) == list(range(100 * (1 + at // 5), 100 * (1 + at // 5) + 30))
            streams = [await engine.prepare([1], SamplingParams(n=3)) for engine in engines]
            tags = [tag for stream in streams for tag in stream.tags]
            assert len(set(tags)) == len(tags) == 9
            ended = [(await collect(engine, [5], max_tokens=1))[0].timeline for engine in engines]
            for engine, timeline in zip(engines, ended, strict=True):
                assert await engine.explain_sequences([timeline.tag]) == [timeline]
            assert all(engine.stats().running == 0 for engine in engines)

    asyncio.run(main())


def test_a_process_that_was_started_early_gets_the_first_engine_and_ends_without_one(monkeypatch):
    async def main():
        counting_engine.install(monkeypatch.setattr)
        async with asyncio.timeout(GUARD), EngineProcess() as process, EngineProcess() as unused:
            process.start_early()
            unused.start_early()
            pid = process.pid
            async with AsyncEngine(process=process) as engine:
                assert engine.pid == pid
                assert ids(await collect(engine, [5], max_tokens=2)) == [5, 6]
            pid = unused.pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


def test_an_engine_loads_and_ends_while_another_serves(monkeypatch, tmp_path):
    gate = tmp_path / "gate"
    monkeypatch.setenv("COUNTING_ENGINE_GATE", str(gate))

    async def main():
        async with counting(monkeypatch, EngineProcess(), {}, {"seed": 14}) as (first, second):
            stream = endless(first)
            for _ in range(2):
                other = endless(second)
                await until(lambda: second.stats().running == 1)
                await second.close()
                with pytest.raises(EngineClosed):
                    await other
                with pytest.raises(EngineDead, match="closed"):
                    await collect(second, [1])
                gate.touch()
                starting = asyncio.create_task(second.start())
                await go_on(first)
                assert ids(await collect(first, [5], max_tokens=3, ignore_eos=True)) == [5, 6, 7]
                assert not starting.done()
                gate.unlink()
                await starting
                assert ids(await collect(second, [5], max_tokens=2)) == [5, 6]
            # One that is not wanted any more ends as soon as it is loaded.
            await second.close()
            gate.touch()
            starting = asyncio.create_task(second.start())
            await go_on(first)
            starting.cancel()
            await go_on(first)
            gate.unlink()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await second.start()
            assert ids(await collect(second, [5], max_tokens=2)) == [5, 6]
            assert not stream.done()
            stream.cancel()

    asyncio.run(main())


def test_an_engine_that_cannot_be_loaded_disturbs_no_other(monkeypatch):
    async def main():
        process = EngineProcess()
        async with counting(monkeypatch, process, {}) as (first,):
            stream = endless(first)
            await until(lambda: first.stats().running)
            unlucky = AsyncEngine(process=process, seed=13)
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="an unlucky seed"):
                    await unlucky.start()
                assert not unlucky.alive
                await go_on(first)
            assert not stream.done()
            stream.cancel()

    asyncio.run(main())


def test_the_first_engine_may_be_the_one_that_cannot_be_loaded(monkeypatch):
    async def main():
        counting_engine.install(monkeypatch.setattr)
        async with asyncio.timeout(GUARD), EngineProcess() as process:
            unlucky, other = AsyncEngine(process=process, seed=13), AsyncEngine(process=process)
            results = await asyncio.gather(unlucky.start(), other.start(), return_exceptions=True)
            assert isinstance(results[0], InvalidRequest)
            assert ids(await collect(other, [5], max_tokens=2)) == [5, 6]

    asyncio.run(main())


def test_an_engine_whose_step_fails_ends_alone(monkeypatch, capfd):
    async def main():
        async with counting(monkeypatch, EngineProcess(), {}, {}) as (first, second):
            ends = []
            first.on_end, second.on_end = lambda: ends.append("first"), lambda: ends.append("second")
            pid, stream, lost = first.pid, endless(first), endless(second)
            await until(lambda: second.stats().running)
            for failing in (collect(second, [CRASHING]), lost):
                with pytest.raises(EngineDead, match="ZeroDivisionError: a bug in the model"):
                    await failing
            await second.ended()
            assert (ends, second.ready, first.ready) == (["second"], False, True)
            await second.close()
            await second.start()
            assert ids(await collect(second, [5], max_tokens=2)) == [5, 6]
            await go_on(first)
            assert (first.pid, stream.done()) == (pid, False)
            stream.cancel()

    asyncio.run(main())
    assert "a bug in the model" in capfd.readouterr().err


def test_all_engines_hear_that_their_process_was_killed_and_start_again(monkeypatch):
    async def main():
        async with counting(monkeypatch, EngineProcess(), {}, {}) as engines:
            ends = []
            for engine in engines:
                engine.on_end = lambda engine=engine: ends.append((engine.ready, engine.alive))
            streams = [endless(engine) for engine in engines]
            await until(lambda: all(engine.stats().running for engine in engines))
            pid = engines[0].pid
            os.kill(pid, signal.SIGKILL)
            for result in await asyncio.gather(*streams, return_exceptions=True):
                assert type(result) is EngineDead
                assert "killed by signal 9" in str(result)
            assert ends == [(False, False)] * 2
            for engine in engines:
                await engine.ended()
                await engine.close()
            await asyncio.gather(*(engine.start() for engine in engines))
            assert engines[0].pid == engines[1].pid != pid
            for engine in engines:
                assert ids(await collect(engine, [5], max_tokens=2)) == [5, 6]

    asyncio.run(main())


SIZES = {"load_format": "dummy", "num_kv_blocks": 200, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64, "threads": 1}
TEXTS = [np.random.default_rng(length).integers(4, 56, length).tolist() for length in (3, 17, 26)]


def requests():
    for seed in range(8):
        prompt = [int(token) for token in np.random.default_rng(seed).integers(1, 250, 5 + 20 * seed)]
        yield prompt, SamplingParams(max_tokens=40, temperature=0.9 * (seed % 2), seed=seed, ignore_eos=True)


async def embed(engine, text):
    [output] = [output async for output in engine.generate(text, EMBED)]
    return np.asarray(output.embedding)


def test_answers_are_equal_alone_and_together(byte_model, tmp_path):
    tiny_encoders.write("Bert", tmp_path)
    with LLM(byte_model, **SIZES) as llm:
        alone = [llm.generate([prompt], params)[0].token_ids for prompt, params in requests()]
    with LLM(tmp_path, threads=1) as llm:
        vectors = llm.embed(TEXTS)

    async def main():
        async with asyncio.timeout(GUARD), EngineProcess() as process:
            first, second = (AsyncEngine(model=str(byte_model), process=process, **SIZES) for _ in range(2))
            encoder = AsyncEngine(model=str(tmp_path), process=process, threads=1)
            for engine in (first, second, encoder):
                await engine.start()

            async def answer(engine, prompt, params):
                return ids([output async for output in engine.generate(prompt, params)])

            jobs = [answer(engine, *request) for request in requests() for engine in (first, second)]
            answers, embeddings = await asyncio.gather(asyncio.gather(*jobs), asyncio.gather(*(embed(encoder, text) for text in TEXTS)))
            assert answers[::2] == answers[1::2] == alone
            assert all(np.array_equal(one, other) for one, other in zip(embeddings, vectors, strict=True))

    asyncio.run(main())


def test_a_model_that_leaves_keeps_no_tokenizer_and_reads_it_again(monkeypatch):
    async def main():
        process = EngineProcess()
        async with counting(monkeypatch, process, {}) as (other,):
            engine = ReplicatedEngine(other.config, [process])
            await engine.start()
            await engine.encode("ab")
            tokenizer = weakref.ref(engine.tokenizer)
            await engine.close()
            assert tokenizer() is None
            await engine.start()
            assert await engine.encode("ab")
            await engine.close()
            assert await other.encode("ab")

    asyncio.run(main())


def test_a_model_that_leaves_keeps_its_tokenizer_for_its_live_sequences(monkeypatch):
    async def main():
        process = EngineProcess()
        async with counting(monkeypatch, process, {}) as (other,):
            engine = ReplicatedEngine(other.config, [process])
            await engine.start()
            sequence = engine.hold([1, 2], Scheduling(), LEASE)
            await engine.close()
            assert engine.tokenizer.encode("ab") == [97, 98]
            await sequence.append("ab")
            assert sequence.token_ids == [1, 2, 97, 98]
            tokenizer = weakref.ref(engine.tokenizer)
            await engine.start()
            assert tokenizer() is None  # the new one has taken its place
            sequence.drop()
            await engine.close()
            with pytest.raises(EngineDead):
                _ = engine.tokenizer

    asyncio.run(main())


def test_a_request_is_answered_while_another_model_is_overloaded(byte_model):
    async def main():
        async with asyncio.timeout(GUARD), EngineProcess() as process:
            busy, other = (AsyncEngine(model=str(byte_model), process=process, **SIZES) for _ in range(2))
            await asyncio.gather(busy.start(), other.start())
            flood = [asyncio.create_task(collect(busy, [1] * 50, max_tokens=400, ignore_eos=True)) for _ in range(100)]
            await until(lambda: busy.stats().waiting > 50)
            assert len(ids(await collect(other, [1] * 50, max_tokens=50, ignore_eos=True))) == 50
            assert busy.stats().waiting > 0
            for job in flood:
                job.cancel()

    asyncio.run(main())


def resident(pid):
    """MiB of a process's memory."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_memory_of_an_engine_that_ends_is_free(byte_model, tmp_path):
    config = json.loads((byte_model / "config.json").read_text())
    config |= {"hidden_size": 512, "intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((byte_model / "tokenizer.json").read_bytes())

    async def main():
        async with asyncio.timeout(GUARD), EngineProcess() as process:
            small = AsyncEngine(model=str(byte_model), process=process, **SIZES)
            large = AsyncEngine(model=str(tmp_path), process=process, **SIZES)
            await small.start()
            before = resident(small.pid)
            for _ in range(3):
                await large.start()
                await collect(large, [1] * 50, max_tokens=5)
                loaded = resident(small.pid)
                await large.close()
                assert loaded - before > 60
                assert resident(small.pid) - before < 0.3 * (loaded - before)
            assert len(ids(await collect(small, [1, 2, 3], max_tokens=5, ignore_eos=True))) == 5

    asyncio.run(main())


def test_weight_priority_and_itl_target_reach_the_arbiter(monkeypatch):
    sent, added, idle = [], [], SimpleQueue()
    monkeypatch.setattr(EngineProcess, "write", lambda self, number, frame: sent.append(frame))

    class Arbiter:
        def add(self, model, **shares):
            added.append((model, shares))
            idle.put((0, Stop()))

        def ready(self, model, now):
            pass

    async def main():
        counting_engine.install(monkeypatch.setattr)
        async with asyncio.timeout(GUARD), EngineProcess() as process:
            engine = AsyncEngine(process=process, weight=3, priority=-1, target_itl_ms=12.5)
            starting = asyncio.create_task(engine.start())
            await until(lambda: sent)
            starting.cancel()

    asyncio.run(main())
    monkeypatch.setattr(step_loop, "_core", SimpleNamespace(Arbiter=Arbiter))
    monkeypatch.setattr(step_loop, "start_sentinels", list)
    [load] = [frame for frame in sent if isinstance(frame, Load)]
    step_loop.StepLoop(idle, lambda frame, engine=0, timeout=-1: None, counting_engine.CountingEngine).run((0, load))
    assert added == [(0, {"weight": 3, "priority": -1, "itl": 12_500})]
