"""AsyncEngine against a child process with an engine that counts: streams, early exits and refusals."""

import asyncio
import os
import signal
from contextlib import aclosing
from dataclasses import replace

import counting_engine
import pytest
from async_engine import collect, ids, into, run, until
from counting_engine import DEADLINE, ENDLESS, EOS, FAILING, FULL, LATE, PATIENT, REFUSED, VOCABULARY, text_of

from chairlift.config import EngineConfig
from chairlift.engine import frames, questions
from chairlift.engine.client import AsyncEngine
from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.frames import Add
from chairlift.engine.stream import deliver
from chairlift.engine.validation import validate
from chairlift.errors import DeadlineMissed, EngineDead, InvalidRequest, QueueFull, RequestFailed
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling


@pytest.fixture(autouse=True)
def _counting(monkeypatch):
    counting_engine.install(monkeypatch.setattr)


def test_many_streams_each_get_their_own_tokens():
    async def test(engine):
        jobs = [collect(engine, [100 * number], max_tokens=1 + number % 17) for number in range(1, 65)]
        for number, outputs in enumerate(await asyncio.gather(*jobs), 1):
            count = 1 + number % 17
            assert ids(outputs) == list(range(100 * number, 100 * number + count))
            assert "".join(output.text for output in outputs) == text_of(100 * number, count)
            assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
            assert outputs[0].prompt_token_ids == [100 * number]

    run(test)


def test_text_is_encoded_and_the_account_is_kept():
    async def test(engine):
        assert engine.info.model == "smollm2-135m-instruct"
        assert (await collect(engine, "a", max_tokens=1))[-1].prompt_token_ids == [97]
        for _ in range(2):
            last = (await collect(engine, "a" * 40, max_tokens=3))[-1]
        assert [last.timeline] == await engine.explain_sequences([last.timeline.tag])
        account = last.timeline
        assert (account.finish, account.prompt_tokens, account.cached_tokens, account.output_tokens) == ("length", 40, 32, 3)
        assert (last.cached_tokens, last.own_cached_tokens) == (32, 32)
        assert last.timing.queued == account.started - account.submitted
        assert last.timing.first_token == account.first_token - account.arrived
        assert last.timing.total == account.ended - account.arrived > last.timing.first_token
        assert sum(account.states.values()) == pytest.approx(last.timing.total)

    run(test)


def test_the_start_is_told_once_and_before_the_first_token():
    async def test(engine):
        reported = []
        stream = engine.generate([100], SamplingParams(max_tokens=3, n=3), on_start=lambda: reported.append(len(outputs)))
        outputs = []
        await into(outputs, stream)
        assert reported == [0]

    run(test)


def test_end_of_sequence_is_an_id_but_no_text():
    async def test(engine):
        outputs = await collect(engine, [EOS - 2], max_tokens=10)
        assert ids(outputs) == [EOS - 2, EOS - 1, EOS]
        assert "".join(output.text for output in outputs) == text_of(EOS - 2, 2)
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)

    run(test)


def test_stop_token_is_named():
    async def test(engine):
        outputs = await collect(engine, "a", max_tokens=10, stop_token_ids=(ord("c"),))
        assert ids(outputs) == [97, 98, 99]
        assert "".join(output.text for output in outputs) == "ab"
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", 99)

    run(test)


def test_stop_string_ends_the_request_in_the_engine_too():
    async def test(engine):
        await collect(engine, "a" * 40, max_tokens=1)
        outputs = await collect(engine, "a" * 40, max_tokens=ENDLESS, stop=("zz", "def"))
        assert ids(outputs) == [97, 98, 99, 100, 101, 102]
        assert "".join(output.text for output in outputs) == "abc"
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "def")
        assert outputs[-1].timing.first_token <= outputs[-1].timing.total
        assert (outputs[-1].cached_tokens, outputs[-1].timing.queued) == (32, outputs[0].queued)
        await until(lambda: engine.stats().expired == 1 and engine.stats().running == 0)

    run(test)


def test_several_answers_come_side_by_side_and_each_to_its_own_end():
    async def test(engine):
        outputs = await collect(engine, [1000], n=3, max_tokens=4, stop_token_ids=(1101,))
        for index, count in enumerate((4, 2, 4)):
            own = [output for output in outputs if output.index == index]
            assert ids(own) == list(range(1000 + 100 * index, 1000 + 100 * index + count))
            assert [output.finish_reason for output in own] == [None] * (len(own) - 1) + ["stop" if index == 1 else "length"]
            assert own[-1].timeline is not None
        assert sorted(output.index for output in outputs if output.finish_reason) == [0, 1, 2]

    run(test)


def test_answers_that_end_by_a_stop_string_are_aborted_one_by_one():
    async def test(engine):
        outputs = await collect(engine, [1000], n=2, max_tokens=ENDLESS, stop=(text_of(1105, 2),), stop_token_ids=(1050,))
        ends = {output.index: output for output in outputs if output.finish_reason}
        assert (ends[0].stop_reason, ends[1].stop_reason) == (1050, text_of(1105, 2))
        assert (ends[0].timeline is None, ends[1].timeline is None) == (False, True)
        await until(lambda: engine.stats().expired == 1 and engine.stats().running == 0)

    run(test)


def test_the_best_answers_come_whole_at_the_end_and_the_best_first():
    async def test(engine):
        outputs = await collect(engine, [1000], n=3, best_of=5, max_tokens=4)
        assert [(output.index, output.token_ids[0]) for output in outputs] == [(0, 1200), (1, 1100), (2, 1300)]
        for output in outputs:
            assert output.token_ids == list(range(output.token_ids[0], output.token_ids[0] + 4))
            assert output.text == text_of(output.token_ids[0], 4)
            assert (output.finish_reason, output.timeline.finish) == ("length", "length")

    run(test)


def test_leaving_aborts_all_answers_that_are_not_over():
    async def test(engine):
        async with aclosing(engine.generate([1000], SamplingParams(max_tokens=ENDLESS, n=3, stop_token_ids=(1100,)))) as stream:
            async for output in stream:
                if output.finish_reason:
                    break
        await until(lambda: engine.stats().expired == 2 and engine.stats().running == 0)

    run(test)


def test_a_missed_deadline_is_raised_after_what_there_was():
    async def test(engine):
        outputs = []
        with pytest.raises(DeadlineMissed, match=r"after 3 tokens of output.*allow more time") as caught:
            await into(outputs, engine.generate([LATE], SamplingParams(max_tokens=9), Scheduling(deadline_ms=DEADLINE)))
        assert ids(outputs) == [LATE, LATE + 1, LATE + 2]
        assert [output for output in outputs if output.finish_reason] == []
        assert (caught.value.prompt_tokens, caught.value.completion_tokens) == (1, 3)
        with pytest.raises(DeadlineMissed) as caught:
            await into([], engine.generate([1000], SamplingParams(max_tokens=1), Scheduling(deadline_ms=0.001)))
        assert caught.value.completion_tokens == 0
        await until(lambda: engine.stats().running == 0)

    run(test)


def test_one_answer_may_be_late_and_another_not():
    async def test(engine):
        outputs, params = [], SamplingParams(max_tokens=9, n=2, stop_token_ids=(LATE + 101,))
        with pytest.raises(DeadlineMissed) as caught:
            await into(outputs, engine.generate([LATE], params, Scheduling(deadline_ms=DEADLINE)))
        assert [(output.index, output.finish_reason) for output in outputs if output.finish_reason] == [(1, "stop")]
        assert caught.value.completion_tokens == 3 + 2

    run(test)


def test_a_full_queue_says_when_to_come_back():
    async def test(engine):
        with pytest.raises(QueueFull, match="4 requests wait") as caught:
            await collect(engine, [FULL], n=2)
        assert caught.value.retry_after == 2.5
        assert ids(await collect(engine, [1000], max_tokens=1)) == [1000]

    run(test)


def test_an_engine_that_waits_for_its_time_answers_then():
    async def test(engine):
        assert ids(await collect(engine, [1000], max_tokens=2)) == [1000, 1001]

    run(test, **PATIENT)


def test_requests_are_explained_by_the_id_that_they_were_given(monkeypatch):
    monkeypatch.setattr(questions, "REMEMBERED", 2)

    async def one(engine, request_id, **params):
        return [output async for output in engine.generate([1000], SamplingParams(max_tokens=2, **params), request_id=request_id)]

    async def test(engine):
        outputs = await one(engine, "a", n=2)
        ended = [output.timeline for output in outputs if output.finish_reason]
        explained = await engine.explain("a")
        assert [replace(account, queued_behind={}, served_before={}, served_first=()) for account in explained] == ended
        assert await engine.explain("unknown") == []
        await one(engine, None)
        await one(engine, "b")
        await one(engine, "a")
        await one(engine, "c")
        assert [len(await engine.explain(request_id)) for request_id in "abc"] == [1, 0, 1]
        async with aclosing(engine.generate([1000], SamplingParams(max_tokens=ENDLESS), request_id="open")) as stream:
            await anext(stream)
            assert [timeline.finish for timeline in await engine.explain("open")] == [None]

    run(test)


def test_the_oldest_are_forgotten_also_after_others_were(monkeypatch):
    monkeypatch.setattr(questions, "REMEMBERED", 2)
    remembered = questions.Remembered()
    for id, what in (("a", 1), ("b", 2)):
        remembered.add(id, what)
    remembered.forget(1)
    for id, what in (("c", 3), ("d", 4)):
        remembered.add(id, what)
    assert [remembered.get(id) for id in "abcd"] == [None, None, 3, 4]


def test_an_engine_is_asked_for_few_timelines_at_once():
    async def test(engine):
        await into([], engine.generate([1000], SamplingParams(max_tokens=1, n=40), request_id="many"))
        sent, write = [], engine.process.write
        engine.process.write = lambda number, frame: sent.append(frame) or write(number, frame)
        assert len(await engine.explain("many")) == 40
        assert [len(frame.tags) for frame in sent] == [16, 16, 8]

    run(test)


def test_a_look_has_the_names_of_those_there():
    async def test(engine):
        await collect(engine, [1000], max_tokens=1)
        async with aclosing(engine.generate([1000], SamplingParams(max_tokens=ENDLESS), request_id="open")) as stream:
            await anext(stream)
            seen = await engine.take_snapshot()
            assert seen["names"] == [(seen["running"][0]["tag"], "open")]

    run(test)


def test_a_question_to_an_engine_that_dies_is_not_left_open():
    async def test(engine):
        hanging = asyncio.create_task(into([], engine.generate([1000], SamplingParams(max_tokens=ENDLESS), request_id="a")))
        await until(lambda: engine.stats().running)
        # A stopped process answers nothing, whatever it has read already.
        os.kill(engine.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, engine.pid, os.WSTOPPED)
        asking = asyncio.create_task(engine.explain("a"))
        await asyncio.sleep(0)  # it asks
        os.kill(engine.pid, signal.SIGKILL)
        for result in await asyncio.gather(hanging, asking, return_exceptions=True):
            assert isinstance(result, EngineDead)
        with pytest.raises(EngineDead):
            await engine.explain("a")

    run(test)


def test_counters_that_are_not_sent_stay_as_they_were():
    async def test(engine):
        await collect(engine, [1000], max_tokens=50)
        await until(lambda: engine.stats().running == 0 and engine.stats().tenants.get("", {}).get("running") == 0)
        for usage in (engine.stats().tenants[""], engine.stats().classes[0]):
            assert (usage["running"], usage["requests"], usage["output_tokens"]) == (0, 1, 50)

    run(test)


def test_slow_reader_gets_tokens_with_much_work_in_pieces():
    async def test(engine):
        stream = engine.generate("a", SamplingParams(max_tokens=2000, n=2, stop="never"))
        outputs = [await anext(stream)]
        await until(lambda: engine.stats().steps >= 2000 and engine.stats().running == 0)
        outputs += [output async for output in stream]
        assert max(len(output.token_ids) for output in outputs) == 32
        for index in range(2):
            own = [output for output in outputs if output.index == index]
            assert [token for output in own for token in output.token_ids] == [97 + 100 * index + i for i in range(2000)]
            assert [output.finish_reason for output in own if output.finish_reason] == ["length"]

    run(test)


def test_slow_reader_gets_everything_in_one_increment():
    async def test(engine):
        stream = engine.generate("a", SamplingParams(max_tokens=2000))
        first = await anext(stream)
        await until(lambda: engine.stats().steps >= 2000 and engine.stats().running == 0)
        rest = [output async for output in stream]
        assert len(rest) == 1
        assert rest[0].finish_reason == "length"
        assert first.token_ids + rest[0].token_ids == list(range(97, 2097))
        assert first.text + rest[0].text == text_of(97, 2000)
        await collect(engine, "a")  # an abort would have arrived before this
        await until(lambda: engine.stats().steps > 2000 and engine.stats().running == 0)
        assert engine.stats().expired == 0

    run(test)


def test_slow_reader_sees_the_ids_up_to_the_stop_string_only():
    async def test(engine):
        stream = engine.generate("a", SamplingParams(max_tokens=20, stop=("fg",)))
        first = await anext(stream)
        # After 20 steps, or fewer if the first output has the stop string already.
        await until(lambda: engine.stats().steps > 1 and engine.stats().running == 0)
        rest = [first] + [output async for output in stream]
        assert ids(rest) == [ord(character) for character in "abcdefg"]
        assert "".join(output.text for output in rest) == "abcde"
        assert (rest[-1].finish_reason, rest[-1].stop_reason) == ("stop", "fg")

    run(test)


@pytest.mark.parametrize("way", ["break", "raise", "cancel"])
@pytest.mark.slow
def test_leaving_early_aborts_in_the_engine(way):
    async def leave(engine, started):
        stream = engine.generate("a", SamplingParams(max_tokens=ENDLESS))
        if way == "break":
            async for _ in stream:
                started.set()
                return
        async with aclosing(stream):
            async for _ in stream:
                started.set()
                if way == "raise":
                    raise ZeroDivisionError

    async def test(engine):
        started = asyncio.Event()
        task = asyncio.create_task(leave(engine, started))
        other = asyncio.create_task(collect(engine, [1000], max_tokens=500))
        await started.wait()
        if way == "cancel":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ids(await other) == list(range(1000, 1500))
        await until(lambda: engine.stats().expired == 1 and engine.stats().running == 0)

    run(test)


def test_a_request_left_before_its_first_token_is_aborted():
    async def test(engine):
        task = asyncio.create_task(collect(engine, [1000], max_tokens=ENDLESS))
        await until(lambda: engine.stats().waiting)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: engine.stats().expired == 1 and engine.stats().waiting == 0)
        assert engine.stats().generated_tokens == 0

    run(test, **PATIENT | {"batch_timeout_ms": 1e6})


def test_a_refused_request_says_why_and_disturbs_nobody():
    async def test(engine):
        other = asyncio.create_task(collect(engine, [1000], max_tokens=300))
        with pytest.raises(InvalidRequest, match="needs 12 blocks of 10") as caught:
            await collect(engine, [REFUSED])
        assert (caught.value.param, caught.value.code) == ("prompt", "never_fits")
        with pytest.raises(RequestFailed, match="RuntimeError"):
            await collect(engine, [counting_engine.BROKEN])
        assert len(ids(await other)) == 300
        await until(lambda: engine.stats().steps > 300 and engine.stats().running == 0)
        assert engine.stats().expired == 0

    run(test)


def test_a_resumed_request_whose_first_answer_is_over_can_be_refused():
    async def test(engine):
        stream = await engine.prepare([REFUSED], SamplingParams(max_tokens=1, n=3))
        other = counting_engine.CountingEngine(EngineConfig())  # which then ended
        other.add(EngineRequest.of(stream.tags[0], [5], SamplingParams(max_tokens=1)))
        deliver(other.step(), dict.fromkeys(stream.tags, stream))
        with pytest.raises(InvalidRequest, match="needs 12 blocks of 10"):
            await engine.collect(stream)
        assert engine.open_sequences == 0

    run(test)


def test_a_failing_request_fails_alone():
    async def test(engine):
        other = asyncio.create_task(collect(engine, [1000], max_tokens=300))
        with pytest.raises(RequestFailed, match="not finite"):
            await collect(engine, [FAILING], max_tokens=5)
        assert len(ids(await other)) == 300

    run(test)


def test_what_the_model_cannot_take_is_refused_before_it_is_sent():
    cases = [
        ([], {}, "The prompt is empty"),
        ("", {}, "The prompt is empty"),
        ([VOCABULARY], {}, "from 0 to 999999"),
        ([-1], {}, "from 0 to 999999"),
        ([True], {}, "not a token id"),
        (["a"], {}, "not a token id"),
        ([1, 2], {"max_tokens": 2 * ENDLESS}, r"requested 2000002 tokens \(2 in the prompt, 2000000 in the completion\)"),
    ]

    async def test(engine):
        for prompt, params, message in cases:
            with pytest.raises(InvalidRequest, match=message) as caught:
                await collect(engine, prompt, **params)
            assert caught.value.param == "prompt"

    run(test)


def test_validate_fills_what_the_context_leaves():
    class Engine(AsyncEngine):
        info = EngineInfo(max_model_len=10, vocab_size=5)

    engine = Engine()
    assert engine.validate([1] * 9, SamplingParams(max_tokens=None)).max_tokens == 1
    assert engine.validate([1], SamplingParams(max_tokens=9)).max_tokens == 9
    with pytest.raises(InvalidRequest, match=r"maximum context length is 10 .* 11 tokens \(10 in the prompt, 1 in the") as caught:
        engine.validate([1] * 10, SamplingParams(max_tokens=None))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_no_more_alternatives_than_tokens(field):
    info = EngineInfo(max_model_len=10, vocab_size=5)
    validate([1], SamplingParams(**{field: 5}, max_tokens=1), info)
    with pytest.raises(InvalidRequest, match=f"{field} must be at most 5") as caught:
        validate([1], SamplingParams(**{field: 6}, max_tokens=1), info)
    assert caught.value.param == field


def test_a_request_that_is_submitted_again_keeps_its_time_of_arrival(monkeypatch):
    sent, encode = [], frames.encode
    monkeypatch.setattr(frames, "encode", lambda frame, engine, seal: sent.append(frame) or encode(frame, engine, seal))

    async def test(engine):
        async for _ in engine.generate([1000], SamplingParams(max_tokens=1), spent={"receive": 0.25, "restart": 1.5}):
            pass
        [added] = [frame.request["spent"] for frame in sent if isinstance(frame, Add)]
        assert (added["receive"], added["restart"], added.keys()) == (250_000, 1_500_000, {"receive", "restart", "tokenize"})

    run(test)
