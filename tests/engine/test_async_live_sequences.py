"""Live sequences of AsyncEngine: the same answers as those of LLM, and what becomes of them when the engine ends."""

import asyncio
import os
import signal
from contextlib import aclosing

import pytest

from chairlift import (
    LLM,
    AsyncEngine,
    EngineDead,
    InvalidRequest,
    SamplingParams,
    Scheduling,
    SequenceBusy,
    SequenceDropped,
    TooManySequences,
)
from chairlift.engine.held_sequences import MAX_PER_TENANT

PROMPT = "The lift carries people up the mountain. It has forty chairs."
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.3, max_tokens=9, ignore_eos=True, seed=7)
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
SIZES = {
    "load_format": "dummy",
    "num_kv_blocks": 64,
    "block_size": 8,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
}


@pytest.fixture(scope="module")
def model(byte_model):
    """Runs a coroutine function with an engine that has just started, or one that an earlier test has left."""
    with asyncio.Runner() as runner:
        engine = AsyncEngine(model=byte_model, **SIZES)
        runner.run(engine.start())
        yield lambda scenario: runner.run(scenario(engine))
        runner.run(engine.close())


async def settled(engine, key, value):
    """Waits until a counter of the idle engine has this value."""
    async with asyncio.timeout(10):
        while getattr(engine.stats(), key) != value:
            await asyncio.sleep(0.01)


def search(llm):
    """Tokens and scores of a small search with `LLM`."""
    with llm.open(PROMPT) as root:
        left, right = root.fork(2)
        left.append(" left")
        first = left.generate(GREEDY)
        left.rewind(3)
        left.append([17, 18, 19, 20, 21])
        second, third = left.generate(SAMPLED), right.generate(SAMPLED)
        found = [(path.token_ids, path.score()) for path in (root, left, right)]
        left.drop()
        right.drop()
        return found, [output.text for output in (first, second, third)]


def test_a_search_is_the_same_as_that_of_llm(byte_model, model):
    with LLM(byte_model, **SIZES) as llm:
        expected, computed = search(llm), llm.engine.stats().computed_tokens

    async def scenario(engine):
        await settled(engine, "free_blocks", 63)
        before = engine.stats().computed_tokens
        async with await engine.open(PROMPT) as root:
            left, right = await root.fork(2)
            await left.append(" left")
            first = await left.generate(GREEDY)
            left.rewind(3)
            await left.append([17, 18, 19, 20, 21])
            second, third = await left.generate(SAMPLED), await right.generate(SAMPLED)
            found = [(path.token_ids, path.score()) for path in (root, left, right)]
            left.drop()
            right.drop()
        await settled(engine, "free_blocks", 63)
        assert (found, [output.text for output in (first, second, third)]) == expected
        assert engine.stats().computed_tokens - before == computed
        assert root.dropped

    model(scenario)


def test_a_stream_that_is_closed_leaves_the_sequence_as_it_was_and_one_of_a_dropped_sequence_fails(model):
    async def scenario(engine):
        async with await engine.open(PROMPT) as root:
            tokens = root.token_ids
            async with aclosing(root.stream(LONG)) as outputs:
                await anext(outputs)
                with pytest.raises(SequenceBusy):
                    await root.generate(GREEDY)
                with pytest.raises(SequenceBusy):
                    root.rewind(1)
                (fork,) = await root.fork()  # as it was before
            assert root.token_ids == fork.token_ids == tokens
            expected = await root.generate(GREEDY)
            async with aclosing(fork.stream(LONG)) as outputs:
                await anext(outputs)
                fork.drop()
                with pytest.raises(SequenceDropped):
                    async for _ in outputs:
                        pass
            for use in (fork.fork, lambda: fork.append("a"), fork.generate):
                with pytest.raises(SequenceDropped):
                    await use()
            root.rewind(9)
            assert (await root.generate(GREEDY)).token_ids == expected.token_ids
        await settled(engine, "free_blocks", 63)

    model(scenario)


def test_limits_and_wrong_uses(model):
    async def scenario(engine):
        alice = Scheduling(tenant="alice")
        async with await engine.open(PROMPT, scheduling=alice) as root:
            with pytest.raises(TooManySequences, match=f"a tenant may hold {MAX_PER_TENANT} sequences, and this one holds 1") as refused:
                await root.fork(100_000)
            assert 590 < refused.value.retry_after <= 600
            forks = [fork for _ in range(3) for fork in await root.fork(341)]
            with pytest.raises(TooManySequences):
                await engine.open(PROMPT, scheduling=alice)
            async with await engine.open(PROMPT, scheduling=Scheduling(tenant="bob")) as other:
                assert len((await other.generate(GREEDY)).token_ids) == 9
            for fork in forks:
                fork.drop()
            with pytest.raises(InvalidRequest, match="the context of this model has 256"):
                await root.append([1] * 256)
            with pytest.raises(InvalidRequest, match="is not a token id"):
                await root.append([2**40])
            with pytest.raises(InvalidRequest, match="has one answer"):
                await root.generate(SamplingParams(n=2))
        with pytest.raises(InvalidRequest, match="lease must be"):
            await engine.open(PROMPT, lease=0)
        await settled(engine, "free_blocks", 63)

    model(scenario)


def test_a_lease_ends_although_nobody_looks(model):
    async def scenario(engine):
        sequence = await engine.open(PROMPT, lease=0.2)
        dropped = asyncio.Event()
        sequence.on_drop = dropped.set
        async with asyncio.timeout(10):
            await dropped.wait()
        await settled(engine, "free_blocks", 63)
        with pytest.raises(SequenceDropped, match="its lease has ended"):
            sequence.rewind(1)

    model(scenario)


def test_sequences_outlive_their_engine(model):
    async def scenario(engine):
        async with await engine.open(PROMPT) as root:
            (fork,) = await root.fork()
            expected = await fork.generate(GREEDY)
            generation = asyncio.create_task(root.generate(LONG))
            await asyncio.sleep(0)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDead):
                await generation
            await engine.ended()
            (copy,) = root.fork_now(1)
            fork.drop()
            await engine.close()
            await engine.start()
            assert (await copy.generate(GREEDY)).token_ids == (await root.generate(GREEDY)).token_ids == expected.token_ids
            copy.drop()
        await settled(engine, "free_blocks", 63)

    model(scenario)
