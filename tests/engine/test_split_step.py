"""Steps for which the device has too little memory: nobody's answer changes, and nobody fails who could be served."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from lazy_device import LazyDevice
from lazy_engine import POLICIES, clock, compare, directory, lazy, live, make, script

from chairlift import SamplingParams
from chairlift.engine import split_step
from chairlift.engine.engine import Engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.frames import StepOutputs
from chairlift.engine.stream import Stream, deliver
from chairlift.errors import OutOfMemory
from chairlift.server.errors import api_error
from chairlift.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MOMENTS = 3_000
"""Microseconds for which a size stays too large, so that the whole is tried again some steps later."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_step, "LIMIT_MICROSECONDS", MOMENTS)


def tight(engine: Engine, lazy: LazyDevice, fails: Callable[[Any, int, int], bool]) -> Counter[str]:
    """Has the model lack memory for steps of which `fails(buffers, num_tokens, num_seqs)` says so, halfway through; counts them."""
    model, seen = engine.runner.model, Counter[str]()
    forward = model.forward

    def lacking(buffers: Any, num_tokens: int, num_seqs: int) -> None:
        seen["passes"] += 1
        if not fails(buffers, num_tokens, num_seqs):
            return forward(buffers, num_tokens, num_seqs)
        seen["failed"] += 1
        slots = buffers.on_device.slot_mapping.box

        def spoil() -> None:
            model.cache.reshape(-1)[slots.value[: (num_tokens + 1) // 2].numpy()] = 99

        lazy.put(spoil)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. If reserved but unallocated memory is large, try")

    model.forward = lacking
    return seen


def chances(seed: int) -> Iterator[bool]:
    """What fails: a fifth, but not twice in so short a time that one token were tried in vain for the second time."""
    source = random.Random(seed)
    while True:
        if source.random() < 0.2:
            yield from (True, False, False, False, False)
        yield False


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_steps_that_are_too_large_run_in_pieces(make, lazy, clock, overlaps, most):
    for seed in range(most, most + 2):
        requested = script(seed)
        settings = {"scheduling_policy": POLICIES[seed % len(POLICIES)], "num_kv_blocks": 16, "swap_space": 2**14 * (seed % 2)}
        expected = live(make(overlaps, **settings), requested, clock)
        engine = make(overlaps, **settings)
        seen = tight(engine, lazy, lambda buffers, num_tokens, num_seqs: num_tokens > most)
        reported = live(engine, requested, clock)
        compare([expected, reported])
        assert seen["failed"] > 0
        assert 0 < engine.stats().steps_short_of_memory <= seen["failed"]
        assert not any(one.finish == "starved" for one in reported.values())


def lacking(work: Callable, chance: Iterator[bool]) -> Callable:
    """Work that is done, and fails all the same."""

    def done(*given: Any) -> Any:
        what = work(*given)
        if next(chance):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return what

    return done


@pytest.mark.parametrize("overlaps", [False, True])
def test_passes_and_samples_that_fail_now_and_then_change_nothing(make, lazy, clock, monkeypatch, overlaps):
    for seed in range(6, 10):
        requested = script(seed)
        settings = {"scheduling_policy": POLICIES[seed % len(POLICIES)], "num_kv_blocks": 13}
        expected = live(make(overlaps, **settings), requested, clock)
        engine = make(overlaps, **settings)
        chance = chances(seed)
        tight(engine, lazy, lambda *step, chance=chance: next(chance))
        for whole, name in ((engine.runner.sampler, "draw"), (engine.runner.model, "logits")):
            setattr(whole, name, lacking(getattr(whole, name), chance))
        compare([expected, live(engine, requested, clock)])
        assert engine.stats().steps_short_of_memory > 3


def needs_much(buffers: Any, num_tokens: int) -> bool:
    """Whether a prompt that begins with 95 is begun."""
    return bool(((buffers.input_ids[:num_tokens] == 95) & (buffers.positions[:num_tokens] == 0)).any())


@pytest.mark.parametrize("overlaps", [False, True])
def test_one_that_never_fits_fails_alone(make, lazy, clock, overlaps):
    for seed in range(3):
        requested = [replace(one, leaves=None) for one in script(seed)]
        needy = replace(requested[1], prompt=[95, *requested[1].prompt], params=GREEDY, leaves=None)
        expected = live(make(overlaps), requested[:1] + requested[2:], clock)
        engine = make(overlaps)
        tight(engine, lazy, lambda buffers, num_tokens, num_seqs: needs_much(buffers, num_tokens))
        reported = live(engine, [requested[0], needy, *requested[2:]], clock)
        assert reported.pop(needy.tag).finish == "starved"
        timeline = engine.explain(needy.tag)
        assert timeline is not None
        assert timeline["finish"] == "error"
        compare([expected, reported])


@pytest.mark.parametrize("overlaps", [False, True])
def test_who_shares_blocks_that_were_not_computed_fails_too_and_later_ones_do_not(make, lazy, clock, overlaps):
    prompt = list(range(20, 32))
    [first, *_] = script(0)
    requested = [
        replace(first, tag=tag, prompt=tokens, params=GREEDY, after=after, leaves=None)
        for tag, tokens, after in ((0, prompt, 0), (100, prompt, 0), (200, [1, 2, 3], 0), (300, prompt, 4))
    ]
    expected = live(make(overlaps), requested, clock)
    engine, fits = make(overlaps), [False]

    def fails(buffers: Any, num_tokens: int, num_seqs: int) -> bool:
        """Whether token 5 of the first is there, as long as the first and the second are."""
        return not fits[0] and 25 in buffers.input_ids[:num_tokens]

    tight(engine, lazy, fails)
    step = engine.step

    def stepping() -> Any:
        report = step()
        fits[0] |= bool(report.starved)
        return report

    engine.step = stepping
    reported = live(engine, requested, clock)
    assert [reported[tag].finish for tag in (0, 100)] == ["starved", "starved"]
    assert [reported[tag] for tag in (200, 300)] == [expected[tag] for tag in (200, 300)]


def test_sizes_that_fit_are_remembered_for_a_while(make, lazy, clock, caplog):
    engine = make(False)
    seen = tight(engine, lazy, lambda buffers, num_tokens, num_seqs: num_tokens > 4)
    engine.add(EngineRequest.of(1, list(range(16)), GREEDY))
    engine.step()
    assert seen == {"passes": 2 + 4, "failed": 2}  # 16 and 8 are too many; four pieces of 4
    engine.add(EngineRequest.of(2, list(range(40, 56)), GREEDY))
    engine.step()
    assert (seen["failed"], engine.stats().steps_short_of_memory) == (2, 1)
    clock[0] += 2 * MOMENTS
    engine.add(EngineRequest.of(3, list(range(60, 76)), GREEDY))
    engine.step()
    assert (seen["failed"], engine.stats().steps_short_of_memory) == (4, 2)
    assert sum("out of memory in a step of" in record.getMessage() for record in caplog.records) == 2
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("lasts", [1, 10**9])
@pytest.mark.parametrize("overlaps", [False, True])
def test_blocks_are_copied_once_for_all_pieces_of_a_step(make, lazy, overlaps, lasts, monkeypatch):
    monkeypatch.setattr(split_step, "LIMIT_MICROSECONDS", lasts)
    engine = make(overlaps)
    seen = tight(engine, lazy, lambda buffers, num_tokens, num_seqs: num_tokens > 1)
    engine.add(EngineRequest.of(1, list(range(8)), GREEDY))
    engine.step()
    copied: list[list[list[int]]] = []
    monkeypatch.setattr(engine.runner.model, "copy", lambda pairs: copied.append(pairs.tolist()))
    engine.add(EngineRequest.of(2, list(range(8)), GREEDY))  # its last block is the other's, and is computed anew in part
    for _ in range(3):
        engine.step()
    assert seen["failed"] > 0
    assert [len(pairs) for pairs in copied] == [1]
    engine.abort(1)
    engine.abort(2)
    while engine.has_work:
        engine.step()


def test_its_caller_is_told_to_try_again(byte_model):
    stream = Stream(Tokenizer(byte_model), 7, [1, 2], SamplingParams(max_tokens=3), arrived=0.0)
    requests = {7: stream}
    assert deliver(StepOutputs(starved=[7]), requests) == [stream]
    assert not requests
    stream.wake()
    with pytest.raises(OutOfMemory, match="too little memory for this request just now: try again later") as raised:
        asyncio.run(stream.next())
    reported = api_error(raised.value)
    assert (reported.status, reported.envelope["error"]["code"], reported.headers) == (503, "out_of_memory", {"retry-after": "5"})
