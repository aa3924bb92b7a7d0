"""Streams of LLM: increments, threads that share the engine, and how streams end."""

import os
import signal
import sys
import threading

import pytest
from counting_engine import DEADLINE, FAILING, FULL, LATE, text_of

from chairlift.engine import local_engine
from chairlift.engine.choice import Choice
from chairlift.engine.stream import Stream
from chairlift.errors import EngineClosed, InvalidRequest, QueueFull
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling


def test_a_stream_yields_increments_as_the_engine_makes_them(llm):
    outputs = list(llm.stream("a", SamplingParams(max_tokens=4)))
    assert [output.text for output in outputs] == ["a", "b", "c", "d"]
    assert [output.finish_reason for output in outputs] == [None, None, None, "length"]
    assert outputs[-1].timing.total == outputs[-1].timeline.ended - outputs[-1].timeline.arrived
    assert [output.text for output in llm.stream_chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=2))] == ["a", "b"]


def test_a_stream_has_all_answers_by_index(llm):
    texts = {0: "", 1: ""}
    for output in llm.stream([1000], SamplingParams(n=2, max_tokens=3)):
        texts[output.index] += output.text
    assert texts == {0: text_of(1000, 3), 1: text_of(1100, 3)}


def test_a_stop_string_ends_a_stream(llm):
    outputs = list(llm.stream("a", SamplingParams(max_tokens=100_000, stop=("cd",))))
    assert "".join(output.text for output in outputs) == "ab"
    assert outputs[-1].stop_reason == "cd"
    assert not llm.engine.running


@pytest.mark.parametrize(("prompt", "reason"), [(FAILING, "error"), (LATE, "deadline")])
def test_a_stream_that_fails_says_so_in_its_last_increment(llm, prompt, reason):
    *_, last = llm.stream([prompt], SamplingParams(max_tokens=9), scheduling=Scheduling(deadline_ms=DEADLINE))
    assert last.finish_reason == reason


def test_a_wrong_prompt_is_refused_before_the_stream_is_read(llm):
    with pytest.raises(InvalidRequest, match="a prompt is text"):
        llm.stream(5)
    with pytest.raises(InvalidRequest, match="a conversation is a list of messages"):
        llm.stream_chat("hello")
    with pytest.raises(QueueFull):
        next(llm.stream([FULL]))


def test_leaving_a_stream_aborts_its_request(llm):
    for output in llm.stream("a", SamplingParams(max_tokens=100_000)):
        if output.text == "c":
            break
    assert not llm.engine.running
    assert llm.generate("a", SamplingParams(max_tokens=2))[0].text == "ab"


def test_a_stream_that_the_garbage_collector_closes_in_a_step_is_aborted_after_it(llm, monkeypatch):
    stream, step = llm.stream("a", SamplingParams(max_tokens=100_000)), llm.engine.step
    next(stream)

    def collecting():
        stream.close()
        return step()

    monkeypatch.setattr(llm.engine, "step", collecting)
    assert llm.generate("x", SamplingParams(max_tokens=2))[0].text == "xy"
    assert not llm.engine.running


def test_requests_run_beside_an_open_stream(llm):
    stream = llm.stream("a", SamplingParams(max_tokens=5))
    assert next(stream).text == "a"
    assert llm.generate("x", SamplingParams(max_tokens=2))[0].text == "xy"
    other = llm.stream("k", SamplingParams(max_tokens=2))
    assert next(other).text == "k"
    # What the others' steps computed comes at once.
    assert [output.text for output in stream] == ["bcd", "e"]
    assert [output.text for output in other] == ["l"]


def test_threads_share_the_engine(llm):
    texts = {}

    def generate(first):
        texts[first] = [
            output.text for output in llm.generate([[first], [first + 50]], SamplingParams(max_tokens=30, stop=(text_of(first + 20, 1),)))
        ]

    threads = [threading.Thread(target=generate, args=(1000 * number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {first: [text_of(first, 20), text_of(first + 50, 30)] for first in range(1000, 9000, 1000)}
    assert not llm.engine.running


@pytest.mark.parametrize("moment", ["take", "num_untaken"])
def test_tokens_that_another_thread_brings_while_a_stream_is_read_are_not_lost(llm, monkeypatch, moment):
    local, seen, whole = llm._local, [], getattr(Stream, moment)  # noqa: SLF001

    def read_and_step(stream, *most):
        read = whole(stream, *most) if moment == "take" else whole.fget(stream)
        with local.between_steps() as engine:
            if len(seen) == 2 and (report := engine.step()) is not None:  # as another thread would
                local._deliver(report)  # noqa: SLF001
        return read

    monkeypatch.setattr(local_engine._Stream, moment, read_and_step if moment == "take" else property(read_and_step))  # noqa: SLF001
    for output in llm.stream("a", SamplingParams(max_tokens=4)):
        seen.append(output.text)
    assert "".join(seen) == "abcd"


def test_no_thread_brings_tokens_while_others_are_taken(llm, monkeypatch):
    local, take, held_up = llm._local, Choice.take, []  # noqa: SLF001

    def other():
        with local.between_steps() as engine:
            local._deliver(engine.step())  # noqa: SLF001

    def take_beside_a_step(choice, *most):
        if len(held_up) < 3:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(0.02)
            held_up.append(thread)
            assert thread.is_alive()
        return take(choice, *most)

    monkeypatch.setattr(Choice, "take", take_beside_a_step)
    assert "".join(output.text for output in llm.stream("a", SamplingParams(max_tokens=9))) == "abcdefghi"
    assert len(held_up) == 3
    for thread in held_up:
        thread.join()


def test_ctrl_c_ends_a_stream_after_the_step(llm, monkeypatch):
    step, finished = llm.engine.step, []

    def pressed():
        signal.raise_signal(signal.SIGINT)
        finished.append(step())
        return finished[-1]

    stream = llm.stream("a", SamplingParams(max_tokens=100))
    next(stream)
    monkeypatch.setattr(llm.engine, "step", pressed)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert len(finished) == 1
    assert not llm.engine.running


def test_close_ends_the_engine_once_and_open_streams(llm, capfd):
    with llm:
        stream = llm.stream("a", SamplingParams(max_tokens=9))
        next(stream)
    llm.close()
    assert capfd.readouterr().err.count("closed") == 1
    with pytest.raises(EngineClosed, match="the LLM is closed"):
        next(stream)


def uses(llm, sequence):
    """Calls that need the engine."""
    return {
        "generate": lambda: llm.generate("a"),
        "generate nothing": lambda: llm.generate([]),
        "open": lambda: llm.open("a"),
        "open more": lambda: llm.open("abc"),
        "fork": sequence.fork,
        "append": lambda: sequence.append("a"),
        "rewind": lambda: sequence.rewind(0),
        "continue": lambda: sequence.generate(),
        "set a priority": lambda: setattr(sequence, "priority", 3),
        "load an adapter": lambda: llm.load_lora_adapter("a", "b"),
        "unload an adapter": lambda: llm.unload_lora_adapter("a"),
    }


def test_a_closed_engine_refuses_every_use(llm):
    sequence = llm.open("a")
    llm.close()
    for name, use in uses(llm, sequence).items():
        with pytest.raises(EngineClosed, match="the LLM is closed"):
            print(name, use())


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_cannot_use_it_and_leaves_it_alone(llm, monkeypatch, capfd):
    sequence = llm.open("a")
    stream = llm.stream([2000], SamplingParams(max_tokens=9))
    next(stream)
    local, step, status = llm._local, llm.engine.step, []  # noqa: SLF001

    def in_the_child():
        wrong = []
        for name, use in {**uses(llm, sequence), "read": lambda: next(stream)}.items():
            try:
                wrong.append((name, use()))
            except EngineClosed as error:
                if "made in another process" not in str(error):
                    wrong.append((name, error))
        sequence.drop()
        stream.close()
        llm.close()
        return wrong

    def forking():  # while the engine's lock is held
        monkeypatch.undo()
        references = sys.getrefcount(local)
        if (child := os.fork()) == 0:
            freed = sys.getrefcount(local) <= references
            signal.alarm(20)
            wrong = in_the_child()
            os.write(2, str(wrong).encode() if wrong else b"")
            os._exit(bool(wrong) or freed)
        status.append(os.waitpid(child, 0)[1])
        return step()

    monkeypatch.setattr(llm.engine, "step", forking)
    assert llm.generate([1000], SamplingParams(max_tokens=3))[0].token_ids == [1000, 1001, 1002]
    assert (status, capfd.readouterr().err) == ([0], "")
    assert [token for output in stream for token in output.token_ids] == list(range(2001, 2009))
    assert not sequence.dropped
