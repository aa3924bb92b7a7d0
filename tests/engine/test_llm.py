"""LLM with an engine that counts: order, refusals before work, interrupts, failures that stay alone."""

import asyncio
import dataclasses
import inspect
import pydoc
import re
import signal
import subprocess
import sys

import pytest
from counting_engine import BROKEN, DEADLINE, EOS, FAILING, FULL, LATE, PATIENT, REFUSED, text_of

import chairlift
from chairlift import errors
from chairlift.config import EngineConfig
from chairlift.engine.client import AsyncEngine
from chairlift.engine.llm import LLM
from chairlift.errors import EngineDead, InvalidRequest, QueueFull, RequestFailed
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams, StructuredOutput
from chairlift.scheduling import Scheduling


def params(**values):
    return SamplingParams(**values)


def test_outputs_are_whole_and_in_the_order_of_the_prompts(llm):
    prompts = [[100 * number] for number in range(1, 30)]
    outputs = llm.generate(prompts, [params(max_tokens=30 - number) for number in range(1, 30)])
    for number, output in enumerate(outputs, 1):
        assert output.prompt_token_ids == [100 * number]
        assert output.token_ids == list(range(100 * number, 100 * number + 30 - number))
        assert output.text == text_of(100 * number, 30 - number)
        assert output.finish_reason == "length"
        assert output.timing.total == output.timeline.ended - output.timeline.arrived
    assert llm.generate([100] * 40)[0].cached_tokens == 0
    assert llm.generate([100] * 40)[0].cached_tokens == 32


def test_one_prompt_may_be_text_or_ids(llm):
    assert [output.text for output in llm.generate("a")] == [text_of(97, 16)]
    assert [output.token_ids for output in llm.generate([97], params(max_tokens=2))] == [[97, 98]]
    assert [output.text for output in llm.generate(["a", [98]], params(max_tokens=2))] == ["ab", "bc"]
    assert llm.generate([]) == []


def test_chat_takes_one_conversation_or_several(llm):
    hello, bye = ([{"role": "user", "content": text}] for text in ("hello", "bye"))
    one = params(max_tokens=1)
    assert [output.prompt_token_ids for output in llm.chat(hello, one)] == [llm.tokenizer.encode("hello")]
    assert [output.prompt_token_ids for output in llm.chat([hello, bye], one)] == [llm.tokenizer.encode(text) for text in ("hello", "bye")]
    for wrong in ("hello", [hello, []], [hello, "bye"]):
        with pytest.raises(InvalidRequest, match="a conversation is a list of messages"):
            llm.chat(wrong)


@pytest.mark.usefixtures("llm")
def test_the_answer_of_a_chat_fills_the_context_unless_a_length_is_given():
    llm = LLM(max_model_len=100)
    hello = [{"role": "user", "content": "h"}]
    assert len(llm.chat(hello)[0].token_ids) == 99
    assert len(llm.chat(hello, [params(temperature=0.5)])[0].token_ids) == 99
    assert len([*llm.stream_chat(hello, sampling_params=params(seed=1))]) == 99
    assert len(llm.chat(hello, params(max_tokens=16))[0].token_ids) == 16
    assert len(llm.generate("h")[0].token_ids) == 16


def test_vllm_s_name_of_the_parameters(llm):
    assert llm.generate("a", sampling_params=params(max_tokens=2))[0].text == "ab"
    assert [output.text for output in llm.stream("a", sampling_params=params(max_tokens=2))] == ["a", "b"]
    with pytest.raises(InvalidRequest, match="params and sampling_params are the same: give one"):
        llm.generate("a", params(), sampling_params=params())


def test_outputs_name_their_prompts_if_these_are_texts(llm):
    prompts = ["a", [1000], {"prompt": "b"}, {"prompt_token_ids": [1001]}]
    assert [output.prompt for output in llm.generate(prompts, params(n=2, max_tokens=2))] == ["a", None, "b", None]


def test_stops(llm):
    end, token, string = llm.generate(
        [[EOS - 1], "a", "a"],
        [params(max_tokens=9), params(max_tokens=9, stop_token_ids=(99,)), params(max_tokens=100_000, stop=("ef", "cd"))],
    )
    assert (end.token_ids, end.text, end.finish_reason, end.stop_reason) == ([EOS - 1, EOS], chr(EOS - 1), "stop", None)
    assert (token.token_ids, token.text, token.finish_reason, token.stop_reason) == ([97, 98, 99], "ab", "stop", 99)
    assert (string.token_ids, string.text, string.finish_reason, string.stop_reason) == ([97, 98, 99, 100], "ab", "stop", "cd")
    assert len(llm.engine.aborted) == 1
    assert not llm.engine.running


def test_several_answers_of_a_prompt_are_one_output(llm):
    several, single = llm.generate([[1000], [5000]], [params(n=3, max_tokens=4), params(max_tokens=2)])
    assert (several.text, single.text) == (text_of(1000, 4), text_of(5000, 2))
    outputs = [*several.outputs, *single.outputs]
    assert [(output.index, output.token_ids[0], len(output.token_ids)) for output in outputs] == [
        (0, 1000, 4),
        (1, 1100, 4),
        (2, 1200, 4),
        (0, 5000, 2),
    ]
    assert [output.text for output in outputs] == [text_of(output.token_ids[0], len(output.token_ids)) for output in outputs]
    assert all(output.finish_reason == output.timeline.finish == "length" for output in outputs)


@pytest.mark.parametrize("stop", [(), (text_of(1202, 2),)])
def test_the_best_answers_are_kept_and_come_first(llm, stop):
    outputs = llm.generate([1000], params(n=2, best_of=5, max_tokens=30, stop=stop))[0].outputs
    assert [(output.index, output.token_ids[0]) for output in outputs] == [(0, 1200), (1, 1100)]
    # What ends by a stop string is ranked by what it has up to there.
    assert (outputs[0].finish_reason, len(outputs[0].token_ids)) == (("stop", 4) if stop else ("length", 30))
    assert not llm.engine.running


def test_an_answer_without_an_end_ranks_below_those_with_one(llm):
    # The third answer would be the best; it misses its deadline.
    stops, scheduling = [LATE - 200 + 1, LATE - 100 + 1, LATE + 100 + 1, LATE + 200 + 1], Scheduling(deadline_ms=DEADLINE)
    outputs = llm.generate([LATE - 200], params(n=4, best_of=4, max_tokens=9, stop_token_ids=stops), scheduling=scheduling)[0].outputs
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "deadline", "stop"]
    outputs = llm.generate([LATE - 200], params(n=4, best_of=5, max_tokens=9, stop_token_ids=stops), scheduling=scheduling)[0].outputs
    assert [output.token_ids[0] - LATE + 200 for output in outputs] == [100, 300, 0, 400]


def test_what_misses_its_deadline_keeps_what_it_has(llm):
    late, never, good = llm.generate(
        [[LATE], [1000], "a"],
        [params(max_tokens=9), params(max_tokens=1), params(max_tokens=3)],
        scheduling=[Scheduling(deadline_ms=DEADLINE), Scheduling(deadline_ms=0.001), Scheduling()],
    )
    assert (late.finish_reason, late.token_ids) == ("deadline", [LATE, LATE + 1, LATE + 2])
    assert (never.finish_reason, never.token_ids, never.timing.first_token) == ("deadline", [], None)
    assert never.timing.queued == never.timing.total == never.timeline.ended - never.timeline.arrived
    assert good.text == "abc"


def test_scheduling_is_one_for_all_or_one_each(llm):
    one, two = Scheduling(priority=1), Scheduling(tenant="b", deadline_ms=1e6)
    llm.generate(["a", "b"], params(max_tokens=1), scheduling=[one, two])
    llm.generate(["a", "b"], params(max_tokens=1), scheduling=one)
    llm.chat([{"role": "user", "content": "a"}], params(max_tokens=1), scheduling=two)
    llm.generate("a", params(max_tokens=1))
    assert llm.engine.scheduling == [one, two, one, one, two, Scheduling()]
    with pytest.raises(InvalidRequest, match="2 prompts and 1 scheduling"):
        llm.generate(["a", "b"], scheduling=[one])


def test_a_full_queue_refuses_all(llm):
    with pytest.raises(QueueFull, match="no more may") as caught:
        llm.generate(["a", [FULL]])
    assert caught.value.retry_after == 2.5
    assert not llm.engine.running


@pytest.mark.usefixtures("llm")
def test_an_engine_that_waits_for_its_time_is_waited_for():
    llm = LLM(**PATIENT)
    (output,) = llm.generate([1000], params(max_tokens=2))
    assert output.token_ids == [1000, 1001]
    assert llm.engine.steps <= 5


def test_a_stop_token_that_is_the_ignored_end_is_named(llm):
    (output,) = llm.generate([EOS], params(ignore_eos=True, stop_token_ids=(EOS,)))
    assert output.stop_reason == EOS


@pytest.mark.parametrize("bad", [[], "", [1_000_000], [-1], 5, [1, "a"], [REFUSED]])
def test_a_bad_prompt_is_named_before_anything_runs(llm, bad):
    with pytest.raises(InvalidRequest, match="prompt 2: ") as caught:
        llm.generate(["a", "b", bad])
    assert caught.value.param == "prompt"
    assert llm.engine.steps == 0
    assert not llm.engine.running


def test_a_live_sequence_of_another_llm_is_refused(llm):
    with LLM() as other, other.open("a") as sequence:
        for use in (lambda: llm.generate(["a", sequence]), lambda: llm.stream(sequence)):
            with pytest.raises(InvalidRequest, match="this sequence belongs to another LLM"):
                use()


def test_a_prompt_too_long_keeps_its_code(llm):
    with pytest.raises(InvalidRequest, match="prompt 0: This model's maximum context length is 2000000 tokens") as caught:
        llm.generate([[1]], params(max_tokens=2_000_000))
    assert caught.value.code == "context_length_exceeded"


def test_as_many_params_as_prompts(llm):
    with pytest.raises(InvalidRequest, match="2 prompts and 3 params"):
        llm.generate(["a", "b"], [params()] * 3)


def test_a_failing_request_fails_alone(llm):
    failed, good = llm.generate([[FAILING], "a"], params(max_tokens=3))
    assert (failed.finish_reason, failed.text, failed.token_ids) == ("error", "", [])
    assert good.text == "abc"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_aborts_everything_and_leaves_the_engine_usable(llm, monkeypatch, error):
    step = llm.engine.step

    def failing():
        if llm.engine.steps == 3:
            raise error
        return step()

    monkeypatch.setattr(llm.engine, "step", failing)
    with pytest.raises(error):
        llm.generate(["a", "b"], params(max_tokens=100))
    assert not llm.engine.running
    monkeypatch.undo()
    assert llm.generate("a", params(max_tokens=3))[0].text == "abc"


def test_ctrl_c_waits_for_the_steps_end(llm, monkeypatch):
    step, finished = llm.engine.step, []

    def pressed():
        if len(finished) == 2:
            signal.raise_signal(signal.SIGINT)
        report = step()
        finished.append(report)
        return report

    monkeypatch.setattr(llm.engine, "step", pressed)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", params(max_tokens=100))
    assert len(finished) == 3
    assert not llm.engine.running
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait(llm, monkeypatch):
    def stuck():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    monkeypatch.setattr(llm.engine, "step", stuck)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a")


def test_ctrl_c_while_requests_are_added_adds_no_more(llm, monkeypatch):
    add, added = llm.engine.add, []

    def pressed(request):
        if not added:
            signal.raise_signal(signal.SIGINT)
        added.append(request.tag)
        add(request)

    monkeypatch.setattr(llm.engine, "add", pressed)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"])
    assert len(added) == 1
    assert not llm.engine.running


def test_a_request_that_is_left_before_the_engine_has_it_never_runs(llm):
    async def failing():
        raise ZeroDivisionError

    local = llm._local  # noqa: SLF001
    collected = local.collect(local.make("a", params(max_tokens=100), Scheduling()))
    with local.between_steps() as engine, pytest.raises(ZeroDivisionError):  # as while another thread runs a step
        local.wait_all([collected, failing()])
    with local.between_steps():
        assert (engine.running, len(engine.scheduling), len(engine.aborted), engine.steps) == (0, 1, 1, 0)


def test_an_engine_without_work_is_an_error_and_no_endless_loop(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "step", lambda: None)
    monkeypatch.setattr(llm.engine, "wakes_in", lambda: None)
    with pytest.raises(EngineDead, match="nothing to run, with 1 requests open"):
        llm.generate("a")


def test_an_engine_that_cannot_add_leaves_nothing_behind(llm):
    with pytest.raises(RequestFailed, match="could not take the request"):
        llm.generate(["a", [BROKEN]])
    assert not llm.engine.running


def test_progress_is_shown_when_wanted_and_never_on_stdout(llm, capfd):
    llm.generate(["a", "b"], params(max_tokens=5), progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "generating" in err
    assert "2/2 requests" in err
    assert "tokens/s" in err


def test_progress_is_shown_by_itself_for_long_work_on_a_terminal_only(llm, capfd, monkeypatch):
    def shows(wish, terminal, patience):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        monkeypatch.setattr("chairlift.engine.llm.LONG_WORK", patience)
        llm.generate(["a", "b"], params(max_tokens=5), progress=wish)
        out, err = capfd.readouterr()
        assert out == ""
        return "generating" in err

    assert shows(None, terminal=True, patience=0)
    assert not shows(None, terminal=True, patience=1000)
    assert not shows(None, terminal=False, patience=0)
    assert not shows(False, terminal=True, patience=0)


@pytest.mark.parametrize("engine", [LLM, AsyncEngine])
def test_help_shows_every_setting_with_its_default(engine):
    shown, parameters = pydoc.render_doc(engine, renderer=pydoc.plaintext), inspect.signature(engine).parameters
    assert "shared_max_model_len" not in parameters  # a server sets them
    for field in dataclasses.fields(EngineConfig):
        if field.name == "shared_max_model_len":
            continue
        assert (parameters[field.name].default, parameters[field.name].annotation) in (
            (field.default, field.type),
            (field.default, "str | os.PathLike[str]"),
        )
        if "help" in field.metadata:
            assert f"{field.name}: {field.metadata['help'][:20]}" in shown
    assert "max_num_seqs)" in shown
    assert "--" not in shown.partition("Methods defined here")[0]


def test_facts_name_the_model_as_it_was_asked_for(llm):
    assert llm.info.model == llm.config.model == "smollm2-135m-instruct"


def test_importing_chairlift_imports_nothing_heavy():
    code = (
        "import sys, chairlift\n"
        "assert not [name for name in sys.modules if name.startswith('chairlift.')], sys.modules\n"
        "from chairlift import LLM, AsyncEngine, SamplingParams, Scheduling, RequestOutput, Timeline, errors, __version__\n"
        "assert not {'torch', 'transformers', 'starlette', 'triton', 'uvicorn'} & sys.modules.keys()\n"
        "assert set(chairlift.__all__) <= set(dir(chairlift))\n"
        "assert all(hasattr(chairlift, name) for name in chairlift.__all__)\n"
        "assert not hasattr(chairlift, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))})


def test_every_type_that_a_caller_meets_is_exported():
    raised = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.ChairliftError)}
    assert raised - {"RequestMoved"} <= set(chairlift.__all__)
    calls = [getattr(engine, name) for engine in (LLM, AsyncEngine) for name in ("__init__", "generate", "chat", "open")]
    hints = [hint for call in calls for hint in call.__annotations__.values()]
    hints += [field.type for kind in (RequestOutput, SamplingParams) for field in dataclasses.fields(kind)]
    named = {word for hint in hints for word in re.findall(r"[A-Z]\w+", hint)}
    others = {"Any", "AsyncGenerator", "Callable", "Iterable", "Mapping", "None", "PathLike", "Sequence"}
    assert named - others - {"InitVar", "ModelSettings", "Settings", "Unpack"} <= set(chairlift.__all__)


def test_a_grammar_that_cannot_be_compiled_is_refused_before_anything_runs(byte_model):
    with LLM(str(byte_model), load_format="none") as llm:
        with pytest.raises(InvalidRequest, match="prompt 1: "):
            llm.generate(["a", "b"], [params(), params(structured_output=StructuredOutput("regex", "(a"))])
        assert llm.engine.stats().steps == 0
        assert not llm.engine.has_work
        assert llm.generate("a", params(max_tokens=3, ignore_eos=True))[0].finish_reason == "length"


def test_it_runs_in_a_thread_with_an_event_loop(llm):
    async def notebook():
        stream = llm.stream("a", params(max_tokens=100_000))
        assert next(stream).text == "a"
        stream.close()
        return llm.generate("a", params(max_tokens=2))[0].text, [part.text for part in llm.stream("k", params(max_tokens=2))]

    assert asyncio.run(notebook()) == ("ab", ["k", "l"])
    assert not llm.engine.running
