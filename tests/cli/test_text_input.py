import io

import pytest

from chairlift.cli import main


@pytest.mark.parametrize("command", [["generate"], ["run"], ["chat", "--url", "http://127.0.0.1:1", "--model", "m"]])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_not_utf8_is_named(command, errors, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
    assert main.main(command) == 2
    assert capsys.readouterr().err == "chairlift: standard input is not UTF-8 text\n"
