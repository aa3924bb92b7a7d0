"""A hostile template takes neither time nor memory from the process that asks for a rendering."""

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cpu_cost import cost

from chairlift import chat_template
from chairlift.chat_template import ChatTemplate
from chairlift.child_process import STOPS
from chairlift.errors import InvalidRequest
from chairlift.template_process import JOB_TIME, TemplateProcesses
from chairlift.template_renderer import render

HELLO = [{"role": "user", "content": "hello"}]

SLOW = [
    "{{ 7**8000000 > 1 }}",  # folded when the template is compiled
    "{{ (messages|length + 6)**8000000 > 1 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
]
LARGE = [
    "{{ ('x' * 1000000000)|length }}",
    "{{ (messages[0].content * 1000000000)|length }}",
    "{{ 'x'|center(1000000000) }}",
    "{{ messages[0].content.rjust(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000d}'.format(1) }}",
    "{{ ('x\\n' * 100000)|indent(100000) }}",
    "{{ ('x' * 100000)|replace('x', 'y' * 100000) }}",
    "{{ ('y' * 100000).join('x' * 100000) }}",
    "{{ [1]|tojson(indent=1000000000) }}",
    "{{ [1]|batch(1000000000, 'x')|list }}",
    "{{ (1).to_bytes(1000000000, 'big')|length }}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
]
COSTLY = "{% for i in range(9999) %}{{ i }}{% endfor %}"


@pytest.fixture
def processes(monkeypatch):
    """Processes with a tenth of a second and 64 MiB."""
    processes = TemplateProcesses(0.1, 64 << 20)
    monkeypatch.setattr(chat_template, "PROCESSES", processes)
    yield processes
    processes.close()


def test_a_process_that_was_prepared_renders_the_first_conversation(processes):
    for _ in range(2):
        processes.prepare()
        (prepared,) = processes.pids
        assert ChatTemplate({"default": "{{ messages[0].content }}"}, {}).render(HELLO, ()) == [("hello", False)]
        assert processes.pids == [prepared]


@pytest.mark.parametrize("source", [*SLOW, *LARGE])
def test_a_hostile_template_takes_neither_time_nor_memory_here(processes, source):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak of the memory
    before, errors = _peak(), []

    def refused():
        with pytest.raises(InvalidRequest, match="the chat template cannot render these messages: ") as caught:
            ChatTemplate({"default": source}, {}).render(HELLO, ())
        errors.append(caught.value)

    assert cost(refused, attempts=1, clock=time.process_time) < 15
    assert _peak() - before < 16 << 10
    assert errors[0].param == "messages"
    if source in SLOW:
        assert "takes longer than 0.1 seconds" in str(errors[0])
    assert ChatTemplate({"default": "{{ messages[0].content }}"}, {}).render(HELLO, ()) == [("hello", False)]


def _peak() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


@pytest.mark.parametrize(("source", "least", "most"), [(SLOW[2], 0.1, 0.1), (LARGE[-1], 1e-6, 0.1), (COSTLY, 1e-3, 0.1)])
def test_the_time_of_a_job_is_counted_for_its_thread(processes, source, least, most):
    before = JOB_TIME.seconds
    with contextlib.suppress(InvalidRequest):
        ChatTemplate({"default": source}, {}).render(HELLO, ())
    assert least <= round(JOB_TIME.seconds - before, 6) <= most


def test_a_hostile_template_is_not_run_to_learn_what_it_reads(processes):
    template = ChatTemplate({"default": "{{ 7**8000000 > 1 }}{{ tools }}", "other": "{{ documents }}{% set x = x %}"}, {})
    names = ("tools", "documents", "x", "y")
    assert cost(lambda: list(map(template.uses, names)), attempts=1, clock=time.process_time) < 15
    assert list(map(template.uses, names)) == [False, True, True, False]


def test_a_process_that_was_killed_is_replaced(processes):
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    template.render(HELLO, ())
    [process] = processes.pids
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert template.render(HELLO, ()) == [("hello", False)]
    assert process not in processes.pids


def test_a_job_whose_process_is_killed_is_done_by_another(processes):
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    template.render(HELLO, ())
    [process] = processes.pids
    os.kill(process, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as executor:
        rendered = executor.submit(template.render, HELLO, ())
        while processes.pids:
            time.sleep(0.001)
        time.sleep(0.05)  # it sends the job
        os.kill(process, signal.SIGKILL)
        assert rendered.result(60) == [("hello", False)]
    assert process not in processes.pids


@pytest.mark.parametrize("stop", STOPS)
def test_the_signal_that_stops_a_server_ends_no_job(processes, stop):
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    template.render(HELLO, ())
    [process] = processes.pids
    os.kill(process, stop)
    assert template.render(HELLO, ()) == [("hello", False)]
    assert processes.pids == [process]


def test_ctrl_c_ends_no_process_that_still_imports(processes):
    processes.prepare()
    [process] = processes.pids
    os.kill(process, signal.SIGINT)
    assert ChatTemplate({"default": "{{ messages[0].content }}"}, {}).render(HELLO, ()) == [("hello", False)]
    assert processes.pids == [process]


def test_messages_that_are_no_json_are_refused(processes):
    with pytest.raises(InvalidRequest, match="must be JSON"):
        ChatTemplate({"default": ""}, {}).render([{"role": "user", "content": object()}], ())


@pytest.mark.parametrize("content", ["\ud800", "\x00", "9" * 5000, {"a": 1e400}], ids=["surrogate", "zero", "digits", "infinity"])
def test_what_a_message_says_crosses_unchanged(processes, content):
    text = ChatTemplate({"default": "{{ messages[0].content }}"}, {}).render([{"content": content}], ())
    assert text == [(str(content), False)]


CONTROLS = (*(f"<|reserved_special_token_{i}|>" for i in range(250)), "<|begin_of_text|>", "[CALL]", "<eos>")


@pytest.mark.parametrize("text", ["<|r" * 200_000, "<" * 600_000, "<|reserved_special_token_2" * 24_000], ids=["begins", "short", "almost"])
def test_looking_for_control_tokens_is_cheap(text):
    job = {"source": "x", "messages": [{"content": text}], "variables": {}, "defaults": {}, "continue_final_message": False}
    many, few = job | {"controls": CONTROLS}, job | {"controls": CONTROLS[-3:]}
    assert render(many) == render(few) == [("x", False)]  # compiles, too
    assert cost(lambda: render(many), lambda: render(few)) < 5  # a pattern that tries each of the tokens takes 50 times as long


def test_the_longest_control_token_is_found():
    job = {"source": "{{ messages[0] }}", "variables": {}, "defaults": {}, "continue_final_message": False}
    job |= {"messages": ["a<|x|>b<|x|>>c<|xd"], "controls": ("<|x|>>", "<|x|>", "<|")}
    marked = [(text, True) for text in ("<|x|>", "<|x|>>", "<|")]
    assert render(job) == [("a", False), marked[0], ("b", False), marked[1], ("c", False), marked[2], ("xd", False)]


def test_control_tokens_in_messages_are_limited(processes):
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    assert len(template.render([{"content": "<|x|>a" * 10_000}], ["<|x|>"])) == 20_000
    with pytest.raises(InvalidRequest, match="the messages have 10001 texts of control tokens, and 10000 are allowed") as caught:
        template.render([{"content": "<|x|>a" * 10_001}], ["<|x|>"])
    assert caught.value.param == "messages"


CALLS = (
    "{% for message in messages %}{% for call in message.tool_calls or () %}{{ '<call>' + call.function.name + ' ' }}"
    "WRITTEN{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("{{ call.function.arguments | tojson }}", '{"a": "ü"}'),
        ("{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}", '{"a": "ü"}'),
        ("{% for name, value in call.function.arguments.items() %}{{ name ~ '=' ~ value }}{% endfor %}", "a=ü"),
        ("{{ '' + call.function.arguments }}", '{"a": "ü"}'),  # as Functionary writes it
        ("{{ call.function.arguments | string }}", '{"a": "ü"}'),  # as Apriel writes it
    ],
)
def test_a_template_gets_the_arguments_of_calls_as_it_takes_them(written, shown):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    job = {"source": CALLS.replace("WRITTEN", written), "messages": messages, "variables": {}, "defaults": {}, "controls": []}
    assert render({**job, "continue_final_message": False}) == [(f"<call>f {shown}", False)]


def test_clients_get_no_path_of_a_template_that_cannot_be_read(monkeypatch, tmp_path):
    def refuse(file, encoding):
        raise PermissionError(13, "Permission denied", str(file))

    (tmp_path / "chat_template.jinja").touch()
    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(InvalidRequest, match=r"cannot be read \(Permission denied\); use --chat-template"):
        ChatTemplate.from_files(tmp_path, {}, {})
