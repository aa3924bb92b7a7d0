import io

import pytest

from chairlift.cli import main
from chairlift.cli.chat import Conversation, converse


@pytest.mark.parametrize("command", [["generate"], ["run"], ["chat", "--url", "http://127.0.0.1:1", "--model", "m"]])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_not_utf8_is_named(command, errors, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
    assert main.main(command) == 2
    assert capsys.readouterr().err == "chairlift: standard input is not UTF-8 text\n"


def test_a_chat_on_a_terminal_goes_on_after_such_a_line(monkeypatch, capsys):
    lines = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nhello\n"), "utf-8", "surrogateescape")
    monkeypatch.setattr(lines, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", lines)
    asked = []
    converse("m", Conversation(None), asked.append)
    assert asked == ["hello"]
    assert capsys.readouterr().err == "chairlift: standard input is not UTF-8 text\n"
