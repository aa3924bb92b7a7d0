import asyncio
import io
import signal

import pytest

from chairlift.cli import chat, generate, main
from chairlift.errors import InvalidRequest
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams


class EchoEngine:
    """An engine that answers with what it was asked, in capitals and word by word."""

    closed = 0

    def __init__(self, config):
        self.config = config

    async def start(self, since):
        assert since > 0

    async def close(self):
        EchoEngine.closed += 1

    def default_params(self, **settings):
        return SamplingParams(**settings)

    async def chat(self, messages, params):
        if messages[-1]["content"] == "think":
            yield RequestOutput("", [1], [1], reasoning="Hm,")
            yield RequestOutput("so.", [1], [1], "stop", reasoning=" well.")
            return
        async for output in self.generate(" | ".join(f"{message['role']}: {message['content']}" for message in messages), params):
            yield output

    async def generate(self, prompt, params):
        if "too long" in prompt:
            raise InvalidRequest("that is too long")
        for word in prompt.upper().split():
            await asyncio.sleep(0)
            if word == "INTERRUPT" and "ASSISTANT" not in prompt.upper():
                signal.raise_signal(signal.SIGINT)
            yield RequestOutput(f"{word} ", [1], [1])
        for index in range(params.n):
            yield RequestOutput(f"({params.max_tokens})", [1], [1], "stop", index=index)


@pytest.fixture(autouse=True)
def echo(monkeypatch):
    EchoEngine.closed = 0
    monkeypatch.setattr(chat, "AsyncEngine", EchoEngine)
    monkeypatch.setattr(generate, "AsyncEngine", EchoEngine)
    yield
    assert EchoEngine.closed == 1


def say(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_generate_goes_on_from_one_prompt_or_several(capsys):
    assert main.main(["generate", "a b", "--max-tokens", "7"]) == 0
    assert capsys.readouterr().out == "A B (7)\n"
    EchoEngine.closed = 0
    assert main.main(["generate", "a", "b"]) == 0
    assert capsys.readouterr().out == "==> a <==\nA (128)\n\n==> b <==\nB (128)\n\n"


def test_generate_gives_several_answers(capsys):
    assert main.main(["generate", "a b", "-n", "2"]) == 0
    assert capsys.readouterr().out == "==> a b <==\nA B (128)\n\n==> a b <==\n(128)\n\n"


def test_generate_says_which_of_several_prompts_cannot_be_asked(capsys):
    assert main.main(["generate", "a", "too long"]) == 2
    assert capsys.readouterr().err == "chairlift: prompt 2: that is too long\n"


def test_generate_reads_a_pipe(monkeypatch, capsys):
    say(monkeypatch, "from a\npipe\n")
    assert main.main(["generate"]) == 0
    assert capsys.readouterr().out == "FROM A PIPE (128)\n"


def test_chat_remembers_until_reset_and_leaves_at_exit(monkeypatch, capsys):
    say(monkeypatch, "one\n\ntwo\n/reset\nthree\n/exit\nfour\n")
    assert main.main(["chat", "--system", "be brief"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "SYSTEM: BE BRIEF | USER: ONE (None)",
        "SYSTEM: BE BRIEF | USER: ONE | ASSISTANT: SYSTEM: BE BRIEF | USER: ONE (NONE) | USER: TWO (None)",
        "SYSTEM: BE BRIEF | USER: THREE (None)",
    ]


@pytest.mark.parametrize(("terminal", "shown"), [(False, "so."), (True, "\x1b[2mHm,\x1b[0m\x1b[2m well.\x1b[0m\n\nso.")])
def test_a_terminal_shows_the_reasoning_and_the_conversation_is_without(terminal, shown, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    say(monkeypatch, "think\ngo on\n")
    assert main.main(["chat"]) == 0
    assert capsys.readouterr().out == f"{shown}\nUSER: THINK | ASSISTANT: SO. | USER: GO ON (None)\n"


def test_chat_ends_with_its_input(monkeypatch, capsys):
    say(monkeypatch, "one")
    assert main.main(["chat", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "USER: ONE (5)\n"


def test_an_interrupt_stops_the_answer_and_not_the_chat(monkeypatch, capsys):
    say(monkeypatch, "please interrupt me\nand now\n")
    assert main.main(["chat"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(" [stopped]")
    # What was shown of the answer is part of the conversation.
    assert second == "USER: PLEASE INTERRUPT ME | ASSISTANT: USER: PLEASE INTERRUPT | USER: AND NOW (None)"


def test_what_cannot_be_asked_is_said_and_forgotten(monkeypatch, capsys):
    say(monkeypatch, "too long\nshort\n")
    assert main.main(["chat"]) == 0
    reported = capsys.readouterr()
    assert reported.err == "chairlift: that is too long (/reset starts a new conversation)\n"
    assert reported.out == "USER: SHORT (None)\n"
